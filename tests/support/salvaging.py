"""Runs to be damaged, the damage, and what a salvaged run must come to."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import anyio

from pipeline import Pipeline, Task
from pipeline.checkpoint import Salvaged, salvage
from pipeline.store.frames import Frame, scan
from pipeline.store.layout import Layout
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, train, uneven
from tests.support.disk import tree
from tests.support.runs import numbers

ITEMS, EPOCHS, GROUPS = 10, 2, 2


def make(seed: int, directory: str, tasks: list[Task] | None = None, **options: Any) -> Pipeline:
    """A pipeline of one life: rollouts take other times in each."""
    given = tasks or [Task("numbers", source=numbers(ITEMS), run=uneven(seed), epochs=EPOCHS, group_size=2)]
    options = {"concurrency": 4, "capacity": 7, "keep": None, "max_deaths": 99, "segment_bytes": 2000, **options}
    return inline_pipeline(given, directory=directory, **options)


async def two_lives(folder: Path, **options: Any) -> str:
    """A run that was killed, resumed, and killed again: steps 1, 2 and 4 are saved, and more is finished."""
    first, second, third = (str(folder / name) for name in ("life1", "life2", "run"))
    for life, (directory, copy, steps) in enumerate(((first, second, 2), (second, third, 4))):
        async with make(life, directory, **options) as pipe:
            trained = Trained()
            resumed = await begin(pipe, trained=trained)
            async for batch in pipe.batches(GROUPS, until=steps):
                await train(pipe, trained, batch)
                if batch.step != resumed.step + 1 or life == 0:
                    await (await pipe.save(batch.step)).committed()
            await anyio.sleep(4.0)
            crashed_copy(directory, copy)
    return third


async def goes_on(directory: str, **options: Any) -> Counter[int]:
    """Resume a salvaged run and train what is left; returns how often each item was trained, all lives together."""
    async with make(99, directory, **options) as pipe:
        trained = Trained()
        resumed = await begin(pipe, trained=trained)
        assert resumed.step == len(trained.batches)
        pipe.ledger.check()
        await finish(pipe, trained, GROUPS)
        await (await pipe.save(pipe.ledger.step)).committed()
    async with make(100, directory, **options) as pipe:  # by what it wrote itself
        again = Trained()
        await begin(pipe, trained=again)
        assert again.batches == trained.batches
        pipe.ledger.check()
    return Counter(trained.items)


EVERY = dict.fromkeys(range(ITEMS), EPOCHS)


def salvaged(directory: str, target: str, **options: Any) -> Salvaged:
    """Salvage, and see that the damaged run stays as it is."""
    before = fingerprint(directory)
    found = salvage(directory, target, **options)
    assert fingerprint(directory) == before
    return found


def fingerprint(directory: str) -> tuple[dict[str, bytes], dict[str, tuple[int, ...]]]:
    """The content of every file, and what else would tell that one was touched."""
    status: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(directory).rglob("*")):
        each = path.lstat()
        status[str(path)] = (each.st_ino, each.st_nlink, each.st_mtime_ns, each.st_ctime_ns, each.st_size)
    return tree(directory), status


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def frames(directory: str, path: str) -> list[Frame]:
    run = Layout(directory).read_run()
    assert run is not None
    return list(scan(os.path.join(directory, path), run_tag=run.tag))

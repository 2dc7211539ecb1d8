"""``resume(from_=...)``: another run's state begins a new one, and the other is only read."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import ForebayError, Pipeline, StoreError, Task, UsageError
from pipeline.store.frames import PAYLOAD, scan
from pipeline.store.layout import Layout
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, train, uneven
from tests.support.disk import ScriptedFiles
from tests.support.runs import numbers

pytestmark = pytest.mark.virtual_time

EVERY: list[dict[str, Any]] = [{"strategy": "synchronous"}, {"order": "strict", "capacity": 9}, {"capacity": 9}]


def make(seed: int, directory: str | None, **options: Any) -> Pipeline:
    given = Task("numbers", source=numbers(12), run=uneven(seed), epochs=2, group_size=2)
    return inline_pipeline(given, directory=directory, concurrency=3, keep=None, max_deaths=99, **options)


async def a_run(directory: str, **options: Any) -> Trained:
    """Three steps saved, a batch leased after them, and more finished; closed."""
    async with make(1, directory, **options) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=4, until=3):
            await train(pipe, trained, batch)
            await (await pipe.save(batch.step, replay_buffer=batch.step != 2)).committed()
        with anyio.move_on_after(2.0):
            await pipe.get_batch(4)
            await anyio.sleep_forever()
    return trained


def contents(directory: str) -> dict[str, bytes]:
    return {
        os.path.relpath(os.path.join(folder, name), directory): Path(folder, name).read_bytes()
        for folder, _, names in os.walk(directory)
        for name in names
    }


@pytest.mark.parametrize("options", EVERY)
@pytest.mark.parametrize("step", [None, 0, 1, 2, 3])
async def test_a_fork_goes_on_as_the_run_itself_would(
    tmp_path: Path, options: dict[str, Any], step: int | None
) -> None:
    source, target = str(tmp_path / "a"), str(tmp_path / "b")
    before = await a_run(source, **options)
    there = contents(source)
    own = str(tmp_path / "own")
    shutil.copytree(source, own)
    ends = []
    both: list[tuple[str, dict[str, Any]]] = [(own, {}), (target, {"from_": source})]
    for directory, more in both:
        async with make(9, directory, **options) as pipe:
            trained = Trained()
            pipe.attach(trained=trained)
            resumed = await pipe.resume(step, **more)
            assert trained.batches == before.batches[: resumed.step]
            pipe.ledger.check()
            await pipe.start(weights_current=True)
            await finish(pipe, trained, 4)
            ends.append((agreed(resumed), trained.batches if options.keys() & {"order", "strategy"} else None))
        assert Counter(trained.items) == dict.fromkeys(range(12), 2)
    assert ends[0] == ends[1]
    assert contents(source) == there
    shutil.rmtree(source)  # nothing of it is needed any more
    async with make(10, target, **options) as pipe:
        again = Trained()
        await begin(pipe, trained=again)
        pipe.ledger.check()


def agreed(resumed: Any) -> tuple[Any, ...]:
    """What a fork and a resume must agree on."""
    return (resumed.step, resumed.version, resumed.buffered, resumed.waiting, resumed.repeated)


async def test_a_fork_survives_crashes_of_its_own(tmp_path: Path) -> None:
    source, target = str(tmp_path / "a"), str(tmp_path / "b0")
    await a_run(source, capacity=9)
    async with make(2, target, capacity=9) as pipe:
        trained = Trained()
        pipe.attach(trained=trained)
        await pipe.resume(1, from_=source)
        folded = pipe.ledger.snapshot()
        crashed = crashed_copy(target, tmp_path / "b1")  # before anything else happens
    assert folded["entries"]
    for life in range(3):
        async with make(3 + life, crashed, capacity=9) as pipe:
            trained = Trained()
            assert (await begin(pipe, trained=trained)).step == 1 + life
            async for batch in pipe.batches(groups=4, until=2 + life):
                await train(pipe, trained, batch)
                await (await pipe.save(batch.step)).committed()
            await anyio.sleep(1.0)
            crashed = crashed_copy(crashed, tmp_path / f"c{life}")
    async with make(9, crashed, capacity=9) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        await finish(pipe, trained, 4)
    assert Counter(trained.items) == dict.fromkeys(range(12), 2)


async def test_a_fork_that_was_cut_before_its_first_generation_is_begun_again(tmp_path: Path) -> None:
    source = str(tmp_path / "a")
    await a_run(source, capacity=9)
    for call in range(200):
        target = str(tmp_path / f"b{call}")
        files = ScriptedFiles(call + 1, stays=True)
        try:
            async with make(2, target, capacity=9, files=files) as pipe:
                pipe.attach(trained=Trained())
                await pipe.resume(3, from_=source)
                break
        except (ForebayError, OSError):  # wherever the disk died
            pass
        async with make(3, target, capacity=9) as pipe:
            trained = Trained()
            pipe.attach(trained=trained)
            more: dict[str, Any] = {} if (Path(target, "generations").exists() and whole(target)) else {"from_": source}
            assert (await pipe.resume(3, **more)).step == 3
            await pipe.start(weights_current=True)
            await finish(pipe, trained, 4)
        assert Counter(trained.items) == dict.fromkeys(range(12), 2)
    assert call > 5


def whole(directory: str) -> bool:
    return any((each / "manifest.json").exists() for each in Path(directory, "generations").iterdir())


async def test_what_an_earlier_try_left_in_the_folder_does_not_count(tmp_path: Path) -> None:
    """A fork of step 3 dies after its state is written, and before its generation is; then step 1 is forked."""
    source, target, fresh = (str(tmp_path / name) for name in ("a", "b", "c"))
    await a_run(source, capacity=9)
    async with make(2, target, capacity=9) as pipe:
        pipe.attach(trained=Trained())
        await pipe.resume(3, from_=source)
    shutil.rmtree(Path(target, "generations"))
    os.makedirs(Path(target, "generations"))
    found = []
    for directory in (target, fresh):
        async with make(3, directory, capacity=9) as pipe:
            pipe.attach(trained=Trained())
            await pipe.resume(1, from_=source)
        async with make(4, directory, capacity=9) as pipe:  # by its own journals
            pipe.attach(trained=Trained())
            await pipe.resume()
            pipe.ledger.check()
            state = dict(pipe.ledger.snapshot())
            for entry in state["entries"].values():
                del entry["made"]  # another incarnation
            found.append(state)
    assert found[0] == found[1]


async def test_payloads_keep_the_life_that_they_are_of(tmp_path: Path) -> None:
    source, target = str(tmp_path / "a"), str(tmp_path / "b")
    await a_run(source, capacity=9)
    async with make(2, source, capacity=9) as pipe:  # everything that was unconsumed begins a life anew
        pipe.attach(trained=Trained())
        await pipe.resume(2)
        await pipe.start(weights_current=True)
        await anyio.sleep(5.0)
        lives = {uid: entry.life for uid, entry in pipe.ledger.entries.items()}
    async with make(3, target, capacity=9) as pipe:
        pipe.attach(trained=Trained())
        await pipe.resume(from_=source)
    layout = Layout(target)
    run = layout.read_run()
    assert run is not None
    paths = [os.path.join(layout.segments, name) for name in layout.list_segments()]
    headers = [frame.header for path in paths for frame in scan(path, run_tag=run.tag) if frame.header.kind == PAYLOAD]
    assert headers
    assert all(header.life == lives[header.sequence] for header in headers)
    assert any(header.life for header in headers)


async def test_the_first_generation_says_where_it_comes_from(tmp_path: Path) -> None:
    source, target = str(tmp_path / "a"), str(tmp_path / "b")
    await a_run(source, capacity=9)
    async with make(2, target, capacity=9) as pipe:
        pipe.attach(trained=Trained())
        await pipe.resume(from_=Path(source))
    first = json.loads(next(Path(target, "generations").glob("*/manifest.json")).read_text())
    run_id = json.loads(Path(source, "run.json").read_text())["run_id"]
    assert (first["reason"], first["parent"]) == ("fork", -1)
    assert first["origin"].startswith(f"{run_id}/")
    assert first["run_id"] != run_id


async def test_what_cannot_be_forked_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    source, used = str(tmp_path / "a"), str(tmp_path / "used")
    await a_run(source, capacity=9)
    await a_run(used, capacity=9)
    async with make(1, used) as pipe:
        with pytest.raises(UsageError, match="begins a new run"):
            await pipe.resume(from_=source)
    async with make(1, None) as pipe:
        with pytest.raises(UsageError, match="begins a new run"):
            await pipe.resume(from_=source)
    for empty in (str(tmp_path / "nothing"), str(tmp_path)):
        async with make(1, str(tmp_path / "b")) as pipe:
            with pytest.raises(StoreError, match=r"no run|no run\.json"):
                await pipe.resume(from_=empty)
    async with make(1, str(tmp_path / "b")) as pipe:
        pipe.attach(trained=Trained())
        with pytest.raises(StoreError, match="no generation of step 7"):
            await pipe.resume(7, from_=source)

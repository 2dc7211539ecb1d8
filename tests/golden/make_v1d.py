"""Wrote ``tests/golden/v1d``: a run of format version 1 whose segments were removed and emptied.

    python -m tests.golden.make_v1d

Every sixteenth group waits for its reward while the others are trained and their segments go; what waits is moved. A
first life is killed, and a second one goes on. Beside it lies ``every_event.fbj``. As with ``v1``, these files are
never written again.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from pipeline import Context, Item, Pipeline, Rollout, Task
from pipeline.records import AnyEvent, Moved, Opened
from tasks import SequenceSource
from tests.golden.make_v1 import Learner, fixed_machine, run, write_every_event
from tests.support.crashes import crashed_copy

TARGET = Path(__file__).parent / "v1d"
COUNT = 120
EVERY_EVENT: list[AnyEvent] = [
    Opened(9, 0, 5, 40, 41, 3, "h", 9, 1.5),
    Moved(2**63 - 1, 2, 3, 2**40, 100),
]


async def wait(item: Item, ctx: Context) -> Rollout:
    """A second each; every sixteenth waits for its reward."""
    await anyio.sleep(1 + item["n"] / 1000)
    if item["n"] % 16 == 0:
        ctx.park()
    return Rollout({"n": [item["n"]]}, reward=1.0)


def task() -> Task:
    """The task of the run."""
    return Task("words", source=SequenceSource([{"n": n} for n in range(COUNT)], "words"), run=wait, shuffle=False)


OPTIONS: dict[str, Any] = {
    "concurrency": 8,
    "capacity": 24,
    "batch_groups": 4,
    "keep": 2,
    "save_every": 1,
    "watchdog": None,
    "segment_bytes": 2000,
}


async def life(until: int) -> None:
    """Train up to a step, a generation after each; then the process dies."""
    learner = Learner()
    async with Pipeline(task(), OPTIONS, directory="run", inline=True) as pipe:
        pipe.attach(learner=learner)
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        async for batch in pipe.batches(groups=4, until=until):
            learner.train(batch.step, [group.index for group in batch])
        await anyio.sleep(0.5)
        crashed_copy("run", "crashed")


def make(target: Path) -> None:
    """Write the run to ``target``, which must not exist."""
    with fixed_machine():
        for until in (16, 20):
            run(partial(life, until))
            shutil.rmtree("run")
            shutil.move("crashed", "run")
        write_every_event(EVERY_EVENT, 9, in_a_frame=len(EVERY_EVENT))
        shutil.copytree("run", target)


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)

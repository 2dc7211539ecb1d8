"""Wrote ``tests/golden/v1c``: a run of format version 1 with the events that came after ``v1b`` was written.

    python -m tests.golden.make_v1c

A first life keeps partial rollouts, counts the versions of tokens, and saves without its buffer; it is killed. A second
one inherits that generation, runs single members of groups again, saves, and is killed with a partial rollout kept.
Beside it lies ``every_event.fbj``, with one of each new event and of each that got new fields. As with ``v1``, these
files are never written again.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio

from pipeline import Context, Item, Pipeline, Retry, Rollout, SourceMark, Task
from pipeline.records import Aged, AnyEvent, HeldItem, Inherited, Opened, PartSaved, Reopened
from tasks import SequenceSource
from tests.golden.make_v1 import Learner, fixed_machine, run, write_every_event
from tests.support.crashes import crashed_copy

TARGET = Path(__file__).parent / "v1c"
EVERY_EVENT: list[AnyEvent] = [
    Opened(9, 0, 5, 40, 41, -(2**63), "h", 9, 1.5, [(6, 0, 12)], parent=7, origin="00ff/3"),
    PartSaved(2**63 - 1, 2, 6, oldest=39, newest=41, segment=3, offset=2**40, length=100),
    Aged(uid=2**63 - 1, member=2, tokens={0: 1, 2**40: 2**33}),
    Reopened(uid=2**63 - 1, reason="expired", members=[0, 2], oldest=39, newest=41, rewards=-0.5, tokens=12),
    Inherited(
        items=[
            HeldItem(
                2**62,
                "é",
                3,
                -1,
                4,
                3,
                2,
                "external",
                b"\x00c",
                b"\x02\x03\x04",
                (1, 2, 3),
                (4, 5, 6),
                life=1,
                interruptions=2,
                deaths=3,
                rerolls=4,
                order=5,
                oldest=39,
                newest=41,
                effective=38,
                rewards=-0.25,
                tokens=7,
                places=((0, 6, 0, 3, 2**40, 100),),
                given=((2, 0.5),),
                ages=(0, 39, 7),
            ),
            HeldItem(8, "b", 0, 1, 2, 1, 1, "train", None, b"\x00", (0,), (0,), oldest=None),
        ],
        cursors={"é": (3, 4, -1, SourceMark(kind="k", length=8, digests={0: "d"}), 1)},
        shares={"é": 5.0, "b": 3.0},
        drawn={"é": 2, "b": 2**40},
        totals={"é": {"claimed": 9, "dropped": {"expired": 1}}},
        dropped=[(0, 3), (5, 2**40)],
        next_uid=2**62 + 1,
        given={"é": 0.5, "b": 3.0},
    ),
]


async def write(item: Item, ctx: Context) -> Rollout:
    """One token a second, each with the version that made it; a part is kept after each. Odd members fail at first."""
    if ctx.member == 1 and ctx.attempt == 1:
        await anyio.sleep(7.5 if item["n"] == 6 else 1.5)
        raise ValueError("a bad day")
    part = ctx.partial
    versions = [] if part is None else part["versions"].tolist()
    version = ctx.version
    while len(versions) < 2 + item["n"] % 3:
        await anyio.sleep(1.0)
        versions.append(version + int(ctx.version_changed))
        ctx.save_partial(Rollout({"versions": versions}))
    return Rollout({"versions": versions}, reward=float(item["n"]), tokens=len(versions))


def task() -> Task:
    """The task of the run."""
    source = SequenceSource([{"n": n} for n in range(12)], "words")
    return Task("words", source=source, run=write, group_size=2, shuffle=False, on_failure=Retry(attempts=9))


OPTIONS: dict[str, Any] = {
    "concurrency": 6,
    "capacity": 8,
    "max_staleness": 1,
    "batch_groups": 2,
    "max_rerolls": 99,
    "keep": None,
    "watchdog": None,
    "segment_bytes": 4000,
}


async def train(pipe: Pipeline, learner: Learner) -> None:
    batch = await pipe.get_batch(2)
    learner.train(batch.step, [group.index for group in batch])
    async with pipe.weight_update(version=batch.step):
        pass


async def first_life() -> None:
    """One step, saved without the buffer; then some more, and the process dies."""
    learner = Learner()
    async with Pipeline(task(), OPTIONS, staleness_policy="mask", directory="run", inline=True) as pipe:
        pipe.attach(learner=learner)
        await pipe.start()
        await train(pipe, learner)
        await (await pipe.save(1, replay_buffer=False)).committed()
        await anyio.sleep(1.2)
        crashed_copy("run", "crashed")


async def second_life() -> None:
    """Goes on from the generation without a buffer, and runs members again; killed with partial rollouts kept."""
    learner = Learner()
    async with Pipeline(task(), OPTIONS, staleness_policy="reroll", directory="run", inline=True) as pipe:
        pipe.attach(learner=learner)
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        for _ in range(3):
            await train(pipe, learner)
        await (await pipe.save(4)).committed()
        await train(pipe, learner)
        await anyio.sleep(0.7)
        crashed_copy("run", "crashed")


def make(target: Path) -> None:
    """Write the run to ``target``, which must not exist."""
    with fixed_machine():
        for life in (first_life, second_life):
            run(life)
            shutil.rmtree("run")
            shutil.move("crashed", "run")
        write_every_event(EVERY_EVENT, 9, in_a_frame=len(EVERY_EVENT))
        shutil.copytree("run", target)


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)

"""Wrote ``tests/golden/v1b``: a run of format version 1 with the events that came after ``v1`` was written.

    python -m tests.golden.make_v1b

Parked and rewarded rollouts, items and rollouts by hand, a stream, a source that learns, another share, evaluations;
the process dies once, and the second life closes. Beside it lies ``every_event.fbj``, with one of each new event and of
each that got new fields. As with ``v1``, these files are never written again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio

from pipeline import Context, Item, Pipeline, Rollout, SourceMark, Task
from pipeline.records import AnyEvent, Evaluated, Feedback, Mixed, Opened, Parked, Rewarded
from tasks import SequenceSource
from tests.golden.make_v1 import Learner, fixed_machine, run, write_every_event
from tests.support.crashes import crashed_copy

TARGET = Path(__file__).parent / "v1b"
EVERY_EVENT: list[AnyEvent] = [
    Opened(8, 0, 5, 40, 41, -(2**63), "h", 9, 1.5, [(6, 0, 12)], parent=7),
    Mixed(shares={"é": 5.0, "b": 3.0}, given={"é": 0.5, "b": 3.0}),
    Parked(
        uid=2**63 - 1,
        member=2,
        attempt=6,
        oldest=39,
        newest=41,
        segment=3,
        offset=2**40,
        length=100,
        tokens=12,
        seconds=0.125,
        policy="p",
    ),
    Rewarded(uid=2**63 - 1, member=2, attempt=6, reward=-0.0),
    Feedback(task="é", uid=7, index=2**62, value=0.25),
    Evaluated(
        task="é",
        version=41,
        index=3,
        member=1,
        uid=2**64 - 1,
        reward=-0.0,
        oldest=41,
        newest=42,
        mark="0123456789abcdef",
        segment=3,
        offset=2**40,
        length=100,
        tokens=12,
        seconds=0.125,
    ),
]


class Levels(SequenceSource):
    """A source that learns: it gives an item with how often it was told of it."""

    def __init__(self) -> None:
        super().__init__([{"n": n} for n in range(4)], "levels")
        self.told: list[tuple[int, float]] = []

    def item(self, index: int) -> Any:
        return {"n": index, "told": sum(index == each for each, _ in self.told)}

    def mark(self) -> SourceMark:
        return SourceMark("levels", 4, {0: "zero"})

    def feedback(self, index: int, reward: float) -> None:
        self.told.append((index, reward))


async def letters(*given: str) -> AsyncIterator[Any]:
    """A stream of texts that ends after them."""
    for text in given:
        yield {"text": text}


async def levels(item: Item, ctx: Context) -> Rollout:
    """Items of even numbers park their second member."""
    await anyio.sleep(1.0 + item["n"] / 10)
    if item["n"] % 2 == 0 and ctx.member == 1:
        ctx.park()
    return Rollout({"n": [item["n"], item["told"]]}, reward=float(ctx.member), tokens=2)


async def read(item: Item, ctx: Context) -> Rollout:
    """A text, as bytes."""
    await anyio.sleep(1.0)
    return Rollout({"text": list(item["text"].encode())}, reward=1.0, info={"kind": ctx.kind})


def tasks(*texts: str) -> list[Task]:
    """The tasks of the run; ``texts`` is what is still to come of the stream."""
    return [
        Task("levels", source=Levels(), run=levels, group_size=2, share=2, shuffle=False, epochs=2),
        Task("letters", source=letters(*texts), run=read),
    ]


def exam() -> Task:
    """What is evaluated."""
    return Task("exam", source=SequenceSource([{"text": text} for text in ("x", "y", "z")], "exam"), run=read)


OPTIONS: dict[str, Any] = {"concurrency": 4, "capacity": 8, "segment_bytes": 3000, "keep": None, "watchdog": None}


async def first_life() -> None:
    """One step trained and saved; then the process dies, with groups parked and an evaluation half done."""
    learner = Learner()
    async with Pipeline(tasks("a", "é", "\U0001f600"), OPTIONS, directory="run", inline=True) as pipe:
        pipe.attach(learner=learner)
        await pipe.start()
        await pipe.submit("letters", {"text": "by hand", "pair": (1, 2**70)})
        await pipe.put(
            "letters", [Rollout({"text": [1, 2]}, reward=0.5), Rollout({"text": []}, reward=0.25)], {"text": ""}
        )
        batch = await pipe.get_batch(2)
        learner.train(1, [group.index for group in batch])
        async with pipe.weight_update(version=1):
            pass
        await (await pipe.save(1)).committed()
        await pipe.set_share("letters", 3.0)
        await anyio.sleep(3)
        await pipe.reward(min(pipe.ledger.parked), 7.5, member=1)
        with anyio.move_on_after(1.5):
            await pipe.evaluate(exam())
        crashed_copy("run", "crashed")


async def second_life() -> None:
    """Goes on, rewards another group, finishes the evaluation, and closes."""
    async with Pipeline(tasks("more"), OPTIONS, directory="run", inline=True) as pipe:
        pipe.attach(learner=Learner())
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        await pipe.evaluate(exam())
        await anyio.sleep(3)
        await pipe.discard(max(pipe.ledger.parked))


def make(target: Path) -> None:
    """Write the run to ``target``, which must not exist."""
    with fixed_machine():
        run(first_life)
        shutil.rmtree("run")
        shutil.move("crashed", "run")
        run(second_life)
        os.unlink("run/lock")
        write_every_event(EVERY_EVENT, 8, in_a_frame=len(EVERY_EVENT))
        shutil.copytree("run", target)


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)

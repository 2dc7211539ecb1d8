"""Wrote ``tests/golden/v1``: a small run of format version 1, crashed once and resumed, as this library left it.

    python -m tests.golden.make_v1

Beside the run lies ``every_event.fbj``, a journal with an event of each kind and no default anywhere. Golden files are
never written again: if one stops loading, the code is wrong. This stays to say what is in them. The
clock is virtual, the host, the process and the times of the wall are fixed, and the folder is named by a relative path,
so that nothing of the machine that ran this is in the files.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import torch

from pipeline import Context, Item, Pipeline, Retry, Rollout, Task
from pipeline.records import (
    AnyEvent,
    BatchHint,
    Claimed,
    Closed,
    Dropped,
    EpochBegan,
    Failed,
    Finished,
    Interrupted,
    Mixed,
    Opened,
    Reopened,
    SourceMark,
    Started,
    Trace,
)
from pipeline.store.files import OsFiles
from pipeline.store.layout import Layout
from pipeline.store.writer import StoreWriter
from pipeline.testing import VirtualClockLoop
from tasks import SequenceSource
from tests.support.crashes import crashed_copy

TARGET = Path(__file__).parent / "v1"
RUN_ID = "00112233445566778899aabbccddeeff"
EVERY_EVENT: list[AnyEvent] = [
    Opened(
        incarnation=7,
        rank=0,
        generation=5,
        version=40,
        step=41,
        seed=-(2**63),
        host="h",
        process=9,
        wall=1.5,
        discarded=[(6, 0, 12)],
    ),
    EpochBegan(task="é", epoch=3, length=-1, mark=SourceMark(kind="k", length=8, digests={0: "d"}), restarted=True),
    Claimed(uid=2**63, task="é", epoch=3, position=4, index=2, size=3, need=2, kind="evaluation", content=b"\x00c"),
    Started(uid=2**63, member=2, attempt=5, version=41, policy="p"),
    Failed(uid=1, member=2, attempt=5, reason="timeout", error="E: \0", final=True, seconds=0.25),
    Interrupted(uid=1, member=2, attempt=5, reason="shutdown", unplanned=True),
    Finished(
        uid=1,
        member=2,
        attempt=6,
        reward=-0.0,
        oldest=39,
        newest=41,
        segment=3,
        offset=2**40,
        length=100,
        tokens=12,
        seconds=0.125,
        policy="p",
    ),
    Reopened(uid=1, reason="expired"),
    Dropped(uid=1, reason="quarantined"),
    BatchHint(step=42, uids=[1, 2**63], lives=[0, 2], consumer="other"),
    Mixed(shares={"é": 0.5, "b": 3.0}),
    Closed(wall=9.5),
]


class Learner:
    """What is attached: a few tensors and plain values, changed by each step."""

    def __init__(self) -> None:
        self.weight = torch.zeros((2, 3), dtype=torch.bfloat16)
        self.moments = {0: torch.zeros(2, dtype=torch.float64), 1: None}
        self.trained: list[tuple[int, int]] = []

    def train(self, step: int, indices: list[int]) -> None:
        self.weight += step
        self.moments[0] = torch.tensor([step, 1 / 3], dtype=torch.float64)
        self.trained += [(step, index) for index in indices]

    def state_dict(self) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "tied": self.weight,
            "moments": self.moments,
            "trained": self.trained,
            "best": float("-inf"),
            "big": 2**70,
            "betas": (0.9, 0.999),
            "empty": torch.zeros((0, 4), dtype=torch.bool),
            "dtype": torch.float16,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["weight"])
        self.moments, self.trained = state["moments"], state["trained"]


async def solve(item: Item, ctx: Context) -> Rollout:
    """Takes longer the greater the item's number; item 3 fails for good, item 4 at its first try."""
    number = item["n"]
    await anyio.sleep(1.0 + number / 10 + ctx.member / 100)
    if number == 3 or (number == 4 and ctx.attempt == 1):
        raise ValueError(f"no answer to {number}")
    tensors = {
        "ids": torch.arange(number + 1),
        "logprobs": torch.full((number + 1,), -0.5, dtype=torch.float16),
        "done": torch.tensor(True),
        "image": torch.full((2, 2, 3), number, dtype=torch.uint8),
        "nothing": torch.zeros((0, 2)),
    }
    info = {"text": "ok \ud83d", "pair": (number, 2**70), "by number": {7: [None, float("nan"), b"\x00"]}}
    return Rollout(
        [Trace(tensors, "solver", "big"), Trace({"ids": [number]}, "judge")], number / 4, info, tokens=number
    )


async def talk(item: Item, ctx: Context) -> Rollout:
    """One tensor, drawn from the attempt's own random stream."""
    await anyio.sleep(0.7)
    return Rollout({"noise": ctx.rng.random(3)}, reward=1.0, info={"said": item["text"]}, tokens=10)


def tasks() -> list[Task]:
    """The tasks of the run: both lives, and whoever opens it."""
    rows = SequenceSource([{"n": number} for number in range(8)], "rows")
    texts = SequenceSource([{"text": text} for text in ("a", "é", "\U0001f600")], "texts")
    return [
        Task("math", source=rows, run=solve, group_size=2, share=2, on_failure=Retry(attempts=2), epochs=2),
        Task("chat", source=texts, run=talk, shuffle=False),
    ]


OPTIONS: dict[str, Any] = {
    "concurrency": 4,
    "max_staleness": 2,
    "batch_groups": 2,
    "capacity": 6,
    "segment_bytes": 3000,
    "keep": None,
    "seed": 11,
    "watchdog": None,
}


async def first_life() -> None:
    """Two steps trained, the first of them saved, the third handed out; then the process dies."""
    learner = Learner()
    async with Pipeline(tasks(), OPTIONS, directory="run", inline=True) as pipe:
        pipe.attach(learner=learner)
        await pipe.start()
        for step in (1, 2):
            batch = await pipe.get_batch(2)
            learner.train(step, [group.index for group in batch])
            async with pipe.weight_update(version=step):
                pass
            if step == 1:
                await (await pipe.save(1)).committed()
            else:
                await pipe.ack(2)
        await pipe.get_batch(2)
        await anyio.sleep(0.5)
        crashed_copy("run", "crashed")


async def second_life() -> None:
    """Resumes the first generation after, repeats the batches of before, saves step 3, and closes."""
    learner = Learner()
    async with Pipeline(tasks(), OPTIONS, directory="run", inline=True) as pipe:
        pipe.attach(learner=learner)
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        for step in (2, 3):
            batch = await pipe.get_batch(2)
            learner.train(step, [group.index for group in batch])
            async with pipe.weight_update(version=step):
                pass
            await (await pipe.save(step)).committed()
        await pipe.get_batch(2)
        await anyio.sleep(1.15)


def run(main: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())


@contextmanager
def fixed_machine() -> Iterator[None]:
    """In an empty folder, on a host, in a process and at a time that are the same everywhere."""
    before = os.getcwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(socket, "gethostname", return_value="golden"),
        mock.patch.object(os, "getpid", return_value=4242),
        mock.patch("secrets.token_hex", return_value=RUN_ID),
        mock.patch("time.time", return_value=1_700_000_000.0),
        mock.patch("pipeline.wiring.saving.datetime") as clock,
    ):
        clock.now.return_value = datetime(2024, 1, 1, tzinfo=UTC)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def write_every_event(events: list[AnyEvent], incarnation: int, *, in_a_frame: int) -> None:
    """Write a journal with ``events``, so many in a frame, and a synced mark, to ``run/every_event.fbj``."""
    os.makedirs("other/journals")
    writer = StoreWriter(Layout("other"), OsFiles(), run_tag=int(RUN_ID[:16], 16), incarnation=incarnation)
    for number, event in enumerate(events, 1):
        writer.append(event)
        if number % in_a_frame == 0 or number == len(events):
            writer.write(writer.take())
    writer.sync()
    writer.close()
    shutil.move(f"other/journals/{incarnation:06d}-0000.fbj", "run/every_event.fbj")


def make(target: Path) -> None:
    """Write the run to ``target``, which must not exist."""
    with fixed_machine():
        run(first_life)
        with open("crashed/journals/000001-0000.fbj", "ab") as journal:
            journal.write(b"FBAY torn")
        shutil.rmtree("run")
        shutil.move("crashed", "run")
        run(second_life)
        os.unlink("run/lock")
        write_every_event(EVERY_EVENT, 7, in_a_frame=2)
        shutil.copytree("run", target)


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)

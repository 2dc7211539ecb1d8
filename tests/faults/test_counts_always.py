"""The counts add up after every callback of the event loop, attempts included, over aborts, parking and crashes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Pipeline, Retry, Rollout, Task, ZeroVariance
from pipeline.ledger import IN_FLIGHT
from pipeline.records import AnyEvent, Started
from pipeline.wiring.state import RunState
from tests.support.crashes import Trained, crashed_copy, inline_pipeline
from tests.support.runs import numbers

pytestmark = pytest.mark.virtual_time

ENDS = ("finished", "failed", "interrupted")


class Auditor:
    """Looks at a pipeline after every callback, and counts the attempts that were begun by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pipe: Pipeline | None = None
        self.checks = self.begun = self.before = 0
        self.found: list[str] = []
        run, record = asyncio.events.Handle._run, RunState.record

        def recorded(state: RunState, event: AnyEvent) -> Any:
            self.begun += isinstance(event, Started)
            return record(state, event)

        def called(handle: Any) -> None:
            run(handle)
            if self.pipe is not None:
                self.check(self.pipe)

        monkeypatch.setattr(RunState, "record", recorded)
        monkeypatch.setattr(asyncio.events.Handle, "_run", called)

    def watch(self, pipe: Pipeline) -> None:
        """From now on. What earlier lives began and ended is left out."""
        self.before = sum(getattr(pipe.statistics().rollouts, name) for name in ENDS)
        self.pipe, self.begun = pipe, 0

    def check(self, pipe: Pipeline) -> None:
        self.checks += 1
        pipe.ledger.check()
        now = pipe.statistics()
        ended = sum(getattr(now.rollouts, name) for name in ENDS) - self.before
        if self.begun != now.rollouts.in_flight + ended:
            self.found.append(f"{self.begun} begun, {now.rollouts.in_flight} in flight, {ended} ended")
        for entry in pipe.ledger.entries.values():
            if entry.in_flight != entry.members.count(IN_FLIGHT):
                self.found.append(f"uid {entry.uid}: {entry.in_flight} in flight, {list(entry.members)}")
        if now.buffer.groups != now.groups.buffered:
            self.found.append(f"{now.buffer.groups} in the buffer, {now.groups.buffered} buffered")


def moody(rng: random.Random) -> Task:
    """A task whose attempts fail, take too long, or are parked."""

    async def run(item: Item, ctx: Context) -> Rollout:
        chance = rng.random()
        await anyio.sleep(0.2 + 3 * chance**4)
        if chance > 0.8:
            raise ValueError("a bad day")
        if chance < 0.1:
            ctx.park()
        return Rollout({"n": [item["n"]]}, reward=float(chance > 0.4), tokens=3)

    limits: dict[str, Any] = {"timeout": 1.5, "group_timeout": 4.0, "on_failure": Retry(attempts=2)}
    return Task("numbers", source=numbers(60), run=run, group_size=3, min_group=2, filter=ZeroVariance(), **limits)


async def train(pipe: Pipeline, rng: random.Random) -> None:
    async for batch in pipe.batches(groups=3):
        async with pipe.weight_update(version=batch.step, running=rng.choice(["keep", "abort", "finish"])):
            await anyio.sleep(0.1)
        await anyio.sleep(0.5)
        for uid in list(pipe.ledger.parked):
            await pipe.discard(uid)
        if rng.random() < 0.5:
            await pipe.save(batch.step, replay_buffer=rng.random() < 0.5)


@pytest.mark.parametrize("seed", range(6))
async def test_they_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    auditor = Auditor(monkeypatch)
    directory = str(tmp_path / "0")
    options: dict[str, Any] = {"concurrency": 7, "capacity": 12, "max_staleness": 3, "batch_groups": 3}
    for life in range(1, 5):
        async with inline_pipeline(moody(rng), directory=directory, **options) as pipe:
            pipe.attach(trained=Trained())
            resumed = await pipe.resume()
            async with pipe.weight_update(version=resumed.version):
                pass
            auditor.watch(pipe)
            await pipe.start()
            with anyio.move_on_after(2.0 * life):
                await train(pipe, rng)
            directory = crashed_copy(directory, tmp_path / str(life))
            auditor.pipe = None
    assert not auditor.found
    assert auditor.checks > 500

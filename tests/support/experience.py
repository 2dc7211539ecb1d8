"""Runs whose rollouts fill a replay buffer: a walk along a line, whose every row says where it comes from."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import numpy as np

from pipeline import Context, EndOfSource, Item, Limiter, Pipeline, ReplayBuffer, Resumed, Rollout
from tests.support.runs import pipeline, task

ROWS = 3


def block(item: Item, part: int, rows: int = ROWS, *, ends: bool = False) -> dict[str, Any]:
    """``rows`` rows of an episode's part: whose they are, their place, and whether it ends with them."""
    place = np.arange(part * rows, (part + 1) * rows)
    terminated = np.zeros(rows, bool)
    terminated[-1] = ends
    return {
        "obs": np.stack([np.full(rows, item.index), place], axis=1).astype(np.float32),
        "reward": place.astype(np.float32),
        "terminated": terminated,
    }


async def walk(item: Item, ctx: Context) -> Rollout:
    """Two blocks of one episode."""
    for part in range(2):
        await anyio.sleep(0.001)
        await ctx.extend(block(item, part, ends=part == 1))
    return Rollout(reward=float(item.index))


async def hop(item: Item, ctx: Context) -> Rollout:
    """An episode of one block, which says nothing of when it was made."""
    await ctx.extend(block(item, 0, ends=True))
    return Rollout(reward=float(item.index))


def fed(buffer: ReplayBuffer, count: int = 12, run: Any = walk, **options: Any) -> Pipeline:
    """A pipeline of ``count`` walks that fills ``buffer``."""
    of_task = {name: options.pop(name) for name in ("on_failure", "epochs", "timeout") if name in options}
    options.setdefault("concurrency", 3)
    return pipeline(task(count, run, **of_task), buffer=buffer, **options)


def contents(buffer: ReplayBuffer) -> list[tuple[int, int]]:
    """Whose and which rows the buffer holds, oldest first."""
    if buffer.schema is None:
        return []
    keys = buffer.ring.keys()
    obs = buffer.ring.storage.view("obs")[buffer.ring.slots(keys)]
    return [(int(index), int(place)) for index, place in obs]


async def filled(pipe: Pipeline) -> None:
    """Wait until every episode has ended, or the run has failed."""
    state = pipe._run.state
    await state.changed.wait_for(
        lambda: state.failure is not None or (not pipe.ledger.outstanding and pipe._run.producer.drained)
    )


async def reaches(pipe: Pipeline, buffer: ReplayBuffer, added: int) -> None:
    """Wait until so many rows were added."""
    await pipe._run.state.changed.wait_for(lambda: buffer.ring.added >= added)


async def written(pipe: Pipeline) -> None:
    """Let everything that is queued be written."""
    assert pipe._run.state.writer is not None
    await pipe._run.state.writer.flush()


async def resumed(pipe: Pipeline, step: int | None = None) -> Resumed:
    """Resume, and say that the weights are those."""
    found = await pipe.resume(step)
    async with pipe.weight_update(version=found.version):
        pass
    return found


class Agent:
    """Counts what it was trained on."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def train(self, batch: Any) -> np.ndarray:
        self.seen.append(float(batch["obs"].sum()))
        return np.asarray(batch["reward"]) + 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def play_until_done(pipe: Any, directory: str, count: int) -> None:
    """An off-policy trainer's process, made to be killed: it says which steps were saved, and at last what it has."""
    limiter = Limiter(min_size=1, ratio=2.0, error_buffer=100.0)
    buffer, agent = ReplayBuffer(10 * count, select={"select": "prioritized"}, limiter=limiter, seed=2), Agent()
    with fed(buffer, count, run=walk_unevenly, directory=directory, max_deaths=10**6, concurrency=8).sync() as run:
        run.attach(agent=agent)
        step = run.resume().step
        with run.weight_update(version=step):
            pass
        assert len(agent.seen) == step, "weights and agent are of one step"
        pipe.send(("resumed", step, len(buffer)))
        run.start()
        begun = step
        for step in itertools.count(begun + 1):
            try:
                batch = run.sample(16)
            except EndOfSource:
                break
            buffer.update_priorities(batch.keys, agent.train(batch))
            if step % 4 == 0:
                run.save(step).committed()
                pipe.send(("saved", step, len(buffer)))
            else:
                run.ack(step)
        run.ledger.check()
        pipe.send(("done", contents(buffer), run.ledger.totals["numbers"].retired))


async def walk_unevenly(item: Item, ctx: Context) -> Rollout:
    """One to four blocks."""
    parts = 1 + item.index % 4
    for part in range(parts):
        await anyio.sleep(0.0005 * (1 + item.index % 5))
        await ctx.extend(block(item, part, ends=part == parts - 1))
    return Rollout(reward=0.0)

"""Runs of every kind for those who look at them: what they hold is known exactly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import Context, Item, ReplayBuffer, Rollout, TrajectoryBuffer
from pipeline.distributed import Ranks
from tests.support.crashes import Trained, begin, inline_pipeline, train
from tests.support.ranks import fine, on_ranks
from tests.support.runs import task
from tests.support.trajectories import trajectory

MESSAGES = [
    {"role": "user", "content": "What is 6 times 7?\nThink first."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}}],
    },
    {"role": "tool", "content": "42", "name": "multiply"},
    {"role": "assistant", "content": "It is 42. \x1b[2J\x1b]0;owned\x07"},
]
"""The last one would clear the screen, were it printed as it is."""


async def talk(item: Item, ctx: Context) -> Rollout:
    """A conversation with as many tokens as the item's number; numbers that 4 divides fail once."""
    number = item["n"]
    if number % 4 == 0 and ctx.attempt == 1:
        raise ValueError(f"no answer to {number}")
    tokens = {"prompt_ids": np.arange(3), "completion_ids": np.arange(number), "logprobs": np.full(number, -0.5)}
    return Rollout(tokens, reward=number / 8, info={"messages": MESSAGES, "n": number}, tokens=number)


async def rollouts(directory: str, *, steps: int = 2, **options: Any) -> str:
    """Eight items, of which the first ``2 * steps`` were trained and the rest wait."""
    given = task(8, talk)
    async with inline_pipeline(given, directory=directory, concurrency=1, capacity=8, keep=None, **options) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        for _ in range(steps):
            await train(pipe, trained, await pipe.get_batch(2))
        await pipe._run.state.changed.wait_for(lambda: pipe.ledger.totals["numbers"].produced == 8)
        await (await pipe.save(steps)).committed()
    return directory


class Learner:
    """What is attached."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "weight": np.ones(100)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def rows(count: int, first: int = 0) -> dict[str, Any]:
    """Rows whose reward is their number, in episodes of ten."""
    numbers = np.arange(first, first + count)
    return {
        "obs": np.stack([numbers, numbers * 2], 1).astype(np.float32),
        "reward": numbers.astype(np.float32),
        "terminated": numbers % 10 == 9,
    }


def transitions(directory: str, count: int = 150, capacity: int = 100, **options: Any) -> str:
    """A buffer into which 0 to ``count`` were added, in two saves; all of version 3 but the last ten."""
    with ReplayBuffer(capacity, directory=directory, seed=5, **options) as buffer:
        buffer.attach(learner=Learner())
        buffer.resume()
        buffer.extend(rows(count // 2), version=3)
        buffer.save(1, wait=True)
        buffer.extend(rows(count - 10 - count // 2, count // 2), version=3)
        buffer.extend(rows(10, count - 10), version=4)
        if buffer.drawer.takes_priorities:
            keys = buffer.ring.keys()
            buffer.update_priorities(keys, 1.0 + keys % 7)
        buffer.save(2, wait=True)
    return directory


def trajectories(directory: str, count: int = 6) -> str:
    """Trajectories of 4 steps and 3 environments."""
    with TrajectoryBuffer(directory=directory, seed=5, sample_window_size=4) as buffer:
        buffer.resume()
        for number in range(count):
            buffer.add_trajectories([trajectory(number)])
        buffer.save(1, wait=True)
    return directory


def shards(directory: str, ranks: int = 2) -> str:
    """A buffer of which each rank has 20 rows, of its own hundred numbers."""

    def fill(each: Ranks) -> None:
        with ReplayBuffer(50, directory=directory, ranks=each, seed=5) as buffer:
            buffer.resume()
            buffer.extend(rows(20, 100 * each.rank))
            buffer.save(1, wait=True)

    fine(on_ranks(ranks, fill))
    return directory


def fingerprint(directory: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """What would tell that a file was touched."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(directory).rglob("*")):
        each = path.lstat()
        found[str(path)] = (each.st_ino, each.st_mtime_ns, each.st_ctime_ns, each.st_size)
    return found

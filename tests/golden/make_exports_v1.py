"""Wrote ``tests/golden/exports_v1``: exports of format version 1, in JSON lines and safetensors.

    python -m tests.golden.make_exports_v1

Of a small buffer with priorities and an open episode, of rollouts of which one has no trace, and of trajectories of two
lengths. As with ``v1``, these files are never written again.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import Context, Item, Pipeline, Prioritized, ReplayBuffer, Rollout, Task, Trace, TrajectoryBuffer
from pipeline.testing import VirtualClockLoop
from pipeline.tools.exporting import export
from tests.support.runs import numbers

TARGET = Path(__file__).parent / "exports_v1"
FORMATS = ("jsonl", "safetensors")
INFO: dict[str, Any] = {"bytes": b"\x00\xff", "tuple": (1, None), "big": 2**70, "nan": float("nan"), "map": {1: "a"}}


def rows() -> dict[str, Any]:
    """Six rows; the last episode is open."""
    return {
        "obs": np.array([[0.5, -0.0], [np.nan, np.inf], [1, 2], [3, 4], [5, 6], [7, 8]], np.float32),
        "half": torch.arange(6).bfloat16() / 4,
        "action": np.arange(6, dtype=np.uint8),
        "reward": np.arange(6) / 2,
        "terminated": np.arange(6) == 1,
        "truncated": np.arange(6) == 3,
    }


async def play(item: Item, ctx: Context) -> Rollout:
    """A rollout of two traces; of item 1, of none."""
    n = item["n"]
    if n == 1:
        return Rollout((), reward=-1.0, info=INFO)
    ids = {"prompt_ids": torch.arange(n), "logprobs": torch.arange(n) / -8}
    return Rollout((Trace(ids, "solver", "p"), Trace({"score": torch.tensor(n / 4)}, "judge")), reward=n / 3, tokens=n)


def trajectory(number: int) -> dict[str, Any]:
    """A trajectory [T, 2, ...]."""
    steps = 2 + number
    return {
        "rewards": torch.arange(steps * 2).reshape(steps, 2) / 4 + number,
        "actions": torch.arange(steps * 2 * 3, dtype=torch.int16).reshape(steps, 2, 3),
        "model_weights_id": f"w{number}",
    }


async def rollouts(directory: str) -> None:
    async with Pipeline(
        Task("play", source=numbers(4), run=play, epochs=1, shuffle=False), directory=directory
    ) as pipe:
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        await pipe.get_batch(groups=4)
        await (await pipe.save(0)).committed()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with ReplayBuffer(6, select=Prioritized(alpha=0.5), directory="buffer", seed=1) as buffer:
            buffer.resume()
            buffer.extend(rows(), version=2)
            buffer.update_priorities(np.arange(6), np.arange(6) + 1.0)
            buffer.save(3, wait=True)
        with TrajectoryBuffer(directory="trajectories", seed=1) as buffer_of:
            buffer_of.resume()
            buffer_of.add_trajectories([trajectory(0), trajectory(1)])
            buffer_of.save(4, wait=True)
        with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
            runner.run(rollouts("rollouts"))
        for name in ("buffer", "trajectories", "rollouts"):
            for to in FORMATS:
                export(name, TARGET / f"{name}-{to}", to=to)


if __name__ == "__main__":
    main()

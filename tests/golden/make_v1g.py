"""Wrote ``tests/golden/v1g``: a run of format version 1 whose rollouts fill a replay buffer, and whose generations say
how it draws.

    python -m tests.golden.make_v1g

As with ``v1``, these files are never written again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio

from pipeline import Pipeline, ReplayBuffer
from tests.golden.make_v1 import fixed_machine, run
from tests.golden.make_v1e import OPTIONS, task
from tests.support.crashes import crashed_copy
from tests.support.experience import Agent

TARGET = Path(__file__).parent / "v1g"


def buffer() -> ReplayBuffer:
    """The buffer of the run."""
    return ReplayBuffer(60, select={"select": "uniform", "uses": 3, "window_trajectories": 4}, seed=9)


async def life() -> None:
    """Train some steps, saving each; then the process dies."""
    agent = Agent()
    async with Pipeline(task(), OPTIONS, directory="run", buffer=buffer(), inline=True) as pipe:
        pipe.attach(agent=agent)
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        for step in range(1, 6):
            await anyio.sleep(4)
            agent.train(await pipe.sample(4))
            await (await pipe.save(step)).committed()
        crashed_copy("run", "crashed")


def make(target: Path) -> None:
    """Write the run to ``target``, which must not exist."""
    with fixed_machine():
        run(life)
        shutil.copytree("crashed", target)


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)

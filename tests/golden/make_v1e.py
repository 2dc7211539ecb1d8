"""Wrote ``tests/golden/v1e``: a run of format version 1 whose rollouts fill a replay buffer.

    python -m tests.golden.make_v1e

A first life is killed after its second generation, with rows in its journal that no generation knows of, and an episode
open; a second one goes on. Beside it lies ``every_event.fbj``. As with ``v1``, these files are never written again.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from pipeline import Context, Item, Pipeline, ReplayBuffer, Rollout, Task
from pipeline.records import Added, AnyEvent, Opened
from tasks import SequenceSource
from tests.golden.make_v1 import fixed_machine, run, write_every_event
from tests.support.crashes import crashed_copy
from tests.support.experience import Agent, block

TARGET = Path(__file__).parent / "v1e"
COUNT = 24
EVERY_EVENT: list[AnyEvent] = [
    Opened(9, 0, 5, 40, 41, 3, "h", 9, 1.5, [(6, 0, 12)]),
    Added(2**63 - 1, 0, 3, 7, 2**40, 1000, 12, 3, 2**40, 100),
    Added(1, 0, 1, 0, 0, 1, 0),
]


async def play(item: Item, ctx: Context) -> Rollout:
    """Three blocks, a second apart."""
    for part in range(3):
        await anyio.sleep(1 + item["n"] / 1000)
        await ctx.extend(block(item, part, ends=part == 2))
    return Rollout(reward=1.0)


def task() -> Task:
    """The task of the run."""
    return Task("walks", source=SequenceSource([{"n": n} for n in range(COUNT)], "walks"), run=play, shuffle=False)


def buffer() -> ReplayBuffer:
    """The buffer of the run: it is full in the second life."""
    return ReplayBuffer(100, select={"select": "prioritized", "alpha": 0.5}, seed=8)


OPTIONS: dict[str, Any] = {"concurrency": 3, "keep": 2, "watchdog": None}


async def life(steps: range, added: int) -> None:
    """Train some steps, saving each; then the process dies, when so many rows were added."""
    agent, rows = Agent(), buffer()
    async with Pipeline(task(), OPTIONS, directory="run", buffer=rows, inline=True) as pipe:
        pipe.attach(agent=agent)
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        for step in steps:
            await anyio.sleep(4)
            batch = await pipe.sample(8)
            rows.update_priorities(batch.keys, agent.train(batch))
            await (await pipe.save(step)).committed()
        await pipe._run.state.changed.wait_for(lambda: rows.ring.added >= added)
        await anyio.sleep(0.5)
        crashed_copy("run", "crashed")


def make(target: Path) -> None:
    """Write the run to ``target``, which must not exist."""
    with fixed_machine():
        for steps, added in ((range(1, 3), 50), (range(3, 6), 110)):
            run(partial(life, steps, added))
            shutil.rmtree("run")
            shutil.move("crashed", "run")
        write_every_event(EVERY_EVENT, 9, in_a_frame=len(EVERY_EVENT))
        shutil.copytree("run", target)


if __name__ == "__main__":
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there; golden files are never written again")
    make(TARGET)

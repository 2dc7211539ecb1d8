"""Training processes that are made to be killed, and whose rollouts are made in workers."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio

from pipeline import Pipeline, ProcessEngine, Rollout, Task
from tests.support import in_workers
from tests.support.killed import Tally
from tests.support.runs import numbers
from tests.support.workers import items

GROUPS = 5


async def train(directory: str, count: int, engine: Any, say: Any, run: Any = None) -> Tally:
    """Train until every item has been trained, saving now and then; go on from whatever the directory holds."""
    tally = Tally(count)
    if run is None:
        run = in_workers.number_and_pid if engine is not None else in_workers.number_async
    given = Task("numbers", source=numbers(count), run=run, group_size=2)
    async with Pipeline(
        [given], directory=directory, engine=engine, capacity=10, max_deaths=100, watchdog=None
    ) as pipe:
        pipe.attach(tally=tally)
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        async for batch in pipe.batches(groups=GROUPS):
            assert all(len(group) == 2 and right(group.index, rollout) for group in batch for rollout in group)
            tally.train([group.index for group in batch])
            pids = sorted({rollout.info["pid"] for rollout in batch.rollouts if "pid" in rollout.info})
            async with pipe.weight_update(version=batch.step):
                pass
            if batch.step % 2 == 0:
                await pipe.save(batch.step)
            say((batch.step, pids))
        pipe.ledger.check()
        await pipe.save(pipe.ledger.step)
    return tally


def right(index: int, rollout: Rollout) -> bool:
    """Whether it is a rollout of that item."""
    return rollout["n"].tolist() == [index] and rollout.reward == index


def trainer(pipe: Connection, directory: str, count: int) -> None:
    """The process's main function."""
    tally = anyio.run(lambda: train(directory, count, ProcessEngine(workers=2), pipe.send))
    pipe.send(("seen", tally.seen.tolist()))


def waits(pipe: Connection, folder: str) -> None:
    """Runs what never ends, in workers of both kinds."""

    async def main() -> None:
        bell = str(Path(folder, "bell"))
        tasks = [
            Task("plain", source=items({"bell": bell}), run=in_workers.never_ends),
            Task("async", source=items({"bell": bell}), run=in_workers.never_ends_async),
        ]
        async with Pipeline(tasks, engine=ProcessEngine(workers=1, per_worker=1), watchdog=None) as running:
            await running.start()
            pipe.send(os.getpid())
            await running.get_batch(2)

    anyio.run(main)

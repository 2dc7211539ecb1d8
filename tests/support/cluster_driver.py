"""A training process whose rollouts are made in Ray actors, and which is made to be killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio

from pipeline import Pipeline, RayEngine, Rollout, connect
from tests.support.on_cluster import where_async
from tests.support.runs import task


class Contents:
    """Stands for the weights: remembers every rollout that it was trained on, and goes back with the checkpoint."""

    def __init__(self) -> None:
        self.rollouts: list[list[float]] = []

    def train(self, rollouts: Sequence[Rollout]) -> None:
        """One trainer step."""
        self.rollouts += [[each["n"].item(), *each["noise"].tolist(), each.reward] for each in rollouts]

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": list(self.rollouts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollouts = list(state["rollouts"])


async def train_contents(directory: str, count: int, engine: Any, say: Any) -> list[list[float]]:
    """Train until every item has been trained, saving now and then; go on from whatever the directory holds."""
    contents = Contents()
    given = task(count, where_async, on_failure="fail_fast")
    options: dict[str, Any] = {"capacity": 40, "max_deaths": 100, "watchdog": None}
    async with Pipeline(given, directory=directory, engine=engine, **options) as pipe:
        pipe.attach(contents=contents)
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        async for batch in pipe.batches(groups=5):
            contents.train(batch.rollouts)
            async with pipe.weight_update(version=batch.step):
                pass
            if batch.step % 4 == 0:
                await pipe.save(batch.step)
            say(("step", batch.step))
        pipe.ledger.check()
        totals = pipe.ledger.totals["numbers"]
        assert (totals.failed, totals.dropped) == (0, {})
    return sorted(contents.rollouts)


def driver(pipe: Connection, directory: str, count: int, address: str) -> None:
    """The process's main function: a step for each word, until every item has been trained."""

    def say(told: Any) -> None:
        pipe.send(told)
        pipe.recv()

    engine: Any = RayEngine(actors=4, per_actor=2, address=address, init={"log_to_driver": False})
    pipe.send(("trained", anyio.run(lambda: train_contents(directory, count, engine, say))))


def train_there(run: str, until: int | None, die: bool) -> tuple[str, list[int]]:
    """What a task on another node runs: trains over Ray. Returns its node, and the items; or dies with a batch."""
    import ray

    here: Any = ray
    seen: list[int] = []
    with connect(run).sync() as held:
        for batch in held.batches(groups=4, until=until):
            if die:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += [group.index for group in batch]
            with held.weight_update(version=batch.step):
                pass
            with held.checkpoint(batch.step) as folder:
                Path(folder, "weights").write_text(str(batch.step))
    return here.get_runtime_context().get_node_id(), seen

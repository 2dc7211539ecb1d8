"""Ranks that train on the batches of a pipeline that they have together, each a process of a gloo group."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import anyio
import torch
import torch.distributed

from pipeline import Context, EndOfSource, Item, Pipeline, Retry, Rollout, Task
from pipeline.errors import RanksError
from pipeline.sync_form import SyncPipeline
from pipeline.testing import KillingFiles
from tests.support.ranked import Place
from tests.support.runs import numbers

group: Any = torch.distributed
GROUPS = 6
"""Of a batch, on all ranks together."""
SAVE_EVERY = 3
COUNTS = {"a": 90, "b": 30}


class PeerGone(Exception):
    """Another rank was killed in a step that it had begun."""


class Weights:
    """Stands for weights that all ranks train alike: which items they were trained on, by step."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def train(self, uids: list[int]) -> list[int]:
        """One step, in which ranks put together what each has; nobody leaves it before all have come."""
        given: list[Any] = [None] * group.get_world_size()
        try:
            group.all_gather_object(given, uids)
        except RuntimeError as error:  # what gloo says of a process that was killed
            raise PeerGone(str(error)) from error
        self.steps.append(sorted(uid for each in given for uid in each))
        return self.steps[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = [list(each) for each in state["steps"]]


async def work(item: Item, ctx: Context) -> Rollout:
    """Takes a millisecond or more, uneven by item; every seventh item fails at its first try."""
    await anyio.sleep(0.0005 * (1 + item["n"] % 7))
    if item["n"] % 7 == 3 and ctx.attempt == 1:
        raise ValueError("not yet")
    return Rollout({"n": [item["n"]], "noise": ctx.rng.random(3)}, reward=float(item["n"]))


def tasks(run: Any = work) -> list[Task]:
    """Two tasks, of which one has three times the other's share."""
    return [
        Task(name, source=numbers(count), run=run, share=count / 30, group_size=2, on_failure=Retry(attempts=1000))
        for name, count in COUNTS.items()
    ]


OPTIONS: dict[str, Any] = {"max_deaths": 10**6, "watchdog": None, "max_staleness": 3, "seed": 11, "concurrency": 16}


def train(
    pipe: Connection, place: Place, directory: str, options: dict[str, Any], die_after: int | None = None
) -> None:
    """Resume and say what is there; train to the end of the sources, and say every step; say what was trained.

    Args:
        pipe, place, directory: of this rank.
        options: of the pipeline.
        die_after: be killed instead of the change of the folder that comes after so many.
    """
    torch.set_num_threads(1)
    ranks, weights = place.join(), Weights()
    files = None if die_after is None else KillingFiles(after=die_after)
    try:
        with Pipeline(tasks(), directory=directory, ranks=ranks, files=files, **OPTIONS, **options).sync() as run:
            run.attach(weights=weights)
            resumed = run.resume()
            with run.weight_update(version=resumed.version):
                pass
            run.start()
            pipe.send(("resumed", resumed.generation, resumed.step, len(weights.steps)))
            _train(pipe, run, weights)
    except (RanksError, PeerGone) as error:
        pipe.send(("failed", type(error).__name__, str(error)))
        return
    pipe.send(("trained", weights.steps, {name: each.trained for name, each in run.ledger.totals.items()}))


def _train(pipe: Connection, run: SyncPipeline, weights: Weights) -> None:
    step = 0
    for batch in run.batches(GROUPS):
        step = batch.step
        pipe.send(("step", step, weights.train([each.uid for each in batch])))
        run.ledger.check()
        with run.weight_update(version=step):
            pass
        if step % SAVE_EVERY == 0:
            run.save(step)
    try:
        run.get_batch(GROUPS)
    except EndOfSource:
        run.save(max(step, run.progress.next_consumer_step - 1))

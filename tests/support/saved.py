"""A training process that saves at every step and says what it was promised: made to be killed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import anyio
import torch

from pipeline import Batch, Context, Item, Pipeline, Retry, Rollout
from pipeline.testing import KillingFiles
from tests.support.runs import pipeline, task

NAMES = ("model", "optimizer", "log")


class Part:
    """One of the files of a generation: each says the step, and the last also what was trained."""

    def __init__(self) -> None:
        self.step, self.weight, self.uids = 0, torch.zeros(20_000), list[int]()

    def train(self, batch: Batch) -> None:
        self.step = batch.step
        self.weight.fill_(batch.step)
        self.uids += [group.uid for group in batch]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "weight": self.weight, "uids": self.uids}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.uids = state["step"], list(state["uids"])
        self.weight.copy_(state["weight"])


async def work(item: Item, ctx: Context) -> Rollout:
    await anyio.sleep(0.0005 * (item["n"] % 5))
    if item["n"] % 5 == 0:
        ctx.park()
    return Rollout({"n": torch.full((100,), item["n"])}, reward=0.0)


def make(directory: str, **more: Any) -> Pipeline:
    """Small segments, and few generations: each save removes some of both."""
    source = task(97, work, epochs=None, group_size=2, on_failure=Retry(attempts=10**6))
    options: dict[str, Any] = {"capacity": 24, "concurrency": 6, "keep": 2, "segment_bytes": 10_000}
    return pipeline(source, directory=directory, max_deaths=10**6, **options, **more)


def train(pipe: Connection, directory: str) -> None:
    """Train for ever."""
    parts = {name: Part() for name in NAMES}
    with make(directory).sync() as run:
        run.attach(**parts)
        with run.weight_update(version=run.resume().version):
            pipe.send(("resumed", parts["log"].step))
        run.start()
        for batch in run.batches(groups=2):
            for part in parts.values():
                part.train(batch)
            with run.weight_update(version=batch.step):
                pass
            saving = run.save(batch.step)
            pipe.send(("put", run.put("numbers", [Rollout({"n": torch.full((100,), -1)}, reward=1.0)] * 2)))
            for uid in list(run.ledger.parked)[:4]:
                for member in range(2):
                    if run.ledger.state(uid) == "parked":
                        run.reward(uid, 2.0, member)
                        pipe.send(("rewarded", (uid, member)))
            if batch.step % 2:
                saving.committed()
                pipe.send(("committed", batch.step))


def one_step(pipe: Connection, directory: str, after: int) -> None:
    """Resume, train a step and save it, and die instead of the change of the folder that comes after so many."""
    parts = {name: Part() for name in NAMES}
    files = KillingFiles(after=after)
    with make(directory, files=files).sync() as run:
        run.attach(**parts)
        with run.weight_update(version=run.resume().version):
            pass
        run.start()
        batch = run.get_batch(2)
        for part in parts.values():
            part.train(batch)
        run.save(batch.step).committed()
        pipe.send(("committed", batch.step))

"""A training process that is made to be killed: run by a fork server, so that starting one takes milliseconds."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, Literal

import anyio
import torch

from pipeline import Context, Item, Pipeline, Retry, Rollout, Task
from tests.support.runs import numbers

GROUPS = 4
SAVE_EVERY = 3


class Tally:
    """Stands for the weights: remembers how often each item was trained. It goes back with the checkpoint."""

    def __init__(self, count: int) -> None:
        self.seen = torch.zeros(count, dtype=torch.int64)
        self.steps: list[list[int]] = []

    def train(self, indices: list[int]) -> None:
        """One trainer step."""
        self.seen[indices] += 1
        self.steps.append(sorted(indices))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.copy_(state["seen"])
        self.steps = list(state["steps"])


async def work(item: Item, ctx: Context) -> Rollout:
    """Takes a few milliseconds, uneven by item; every seventh item fails at its first two tries."""
    await anyio.sleep(0.0005 * (1 + item["n"] % 9))
    if item["n"] % 7 == 3 and ctx.attempt <= 2:
        raise ValueError("not yet")
    return Rollout({"n": torch.full((5,), item["n"]), "noise": ctx.rng.random(3)}, reward=float(item["n"]))


async def train(directory: str, count: int, strategy: Literal["asynchronous", "synchronous"]) -> Tally:
    """Train until every item has been trained, saving now and then; go on from whatever the directory holds."""
    tally = Tally(count)
    # Attempts lost to a death of the process are no failures, but more deaths than the default are planned here.
    task = Task("numbers", source=numbers(count), run=work, group_size=2, on_failure=Retry(attempts=1000))
    options: dict[str, Any] = {"concurrency": 16, "max_deaths": 10**6, "watchdog": None, "strategy": strategy}
    async with Pipeline([task], directory=directory, max_staleness=2, **options) as pipe:
        pipe.attach(tally=tally)
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        async for batch in pipe.batches(groups=GROUPS):
            assert batch.staleness <= 2
            assert all(len(group) == 2 for group in batch)
            assert all(rollout["n"].tolist() == [group.index] * 5 for group in batch for rollout in group)
            tally.train([group.index for group in batch])
            async with pipe.weight_update(version=batch.step):
                await anyio.sleep(0.002)
            if batch.step % SAVE_EVERY == 0:
                await pipe.save(batch.step)
        pipe.ledger.check()
        await pipe.save(pipe.ledger.step)
    return tally


def child(directory: str, count: int, strategy: Literal["asynchronous", "synchronous"], log: str) -> None:
    """The process's main function: exit code 0 when the whole run is trained, 1 with a traceback in ``log``."""
    try:
        tally = anyio.run(train, directory, count, strategy)
        with open(log, "a") as file:
            file.write(f"finished {tally.seen.tolist()}\n")
    except BaseException:
        with open(log, "a") as file:
            traceback.print_exc(file=file)
        sys.stdout.flush()
        os._exit(1)

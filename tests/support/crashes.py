"""Crashes without processes: a copy of a run's folder, taken while the run goes on, is what ``kill -9`` leaves.

What a killed process had not handed to the operating system is lost, and the rest is in the files: so it is with a
copy, except that a copy takes a while. Its parts are therefore copied against the order in which they are written: a
generation first, then the journals that it counts on, then the segments that the journals count on.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from typing import Any

import anyio
import torch

from pipeline import Batch, Context, Item, Pipeline, Resumed, Rollout, Task
from tests.support.disk import ScriptedFiles
from tests.support.runs import Runner, ids, pipeline

_PARTS = ("run.json", "generations", "journals", "segments")


def inline_pipeline(tasks: Task | list[Task] | None = None, **options: Any) -> Pipeline:
    """A pipeline for the virtual clock, without threads. Nothing is synced: neither the living nor a copy can tell."""
    options.setdefault("files", ScriptedFiles())
    return pipeline(tasks, inline=True, **options)


def crashed_copy(directory: str, target: str | os.PathLike[str]) -> str:
    """Copy the folder of a run that goes on to ``target``, which must not exist. Returns ``target``."""
    os.makedirs(target)
    for part in _PARTS:
        source, copy = os.path.join(directory, part), os.path.join(target, part)
        while os.path.isdir(source):
            try:
                shutil.copytree(source, copy)
                break
            except (FileNotFoundError, shutil.Error):  # a generation was retired meanwhile: look again
                shutil.rmtree(copy)
        else:
            shutil.copyfile(source, copy)
    return os.fspath(target)


class Trained:
    """Stands for the weights: knows every batch that it was trained on, and goes back with the checkpoint."""

    def __init__(self, begun: int = 0) -> None:
        self.begun = begun
        """Steps that others have trained before."""
        self.batches: list[list[int]] = []
        self.weight = torch.zeros(4)

    def step(self, batch: Batch) -> None:
        """Train on ``batch``."""
        assert batch.step == self.begun + len(self.batches) + 1, "a step was left out or done twice"
        self.batches.append(ids(batch))
        self.weight += batch.step

    @property
    def items(self) -> list[int]:
        """Every item trained, sorted."""
        return sorted(item for batch in self.batches for item in batch)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = [list(batch) for batch in state["batches"]]
        self.weight.copy_(state["weight"])


async def begin(pipe: Pipeline, **attached: Any) -> Resumed:
    """Attach, resume whatever the folder holds, say that the weights are published, and start."""
    pipe.attach(**attached)
    resumed = await pipe.resume()
    async with pipe.weight_update(version=resumed.version):
        pass
    await pipe.start()
    return resumed


async def train(pipe: Pipeline, trained: Trained, batch: Batch) -> None:
    """One step as a trainer does it: train, and publish the weights."""
    trained.step(batch)
    async with pipe.weight_update(version=batch.step):
        pass


async def finish(pipe: Pipeline, trained: Trained, groups: int) -> Trained:
    """Train all that is left, and check that the counts add up."""
    async for batch in pipe.batches(groups=groups):
        await train(pipe, trained, batch)
    pipe.ledger.check()
    return trained


def lasting(seconds: Mapping[int, float], other: float = 1.0) -> Runner:
    """A runner that takes ``seconds[n]`` for item n, and ``other`` for those not named; the reward is n.

    It takes a little longer for greater numbers, so that items which start together end in their order.
    """

    async def run(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(seconds.get(item["n"], other) + 1e-4 * item["n"])
        return Rollout({"n": [item["n"]]}, reward=float(item["n"]))

    return run


def uneven(seed: int, most: float = 5.0) -> Runner:
    """A runner whose attempts take random times, others in each life if ``seed`` differs."""
    rng = random.Random(seed)

    async def run(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(rng.uniform(0.01, most))
        return Rollout({"n": [item["n"]]}, reward=float(item["n"]))

    return run

"""Random streams are a pipeline's own: nobody else's draws change them, and it makes none of theirs."""

from __future__ import annotations

import random
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from pipeline import Context, Item, Pipeline, Rollout
from tests.support.crashes import inline_pipeline
from tests.support.runs import ids, task

virtual = pytest.mark.virtual_time


def seed_globally(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw_globally() -> None:
    """What somebody else draws meanwhile."""
    random.random()
    np.random.random()
    torch.rand(1)


@virtual
async def test_two_pipelines_interleaved_or_one_after_the_other_draw_the_same() -> None:
    def make(seed: int) -> Pipeline:
        async def run(item: Item, ctx: Context) -> Rollout:
            draw_globally()
            await anyio.sleep(0.1 + ctx.rng.random())
            return Rollout({"x": ctx.rng.random(2)}, reward=0.0)

        return inline_pipeline(task(40, run, shuffle=True, epochs=2), seed=seed, order="strict", capacity=9)

    def shown(batch: Any) -> Any:
        return ids(batch), [rollout["x"].tolist() for rollout in batch.rollouts]

    alone = {}
    for seed in (1, 2):
        seed_globally(0)
        async with make(seed) as pipe:
            await pipe.start()
            alone[seed] = [shown(batch) async for batch in pipe.batches(groups=5)]
    seed_globally(99)
    both: dict[int, list[Any]] = {1: [], 2: []}
    async with make(1) as one, make(2) as two:
        await one.start()
        await two.start()
        for _ in range(16):
            for seed, pipe in ((1, one), (2, two)):
                batch = await pipe.get_batch(5)
                both[seed].append(shown(batch))
                await pipe.ack(batch.step)
                draw_globally()
    assert alone[1] != alone[2]
    assert both == alone

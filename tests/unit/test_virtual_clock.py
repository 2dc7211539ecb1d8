"""The virtual clock: hours pass at once, and a pipeline runs on it."""

from __future__ import annotations

import time

import anyio
import pytest

from pipeline import Context, Item, Rollout
from tests.support.runs import ids, pipeline, task


@pytest.mark.virtual_time
async def test_an_hour_passes_at_once() -> None:
    begun, real = anyio.current_time(), time.monotonic()
    await anyio.sleep(3600)
    assert anyio.current_time() - begun == pytest.approx(3600)
    assert time.monotonic() - real < 5


@pytest.mark.virtual_time
async def test_a_pipeline_runs_on_it() -> None:
    async def slow(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(60 * (item["n"] + 1))
        return Rollout(reward=1.0)

    begun = anyio.current_time()
    async with pipeline(task(6, slow), inline=True, concurrency=2) as pipe:
        await pipe.start()
        seen = [number async for batch in pipe.batches(groups=2) for number in ids(batch)]
    assert sorted(seen) == list(range(6))
    assert 60 * 12 - 60 <= anyio.current_time() - begun < 60 * 21

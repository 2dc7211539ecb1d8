"""The bound on staleness holds for every group that reaches a batch, however it became whole."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Rollout, Skip
from tests.support.runs import pipeline, task


@pytest.mark.virtual_time
async def test_a_group_that_becomes_whole_by_a_failure_is_held_to_the_bound() -> None:
    """Item 0's second member gives up late: by then its first is too old for the batch that is being waited for."""

    async def uneven(item: Item, ctx: Context) -> Rollout:
        if item["n"] == 0 and ctx.attempt == 1:
            await anyio.sleep(1 if ctx.member == 0 else 100)
            if ctx.member == 1:
                raise ValueError("gives up")
        elif item["n"] == 3:
            await anyio.sleep(1000)
        return Rollout(reward=1.0)

    settings: dict[str, Any] = {"group_size": 2, "min_group": 1, "on_failure": Skip()}
    async with pipeline(task(4, uneven, **settings), max_staleness=1, batch_groups=1, inline=True) as pipe:
        await pipe.start()
        async for batch in pipe.batches(groups=1):
            assert batch.staleness <= 1
            async with pipe.weight_update(version=batch.step):
                pass
        assert pipe.statistics().tasks["numbers"].totals.reopened == 1


@pytest.mark.virtual_time
@pytest.mark.parametrize("order", ["finished", "strict"])
@pytest.mark.parametrize("most", [0, 1, 3])
async def test_no_batch_holds_what_is_older_than_the_bound(order: str, most: int) -> None:
    async def uneven(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(float(ctx.rng.exponential(3.0)))
        return Rollout(reward=1.0)

    seen: list[int] = []
    async with pipeline(
        task(60, uneven), max_staleness=most, order=order, concurrency=8, max_rerolls=1000, inline=True
    ) as pipe:
        await pipe.start()
        async for batch in pipe.batches(groups=3):
            assert batch.staleness <= most
            seen += [group.index for group in batch]
            await anyio.sleep(1)
            async with pipe.weight_update(version=batch.step):
                pass
    assert sorted(seen) == list(range(60))

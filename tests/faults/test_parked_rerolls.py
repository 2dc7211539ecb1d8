"""A parked group of which only some members are too old is run again, and not given up as failed."""

from __future__ import annotations

import anyio
import pytest

from pipeline import Context, Item, Rollout, Task
from tests.support.crashes import Trained, begin, inline_pipeline, train
from tests.support.runs import numbers

pytestmark = pytest.mark.virtual_time

COUNT = 24


async def run(item: Item, ctx: Context) -> Rollout:
    """Of item 1 a member is parked with the first weights, and the other, at its second attempt, with later ones."""
    if item["n"] == 1:
        if (ctx.member, ctx.attempt) == (1, 1):
            await anyio.sleep(5)
            raise ValueError("not yet")
        ctx.park()
    else:
        await anyio.sleep(4)
    return Rollout({"n": [item["n"]]}, reward=1.0)


async def test_reroll_of_a_parked_group() -> None:
    trained = Trained()
    given = Task("numbers", source=numbers(COUNT), run=run, shuffle=False, group_size=2)
    async with inline_pipeline(
        given, max_staleness=1, staleness_policy="reroll", max_rerolls=1000, concurrency=8
    ) as pipe:
        await begin(pipe)
        async with anyio.create_task_group() as group:

            async def reward() -> None:
                while True:
                    await anyio.sleep(60)  # later than the first too old member is run again
                    for uid in list(pipe.ledger.parked):
                        for member in range(2):
                            await pipe.reward(uid, 7.0, member)

            group.start_soon(reward)
            async for batch in pipe.batches(groups=2):
                assert [each.reward_mean for each in batch] == [7.0 if each.index == 1 else 1.0 for each in batch]
                await train(pipe, trained, batch)
            group.cancel_scope.cancel()
        assert pipe.ledger.totals["numbers"].reopened
        assert pipe.ledger.totals["numbers"].dropped == {}
    assert trained.items == list(range(COUNT))

"""Resources: shared or per slot, opened and closed in a task of their own; slots given away for scoring."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Pipeline, Rollout, RolloutFailed, Task
from tasks import SequenceSource
from tests.support.runs import ids, pipeline, task


class Log:
    """Counts what is open, and notices when a resource is used twice at a time."""

    def __init__(self) -> None:
        self.opened = self.closed = self.in_use = self.most_in_use = 0

    @asynccontextmanager
    async def resource(self) -> AsyncIterator[dict[str, int]]:
        # A task group inside: it must be left in the task that entered it.
        async with anyio.create_task_group():
            self.opened += 1
            yield {"uses": 0}
            self.closed += 1


async def drain(pipe: Any, groups: int = 4) -> list[int]:
    return sorted([number async for batch in pipe.batches(groups=groups) for number in ids(batch)])


@pytest.mark.virtual_time
async def test_a_callable_opens_one_resource_for_each_slot_and_reuses_it() -> None:
    log = Log()

    async def use(item: Item, ctx: Context) -> Rollout:
        assert ctx.resource["uses"] >= 0
        uses, ctx.resource["uses"] = ctx.resource["uses"], -1  # nobody else may see it meanwhile
        await anyio.sleep(1)
        ctx.resource["uses"] = uses + 1
        return Rollout(reward=1.0)

    async with pipeline(task(12, use, resource=log.resource), concurrency=3, inline=True) as pipe:
        await pipe.start()
        assert await drain(pipe) == list(range(12))
        assert (log.opened, log.closed) == (3, 0)
    assert log.closed == 3


@pytest.mark.virtual_time
async def test_a_context_manager_is_opened_once_and_shared() -> None:
    log = Log()

    async def use(item: Item, ctx: Context) -> Rollout:
        log.in_use += 1
        log.most_in_use = max(log.most_in_use, log.in_use)
        await anyio.sleep(1)
        log.in_use -= 1
        return Rollout(reward=1.0)

    async with pipeline(task(12, use, resource=log.resource()), concurrency=3, inline=True) as pipe:
        await pipe.start()
        assert await drain(pipe) == list(range(12))
    assert (log.opened, log.closed, log.most_in_use) == (1, 1, 3)


async def test_tasks_that_name_one_manager_share_what_it_opened() -> None:
    log, seen = Log(), []

    async def use(item: Item, ctx: Context) -> Rollout:
        seen.append(ctx.resource)
        return Rollout(reward=1.0)

    manager = log.resource()
    tasks = [Task(name, source=SequenceSource([0, 1]), run=use, resource=manager) for name in ("one", "two")]
    async with Pipeline(tasks) as pipe:
        await pipe.start()
        assert len(await pipe.get_batch(groups=4)) == 4
    assert (log.opened, log.closed) == (1, 1)
    assert len(seen) == 4
    assert all(each is seen[0] for each in seen)


async def test_a_resource_that_cannot_be_opened_fails_the_attempt() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise ConnectionRefusedError("no server")
        yield

    async def use(item: Item, ctx: Context) -> Rollout:
        return Rollout(reward=1.0)

    async with pipeline(task(4, use, resource=broken, on_failure="fail_fast")) as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match="no server"):
            await pipe.get_batch(1)


@pytest.mark.virtual_time
async def test_scoring_gives_the_slot_to_another_attempt_and_takes_it_back() -> None:
    acting = most_acting = scoring = most_scoring = 0

    async def judged(item: Item, ctx: Context) -> Rollout:
        nonlocal acting, most_acting, scoring, most_scoring
        acting += 1
        most_acting = max(most_acting, acting)
        await anyio.sleep(1)
        acting -= 1
        async with ctx.scoring():
            scoring += 1
            most_scoring = max(most_scoring, scoring)
            await anyio.sleep(5)
            scoring -= 1
        acting += 1  # a little more work after the judge, in a slot again
        most_acting = max(most_acting, acting)
        await anyio.sleep(0.1)
        acting -= 1
        return Rollout(reward=1.0)

    async with pipeline(task(20, judged), concurrency=2, capacity=20, inline=True) as pipe:
        await pipe.start()
        assert await drain(pipe) == list(range(20))
        statistics = pipe.statistics().rollouts
    assert most_acting == 2
    assert most_scoring > 2
    assert (statistics.in_flight, statistics.scoring, statistics.in_flight_peak) == (0, 0, 2)


@pytest.mark.virtual_time
@pytest.mark.parametrize("when", [0.5, 1.5, 6.05])
async def test_an_abort_in_any_part_of_a_scored_attempt_leaves_every_slot_free(when: float) -> None:
    async def judged(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(1)
        async with ctx.scoring():
            await anyio.sleep(5)
        await anyio.sleep(0.1)
        return Rollout(reward=1.0)

    async with pipeline(task(6, judged), concurrency=2, capacity=6, inline=True) as pipe:
        await pipe.start()
        await anyio.sleep(when)
        async with pipe.weight_update(version=1, running="abort"):
            statistics = pipe.statistics()
            assert (statistics.rollouts.in_flight, statistics.rollouts.scoring) == (0, 0)
        assert pipe.statistics().rollouts.in_flight == 2
        assert await drain(pipe) == list(range(6))
        pipe.ledger.check()


async def test_an_attempt_knows_who_it_is() -> None:
    seen: dict[tuple[int, int], tuple[str, int, float]] = {}

    async def look(item: Item, ctx: Context) -> Rollout:
        seen[ctx.uid, ctx.member] = (ctx.key, ctx.attempt, ctx.rng.random())
        return Rollout(reward=1.0)

    async with pipeline(task(3, look, group_size=2)) as pipe:
        await pipe.start()
        await drain(pipe, 3)
    assert set(seen) == {(uid, member) for uid in range(3) for member in range(2)}
    assert len({key for key, _, _ in seen.values()}) == 6
    assert len({draw for _, _, draw in seen.values()}) == 6

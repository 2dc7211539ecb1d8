"""Cancelled anywhere: nothing is lost, everything is closed, and whoever waits is let go."""

from __future__ import annotations

import asyncio
import random

import anyio
import anyio.lowlevel
import pytest

from pipeline import Context, EndOfSource, Item, Rollout, UsageError
from tests.support.crashes import begin, inline_pipeline, lasting
from tests.support.gates import Gate, turn
from tests.support.runs import ids, pipeline, task

virtual = pytest.mark.virtual_time


class TestReceivers:
    """CASES 95 and 96: a batch that comes in the turn in which its receiver is cancelled is not lost."""

    @virtual
    @pytest.mark.parametrize("order", ["cancelled first", "finished first"])
    @pytest.mark.parametrize("way", ["scope", "task"])
    async def test_a_batch_that_comes_as_its_receiver_is_cancelled_can_still_be_had(self, order: str, way: str) -> None:
        gate = Gate()
        async with inline_pipeline(task(1, gate.run)) as pipe:
            await pipe.start()
            scope = anyio.CancelScope()
            got: list[int] = []

            async def receive() -> None:
                with scope:
                    got.extend(ids(await pipe.get_batch(1)))

            receiver = asyncio.get_running_loop().create_task(receive())
            for _ in range(10):
                await turn()
            assert pipe.statistics().buffer.waiters == 1

            if order == "finished first":
                gate.open[0].set()
            if way == "scope":
                scope.cancel()
            else:
                receiver.cancel()
            gate.open[0].set()
            await asyncio.wait([receiver])
            if not got:
                got = ids(await pipe.get_batch(1))
            assert got == [0]
            pipe.ledger.check()

    @virtual
    async def test_ten_thousand_items_with_receivers_cancelled_at_random(self) -> None:
        rng = random.Random(95)

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(rng.uniform(0.1, 2))
            return Rollout(reward=0.0)

        seen: list[int] = []
        cancelled = 0
        async with inline_pipeline(task(10_000, run), concurrency=64, capacity=256) as pipe:
            await pipe.start()
            ended = False

            async def receive(groups: int) -> None:
                nonlocal ended
                try:
                    batch = await pipe.get_batch(groups)
                    await pipe.ack(batch.step)
                    seen.extend(ids(batch))
                except EndOfSource:
                    ended = True

            while not ended:
                receiver = asyncio.get_running_loop().create_task(receive(rng.randint(1, 9)))
                if rng.random() < 0.7:
                    await anyio.sleep(rng.choice([0.0, rng.uniform(0, 0.2)]))
                    for _ in range(rng.randrange(4)):
                        await turn()
                    cancelled += receiver.cancel()
                await asyncio.wait([receiver])
            pipe.ledger.check()
        assert sorted(seen) == list(range(10_000))
        assert cancelled > 100

    @virtual
    @pytest.mark.parametrize("way", ["move_on_after", "wait_for"])
    async def test_receiving_under_a_timeout_in_a_loop_loses_nothing_and_keeps_the_order(self, way: str) -> None:
        received: list[int] = []
        timeouts = 0

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(0.0005)
            return Rollout(reward=0.0)

        async with inline_pipeline(task(2000, run), concurrency=1, selector="fifo") as pipe:
            await pipe.start()
            while len(received) < 2000:
                try:
                    if way == "wait_for":
                        batch = await asyncio.wait_for(pipe.get_batch(1), 0.0005)
                    else:
                        with anyio.fail_after(0.0005):
                            batch = await pipe.get_batch(1)
                except TimeoutError:
                    timeouts += 1
                    continue
                received += ids(batch)
                await pipe.ack(batch.step)
        assert received == list(range(2000))
        assert timeouts > 100

    async def test_a_receiver_cancelled_while_payloads_are_read_from_the_disk(self, run_directory: str) -> None:
        async with pipeline(task(200), directory=run_directory, capacity=200) as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(200)
            batch.release()
            await pipe.save(0)
        rng = random.Random(3)
        seen: list[int] = []

        async def cancel_after(turns: int, scope: anyio.CancelScope) -> None:
            for _ in range(turns):
                await turn()
            scope.cancel()

        async with pipeline(task(200), directory=run_directory, capacity=200) as pipe:
            await begin(pipe)
            while len(seen) < 200:
                with anyio.CancelScope() as scope:
                    if rng.random() < 0.7:
                        asyncio.get_running_loop().create_task(cancel_after(rng.randrange(6), scope))
                    batch = await pipe.get_batch(5)
                    seen += [int(rollout["n"].item()) for rollout in batch.rollouts]
                    with anyio.CancelScope(shield=True):
                        await pipe.ack(batch.step)
            pipe.ledger.check()
        assert sorted(seen) == list(range(200))

    @virtual
    async def test_one_trainer_waits_at_a_time(self) -> None:
        async with inline_pipeline(task(4, lasting({}))) as pipe, anyio.create_task_group() as group:
            await pipe.start()
            group.start_soon(pipe.get_batch, 4)
            await turn()
            with pytest.raises(UsageError, match="waited for already"):
                await pipe.get_batch(1)


def test_on_trio_as_well(run_directory: str) -> None:
    """Receivers under a timeout, an abort, attempts that are too slow, and a close in the midst of it all."""
    cut: list[int] = []

    async def run(item: Item, ctx: Context) -> Rollout:
        if item["n"] == 5 and ctx.attempt == 1:
            await anyio.sleep_forever()
        await anyio.sleep(0.001)
        return Rollout(reward=0.0)

    async def main() -> list[int]:
        seen: list[int] = []
        given = task(40, run, timeout=0.2)
        async with pipeline(given, directory=run_directory, capacity=8, concurrency=4) as pipe:
            await begin(pipe)
            async with pipe.weight_update(version=1, running="abort"):
                assert pipe.statistics().rollouts.in_flight == 0
            while len(seen) < 20:
                with anyio.move_on_after(10 * (len(cut) % 2)) as scope:
                    batch = await pipe.get_batch(2)
                    seen += ids(batch)
                    with anyio.CancelScope(shield=True):
                        await (await pipe.save(batch.step)).committed()
                cut.append(scope.cancelled_caught)
            await pipe.get_batch(2)
        async with pipeline(given, directory=run_directory, capacity=8) as pipe:
            await begin(pipe)
            return sorted([*seen, *[n for each in [ids(b) async for b in pipe.batches(groups=2)] for n in each]])

    assert anyio.run(main, backend="trio") == list(range(40))
    assert cut[0], "nothing had been finished when it waited first"

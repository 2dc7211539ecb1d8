"""Cancelled anywhere: nothing is lost, everything is closed, and whoever waits is let go."""

from __future__ import annotations

import _thread
import asyncio
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from pipeline import ClosedError, Context, EndOfSource, ForebayError, Item, Locked, Pipeline, Rollout, UsageError
from tests.support.crashes import Trained, begin, finish, inline_pipeline, lasting
from tests.support.runs import ids, pipeline, task

virtual = pytest.mark.virtual_time


async def turn() -> None:
    await anyio.lowlevel.checkpoint()


class Gate:
    """Rollouts that end when they are told to."""

    def __init__(self) -> None:
        self.open: dict[int, anyio.Event] = {}

    async def run(self, item: Item, ctx: Context) -> Rollout:
        event = self.open[item["n"]] = anyio.Event()
        await event.wait()
        return Rollout(reward=0.0)


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


@pytest.fixture
async def fixture_pipe(tmp_path: Path) -> AsyncIterator[Pipeline]:
    """Opened in one task and closed in another, as pytest-asyncio does it."""
    async with pipeline(task(40), directory=str(tmp_path / "fixture"), capacity=8) as pipe:
        await begin(pipe)
        yield pipe


class TestClosing:
    @pytest.mark.parametrize("round_", range(2))
    async def test_a_pipeline_can_live_in_an_async_fixture(self, fixture_pipe: Pipeline, round_: int) -> None:
        batch = await fixture_pipe.get_batch(4)
        await fixture_pipe.ack(batch.step)
        await fixture_pipe.get_batch(4)  # leased, and others in flight, when the fixture closes it

    async def test_closing_from_another_task_lets_a_waiting_trainer_go(self, run_directory: str) -> None:
        gate = Gate()
        pipe = pipeline(task(4, gate.run), directory=run_directory)
        await pipe.__aenter__()
        await begin(pipe)
        ended: list[type[BaseException]] = []

        async def wait() -> None:
            try:
                await pipe.get_batch(4)
            except ForebayError as error:
                ended.append(type(error))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            while not pipe.statistics().buffer.waiters:
                await turn()
            group.start_soon(pipe.aclose)
        assert ended == [ClosedError]
        async with pipeline(task(4), directory=run_directory) as again:
            await begin(again)
            assert (await finish(again, Trained(), 4)).items == [0, 1, 2, 3]

    @pytest.mark.parametrize("opened", [True, False])
    async def test_closing_twice_does_nothing(self, run_directory: str, opened: bool) -> None:
        pipe = pipeline(task(4), directory=run_directory)
        if opened:
            await pipe.__aenter__()
            await begin(pipe)
        for _ in range(3):
            await pipe.aclose()
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(pipe.aclose)
        async with pipeline(task(4), directory=run_directory) as again:
            await begin(again)

    async def test_closing_at_once_from_several_tasks(self, run_directory: str) -> None:
        pipe = pipeline(task(40), directory=run_directory)
        await pipe.__aenter__()
        await begin(pipe)
        await pipe.get_batch(4)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(pipe.aclose)
        async with pipeline(task(40), directory=run_directory) as again:
            await begin(again)

    @virtual
    async def test_no_task_is_left_and_every_attempt_was_ended(self) -> None:
        before = asyncio.all_tasks()
        ended: list[str] = []

        async def run(item: Item, ctx: Context) -> Rollout:
            try:
                await anyio.sleep(1000)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(1)
                ended.append("cleaned up")
            return Rollout(reward=0.0)

        async with inline_pipeline(task(40, run), concurrency=5, capacity=40) as pipe:
            await pipe.start()
            await anyio.sleep(5)
        assert ended == ["cleaned up"] * 5
        assert asyncio.all_tasks() == before
        pipe.ledger.check()
        assert pipe.ledger.totals["numbers"].interrupted == 5

    async def test_in_a_scope_that_is_cancelled_from_outside(self, run_directory: str) -> None:
        gate = Gate()
        for verb in ("get_batch", "weight_update", "save", "body"):
            with anyio.CancelScope() as scope:
                async with pipeline(task(4, gate.run), directory=run_directory, concurrency=4) as pipe:
                    await begin(pipe)
                    asyncio.get_running_loop().call_soon(scope.cancel)
                    if verb == "get_batch":
                        await pipe.get_batch(4)
                    elif verb == "weight_update":
                        async with pipe.weight_update(version=0, running="finish"):
                            pytest.fail("nothing finishes")
                    elif verb == "save":
                        while True:
                            await pipe.save(0)
                    else:
                        await anyio.sleep_forever()
            assert scope.cancelled_caught, verb
        async with pipeline(task(4), directory=run_directory) as again:
            await begin(again)
            assert (await finish(again, Trained(), 4)).items == [0, 1, 2, 3]

    @pytest.mark.parametrize("turns", range(12))
    async def test_cancelled_while_it_opens_or_begins(self, run_directory: str, turns: int) -> None:
        before = asyncio.all_tasks()
        with anyio.CancelScope() as scope:

            async def cancel_later() -> None:
                for _ in range(turns * turns):
                    await turn()
                scope.cancel()

            canceller = asyncio.get_running_loop().create_task(cancel_later())
            async with pipeline(task(4), directory=run_directory) as pipe:
                await begin(pipe)
                await anyio.sleep_forever()
        await canceller
        assert asyncio.all_tasks() == before
        async with pipeline(task(4), directory=run_directory) as again:
            await begin(again)
            assert (await finish(again, Trained(), 4)).items == [0, 1, 2, 3]

    async def test_a_loop_that_ends_without_closing_ends(self) -> None:
        async def forgets() -> None:
            pipe = pipeline(task(4, Gate().run))
            await pipe.__aenter__()
            await pipe.start()
            await turn()

        await anyio.to_thread.run_sync(lambda: asyncio.run(asyncio.wait_for(forgets(), 50)))

    async def test_the_lock_is_held_until_the_end_and_free_afterwards(self, run_directory: str) -> None:
        async with pipeline(task(4), directory=run_directory):
            with pytest.raises(Locked):
                async with pipeline(task(4), directory=run_directory):
                    pass
        async with pipeline(task(4), directory=run_directory):
            pass


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


class TestSynchronousForm:
    """What a notebook does: interrupt the cell and go on."""

    @staticmethod
    def opens_again(directory: str) -> None:
        with Pipeline(task(12), directory=directory, watchdog=None).sync() as pipe:
            pipe.resume()
            pipe.start(weights_current=True)
            assert sorted(n for batch in pipe.batches(groups=4) for n in ids(batch)) == list(range(12))

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
    def test_whatever_leaves_the_body_the_lock_is_free(self, run_directory: str, error: type[BaseException]) -> None:
        def body() -> None:
            with Pipeline(task(12), directory=run_directory, watchdog=None).sync() as pipe:
                pipe.start()
                for _ in pipe.batches(groups=4):
                    raise error

        with pytest.raises(error):
            body()
        self.opens_again(run_directory)

    def test_an_interrupt_while_a_batch_is_waited_for(self, run_directory: str) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if ctx.uid == 3:
                _thread.interrupt_main()
            await anyio.sleep_forever()
            raise AssertionError

        def body() -> None:
            with Pipeline(task(12, run), directory=run_directory, watchdog=None).sync() as pipe:
                pipe.start()
                pipe.get_batch(4)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs aside
        try:
            with pytest.raises(KeyboardInterrupt):
                body()
        finally:
            signal.signal(signal.SIGINT, before)
        self.opens_again(run_directory)

    def test_a_runner_that_exits_the_process_is_a_failed_rollout(self, run_directory: str) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if item["n"] == 3:
                raise SystemExit(0)
            return Rollout(reward=0.0)

        with Pipeline(task(12, run, on_failure="skip"), directory=run_directory, watchdog=None).sync() as pipe:
            pipe.start()
            trained: list[Any] = [n for batch in pipe.batches(groups=4) for n in ids(batch)]
        assert sorted(trained) == [n for n in range(12) if n != 3]

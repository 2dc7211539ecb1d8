"""How far ahead rollouts may run and how old they may be: the values at the borders, in arithmetic and in a run."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import ConfigError, Context, Item, Pipeline, Rollout
from pipeline.buffer.staleness import admissible, floor, staleness
from pipeline.testing import VirtualClockLoop
from tests.support.crashes import Trained, begin, inline_pipeline, lasting, train
from tests.support.runs import ids, task

virtual = pytest.mark.virtual_time


class TestArithmetic:
    @pytest.mark.parametrize(("version", "lag"), [(6, 4), (7, 3), (8, 2), (9, 1), (10, 0), (11, 0)])
    def test_staleness_counts_the_steps_trained_since_the_oldest_weights(self, version: int, lag: int) -> None:
        assert staleness(11, version) == lag  # the batch of step 11 is used when 10 steps are trained

    @pytest.mark.parametrize(("limit", "least"), [(3, 7), (0, 10), (10, 0), (12, -2), (None, None)])
    def test_the_oldest_version_that_a_batch_may_hold(self, limit: int | None, least: int | None) -> None:
        assert floor(11, limit) == least

    @pytest.mark.parametrize(
        ("trained", "version", "limit", "capacity", "most"),
        [
            (0, 0, 2, None, 12),  # CASES 21: fresh
            (10, 10, 2, None, 12),  # resumed at version 10: still 12
            (11, 10, 2, None, 8),  # a step without an update: nothing more may start
            (13, 10, 2, None, 0),
            (99, 10, 2, None, 0),
            (10, 11, 2, None, 16),  # weights published before their step is acked
            (0, 0, 0, None, 4),
            (0, 0, 2, 10, 10),
            (0, 0, 2, 99, 12),
            (0, 0, None, None, 8),
            (50, 3, None, 21, 21),
        ],
    )
    def test_how_many_groups_may_be_outstanding(
        self, trained: int, version: int, limit: int | None, capacity: int | None, most: int
    ) -> None:
        given = admissible(max_staleness=limit, batch_groups=4, trained=trained, version=version, capacity=capacity)
        assert given == most

    def test_before_the_size_of_a_batch_is_known(self) -> None:
        assert admissible(max_staleness=2, batch_groups=0, trained=0, version=0, capacity=9) == 0
        assert admissible(max_staleness=None, batch_groups=0, trained=0, version=0, capacity=9) == 9
        assert admissible(max_staleness=None, batch_groups=0, trained=0, version=0, capacity=None) is None


async def step(pipe: Pipeline, *, update: bool = True) -> None:
    """One trainer step on a batch of 4."""
    batch = await pipe.get_batch(4)
    await pipe.ack(batch.step)
    if update:
        async with pipe.weight_update(version=batch.step):
            pass


class TestGate:
    """CASES 21: what may start is counted from what is outstanding, so it is the same after a restart."""

    OPTIONS: Mapping[str, Any] = {"max_staleness": 2, "batch_groups": 4, "concurrency": 100}

    @virtual
    async def test_the_thirteenth_start_waits_and_a_step_lets_four_more_start(self) -> None:
        async with inline_pipeline(task(200, lasting({})), **self.OPTIONS) as pipe:
            await pipe.start()
            await anyio.sleep(100)
            assert pipe.ledger.claimed == 12
            for done in range(1, 6):
                await step(pipe)
                await anyio.sleep(100)
                assert pipe.ledger.claimed == 12 + 4 * done

    @virtual
    @pytest.mark.parametrize("buffered", [0, 12])
    async def test_after_a_resume_at_version_ten_it_is_the_same(self, tmp_path: Path, buffered: int) -> None:
        directory = str(tmp_path / "run")
        async with inline_pipeline(task(200, lasting({})), directory=directory, **self.OPTIONS) as pipe:
            await begin(pipe)
            for _ in range(10):
                await step(pipe)
            if buffered:
                await anyio.sleep(100)
            await pipe.save(10)
            claimed = pipe.ledger.claimed
        async with inline_pipeline(task(200, lasting({})), directory=directory, **self.OPTIONS) as pipe:
            resumed = await begin(pipe)
            assert (resumed.version, resumed.buffered) == (10, buffered)
            await anyio.sleep(100)
            assert pipe.ledger.claimed == claimed == 52
            await step(pipe)
            await anyio.sleep(100)
            assert pipe.ledger.claimed == 56

    @virtual
    async def test_a_resumed_run_with_nothing_in_hand_starts_twelve(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        async with inline_pipeline(task(200, lasting({})), directory=directory, strategy="synchronous") as pipe:
            await begin(pipe)
            for _ in range(10):
                await step(pipe)
            await pipe.save(10)
        async with inline_pipeline(task(200, lasting({})), directory=directory, **self.OPTIONS) as pipe:
            await begin(pipe)
            await anyio.sleep(100)
            assert pipe.ledger.claimed == 40 + 12

    @virtual
    async def test_steps_without_an_update_let_nothing_more_start(self) -> None:
        async with inline_pipeline(task(200, lasting({})), **self.OPTIONS) as pipe:
            await pipe.start()
            for _ in range(3):
                await step(pipe, update=False)
                await anyio.sleep(100)
                assert pipe.ledger.claimed == 12
            async with pipe.weight_update(version=3):
                pass
            await anyio.sleep(100)
            assert pipe.ledger.claimed == 24

    @virtual
    async def test_weights_published_before_the_ack_let_the_next_start_at_once(self) -> None:
        async with inline_pipeline(task(200, lasting({})), **self.OPTIONS) as pipe:
            await pipe.start()
            await anyio.sleep(100)
            batch = await pipe.get_batch(4)
            async with pipe.weight_update(version=batch.step):
                pass
            assert pipe.ledger.claimed == 16
            await pipe.ack(batch.step)
            await anyio.sleep(100)
            assert pipe.ledger.claimed == 16

    @virtual
    @pytest.mark.parametrize("order", ["finished", "strict"])
    @pytest.mark.parametrize("limit", [0, 1, 3])
    async def test_no_batch_is_ever_staler_than_the_limit(self, order: str, limit: int) -> None:
        given = task(120, lasting({n: 1.0 + (n * 7919) % 13 for n in range(120)}))
        options: dict[str, Any] = {"max_staleness": limit, "batch_groups": 4, "concurrency": 9, "order": order}
        async with inline_pipeline(given, max_rerolls=100, **options) as pipe:
            await pipe.start()
            trained = Trained()
            async for batch in pipe.batches(groups=4):
                assert batch.staleness <= limit
                assert batch.staleness == max(batch.step - 1 - group.oldest for group in batch)
                await train(pipe, trained, batch)
            assert trained.items == list(range(120))


class TestBorder:
    """CASES 23, 24 and 26: which versions a batch takes, and what becomes of the others."""

    @staticmethod
    async def taken(limit: int | None, trained: int, versions: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Offer groups of these (oldest, newest) weights to the batch after ``trained`` steps.

        Returns:
            Those that it took as they were, with their staleness. The others were run again.
        """
        size = len(versions)

        async def run(item: Item, ctx: Context) -> Rollout:
            place = item["n"] - trained * size
            oldest, newest = versions[place] if place >= 0 and ctx.attempt == 1 else (None, None)
            return Rollout(reward=0.0, oldest=oldest, newest=newest, info={"attempt": ctx.attempt})

        given = task((trained + 1) * size, run)
        options: dict[str, Any] = {"max_staleness": limit, "batch_groups": size, "order": "strict"}
        async with inline_pipeline(given, **options) as pipe:
            await pipe.start()
            async for batch in pipe.batches(groups=size, until=trained):
                async with pipe.weight_update(version=batch.step):
                    await anyio.sleep(1.0)
            await anyio.sleep(1.0)
            batch = await pipe.get_batch(size)
            assert ids(batch) == list(range(trained * size, (trained + 1) * size))
            return {
                (group.oldest, group.newest): group.staleness
                for group in batch
                if group.rollouts[0].info["attempt"] == 1
            }

    @virtual
    @pytest.mark.parametrize(
        ("limit", "expected"),
        [
            (3, {7: 3, 8: 2, 9: 1, 10: 0, 11: 0}),
            (4, {6: 4, 7: 3, 8: 2, 9: 1, 10: 0, 11: 0}),
            (0, {10: 0, 11: 0}),
            (None, {5: 5, 6: 4, 7: 3, 8: 2, 9: 1, 10: 0, 11: 0}),
        ],
    )
    async def test_the_limit_at_its_border(self, limit: int | None, expected: dict[int, int]) -> None:
        """What is newer than what is trained is taken: such weights were published before their step was acked."""
        given = [(version, version) for version in range(5, 12)]
        taken = await self.taken(limit, 10, given)
        assert {oldest: stale for (oldest, _), stale in taken.items()} == expected

    @virtual
    @pytest.mark.parametrize(("limit", "expected"), [(4, {}), (5, {(3, 7): 5})])
    async def test_a_long_rollout_is_judged_by_its_oldest_weights(
        self, limit: int, expected: dict[tuple[int, int], int]
    ) -> None:
        assert await self.taken(limit, 8, [(3, 7)]) == expected

    @virtual
    async def test_a_rollout_that_says_nothing_has_the_versions_of_its_start_and_end(self) -> None:
        seventh = anyio.Event()

        async def run(item: Item, ctx: Context) -> Rollout:
            if item["n"] == 8:
                await seventh.wait()
            return Rollout(reward=0.0)

        options: dict[str, Any] = {"max_staleness": 5, "batch_groups": 1, "order": "strict"}
        async with inline_pipeline(task(9, run), **options) as pipe:
            await pipe.start()
            async for batch in pipe.batches(groups=1, until=8):
                async with pipe.weight_update(version=batch.step):
                    pass
                if batch.step == 7:
                    seventh.set()
                await anyio.sleep(1.0)
            batch = await pipe.get_batch(1)
        assert (batch.groups[0].oldest, batch.groups[0].newest, batch.staleness) == (3, 7, 5)

    @virtual
    @pytest.mark.parametrize(("selector", "expected"), [("stalest", [6, 7, 8]), ("fifo", [8, 6, 7])])
    async def test_stale_groups_are_run_again_and_the_others_come_in_the_selectors_order(
        self, selector: Any, expected: list[int]
    ) -> None:
        """Versions 3..8 are stored, 8 steps are trained, the limit is 2; the one of version 8 finished first."""
        offered = [8, 3, 6, 4, 7, 5]
        go, again = anyio.Event(), []

        async def run(item: Item, ctx: Context) -> Rollout:
            place = item["n"] - 8 * 6
            if place < 0:
                return Rollout(reward=0.0)
            if ctx.attempt > 1:
                again.append(offered[place])
                await anyio.sleep_forever()
            await go.wait()
            await anyio.sleep(1.0 + place)
            return Rollout(reward=0.0, oldest=offered[place], newest=8)

        options: dict[str, Any] = {"max_staleness": 2, "batch_groups": 6, "concurrency": 20}
        async with inline_pipeline(task(9 * 6, run), selector=selector, **options) as pipe:
            await pipe.start()
            async for batch in pipe.batches(groups=6, until=8):
                async with pipe.weight_update(version=batch.step):
                    pass
            go.set()
            with anyio.move_on_after(100) as scope:
                await pipe.get_batch(4)
            assert scope.cancelled_caught, "four are asked for and three are young enough: it waits"
            assert again == [3, 4, 5]
            batch = await pipe.get_batch(3)
            assert [group.oldest for group in batch] == expected
            assert batch.staleness == 2


class TestCapacity:
    """CASES 107 and 109, as far as they concern groups."""

    @virtual
    @pytest.mark.parametrize("capacity", [1, 5, 16])
    async def test_the_start_beyond_it_waits_and_each_group_trained_lets_one_start(self, capacity: int) -> None:
        async with inline_pipeline(task(60, lasting({})), capacity=capacity, concurrency=100) as pipe:
            await pipe.start()
            await anyio.sleep(100)
            assert pipe.ledger.claimed == capacity
            batch = await pipe.get_batch(1)
            await anyio.sleep(100)
            assert pipe.ledger.claimed == capacity, "a leased group still takes its place"
            await pipe.ack(batch.step)
            await anyio.sleep(100)
            assert pipe.ledger.claimed == capacity + 1

    @virtual
    async def test_a_batch_beyond_it_is_refused(self) -> None:
        async with inline_pipeline(task(60, lasting({})), capacity=8) as pipe:
            await pipe.start()
            with pytest.raises(ConfigError, match=r"groups=9.*capacity=8"):
                await pipe.get_batch(9)
            assert len(await pipe.get_batch(8)) == 8

    @virtual
    async def test_a_short_batch_comes_only_at_the_end_of_the_sources(self) -> None:
        async with inline_pipeline(task(10, lasting({9: 50.0})), concurrency=20, capacity=64) as pipe:
            await pipe.start()
            began = anyio.current_time()
            batch = await pipe.get_batch(64)
            assert len(batch) == 10
            assert anyio.current_time() - began >= 50, "while one may still come, it is waited for"

    @virtual
    async def test_a_fast_producer_holds_no_more_than_it_may(self, tmp_path: Path) -> None:
        """CASES 86: ten times faster than the trainer; the size of a checkpoint does not grow."""
        directory, sizes = str(tmp_path / "run"), []
        options: dict[str, Any] = {"capacity": 16, "concurrency": 4, "keep": 1}
        async with inline_pipeline(task(200 * 8, lasting({}, 0.01)), directory=directory, **options) as pipe:
            await begin(pipe, trained=(trained := Trained()))
            async for batch in pipe.batches(groups=8):
                now = pipe.statistics()
                assert now.groups.claimed - now.groups.trained <= 16
                assert now.buffer.peak <= 16
                await anyio.sleep(1.0)
                trained.batches.append([])
                if batch.step % 50 == 0:
                    trained.batches = trained.batches[:10]
                    saving = await pipe.save(batch.step)
                    await saving.committed()
                    folder = Path(directory, "generations", f"{saving.generation:08d}")
                    sizes.append(sum(os.path.getsize(path) for path in folder.rglob("*") if path.is_file()))
                    assert pipe.statistics().buffer.memory_bytes < 16 * 1000
        assert len(sizes) == 4
        assert max(sizes) <= min(sizes) + 200, "but for the digits of some counts"


def test_a_long_run_keeps_nothing_of_what_is_done() -> None:
    """CASES 91: tasks and memory after ten thousand rollouts, and after four times as many."""

    async def run(item: Item, ctx: Context) -> Rollout:
        return Rollout(reward=0.0)

    async def main() -> None:
        most, sizes = 0, []
        async with inline_pipeline(task(100, run, epochs=400), concurrency=8, capacity=64) as pipe:
            await pipe.start()
            async for batch in pipe.batches(groups=32):
                most = max(most, len(asyncio.all_tasks()))
                if batch.step in (312, 1249):
                    sizes.append(tracemalloc.get_traced_memory()[0])
            assert pipe.ledger.totals["numbers"].trained == 40_000
        assert most <= 8 + 3, "the workers, this task, and the supervisor's"
        assert sizes[1] - sizes[0] < 300_000

    tracemalloc.start()
    try:
        with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
            runner.run(main())
    finally:
        tracemalloc.stop()


@virtual
async def test_the_freshest_come_first_if_that_is_chosen() -> None:
    async with inline_pipeline(task(6, lasting({})), selector="freshest", capacity=6, concurrency=1) as pipe:
        await pipe.start()
        for version in range(1, 6):
            await anyio.sleep(1.0)
            async with pipe.weight_update(version=version):
                pass
        await anyio.sleep(5.0)
        assert [group.oldest for group in await pipe.get_batch(3)] == [5, 4, 3]
        assert [group.oldest for group in await pipe.get_batch(3)] == [2, 1, 0]

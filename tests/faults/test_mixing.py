"""``mixing="batch"``: every batch is divided by the shares, whichever task is slow, ends, fails or was crashed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Batch, ConfigError, Context, EndOfSource, Item, Pipeline, Reroll, Rollout, Task
from pipeline.sampler.quotas import divide
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.runs import numbers, task

pytestmark = pytest.mark.virtual_time


def by_task(batch: Batch) -> dict[str, int]:
    """How many groups of each task a batch has."""
    return dict(Counter(group.task for group in batch))


def parts(batch: Batch) -> list[tuple[str, int]]:
    """Task and index of each group, in order."""
    return [(group.task, group.index) for group in batch]


def fast_and_slow(count: int = 200, slow: float = 50.0, **more: Any) -> list[Task]:
    """A task whose rollouts take a second, and one with a third of its share and fifty times slower."""
    return [
        task(count, lasting({}), "fast", share=3, **more),
        task(count, lasting({}, slow), "slow", share=1, **more),
    ]


async def update(pipe: Pipeline, batch: Batch) -> None:
    async with pipe.weight_update(version=batch.step):
        pass


class TestDivision:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"selector": "fifo"},
            {"order": "strict"},
            {"strategy": "synchronous"},
            {"capacity": 8},
            {"capacity": 13},
            {"max_staleness": 0},
            {"max_staleness": 2},
            {"max_staleness": 2, "order": "strict"},
            {"max_staleness": 2, "staleness_policy": "reroll"},
            {"oversample": 1.5},
            {"strategy": "synchronous", "oversample": 1.5},
            {"concurrency": 1},
        ],
    )
    async def test_every_batch_has_its_part_of_a_slow_task(self, options: dict[str, Any]) -> None:
        async with inline_pipeline(fast_and_slow(), mixing="batch", **options) as pipe:
            await pipe.start()
            with anyio.fail_after(100_000):
                async for batch in pipe.batches(groups=8, until=6):
                    assert by_task(batch) == {"fast": 6, "slow": 2}
                    assert [group.task for group in batch] == ["fast"] * 6 + ["slow"] * 2
                    most = options.get("capacity", pipe.ledger.outstanding)
                    assert pipe.ledger.outstanding <= most
                    await update(pipe, batch)
            pipe.ledger.check()

    async def test_in_the_long_run_a_slow_task_holds_nothing_up(self) -> None:
        async with inline_pipeline(fast_and_slow(), capacity=40) as pipe:
            await pipe.start()
            began = anyio.current_time()
            assert by_task(await pipe.get_batch(8)) == {"fast": 8}
            assert anyio.current_time() - began < 5

    async def test_the_fast_one_takes_no_more_room_than_its_part(self) -> None:
        async with inline_pipeline(fast_and_slow(), mixing="batch", capacity=16, concurrency=32) as pipe:
            await pipe.start()
            await anyio.sleep(1000)
            assert sum(pipe.ledger.counts["fast"]) <= 12
            await pipe.get_batch(8)
            await anyio.sleep(1000)
            assert {name: sum(counts) for name, counts in pipe.ledger.counts.items()} == {"fast": 12, "slow": 4}

    async def test_a_batch_without_a_place_for_some_task_is_refused(self) -> None:
        tasks = [task(10, name="a", share=10), task(10, name="b", share=1)]
        async with inline_pipeline(tasks, mixing="batch") as pipe:
            await pipe.start()
            with pytest.raises(ConfigError, match=r"batch of 4 groups has no place for task 'b' .* 1 in 11") as caught:
                await pipe.get_batch(4)
            assert caught.value.option == "mixing"
            assert by_task(await pipe.get_batch(6)) == {"a": 5, "b": 1}

    async def test_one_task_is_as_ever(self) -> None:
        async with inline_pipeline(task(20, lasting({})), mixing="batch") as pipe:
            await pipe.start()
            assert (await finish(pipe, Trained(), 3)).items == list(range(20))

    async def test_a_batch_given_back_is_had_again(self) -> None:
        async with inline_pipeline(fast_and_slow(), mixing="batch") as pipe:
            await pipe.start()
            batch = await pipe.get_batch(4)
            batch.release()
            assert parts(await pipe.get_batch(4)) == parts(batch)


class TestEnd:
    async def test_a_task_that_has_ended_leaves_its_places_to_the_others(self) -> None:
        tasks = [task(5, lasting({}, 30.0), "a"), task(15, lasting({}), "b"), task(40, lasting({}), "c", share=2)]
        async with inline_pipeline(tasks, mixing="batch") as pipe:
            await pipe.start()
            seen = [by_task(batch) async for batch in pipe.batches(groups=8)]
            with pytest.raises(EndOfSource):
                await pipe.get_batch(8)
            pipe.ledger.check()
        assert seen == [
            {"a": 2, "b": 2, "c": 4},
            {"a": 2, "b": 2, "c": 4},
            {"a": 1, "b": 2, "c": 5},  # 7 places for b and c: 2.33 and 4.67
            {"b": 3, "c": 5},
            {"b": 3, "c": 5},
            {"b": 3, "c": 5},
            {"c": 8},
            {"c": 4},
        ]

    async def test_epochs_are_no_end(self) -> None:
        tasks = [task(3, lasting({}), "a", epochs=4), task(12, lasting({}), "b")]
        async with inline_pipeline(tasks, mixing="batch") as pipe:
            await pipe.start()
            seen = [by_task(batch) async for batch in pipe.batches(groups=4)]
        assert seen == [{"a": 2, "b": 2}] * 6

    async def test_the_last_group_is_tried_again_beside_a_batch_that_is_out(self) -> None:
        """Its source has ended, so its part is what is left: what is leased takes none of that."""
        faults = {3: 1}

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(1.0 + item["n"])
            if faults.pop(item["n"], None):
                raise ValueError("once")
            return Rollout(reward=0.0)

        options: dict[str, Any] = {"mixing": "batch", "max_staleness": 0, "batch_groups": 3, "oversample": 1.5}
        async with inline_pipeline(task(4, run), **options) as pipe:
            await begin(pipe)
            first = await pipe.get_batch(3)
            await update(pipe, first)
            second = await pipe.get_batch(3)
        assert [*parts(first), *parts(second)] == [("numbers", n) for n in range(4)]

    async def test_a_last_group_that_fails_with_its_last_rollout_ends_the_waiting(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(1.0 + ctx.member)
            if ctx.member == 0:
                raise ValueError("always")
            return Rollout(reward=0.0)

        given = task(1, run, group_size=2, min_group=2, on_failure="skip")
        async with inline_pipeline(given, mixing="batch") as pipe:
            await begin(pipe)
            with anyio.fail_after(60), pytest.raises(EndOfSource):
                await pipe.get_batch(2)

    async def test_an_empty_source_gives_nothing(self) -> None:
        tasks = [task(0, lasting({}), "a"), task(6, lasting({}), "b")]
        async with inline_pipeline(tasks, mixing="batch") as pipe:
            await pipe.start()
            assert [by_task(batch) async for batch in pipe.batches(groups=4)] == [{"b": 4}, {"b": 2}]


class TestAgainstAModel:
    @pytest.mark.parametrize("seed", range(60))
    async def test_any_tasks_and_options(self, seed: int) -> None:
        """Every batch is what shares and what is left say, nothing is lost, and nobody waits for ever."""
        rng = random.Random(seed)
        names = ["a", "b", "c"][: rng.randint(2, 3)]
        left = {name: rng.randint(0, 40) for name in names}
        shares = {name: rng.choice([1.0, 1.0, 2.0, 3.0]) for name in names}

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(rng.lognormvariate(0, 1.5) * pace[item.task])
            if rng.random() < failing[item.task]:
                raise ValueError("fails")
            return Rollout(reward=0.0)

        pace = {name: rng.choice([0.1, 1.0, 20.0]) for name in names}
        failing = {name: rng.choice([0.0, 0.0, 0.3, 1.0]) for name in names}
        tasks = [
            Task(
                name, source=numbers(left[name]), run=run, share=shares[name], group_size=rng.randint(1, 3),
                min_group=1, on_failure="skip",
            )
            for name in names
        ]  # fmt: skip
        groups = rng.randint(9, 12)
        options: dict[str, Any] = {
            "concurrency": rng.randint(1, 30),
            "order": rng.choice(["finished", "strict"]),
            "selector": rng.choice(["fifo", "stalest"]),
            "strategy": rng.choice(["asynchronous", "asynchronous", "synchronous"]),
            "max_staleness": rng.choice([None, 1, 2, 3]),
            "capacity": rng.choice([None, groups, 2 * groups + 1]),
            "oversample": rng.choice([1.0, 1.3]),
        }
        async with inline_pipeline(tasks, mixing="batch", max_rerolls=10**6, **options) as pipe:
            await pipe.start()
            with anyio.fail_after(10**7):
                async for batch in pipe.batches(groups=groups):
                    dropped = {name: sum(each.dropped.values()) for name, each in pipe.ledger.totals.items()}
                    most = {name: left[name] - dropped.get(name, 0) for name in names}
                    expected = divide(groups, shares, most)
                    assert by_task(batch) == {name: places for name, places in expected.items() if places}
                    for group in batch:
                        left[group.task] -= 1
                    assert batch.staleness <= (options["max_staleness"] or 10**9)
                    await update(pipe, batch)
            pipe.ledger.check()
            dropped = {name: sum(each.dropped.values()) for name, each in pipe.ledger.totals.items()}
        assert left == {name: dropped.get(name, 0) for name in names}


class TestCrash:
    OPTIONS: Mapping[str, Any] = {"mixing": "batch", "order": "strict", "max_staleness": 2, "concurrency": 7}

    @staticmethod
    def tasks(seed: int) -> list[Task]:
        rng = random.Random(seed)

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(rng.uniform(0.01, 5.0) * (4 if item.task == "b" else 1))
            return Rollout({"noise": ctx.rng.random(2)}, reward=float(item["n"]))

        counts = {"a": 30, "b": 13, "c": 22}
        return [
            Task(name, source=numbers(count), run=run, share=1 + (name == "a"), group_size=2)
            for name, count in counts.items()
        ]

    async def life(
        self, directory: str, seed: int, copies: dict[int, str] | None = None, **more: Any
    ) -> list[tuple[list[tuple[str, int]], list[float]]]:
        """Train to the end from whatever the directory holds; leave crashed copies behind after some batches."""
        seen = []
        async with inline_pipeline(self.tasks(seed), directory=directory, **{**self.OPTIONS, **more}) as pipe:
            await begin(pipe, trained=(trained := Trained()))
            trained.batches = [[]] * pipe.ledger.step
            async for batch in pipe.batches(groups=8):
                seen.append((parts(batch), [float(r["noise"].sum()) for r in batch.rollouts]))
                await train(pipe, trained, batch)
                if batch.step % 2 == 0:
                    await pipe.save(batch.step)
                await anyio.sleep(0.5)
                if copies is not None and batch.step in copies:
                    crashed_copy(directory, copies[batch.step])
            pipe.ledger.check()
        return seen

    @pytest.mark.parametrize("more", [{}, {"strategy": "synchronous"}, {"capacity": 19}])
    async def test_what_is_trained_is_exactly_that_of_an_uninterrupted_run(
        self, tmp_path: Path, more: dict[str, Any]
    ) -> None:
        """In strict order, with other durations in each life: the same groups in the same batches, to the last bit."""
        copies = {step: str(tmp_path / f"copy{step}") for step in (1, 2, 3, 4, 5, 7)}
        whole = await self.life(str(tmp_path / "run"), 1, copies, **more)
        assert sum(len(each) for each, _ in whole) == 65
        for step, directory in copies.items():
            saved = step - step % 2
            again = await self.life(directory, 100 + step, **more)
            assert [each for each, _ in again] == [each for each, _ in whole[saved:]]
            assert [noise for _, noise in again[:2]] == [noise for _, noise in whole[saved : saved + 2]]

    async def test_a_batch_that_was_handed_out_is_handed_out_again_though_the_division_is_another_now(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        async with inline_pipeline(fast_and_slow(20, 2.0), directory=run_directory, capacity=16) as pipe:
            await begin(pipe)
            first = await pipe.get_batch(8)
            assert by_task(first) == {"fast": 8}
            await anyio.sleep(10)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        async with inline_pipeline(fast_and_slow(20, 2.0), directory=copy, mixing="batch") as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(8)
            assert (batch.repeated, parts(batch)) == (True, parts(first))
            await pipe.ack(batch.step)
            assert by_task(await pipe.get_batch(8)) == {"fast": 6, "slow": 2}

    @pytest.mark.parametrize("order", ["finished", "strict"])
    async def test_a_resume_with_less_room_than_what_waits_starts_some_of_every_task(
        self, run_directory: str, tmp_path: Path, order: str
    ) -> None:
        """All of a task's items were drawn before those of the other: they must not take all the room there is."""
        before = [task(30, lasting({}, 100.0), "fast", share=1000), task(30, lasting({}, 100.0), "slow")]
        async with inline_pipeline(before, directory=run_directory, capacity=60) as pipe:
            await begin(pipe)
            await anyio.sleep(1)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        options: dict[str, Any] = {"mixing": "batch", "capacity": 8, "order": order}
        async with inline_pipeline(fast_and_slow(30), directory=copy, **options) as pipe:
            assert (await begin(pipe)).waiting == 60
            with anyio.fail_after(100_000):
                seen = [by_task(batch) async for batch in pipe.batches(groups=8)]
            pipe.ledger.check()
        assert seen[:3] == [{"fast": 6, "slow": 2}] * 3
        assert sum(map(sum, (each.values() for each in seen))) == 60


@pytest.mark.parametrize("policy", ["gate", "wait", Reroll(2)])
def test_policies_that_count_on_the_order_of_batches_are_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match="staleness_policy=") as caught:
        inline_pipeline(task(), max_staleness=1, mixing="batch", staleness_policy=policy)
    assert caught.value.option == "staleness_policy"

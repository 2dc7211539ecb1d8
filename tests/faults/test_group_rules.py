"""Filters, their bound, and deadlines of whole groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import (
    ConfigError,
    Context,
    EndOfSource,
    FailFast,
    GroupsRejected,
    Item,
    Retry,
    Rollout,
    RolloutFailed,
    Skip,
    Task,
    ZeroVariance,
)
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, train
from tests.support.runs import numbers, pipeline

pytestmark = pytest.mark.virtual_time


async def spread(item: Item, ctx: Context) -> Rollout:
    """Odd items give every member the same reward; even ones another to each."""
    await anyio.sleep(1.0 + 0.1 * ctx.member)
    return Rollout({"n": [item["n"]]}, reward=float(ctx.member if item["n"] % 2 == 0 else 7))


def task(run: Any = spread, count: int = 8, **more: Any) -> Task:
    return Task("numbers", source=numbers(count), run=run, shuffle=False, **{"group_size": 3, **more})


def dropped(pipe: Any) -> dict[str, int]:
    found: dict[str, int] = pipe.ledger.totals["numbers"].dropped
    return found


class TestFilters:
    @pytest.mark.parametrize(
        "given",
        [
            ZeroVariance(),
            "zero_variance",
            {"filter": "zero_variance", "tolerance": 0.5},
            lambda rollouts: len({rollout.reward for rollout in rollouts}) > 1,
        ],
    )
    async def test_groups_that_teach_nothing_are_dropped_and_counted(self, given: Any) -> None:
        async with pipeline(task(filter=given)) as pipe:
            trained = Trained()
            await begin(pipe)
            batch = await pipe.get_batch(2)
            assert pipe.progress.filtered_samples["numbers"] == 0  # the window begins with the batch
            await train(pipe, trained, batch)
            await finish(pipe, trained, 2)
            assert trained.items == [0, 2, 4, 6]
            assert dropped(pipe) == {"filtered": 4}
            assert pipe.statistics().tasks["numbers"].totals.dropped == {"filtered": 4}
            assert pipe.ledger.state(1) == "dropped"
            assert len(pipe._run.state.buffer.storage) == 0
            pipe.ledger.check()

    async def test_the_filter_sees_every_rollout_in_the_order_of_members(self) -> None:
        seen: list[list[Any]] = []

        def keep(rollouts: Sequence[Rollout]) -> bool:
            seen.append([(int(rollout["n"][0]), rollout.reward) for rollout in rollouts])
            return True

        async with pipeline(task(count=2, filter=keep), concurrency=1) as pipe:
            await begin(pipe)
            await finish(pipe, Trained(), 2)
        assert seen == [[(0, 0.0), (0, 1.0), (0, 2.0)], [(1, 7.0), (1, 7.0), (1, 7.0)]]

    async def test_a_group_that_is_whole_without_its_last_member_is_judged_too(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if ctx.member == 2:
                await anyio.sleep(5)
                raise ValueError("no")
            return await spread(item, ctx)

        async with pipeline(task(run, filter=ZeroVariance(), min_group=2, on_failure="skip")) as pipe:
            trained = Trained()
            await begin(pipe)
            await finish(pipe, trained, 2)
            assert trained.items == [0, 2, 4, 6]
            assert dropped(pipe) == {"filtered": 4}

    async def test_when_all_is_rejected_the_source_still_ends(self) -> None:
        async with pipeline(task(filter=lambda rollouts: False)) as pipe:
            await begin(pipe)
            with pytest.raises(EndOfSource):
                await pipe.get_batch(2)
            assert dropped(pipe) == {"filtered": 8}

    async def test_an_endless_rejection_ends_with_an_error(self) -> None:
        given = task(filter=lambda rollouts: rollouts[0]["n"][0] < 2, count=1000, max_rejections=5)
        async with pipeline(given, concurrency=3) as pipe:
            await begin(pipe)
            await pipe.ack((await pipe.get_batch(2)).step)
            with pytest.raises(GroupsRejected, match=r"rejected 5 groups in a row"):
                await pipe.get_batch(1)

    async def test_one_that_is_kept_begins_the_count_anew(self) -> None:
        async with pipeline(task(filter=ZeroVariance(), max_rejections=2), concurrency=1) as pipe:
            trained = Trained()
            await begin(pipe)
            await finish(pipe, trained, 2)
        assert trained.items == [0, 2, 4, 6]

    async def test_a_filter_that_raises_is_named(self) -> None:
        def broken(rollouts: Sequence[Rollout]) -> bool:
            raise KeyError("reward")

        async with pipeline(task(filter=broken)) as pipe:
            await begin(pipe)
            with pytest.raises(GroupsRejected, match=r"'numbers': its filter raised at uid 0: KeyError\('reward'\)"):
                await pipe.get_batch(2)

    @pytest.mark.parametrize("given", [5, "no such", {"filter": "zero_variance", "tolerance": -1}, spread])
    def test_what_is_no_filter_is_refused(self, given: Any) -> None:
        with pytest.raises(ConfigError, match=r"filter|tolerance"):
            task(filter=given)

    @pytest.mark.parametrize("at", [0.5, 1.05, 1.15, 1.25, 2.15, 3.05])
    async def test_a_half_finished_group_is_judged_whole_after_a_crash(self, tmp_path: Path, at: float) -> None:
        directory = str(tmp_path / "run")
        async with inline_pipeline(task(filter=ZeroVariance()), directory=directory, concurrency=5) as pipe:
            await begin(pipe)
            await anyio.sleep(at)
            crashed = crashed_copy(directory, tmp_path / "copy")
        for folder in (directory, crashed):
            async with inline_pipeline(task(filter=ZeroVariance()), directory=folder, concurrency=5) as pipe:
                trained = Trained()
                await begin(pipe)
                await finish(pipe, trained, 2)
                assert trained.items == [0, 2, 4, 6]
                assert dropped(pipe) == {"filtered": 4}


class TestFiltersAndRewardsThatComeLater:
    """A group is judged once, by the rewards that it really has."""

    @staticmethod
    async def parking(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(1.0 + ctx.member)
        if ctx.member < 2:
            ctx.park()
        return Rollout({"n": [item["n"]]}, reward=5.0)

    @pytest.mark.parametrize("given", [ZeroVariance(), lambda rollouts: len({each.reward for each in rollouts}) > 1])
    async def test_by_the_rewards_that_were_given(self, given: Any) -> None:
        async with pipeline(task(self.parking, count=2, filter=given)) as pipe:
            await begin(pipe)
            await anyio.sleep(4.0)  # the last member has finished, with the reward that the others returned too
            assert [pipe.ledger.state(uid) for uid in (0, 1)] == ["parked", "parked"]
            for member, reward in ((0, 5.0), (1, 5.0)):
                await pipe.reward(0, reward, member)
            for member, reward in ((0, 5.0), (1, 6.0)):
                await pipe.reward(1, reward, member)
            assert [pipe.ledger.state(uid) for uid in (0, 1)] == ["dropped", "buffered"]
            assert dropped(pipe) == {"filtered": 1}
            pipe.ledger.check()

    async def test_a_reward_before_the_last_member_has_ended(self) -> None:
        async with pipeline(task(self.parking, count=1, filter=ZeroVariance())) as pipe:
            await begin(pipe)
            await anyio.sleep(2.5)
            await pipe.reward(0, 5.0, 0)
            await pipe.reward(0, 4.0, 1)
            (group,) = await pipe.get_batch(1)
            assert [rollout.reward for rollout in group] == [5.0, 4.0, 5.0]

    async def test_not_before_they_are_there_though_enough_have_finished(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if ctx.member == 0:
                ctx.park()
            return Rollout({"n": [item["n"]]}, reward=5.0)

        async with pipeline(task(run, count=1, min_group=2, filter=ZeroVariance())) as pipe:
            await begin(pipe)
            await anyio.sleep(1.0)
            assert pipe.ledger.state(0) == "parked"
            await pipe.reward(0, 6.0, 0)
            assert len(await pipe.get_batch(1)) == 1

    async def test_parked_in_one_life_and_judged_in_another(self, run_directory: str) -> None:
        given = task(self.parking, count=2, filter=ZeroVariance())
        async with inline_pipeline(given, directory=run_directory) as pipe:
            await begin(pipe)
            await anyio.sleep(4.0)
            await pipe.reward(0, 5.0, 0)
        async with inline_pipeline(given, directory=run_directory) as pipe:
            await begin(pipe)
            await pipe.reward(0, 5.0, 1)
            await pipe.reward(1, 5.0, 0)
            await pipe.reward(1, 7.0, 1)
            assert [pipe.ledger.state(uid) for uid in (0, 1)] == ["dropped", "buffered"]

    async def test_a_filter_that_raises_at_a_reward_ends_the_run(self) -> None:
        def broken(rollouts: Sequence[Rollout]) -> bool:
            raise KeyError("reward")

        async with pipeline(task(self.parking, count=1, filter=broken)) as pipe:
            await begin(pipe)
            await anyio.sleep(4.0)
            await pipe.reward(0, 5.0, 0)
            await pipe.reward(0, 5.0, 1)
            with pytest.raises(GroupsRejected, match="its filter raised at uid 0"):
                await pipe.get_batch(1)


class TestGroupDeadlines:
    async def test_what_has_not_finished_is_given_up(self) -> None:
        tries: Counter[tuple[int, int]] = Counter()

        async def run(item: Item, ctx: Context) -> Rollout:
            tries[item["n"], ctx.member] += 1
            await anyio.sleep(100.0 if (item["n"], ctx.member) == (1, 2) else 1.0)
            return Rollout({"n": [item["n"]]}, reward=1.0)

        given = task(run, count=3, group_timeout=3.0, min_group=2, on_failure=Retry(attempts=5))
        async with pipeline(given) as pipe:
            await begin(pipe)
            began = anyio.current_time()
            batch = await pipe.get_batch(3)
            assert anyio.current_time() - began == pytest.approx(3.0, abs=0.01)
            assert sorted((group.index, len(group)) for group in batch) == [(0, 3), (1, 2), (2, 3)]
            assert tries[1, 2] == 1
            pipe.ledger.check()

    async def test_too_few_by_then_and_the_group_is_dropped(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(100.0 if item["n"] == 1 and ctx.member else 1.0)
            return Rollout({"n": [item["n"]]}, reward=1.0)

        async with pipeline(task(run, count=3, group_timeout=3.0, min_group=2)) as pipe:
            trained = Trained()
            await begin(pipe)
            await finish(pipe, trained, 3)
            assert trained.items == [0, 2]
            assert dropped(pipe) == {"failed": 1}

    async def test_members_that_never_started_and_retries_count_as_well(self) -> None:
        started: list[tuple[int, int, int]] = []

        async def run(item: Item, ctx: Context) -> Rollout:
            started.append((item["n"], ctx.member, ctx.attempt))
            await anyio.sleep(2.0)
            if item["n"] == 0 and ctx.member == 0:
                raise ValueError("again")
            return Rollout({"n": [item["n"]]}, reward=1.0)

        given = task(run, count=2, group_timeout=5.0, min_group=1, on_failure=Retry(attempts=9))
        async with pipeline(given, concurrency=1) as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(2)
            # One slot: member 0 twice, then member 1 is cut at 5 s, and member 2 is never begun.
            assert [(group.index, len(group)) for group in batch] == [(1, 2)]
            assert dropped(pipe) == {"failed": 1}
            assert started == [(0, 0, 1), (0, 0, 2), (0, 0, 3), (1, 0, 1), (1, 1, 1), (1, 2, 1)]
            pipe.ledger.check()

    async def test_fail_fast_stops_the_run(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(1e4)
            return Rollout()

        async with pipeline(task(run, group_timeout=3.0, on_failure=FailFast())) as pipe:
            await begin(pipe)
            with pytest.raises(RolloutFailed, match="group_timeout=3"):
                await pipe.get_batch(1)

    async def test_a_group_run_again_has_its_whole_time_again(self, tmp_path: Path) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(2.5)
            return Rollout({"n": [item["n"]]}, reward=1.0)

        directory = str(tmp_path / "run")
        for _ in range(2):
            async with inline_pipeline(task(run, count=2, group_timeout=3.0), directory=directory) as pipe:
                await begin(pipe)
                await anyio.sleep(2.0)
        async with inline_pipeline(task(run, count=2, group_timeout=3.0), directory=directory) as pipe:
            trained = Trained()
            await begin(pipe)
            await finish(pipe, trained, 2)
            assert trained.items == [0, 1]


class TestWhereNothingSucceeds:
    async def fails(self, item: Item, ctx: Context) -> Rollout:
        if item["n"] in (2, 6):
            return Rollout({"n": [item["n"]]}, reward=0.0)
        raise ValueError("a slip of the pen")

    async def test_an_endless_source_ends_with_the_error(self) -> None:
        async def always(item: Item, ctx: Context) -> Rollout:
            raise ValueError("a slip of the pen")

        given = task(run=always, epochs=None, max_failures=20, on_failure=Retry(attempts=2))
        async with pipeline(given, concurrency=3) as pipe:
            await begin(pipe)
            match = r"ValueError: a slip of the pen\. This is number 20 .* in a row.* raise max_failures="
            with pytest.raises(RolloutFailed, match=match):
                await pipe.get_batch(1)

    async def test_one_that_finishes_begins_the_count_anew(self) -> None:
        given = task(run=self.fails, count=9, group_size=1, max_failures=4, on_failure=Skip())
        async with pipeline(given, concurrency=1) as pipe:
            trained = Trained()
            await begin(pipe)
            await finish(pipe, trained, 1)
        assert trained.items == [2, 6]

    async def test_as_many_as_are_too_many_in_a_row_end_the_run(self) -> None:
        given = task(run=self.fails, count=9, group_size=1, max_failures=3, on_failure=Skip())
        async with pipeline(given, concurrency=1) as pipe:
            await begin(pipe)
            await pipe.ack((await pipe.get_batch(1)).step)
            with pytest.raises(RolloutFailed, match="number 3 that was given up"):
                await pipe.get_batch(1)

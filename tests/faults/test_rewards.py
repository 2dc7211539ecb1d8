"""Rewards that come later: nothing is trained without them, nothing is lost while they are waited for."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import ConfigError, Context, Damaged, EndOfSource, Item, Pipeline, Rollout, Starved, UsageError
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.gates import turn
from tests.support.runs import ids, task

pytestmark = pytest.mark.virtual_time


def parking(*members: int, seconds: float = 1.0) -> Any:
    """A runner whose ``members`` park (all of them if none is named); the reward that it returns does not count."""

    async def run(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(seconds)
        if not members or ctx.member in members:
            ctx.park()
            assert ctx.parked
        return Rollout({"n": [item["n"], ctx.member]}, reward=-100.0 if ctx.parked else 1.0, tokens=2)

    return run


class TestOneLife:
    async def test_a_group_is_parked_until_every_member_that_parked_has_its_reward(self) -> None:
        async with inline_pipeline(task(1, parking(0, 2), group_size=3)) as pipe:
            await pipe.start()
            await anyio.sleep(2)
            assert pipe.ledger.state(0) == "parked"
            assert pipe.statistics().groups.parked == 1
            assert pipe.metrics()["tasks/numbers/states/parked"] == 1.0
            pipe.ledger.check()
            await pipe.reward(0, 7, member=2)
            assert pipe.ledger.state(0) == "parked"
            assert not pipe._run.state.buffer.ready(1)
            await pipe.reward(0, 0.5)
            assert pipe.ledger.state(0) == "buffered"
            pipe.ledger.check()
            batch = await pipe.get_batch(1)
        assert [rollout.reward for rollout in batch.rollouts] == [0.5, 1.0, 7.0]
        assert [rollout["n"].tolist() for rollout in batch.rollouts] == [[0, 0], [0, 1], [0, 2]]
        assert batch.rewards.tolist() == [0.5, 1.0, 7.0]
        assert batch.padded()["rewards"].tolist() == [0.5, 1.0, 7.0]
        assert batch.groups[0].reward_mean == pytest.approx(8.5 / 3)
        totals = pipe.ledger.totals["numbers"]
        assert (totals.finished, totals.reward_count, totals.reward_sum, totals.tokens) == (3, 3, 8.5, 6)

    async def test_a_reward_may_come_before_the_other_members_have_ended(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(1.0 + ctx.member)
            if ctx.member == 0:
                ctx.park()
            return Rollout(reward=1.0)

        async with inline_pipeline(task(1, run, group_size=2)) as pipe:
            await pipe.start()
            await anyio.sleep(1.5)
            assert pipe.ledger.state(0) == "running"
            await pipe.reward(0, 3.0)
            await anyio.sleep(1)
            assert pipe.ledger.state(0) == "buffered"
            assert (await pipe.get_batch(1)).rewards.tolist() == [3.0, 1.0]

    async def test_get_batch_waits_for_the_reward_of_the_last_groups(self) -> None:
        """A finite source is at its end, nothing runs: neither EndOfSource, nor Starved, nor a shorter batch."""
        got: list[list[int]] = []

        async def trainer(pipe: Pipeline) -> None:
            async for batch in pipe.batches(groups=2):
                got.append(ids(batch))  # noqa: PERF401  looked at while the loop goes on

        async with inline_pipeline(task(3, parking())) as pipe, anyio.create_task_group() as group:
            await pipe.start()
            await anyio.sleep(2)
            group.start_soon(trainer, pipe)
            await anyio.sleep(1000)
            assert got == []
            await pipe.reward(0, 1.0)
            await anyio.sleep(1000)
            assert got == []
            await pipe.reward(2, 1.0)
            await anyio.sleep(1)
            assert got == [[0, 2]]
            await pipe.reward(1, 1.0)
        assert got == [[0, 2], [1]]

    async def test_a_reward_that_will_not_come_is_given_up(self) -> None:
        async with inline_pipeline(task(2, parking())) as pipe:
            await pipe.start()
            await anyio.sleep(2)
            await pipe.reward(0, 1.0)
            with pytest.raises(UsageError, match="uid 0 is buffered; only what is parked can be discarded"):
                await pipe.discard(0)
            await pipe.discard(1)
            assert pipe.ledger.state(1) == "dropped"
            assert pipe.ledger.totals["numbers"].dropped == {"discarded": 1}
            pipe.ledger.check()
            assert ids(await pipe.get_batch(2)) == [0], "it was waited for no longer"
            with pytest.raises(EndOfSource):
                await pipe.get_batch(2)
            with pytest.raises(UsageError, match="uid 1: it is dropped"):
                await pipe.discard(1)

    async def test_parked_groups_keep_their_place_of_the_capacity(self) -> None:
        async with inline_pipeline(task(9, parking()), capacity=3) as pipe:
            await pipe.start()
            with anyio.move_on_after(50):
                await pipe.get_batch(1)
            assert (pipe.ledger.claimed, pipe.statistics().groups.parked) == (3, 3)
            await pipe.reward(1, 1.0)
            batch = await pipe.get_batch(1)
            assert ids(batch) == [1]
            await pipe.ack(batch.step)
            await anyio.sleep(5)
            assert pipe.ledger.claimed == 4
            pipe.ledger.check()

    @pytest.mark.parametrize("options", [{"order": "strict"}, {"strategy": "synchronous"}])
    async def test_in_draw_order_a_parked_group_holds_back_those_behind_it(self, options: dict[str, Any]) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if item["n"] == 0:
                ctx.park()
            return Rollout(reward=1.0)

        async with inline_pipeline(task(2, run), **options) as pipe, anyio.create_task_group() as group:
            await pipe.start()

            async def later() -> None:
                await anyio.sleep(100)
                await pipe.reward(0, 1.0)

            group.start_soon(later)
            with anyio.move_on_after(50) as scope:
                await pipe.get_batch(2)
            assert scope.cancelled_caught
            assert ids(await pipe.get_batch(2)) == [0, 1]

    async def test_a_group_too_few_of_which_can_still_count_is_not_parked(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if ctx.member > 0:
                raise ValueError("no")
            ctx.park()
            return Rollout(reward=1.0)

        async with inline_pipeline(task(1, run, group_size=3, min_group=2, on_failure="skip")) as pipe:
            await pipe.start()
            await anyio.sleep(1)
            assert (pipe.ledger.state(0), pipe.ledger.totals["numbers"].dropped) == ("dropped", {"failed": 1})

    async def test_a_group_is_parked_when_its_last_member_gives_up(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(1 + ctx.member)
            if ctx.member > 0:
                raise ValueError("no")
            ctx.park()
            return Rollout(reward=1.0)

        async with inline_pipeline(task(1, run, group_size=2, min_group=1, on_failure="skip")) as pipe:
            await pipe.start()
            await anyio.sleep(5)
            assert pipe.ledger.state(0) == "parked"
            await pipe.reward(0, 4.0)
            batch = await pipe.get_batch(1)
            assert (batch.rewards.tolist(), batch.groups[0].members) == ([4.0], [0])

    async def test_an_attempt_that_fails_after_it_parked_has_failed(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if ctx.attempt == 1:
                ctx.park()
                raise ValueError("after all")
            return Rollout(reward=1.0)

        async with inline_pipeline(task(1, run)) as pipe:
            await pipe.start()
            batch = await pipe.get_batch(1)
            assert batch.rewards.tolist() == [1.0]

    async def test_a_parked_rollout_frees_its_slot(self) -> None:
        async with inline_pipeline(task(5, parking()), concurrency=1, capacity=5) as pipe:
            await pipe.start()
            await anyio.sleep(10)
            assert pipe.statistics().groups.parked == 5
            assert pipe.statistics().rollouts.in_flight == 0


class TestRefusals:
    """Bad input changes nothing."""

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ((0, math.nan), ConfigError, "value=nan: a reward is a finite number"),
            ((0, math.inf), ConfigError, "value=inf"),
            ((0, 10**400), ConfigError, "a reward is a finite number"),
            ((0, True), ConfigError, "value=True"),
            ((0, "1"), ConfigError, "value='1'"),
            ((0, None), ConfigError, "value=None"),
            (("0", 1.0), ConfigError, "uid='0'"),
            ((True, 1.0), ConfigError, "uid=True"),
            ((0, 1.0, 2), ConfigError, "member=2: uid 0 has the members 0 to 1"),
            ((0, 1.0, -1), ConfigError, "member=-1"),
            ((0, 1.0, True), ConfigError, "member=True"),
            ((99, 1.0), UsageError, "uid 99: this run has no such item"),
            ((-1, 1.0), UsageError, "uid -1: this run has no such item"),
            ((0, 1.0, 1), UsageError, r"uid 0 \(parked\), member 1 is not parked"),
        ],
    )
    async def test_a_reward_that_cannot_be_is_refused_and_changes_nothing(
        self, run_directory: str, arguments: tuple[Any, ...], error: type[Exception], match: str
    ) -> None:
        async with inline_pipeline(task(1, parking(0), group_size=2), directory=run_directory) as pipe:
            await pipe.start()
            await anyio.sleep(2)
            before = copy.deepcopy(pipe.ledger.snapshot())
            writer = pipe._run.state.writer
            assert writer is not None
            sequence = writer.writer.sequence
            with pytest.raises(error, match=match):
                await pipe.reward(*arguments)
            assert (pipe.ledger.snapshot(), writer.writer.sequence) == (before, sequence)

    async def test_the_same_reward_again_does_nothing_and_another_is_refused(self) -> None:
        async with inline_pipeline(task(1, parking())) as pipe:
            await pipe.start()
            await anyio.sleep(2)
            await pipe.reward(0, 2.0)
            before = copy.deepcopy(pipe.ledger.snapshot())
            await pipe.reward(0, 2)
            with pytest.raises(UsageError, match=r"uid 0 \(buffered\), member 0 was given the reward 2.0 already"):
                await pipe.reward(0, 3.0)
            assert pipe.ledger.snapshot() == before
            batch = await pipe.get_batch(1)
            await pipe.reward(0, 2.0)
            await pipe.ack(batch.step)
            with pytest.raises(UsageError, match="uid 0: it is trained"):
                await pipe.reward(0, 2.0)

    async def test_what_runs_or_never_parked_has_no_reward_to_come(self) -> None:
        async with inline_pipeline(task(2, lasting({0: 1.0, 1: 50.0}))) as pipe:
            await pipe.start()
            await anyio.sleep(2)
            for uid, state in ((0, "buffered"), (1, "running")):
                with pytest.raises(UsageError, match=rf"uid {uid} \({state}\), member 0 is not parked"):
                    await pipe.reward(uid, 1.0)

    async def test_before_the_directory_is_in_use_and_after_the_end(self, run_directory: str) -> None:
        pipe = inline_pipeline(task(1, parking()), directory=run_directory)
        with pytest.raises(UsageError, match="not open"):
            await pipe.reward(0, 1.0)
        async with pipe:
            with pytest.raises(UsageError, match="comes after start"):
                await pipe.reward(0, 1.0)
            await pipe.start()
        with pytest.raises(UsageError, match="closed"):
            await pipe.reward(0, 1.0)


class TestAge:
    """A parked group ages as a buffered one does."""

    async def run_past(self, pipe: Pipeline, steps: int) -> None:
        for _ in range(steps):
            await pipe.reward(max(pipe.ledger.parked), 1.0)  # those that were drawn last are rewarded at once
            batch = await pipe.get_batch(1)
            async with pipe.weight_update(version=batch.step):
                pass
            await pipe.ack(batch.step)
            await anyio.sleep(2)

    async def test_too_old_for_the_next_batch_it_is_run_again_and_a_late_reward_is_refused(self) -> None:
        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 1, "concurrency": 2}
        async with inline_pipeline(task(9, parking()), **options) as pipe:
            await pipe.start()
            await anyio.sleep(2)
            assert sorted(pipe.ledger.parked) == [0, 1]
            entry = pipe.ledger.entries[0]
            await self.run_past(pipe, 1)
            assert (pipe.ledger.state(0), entry.life, entry.attempts) == ("parked", 0, (1,)), "one more step is allowed"
            await self.run_past(pipe, 1)  # for the batch of step 3 version 0 is too old
            await anyio.sleep(2)
            assert (pipe.ledger.state(0), entry.life, entry.attempts, entry.rerolls) == ("parked", 1, (2,), 1)
            assert entry.effective == 2
            with pytest.raises(UsageError, match="the reward is for attempt 1, and the member is at attempt 2"):
                await pipe.reward(0, 5.0, attempt=1)
            await pipe.reward(0, 6.0, attempt=2)
            batch = await pipe.get_batch(1)
            assert (batch.uids, batch.rewards.tolist(), batch.step, batch.staleness) == ([0], [6.0], 3, 0)
            pipe.ledger.check()

    async def test_after_max_rerolls_it_is_dropped(self) -> None:
        options: dict[str, Any] = {"max_staleness": 0, "batch_groups": 2, "concurrency": 2, "max_rerolls": 0}
        async with inline_pipeline(task(9, parking()), **options) as pipe:
            await pipe.start()
            await anyio.sleep(2)
            await pipe.reward(1, 1.0)
            batch = await pipe.get_batch(1)
            async with pipe.weight_update(version=batch.step):
                pass
            await pipe.ack(batch.step)
            with anyio.move_on_after(3):
                await pipe.get_batch(1)
            assert (pipe.ledger.state(0), pipe.ledger.totals["numbers"].dropped) == ("dropped", {"expired": 1})
            pipe.ledger.check()

    async def test_one_that_is_parked_too_old_already_is_not_waited_for(self) -> None:
        """It finishes while the trainer waits, and no reward could help: it is run again at once."""

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(10.0 if ctx.attempt == 1 and item["n"] == 0 else 1.0)
            if item["n"] == 0 and ctx.attempt == 1:
                ctx.park()
            return Rollout(reward=1.0)

        options: dict[str, Any] = {"max_staleness": 0, "batch_groups": 2, "concurrency": 2}
        async with inline_pipeline(task(2, run), **options) as pipe:
            await pipe.start()
            batch = await pipe.get_batch(1)
            async with pipe.weight_update(version=batch.step):
                pass
            await pipe.ack(batch.step)
            batch = await pipe.get_batch(1)
            assert (batch.uids, batch.groups[0].oldest) == ([0], 1)

    @pytest.mark.parametrize("cut", [False, True])
    async def test_nor_is_one_whose_last_member_comes_too_late(
        self, run_directory: str, tmp_path: Path, cut: bool
    ) -> None:
        """Its first member parked long ago, perhaps in another life; the last one ends, and does not park."""

        async def run(item: Item, ctx: Context) -> Rollout:
            late = item["n"] == 0 and ctx.version == 0
            await anyio.sleep(10.0 if late and ctx.member == 1 else 1.0)
            if late and ctx.member == 0:
                ctx.park()
            return Rollout({"n": [item["n"]]}, reward=1.0)

        options: dict[str, Any] = {"max_staleness": 0, "batch_groups": 2, "concurrency": 4}
        given = task(2, run, group_size=2)
        directory = run_directory
        if cut:
            async with inline_pipeline(given, directory=directory, **options) as pipe:
                await begin(pipe)
                await anyio.sleep(2)
                directory = crashed_copy(directory, tmp_path / "copy")
        async with inline_pipeline(given, directory=directory, **options) as pipe:
            await begin(pipe)
            batch = await pipe.get_batch(1)
            assert ids(batch) == [1]
            async with pipe.weight_update(version=batch.step):
                pass
            await pipe.ack(batch.step)
            with anyio.fail_after(30):
                batch = await pipe.get_batch(1)
            assert (ids(batch), batch.rewards.tolist(), batch.groups[0].oldest) == ([0], [1.0, 1.0], 1)


class TestCrashes:
    async def test_parked_groups_outlive_a_crash_and_are_rewarded_in_another_life(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        runs: list[tuple[int, int]] = []

        async def run(item: Item, ctx: Context) -> Rollout:
            runs.append((item["n"], ctx.member))
            rollout: Rollout = await parking(1)(item, ctx)
            return rollout

        given = task(3, run, group_size=2)
        async with inline_pipeline(given, directory=run_directory) as pipe:
            await begin(pipe, trained=Trained())
            await anyio.sleep(2)
            await pipe.reward(0, 5.0, member=1)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        runs.clear()
        trained = Trained()
        async with inline_pipeline(given, directory=copy) as pipe:
            pipe.attach(trained=trained)
            resumed = await pipe.resume()
            assert (resumed.buffered, resumed.parked, resumed.waiting) == (1, 2, 0)
            assert [pipe.ledger.state(uid) for uid in range(3)] == ["buffered", "parked", "parked"]
            await pipe.reward(2, 7.0, member=1)  # before start, too
            again = crashed_copy(copy, tmp_path / "again")
        async with inline_pipeline(given, directory=again) as pipe:
            resumed = await begin(pipe, trained=trained)
            assert (resumed.buffered, resumed.parked) == (2, 1)
            assert pipe.ledger.totals["numbers"].reward_sum == 3 * 1.0 + 5.0 + 7.0
            batch = await pipe.get_batch(2)
            assert batch.rewards.tolist() == [1.0, 5.0, 1.0, 7.0], "the given rewards, not those in the payloads"
            assert batch.groups[1].reward_mean == 4.0
            await train(pipe, trained, batch)
            await pipe.ack(batch.step)
            with anyio.move_on_after(100) as scope:
                await pipe.get_batch(1)
            assert scope.cancelled_caught
            await pipe.reward(1, 9.0, member=1)
            await finish(pipe, trained, 1)
        assert runs == []
        assert trained.items == [0, 1, 2]

    @pytest.mark.parametrize("at", [0.5, 1.5, 2.5])
    async def test_a_group_that_was_cut_half_parked_runs_only_what_is_missing(
        self, run_directory: str, tmp_path: Path, at: float
    ) -> None:
        runs: list[int] = []

        async def run(item: Item, ctx: Context) -> Rollout:
            runs.append(ctx.member)
            await anyio.sleep(1.0 + ctx.member)
            ctx.park()
            return Rollout({"m": [ctx.member]}, reward=0.0)

        given = task(1, run, group_size=3)
        async with inline_pipeline(given, directory=run_directory) as pipe:
            await begin(pipe)
            await anyio.sleep(at)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        runs.clear()
        async with inline_pipeline(given, directory=copy) as pipe:
            await begin(pipe)
            pipe.ledger.check()
            await anyio.sleep(5)
            assert runs == list(range(int(at), 3))
            assert pipe.ledger.state(0) == "parked"
            for member in range(3):
                await pipe.reward(0, member, member)
            assert (await pipe.get_batch(1)).rewards.tolist() == [0.0, 1.0, 2.0]

    async def test_a_damaged_payload_of_a_parked_group_is_found_at_the_resume(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        async with inline_pipeline(task(1, parking()), directory=run_directory) as pipe:
            await begin(pipe)
            await anyio.sleep(2)
            await (await pipe.save(0)).committed()  # what is not synced yet might be run again
            copy = crashed_copy(run_directory, tmp_path / "copy")
        (segment,) = Path(copy, "segments").iterdir()
        content = bytearray(segment.read_bytes())
        content[100] ^= 1
        segment.write_bytes(content)
        async with inline_pipeline(task(1, parking()), directory=copy) as pipe:
            with pytest.raises(Damaged, match="the payload of uid 0, member 0 is damaged"):
                await pipe.resume()

    async def test_a_reward_is_written_when_the_call_returns(self, run_directory: str, tmp_path: Path) -> None:
        async with inline_pipeline(task(1, parking()), directory=run_directory) as pipe:
            await begin(pipe)
            await anyio.sleep(2)
            await pipe.reward(0, 3.0)
            copy = crashed_copy(run_directory, tmp_path / "copy")  # without a turn of the loop between
        async with inline_pipeline(task(1, parking()), directory=copy) as pipe:
            await begin(pipe)
            assert pipe.ledger.state(0) == "buffered"

    async def test_a_reward_goes_to_a_task_that_this_life_does_not_have(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        both = [task(1, parking()), task(1, lasting({}), name="other")]
        async with inline_pipeline(both, directory=run_directory) as pipe:
            await begin(pipe)
            await anyio.sleep(2)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        async with inline_pipeline(both[1], directory=copy) as pipe:
            await begin(pipe)
            assert [group.task for group in await pipe.get_batch(1)] == ["other"]
            with pytest.raises(EndOfSource):  # its reward is in nobody's way, and not waited for
                await pipe.get_batch(1)
            assert pipe._run.state.absent == 1
            await pipe.reward(0, 2.0)
            assert pipe._run.state.absent == 0
            batch = await pipe.get_batch(1)
            assert (batch.groups[0].task, batch.rewards.tolist()) == ("numbers", [2.0])
            pipe.ledger.check()


async def test_a_failed_push_of_weights_is_told_though_rewards_may_come() -> None:
    async with inline_pipeline(task(2, parking())) as pipe:
        await pipe.start()
        await anyio.sleep(2)
        with pytest.raises(OSError, match="server"):
            async with pipe.weight_update(version=1):
                raise OSError("server")
        with pytest.raises(Starved, match="The last weight_update failed"):
            await pipe.get_batch(1)
        await turn()
        pipe.ledger.check()

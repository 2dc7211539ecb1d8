"""What each ``staleness_policy`` does with rollouts that take long, at the border and over many steps."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from structlog.testing import capture_logs

from pipeline import Batch, Context, Item, Pipeline, Reroll, Rollout
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.runs import ids, task

pytestmark = pytest.mark.virtual_time


async def update(pipe: Pipeline, batch: Batch) -> None:
    """Publish the weights of a batch's step."""
    async with pipe.weight_update(version=batch.step):
        pass


class TestWait:
    """Nothing that was begun becomes too old: the trainer waits for it."""

    @pytest.mark.parametrize("seed", range(40))
    async def test_no_group_is_ever_run_again_or_too_old(self, seed: int) -> None:
        rng = random.Random(seed)
        groups, bound, size = rng.randint(1, 5), rng.randint(0, 3), rng.randint(1, 3)
        every, failing = rng.choice([1, 1, 1, 2]), rng.choice([0.0, 0.2])

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(rng.lognormvariate(0, 1.5))
            if rng.random() < failing:
                raise ValueError("once in a while")
            return Rollout(reward=0.0)

        options: dict[str, Any] = {"max_staleness": bound, "batch_groups": groups, "concurrency": rng.randint(1, 20)}
        given = task(60, run, group_size=size, on_failure={"policy": "retry", "attempts": 100})
        async with inline_pipeline(given, staleness_policy="wait", **options) as pipe:
            await pipe.start()
            trained = Trained()
            with anyio.fail_after(10_000):
                async for batch in pipe.batches(groups=groups):
                    assert batch.staleness <= bound
                    trained.step(batch)
                    await anyio.sleep(rng.random())
                    if batch.step % min(every, bound + 1) == 0:
                        await update(pipe, batch)
            totals = pipe.ledger.totals["numbers"]
        assert trained.items == list(range(60))
        assert (totals.reopened, totals.dropped) == (0, {})

    @staticmethod
    def slow_first(**more: Any) -> Pipeline:
        """Item 0 takes 100 seconds, the others one; two groups are a batch and may be one step old."""
        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 2, "staleness_policy": "wait", **more}
        return inline_pipeline(task(20, lasting({0: 100.0})), **options)

    async def test_a_version_that_would_make_a_rollout_in_flight_too_old_is_published_after_it(self) -> None:
        """Item 0 is begun at version 0 and may be one step old: version 1 does it no harm, version 2 does."""
        async with self.slow_first() as pipe:
            began = anyio.current_time()
            await pipe.start()
            first = await pipe.get_batch(2)
            assert ids(first) == [1, 2]
            await update(pipe, first)
            assert anyio.current_time() - began < 2
            async with pipe.weight_update(version=2):  # a trainer that publishes ahead of its steps
                assert anyio.current_time() - began >= 100
                assert pipe.ledger.state(0) == "buffered"
                assert pipe.ledger.entries[4].state == 3, "others go on meanwhile"
            second = await pipe.get_batch(2)
            assert 0 in ids(second)
            assert second.staleness == 1

    async def test_a_batch_waits_when_what_is_old_would_not_fit_into_those_that_are_left(self) -> None:
        """Items 0 and 1 were begun at version 0 and may be two steps old: not both can be in batch 3."""
        options: dict[str, Any] = {"max_staleness": 2, "batch_groups": 1, "staleness_policy": "wait"}
        async with inline_pipeline(task(20, lasting({0: 100.0, 1: 200.0})), **options) as pipe:
            began = anyio.current_time()
            await pipe.start()
            batches = [await pipe.get_batch(1)]
            await update(pipe, batches[0])
            assert anyio.current_time() - began < 2, "it needs not yet wait for either"
            await anyio.sleep(10)
            assert pipe.ledger.state(3) == "buffered"
            batches.append(await pipe.get_batch(1))
            assert 100 <= anyio.current_time() - began < 110
            await update(pipe, batches[1])
            assert anyio.current_time() - began < 110
            batches.append(await pipe.get_batch(1))
            assert 200 <= anyio.current_time() - began < 210
        assert [ids(batch) for batch in batches] == [[2], [0], [1]]
        assert [batch.staleness for batch in batches] == [0, 1, 2]

    @pytest.mark.parametrize(("running", "least"), [("keep", 100), ("finish", 100), ("abort", 0)])
    async def test_what_is_aborted_is_not_waited_for(self, running: Any, least: float) -> None:
        async with self.slow_first() as pipe:
            began = anyio.current_time()
            await pipe.start()
            await pipe.get_batch(2)
            async with pipe.weight_update(version=2, running=running):
                assert least <= anyio.current_time() - began < least + 10

    async def test_an_update_that_waits_can_be_cancelled_and_rollouts_go_on(self) -> None:
        async with self.slow_first() as pipe:
            await pipe.start()
            await pipe.get_batch(2)
            with anyio.move_on_after(10) as scope:
                async with pipe.weight_update(version=2):
                    pytest.fail("it waits for item 0")
            assert scope.cancelled_caught
            assert pipe.version == 0
            async with pipe.weight_update(version=2):
                assert pipe.ledger.state(0) == "buffered"
            assert pipe.version == 2

    async def test_a_retry_starts_while_an_update_waits_for_it(self) -> None:
        """A pause would be a deadlock: the update waits for a group whose member fails and is tried again."""
        tries = []

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(1.0 if item["n"] or ctx.member else 10.0)
            if item["n"] == 0 and ctx.member == 0:
                tries.append(ctx.attempt)
                if ctx.attempt < 3:
                    raise ValueError("not yet")
            return Rollout(reward=0.0)

        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 1, "concurrency": 4, "staleness_policy": "wait"}
        async with inline_pipeline(task(6, run, group_size=2), **options) as pipe:
            await pipe.start()
            await pipe.get_batch(1)
            with anyio.fail_after(100):
                async with pipe.weight_update(version=2):
                    assert pipe.ledger.state(0) == "buffered"
        assert tries == [1, 2, 3]

    async def test_after_a_failed_push_an_update_does_not_wait_for_what_cannot_start(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(50.0 if item["n"] == 0 else 1.0)
            return Rollout(reward=0.0)

        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 1, "concurrency": 2, "staleness_policy": "wait"}
        async with inline_pipeline(task(6, run, group_size=3), **options) as pipe:
            await pipe.start()
            await anyio.sleep(2)  # item 0 has two members in flight and one that has no slot
            with pytest.raises(OSError, match="the server is away"):
                async with pipe.weight_update(version=0):
                    raise OSError("the server is away")
            with anyio.fail_after(1):
                async with pipe.weight_update(version=5):
                    assert pipe.ledger.state(0) == "running"
            trained = [n async for batch in pipe.batches(groups=1) for n in ids(batch)]
            assert sorted(trained) == list(range(6))

    async def test_the_end_of_the_run_ends_an_update_that_waits(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep({0: 100.0, 5: 5.0}.get(item["n"], 1.0))
            if item["n"] == 5:
                raise ValueError("x")
            return Rollout(reward=0.0)

        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 3, "staleness_policy": "wait"}
        async with inline_pipeline(task(6, run, on_failure="fail_fast"), **options) as pipe:
            began = anyio.current_time()
            await pipe.start()
            await pipe.get_batch(3)
            with anyio.fail_after(50):
                async with pipe.weight_update(version=2):
                    pass
            assert anyio.current_time() - began == pytest.approx(5)
            with pytest.raises(Exception, match="ValueError: x"):
                await pipe.get_batch(3)

    async def test_it_holds_after_a_crash(self, run_directory: str, tmp_path: Path) -> None:
        """Weights that went back make old what was not: that is run again, and nothing that was begun since."""
        rng = random.Random(5)

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(rng.lognormvariate(0, 1.5))
            return Rollout(reward=0.0)

        options: dict[str, Any] = {"max_staleness": 1, "concurrency": 6, "staleness_policy": "wait"}
        async with inline_pipeline(task(40, run, group_size=2), directory=run_directory, **options) as pipe:
            await begin(pipe, trained=(trained := Trained()))
            async for batch in pipe.batches(groups=3, until=6):
                await train(pipe, trained, batch)
                if batch.step == 3:
                    await pipe.save(3)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        async with inline_pipeline(task(40, run, group_size=2), directory=copy, **options) as pipe:
            await begin(pipe, trained=(again := Trained()))
            async for batch in pipe.batches(groups=3):
                assert batch.staleness <= 1
                await train(pipe, again, batch)
            assert pipe.ledger.totals["numbers"].dropped == {}
        assert again.items == list(range(40))


def late(slow: dict[int, float], ran: list[tuple[int, int]], other: float = 1.0) -> Any:
    """A runner whose member m of item n takes ``slow[10 * n + m]`` at its first try; ``ran`` is told of each try."""

    async def run(item: Item, ctx: Context) -> Rollout:
        place = 10 * item["n"] + ctx.member
        ran.append((place, ctx.attempt))
        await anyio.sleep(slow.get(place, other) if ctx.attempt == 1 else other)
        return Rollout({"made": [place, ctx.attempt]}, reward=float(place), tokens=1 + place)

    return run


async def outlast(pipe: Pipeline, steps: int) -> None:
    """Train and publish ``steps`` steps of one group each, ten seconds apart."""
    async for batch in pipe.batches(groups=1, until=steps):
        await anyio.sleep(10)
        await update(pipe, batch)


class TestRunAgain:
    """``drop`` runs a whole group again, ``reroll`` only those members of it that are too old."""

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            ("drop", [(0, 2), (1, 3), (2, 2)]),
            ("reroll", [(0, 2), (2, 2)]),
            (Reroll(), [(0, 2), (2, 2)]),
            ({"policy": "reroll", "tail": 1}, [(0, 2), (2, 2)]),
        ],
    )
    async def test_which_members_of_a_group(self, policy: Any, expected: list[tuple[int, int]]) -> None:
        """Member 0 is done at once; member 1 fails once and so is begun with newer weights; member 2 takes long."""
        ran: list[tuple[int, int]] = []
        options: dict[str, Any] = {"max_staleness": 3, "batch_groups": 1, "concurrency": 20}
        given = task(12, self.uneven(ran), group_size=3)
        async with inline_pipeline(given, staleness_policy=policy, **options) as pipe:
            await pipe.start()
            await outlast(pipe, 4)
            again = [each for each in ran if each[0] < 3 and each[1] > 1]
            assert again[0] == (1, 2), "it has failed once"
            assert sorted(again[1:]) == expected
            entry = pipe.ledger.entries[0]
            assert (entry.tokens, entry.rewards, entry.rerolls, entry.life) == (6, 3.0, 1, 1)
            while ids(batch := await pipe.get_batch(1)) != [0]:
                await pipe.ack(batch.step)
            (group,) = batch.groups
            assert (group.oldest, group.newest, group.reward_mean) == (1 if len(expected) == 2 else 3, 3, 1.0)
            tries = {place: max([attempt for each, attempt in ran if each == place]) for place in range(3)}
            made = [rollout["made"].tolist() for rollout in group]
            assert dict(made) == tries
            await pipe.ack(batch.step)
            held = sum(entry.state == 3 for entry in pipe.ledger.entries.values())
            assert pipe.statistics().buffer.memory_bytes == pytest.approx(held * 3 * len(group._blobs[0]), rel=0.1)

    @staticmethod
    def uneven(ran: list[tuple[int, int]]) -> Any:
        inner = late({2: 35.0}, ran)

        async def run(item: Item, ctx: Context) -> Rollout:
            if (item["n"], ctx.member, ctx.attempt) == (0, 1, 1):
                await anyio.sleep(15)
                raise ValueError("not yet")
            rollout: Rollout = await inner(item, ctx)
            return rollout

        return run

    async def test_what_was_kept_and_what_was_run_again_come_back_after_a_crash(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        ran: list[tuple[int, int]] = []
        options: dict[str, Any] = {"max_staleness": 3, "batch_groups": 1, "concurrency": 20}
        options["staleness_policy"] = "reroll"
        given = task(12, self.uneven(ran), group_size=3)
        async with inline_pipeline(given, directory=run_directory, **options) as pipe:
            await begin(pipe)
            async for batch in pipe.batches(groups=1, until=4):
                await anyio.sleep(10)
                await update(pipe, batch)
                await pipe.save(batch.step)
            before = pipe.ledger.snapshot()
            assert pipe.ledger.entries[0].life == 1
            copy = crashed_copy(run_directory, tmp_path / "copy")
        ran.clear()
        async with inline_pipeline(given, directory=copy, **options) as pipe:
            await begin(pipe)
            after = pipe.ledger.snapshot()["entries"][0]
            assert after == before["entries"][0]
            trained = await finish(pipe, Trained(pipe.ledger.step), 1)
            assert 0 in trained.items
            assert not [place for place, _ in ran if place < 3], "nothing of it is run again"

    @pytest.mark.parametrize("policy", ["drop", "reroll"])
    @pytest.mark.parametrize("most", [0, 1, 2])
    async def test_after_so_many_times_it_is_dropped_as_expired(self, policy: str, most: int) -> None:
        tries: list[int] = []

        async def run(item: Item, ctx: Context) -> Rollout:
            if item["n"] == 0:
                tries.append(ctx.attempt)
            await anyio.sleep(100.0 if item["n"] == 0 else 1.0)
            return Rollout(reward=0.0)

        options: dict[str, Any] = {"max_staleness": 1, "concurrency": 8, "max_rerolls": most}
        with capture_logs() as logged:
            async with inline_pipeline(task(200, run), staleness_policy=policy, **options) as pipe:
                await pipe.start()
                async for batch in pipe.batches(groups=1):
                    await anyio.sleep(10)
                    await update(pipe, batch)
                totals = pipe.ledger.totals["numbers"]
                assert (totals.dropped, totals.reopened, totals.trained) == ({"expired": 1}, most, 199)
        assert tries == list(range(1, most + 2))
        told = [(line["log_level"], line["uid"], line["rerolls"]) for line in logged if line["event"] == "item.expired"]
        assert told == [("warning", 0, most)]

    async def test_groups_of_a_task_that_the_run_no_longer_has_are_kept_when_they_are_too_old(
        self, run_directory: str
    ) -> None:
        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 2, "directory": run_directory}
        both = [task(8, lasting({}), "a"), task(8, lasting({}), "b")]
        async with inline_pipeline(both, **options) as pipe:
            await begin(pipe)
            await anyio.sleep(10)
            assert pipe.ledger.counts["b"][3] == 2
            await pipe.save(0)
        options["selector"] = "fifo"
        async with inline_pipeline(task(8, lasting({}), "a"), **options) as pipe:
            await begin(pipe)
            seen: list[str] = []
            async for batch in pipe.batches(groups=1):
                seen += [group.task for group in batch]
                await update(pipe, batch)
            assert pipe.ledger.totals["b"].reopened == pipe.ledger.counts["b"][0] > 0
            assert Counter(seen)["a"] == 8
            pipe.ledger.check()


class TestTail:
    """``Reroll(tail=n)``: what is too old gathers, and is run again together."""

    @staticmethod
    def pipe(slow: dict[int, float], ran: list[tuple[int, int]], count: int = 80, tail: int = 3) -> Pipeline:
        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 2, "concurrency": 20, "capacity": 4}
        return inline_pipeline(task(count, late(slow, ran)), staleness_policy=Reroll(tail), **options)

    async def test_they_run_together_when_enough_have_gathered_and_hold_nobody_up(self) -> None:
        ran: list[tuple[int, int]] = []
        slow = {10 * n: 45.0 for n in (0, 14, 28)}
        async with self.pipe(slow, ran) as pipe:
            await pipe.start()
            begun: dict[int, int] = {}
            async for batch in pipe.batches(groups=2, until=26):
                await anyio.sleep(10)
                await update(pipe, batch)
                begun |= {place: batch.step for place, attempt in ran if attempt == 2 and place not in begun}
                if batch.step == 13:
                    assert pipe.ledger.totals["numbers"].reopened == 2
                    assert pipe.ledger.outstanding == 4 + 2, "two wait, and others take their places"
            assert sorted(begun) == [0, 140, 280]
            assert max(begun.values()) - min(begun.values()) <= 1, "as soon as their number may be begun"
            assert pipe.ledger.totals["numbers"].reopened == 3

    async def test_those_that_have_gathered_when_the_sources_end_are_run_then(self) -> None:
        ran: list[tuple[int, int]] = []
        async with self.pipe({0: 45.0, 40: 45.0}, ran, count=20, tail=5) as pipe:
            await pipe.start()
            trained = Trained()
            with anyio.fail_after(1000):
                async for batch in pipe.batches(groups=2):
                    trained.step(batch)
                    await anyio.sleep(10)
                    await update(pipe, batch)
            assert trained.items == list(range(20))
            assert pipe.ledger.totals["numbers"].reopened == 2
            pipe.ledger.check()
        fresh = max(n for n, (_, attempt) in enumerate(ran) if attempt == 1)
        assert min(n for n, (_, attempt) in enumerate(ran) if attempt == 2) > fresh, "after all that was new"

    @pytest.mark.parametrize("seed", range(15))
    async def test_whatever_gathers_nothing_is_lost_and_nobody_waits_for_ever(self, seed: int) -> None:
        rng = random.Random(seed)

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(rng.lognormvariate(0, 2.0))
            return Rollout(reward=0.0)

        groups = rng.randint(1, 4)
        options: dict[str, Any] = {"max_staleness": rng.randint(0, 2), "concurrency": rng.randint(1, 12)}
        policy = Reroll(rng.randint(2, 9))
        given = task(60, run, group_size=rng.randint(1, 3))
        async with inline_pipeline(given, staleness_policy=policy, max_rerolls=1000, **options) as pipe:
            await pipe.start()
            trained = Trained()
            with anyio.fail_after(10_000):
                async for batch in pipe.batches(groups=groups):
                    assert batch.staleness <= options["max_staleness"]
                    trained.step(batch)
                    await anyio.sleep(rng.random())
                    await update(pipe, batch)
            pipe.ledger.check()
        assert trained.items == list(range(60))

    async def test_after_a_crash_all_that_waits_is_run(self, run_directory: str, tmp_path: Path) -> None:
        ran: list[tuple[int, int]] = []
        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 1, "concurrency": 20, "capacity": 2}
        given = task(30, late({0: 45.0}, ran))
        async with inline_pipeline(given, directory=run_directory, staleness_policy=Reroll(9), **options) as pipe:
            await begin(pipe)
            async for batch in pipe.batches(groups=1, until=8):
                await anyio.sleep(10)
                await update(pipe, batch)
                await pipe.save(batch.step)
            assert pipe.ledger.state(0) == "waiting"
            copy = crashed_copy(run_directory, tmp_path / "copy")
        ran.clear()
        async with inline_pipeline(given, directory=copy, staleness_policy=Reroll(9), **options) as pipe:
            await begin(pipe)
            trained = await finish(pipe, Trained(pipe.ledger.step), 1)
            assert ran[0] == (0, 2), "before what is new, and with nobody to wait for"
            assert 0 in trained.items
            pipe.ledger.check()


class TestOneSlowPrompt:
    """CASES 28: one prompt slower than the bound among twenty fast ones: trained within it, or reported."""

    STEPS = 60
    BOUND = 3

    async def outcome(self, policy: Any, run: Any, **more: Any) -> tuple[dict[int, list[int]], dict[str, int], int]:
        """Train 60 steps of five groups in two epochs and more.

        Returns:
            For each epoch in which the slow item was trained its staleness, why items were dropped, and how often the
            slow one was tried in each epoch, at most.
        """
        tries: Counter[int] = Counter()

        async def counted(item: Item, ctx: Context) -> Rollout:
            if item["n"] == 0:
                tries[item.epoch] += 1
            rollout: Rollout = await run(item, ctx)
            return rollout

        found: dict[int, list[int]] = {}
        options: dict[str, Any] = {"max_staleness": self.BOUND, "batch_groups": 5, "max_rerolls": 2, "concurrency": 21}
        given = task(21, counted, epochs=None)
        async with inline_pipeline(given, staleness_policy=policy, **options, **more) as pipe:
            await pipe.start()
            with anyio.fail_after(10_000):
                async for batch in pipe.batches(groups=5, until=self.STEPS):
                    await anyio.sleep(1.0)
                    for group in batch:
                        if group.index == 0:
                            found.setdefault(group.epoch, []).append(group.staleness)
                    await update(pipe, batch)
            pipe.ledger.check()
            return found, pipe.ledger.totals["numbers"].dropped, max(tries.values())

    @staticmethod
    async def slow(item: Item, ctx: Context) -> Rollout:
        """Item 0 takes five steps of the trainer."""
        await anyio.sleep(5.0 if item["n"] == 0 else 0.5)
        return Rollout(reward=0.0)

    @pytest.mark.parametrize(
        ("policy", "more"), [("wait", {}), ("gate", {"order": "strict"}), ("gate", {"strategy": "synchronous"})]
    )
    async def test_its_start_is_paced_and_it_is_trained_in_time(self, policy: str, more: dict[str, Any]) -> None:
        found, dropped, tries = await self.outcome(policy, self.slow, **more)
        assert len(found) >= 10, "once an epoch"
        assert all(stale <= self.BOUND for each in found.values() for stale in each)
        assert (dropped, tries) == ({}, 1)

    @pytest.mark.parametrize("policy", ["drop", "reroll", Reroll(2)])
    async def test_or_it_is_dropped_and_reported_after_so_many_tries(self, policy: Any) -> None:
        found, dropped, tries = await self.outcome(policy, self.slow)
        assert found == {}
        assert set(dropped) == {"expired"}
        assert tries == 3

    async def test_or_what_is_young_of_it_is_trained(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            versions = []
            for _ in range(10):
                await anyio.sleep(0.5 if item["n"] == 0 else 0.05)
                versions.append(ctx._run.version_now() if ctx._run.version_now else 0)
            return Rollout({"versions": versions}, reward=0.0)

        found, dropped, tries = await self.outcome("mask", run)
        assert len(found) >= 10
        assert (dropped, tries) == ({}, 1)


@pytest.mark.parametrize("policy", ["drop", "reroll", "wait", "mask"])
async def test_the_lengths_that_are_reported_show_which_policy_favours_short_rollouts(policy: str) -> None:
    """One item in ten takes eight steps and is 100 tokens long, the others are 10: the source's mean is 19."""

    async def run(item: Item, ctx: Context) -> Rollout:
        long = item["n"] % 10 == 0
        await anyio.sleep(8.0 if long else 0.5)
        now = pipe.version
        tokens = 100 if long else 10
        versions = torch.linspace(ctx.version, now + 0.999, tokens).long()
        return Rollout({"versions": versions} if policy == "mask" else {}, reward=0.0, tokens=tokens)

    options: dict[str, Any] = {"max_staleness": 2, "batch_groups": 4, "concurrency": 12, "max_rerolls": 2}
    async with inline_pipeline(task(200, run), staleness_policy=policy, **options) as pipe:
        await pipe.start()
        async for batch in pipe.batches(groups=4):
            await anyio.sleep(1.0)
            await update(pipe, batch)
        found = pipe.statistics().tasks["numbers"]
    totals = found.totals
    assert found.source_length == 19.0, "what was run again counts once"
    assert totals.trained + sum(totals.dropped.values()) == 200
    assert totals.trained_tokens + totals.masked_tokens == 10 * 180 + 100 * (20 - totals.dropped.get("expired", 0))
    if policy == "wait":
        assert (totals.dropped, totals.again, found.trained_length) == ({}, 0, 19.0)
    elif policy == "mask":
        assert (totals.dropped, totals.again) == ({}, 0)
        assert totals.masked_tokens > 0
        assert found.trained_length == (10 * 180 + 2000 - totals.masked_tokens) / 200
    else:
        assert totals.again_tokens == 100 * totals.again > 0
        assert found.trained_length is not None
        assert found.trained_length < 15

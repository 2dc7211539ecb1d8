"""``staleness_policy="mask"``: token by token, at the border, after crashes, and in what is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from pipeline import Batch, Context, Item, Pipeline, Rollout, RolloutInvalid, Trace
from tests.support.crashes import Trained, begin, crashed_copy, inline_pipeline, lasting, train
from tests.support.runs import ids, task

pytestmark = pytest.mark.virtual_time


def made_by(versions: Sequence[int], **more: Any) -> Rollout:
    """A rollout whose tokens were made by weights of these versions."""
    return Rollout({"versions": torch.tensor(versions), "ids": list(range(len(versions)))}, reward=1.0, **more)


def masks(batch: Batch) -> list[list[int]]:
    """The staleness masks of a batch's traces."""
    return [mask.int().tolist() for mask in batch.staleness_mask]


class Offer:
    """Offers, after ``trained`` steps of one group each, one group more; item ``trained`` is it."""

    def __init__(self, trained: int, *first: Rollout) -> None:
        self.trained, self.first = trained, first
        self.again = 0

    async def run(self, item: Item, ctx: Context) -> Rollout:
        if item["n"] != self.trained:
            return Rollout({"versions": [ctx.version], "ids": [0]}, reward=0.0)
        self.again += ctx.attempt > 1
        return self.first[ctx.member] if ctx.attempt == 1 else made_by([ctx.version] * 2, tokens=2)

    async def taken(self, pipe: Pipeline) -> Batch:
        """Train, and return the batch after it; nothing was saved."""
        await pipe.start()
        async for batch in pipe.batches(groups=1, until=self.trained):
            async with pipe.weight_update(version=batch.step):
                await anyio.sleep(1.0)
        await anyio.sleep(1.0)
        return await pipe.get_batch(1)

    def pipe(self, limit: int, **more: Any) -> Pipeline:
        given = task(self.trained + 1, self.run, group_size=len(self.first), **more)
        options: dict[str, Any] = {"max_staleness": limit, "batch_groups": 1, "order": "strict"}
        return inline_pipeline(given, staleness_policy="mask", **options)


class TestBorder:
    """CASES 24."""

    @pytest.mark.parametrize(
        ("limit", "versions", "expected"),
        [
            (4, [3, 3, 5, 7], [0, 0, 1, 1]),
            (5, [3, 3, 5, 7], [1, 1, 1, 1]),
            (3, [3, 3, 5, 7], [0, 0, 1, 1]),
            (2, [3, 3, 5, 7], [0, 0, 0, 1]),
            (1, [3, 3, 5, 7], [0, 0, 0, 1]),
            (0, [8, 9, 7], [1, 1, 0]),
        ],
    )
    async def test_tokens_older_than_the_limit_are_masked(
        self, limit: int, versions: list[int], expected: list[int]
    ) -> None:
        offer = Offer(8, made_by(versions, tokens=len(versions)))
        async with offer.pipe(limit) as pipe:
            batch = await offer.taken(pipe)
            assert masks(batch) == [expected]
            assert batch.groups[0].staleness_mask[0].dtype == torch.bool
            assert batch.padded()["mask"].int().tolist() == [expected]
            group = batch.groups[0]
            assert (group.oldest, group.newest, group.staleness) == (min(versions), max(versions), 8 - min(versions))
            await pipe.ack(batch.step)
            assert offer.again == 0
            totals = pipe.ledger.totals["numbers"]
            assert (totals.masked_tokens, totals.trained_tokens) == (expected.count(0), expected.count(1))

    @pytest.mark.parametrize(("limit", "again"), [(0, 1), (1, 0)])
    async def test_a_group_of_which_no_token_is_left_is_treated_as_expired(self, limit: int, again: int) -> None:
        offer = Offer(8, made_by([3, 3, 5, 7]))
        async with offer.pipe(limit) as pipe:
            batch = await offer.taken(pipe)
            assert offer.again == pipe.ledger.totals["numbers"].reopened == again
            assert masks(batch) == ([[1, 1]] if again else [[0, 0, 0, 1]])

    async def test_one_member_with_a_token_left_keeps_its_group(self) -> None:
        offer = Offer(8, made_by([3, 3, 5], tokens=3), made_by([8], tokens=1), made_by([4, 6], tokens=2))
        async with offer.pipe(2) as pipe:
            batch = await offer.taken(pipe)
            assert masks(batch) == [[0, 0, 0], [1], [0, 1]]
            assert batch.padded()["mask"].int().tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0]]
            await pipe.ack(batch.step)
            task_of = pipe.statistics().tasks["numbers"]
            assert (task_of.totals.masked_tokens, task_of.totals.trained_tokens) == (4, 2)

    async def test_after_too_many_times_it_is_dropped(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            return made_by([0] if item["n"] == 2 else [ctx.version])

        options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 1, "order": "strict", "max_rerolls": 2}
        async with inline_pipeline(task(6, run), staleness_policy="mask", **options) as pipe:
            await pipe.start()
            trained = Trained()
            async for batch in pipe.batches(groups=1):
                await train(pipe, trained, batch)
                await anyio.sleep(1)
            totals = pipe.ledger.totals["numbers"]
        assert trained.items == [0, 1, 3, 4, 5]
        assert (totals.reopened, totals.dropped) == (2, {"expired": 1})


class TestWhatDoesNotSay:
    """Where no ``versions`` are given nobody knows which tokens are young: what is oldest counts."""

    @pytest.mark.parametrize(("limit", "again"), [(5, 0), (4, 1)])
    async def test_a_rollout_is_judged_whole_by_its_oldest_weights(self, limit: int, again: int) -> None:
        offer = Offer(8, Rollout({"ids": [1, 2, 3]}, reward=1.0, oldest=3, newest=7, tokens=3))
        async with offer.pipe(limit) as pipe:
            batch = await offer.taken(pipe)
            assert offer.again == again
            assert masks(batch) == ([[1, 1]] if again else [[1, 1, 1]])

    @pytest.mark.parametrize(("limit", "expected"), [(4, [[0, 0], [0, 1], [0]]), (5, [[1, 1], [1, 1], [1]])])
    async def test_so_is_a_trace_beside_others_that_say_it(self, limit: int, expected: list[list[int]]) -> None:
        traces = [Trace({"ids": [1, 2]}), Trace({"ids": [3, 4], "versions": [3, 7]}), Trace({"versions": [3]})]
        offer = Offer(8, Rollout(traces, reward=1.0, oldest=3, tokens=5))
        async with offer.pipe(limit) as pipe:
            batch = await offer.taken(pipe)
            assert masks(batch) == expected
            await pipe.ack(batch.step)
            assert pipe.ledger.totals["numbers"].masked_tokens == sum(each.count(0) for each in expected)

    async def test_without_a_trace_or_a_token_there_is_nothing_to_mask(self) -> None:
        offer = Offer(2, Rollout(reward=1.0), Rollout({"versions": torch.zeros(0, dtype=torch.int64)}, reward=1.0))
        async with offer.pipe(9) as pipe:
            batch = await offer.taken(pipe)
            assert masks(batch) == [[]]
            assert batch.padded()["mask"].shape == (1, 0)

    async def test_other_policies_mask_nothing(self) -> None:
        offer = Offer(3, made_by([0, 1, 3]))
        options: dict[str, Any] = {"max_staleness": 3, "batch_groups": 1, "order": "strict"}
        async with inline_pipeline(task(4, offer.run), **options) as pipe:
            batch = await offer.taken(pipe)
            assert masks(batch) == [[1, 1, 1]]
            assert batch.padded()["mask"].all()

    @pytest.mark.parametrize(
        "versions", [[0.5], [[1]], [-1], 3, np.array([2**63], np.uint64), torch.tensor([True]), [1, 2]]
    )
    async def test_what_is_no_row_of_versions_ends_the_run_by_name(self, versions: Any) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            return Rollout({"versions": versions}, reward=1.0, oldest=2)

        async with inline_pipeline(task(2, run), max_staleness=1, staleness_policy="mask") as pipe:
            await pipe.start()
            with pytest.raises(RolloutInvalid, match=r"item 0 .*'numbers'.*field versions"):
                await pipe.get_batch(1)


class TestCrash:
    """What is masked is decided anew where a batch is handed out again."""

    OPTIONS: Mapping[str, Any] = {
        "max_staleness": 2,
        "batch_groups": 1,
        "order": "strict",
        "staleness_policy": "mask",
    }

    async def test_a_batch_that_is_handed_out_again_has_the_same_masks(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            return made_by([max(0, item["n"] - 3), item["n"]], oldest=0, tokens=2)

        async with inline_pipeline(task(20, run), directory=run_directory, **self.OPTIONS) as pipe:
            await begin(pipe, trained=(trained := Trained()))
            async for batch in pipe.batches(groups=1, until=6):
                await train(pipe, trained, batch)
                if batch.step == 6:
                    await (await pipe.save(6)).committed()
            given = []
            for _ in range(2):
                batch = await pipe.get_batch(1)
                given.append((ids(batch), masks(batch)))
                await train(pipe, trained, batch)
                await pipe.ack(batch.step)
            await anyio.sleep(1)
            totals = pipe.ledger.totals["numbers"]
            counts = (totals.masked_tokens, totals.trained_tokens)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        assert [each for _, each in given] == [[[0, 1]], [[0, 1]]]
        async with inline_pipeline(task(20, run), directory=copy, **self.OPTIONS) as pipe:
            assert (await begin(pipe, trained=Trained())).repeated == 2
            again = []
            for _ in range(2):
                batch = await pipe.get_batch(1)
                assert batch.repeated
                again.append((ids(batch), masks(batch)))
                await pipe.ack(batch.step)
            totals = pipe.ledger.totals["numbers"]
            assert (totals.masked_tokens, totals.trained_tokens) == counts
        assert again == given

    async def test_versions_of_a_dead_life_count_no_more_than_what_was_restored(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        """Two groups of version 6 are finished, then the weights go back to 2: they are of version 2 from there on."""

        async def run(item: Item, ctx: Context) -> Rollout:
            return made_by([0, 6] if item["n"] >= 6 and ctx.attempt == 1 else [ctx.version] * 2, tokens=2)

        options: dict[str, Any] = {**self.OPTIONS, "capacity": 3}
        async with inline_pipeline(task(12, run), directory=run_directory, **options) as pipe:
            await begin(pipe, trained=(trained := Trained()))
            async for batch in pipe.batches(groups=1, until=6):
                await train(pipe, trained, batch)
                if batch.step == 2:
                    await (await pipe.save(2)).committed()
                await anyio.sleep(1)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        async with inline_pipeline(task(12, run), directory=copy, **options) as pipe:
            resumed = await begin(pipe, trained=(trained := Trained()))
            assert resumed.version == 2
            seen = {}
            async for batch in pipe.batches(groups=1):
                seen[batch.step] = (ids(batch)[0], masks(batch)[0], batch.groups[0].staleness)
                await train(pipe, trained, batch)
                await anyio.sleep(1)
            pipe.ledger.check()
        assert all(stale >= 0 for _, _, stale in seen.values())
        assert trained.items == list(range(12))
        # Steps 3 to 6 repeat what was handed out; groups 6 and 7 come at steps 7 and 8, when 2 is older than 2 steps.
        assert [seen[step][:2] for step in (7, 8)] == [(6, [1, 1]), (7, [1, 1])], "they were run again"
        assert pipe.ledger.totals["numbers"].reopened >= 2


async def test_a_run_goes_on_under_another_policy(run_directory: str) -> None:
    """What was kept by its youngest token is too old for a policy that judges by the oldest, and is run again."""
    options: dict[str, Any] = {"max_staleness": 1, "batch_groups": 1, "order": "strict", "directory": run_directory}
    offer = Offer(4, made_by([1, 4], tokens=2))
    given = task(5, offer.run)
    async with inline_pipeline(given, staleness_policy="mask", **options) as pipe:
        await begin(pipe)
        async for batch in pipe.batches(groups=1, until=4):
            async with pipe.weight_update(version=batch.step):
                pass
            await anyio.sleep(1)
        await pipe.save(4)
    async with inline_pipeline(given, staleness_policy="drop", **options) as pipe:
        await begin(pipe)
        batch = await pipe.get_batch(1)
        assert (ids(batch), batch.staleness, offer.again) == ([4], 0, 1)
    async with inline_pipeline(task(6, lasting({})), staleness_policy="mask", **options) as pipe:
        await begin(pipe)
        assert masks(await pipe.get_batch(1)) == [[1, 1]]

"""``oversample``: more groups are begun than a batch needs, and what is left over is kept for the next ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Batch, ConfigError, Pipeline, PipelineOptions
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.runs import ids, task

pytestmark = pytest.mark.virtual_time


async def step(pipe: Pipeline, groups: int = 4) -> Batch:
    """One trainer step that publishes its weights."""
    batch = await pipe.get_batch(groups)
    async with pipe.weight_update(version=batch.step):
        pass
    await pipe.ack(batch.step)
    return batch


class TestSynchronous:
    OVER = 1.5

    def pipe(self, count: int = 40, **more: Any) -> Pipeline:
        run = lasting({1: 50.0, 6: 50.0})
        return inline_pipeline(task(count, run), strategy="synchronous", oversample=self.OVER, **more)

    async def test_a_batch_takes_those_that_finish_first_and_the_others_come_later(self) -> None:
        async with self.pipe() as pipe:
            began = anyio.current_time()
            await pipe.start()
            await anyio.sleep(10)
            assert pipe.ledger.claimed == 0, "nothing is begun before a batch is waited for"
            seen = [await step(pipe)]
            assert (pipe.ledger.claimed, ids(seen[0])) == (6, [0, 2, 3, 4])
            await anyio.sleep(10)
            assert (pipe.ledger.claimed, pipe.ledger.state(5)) == (6, "buffered")
            seen += [await step(pipe), await step(pipe)]
            assert pipe.ledger.claimed == 6 + 4 + 4
            assert anyio.current_time() - began < 30, "nobody waited for items 1 and 6"
            assert 5 in ids(seen[1])
            while pipe.ledger.step < 9:
                seen.append(await step(pipe))
                await anyio.sleep(10)
            items = [n for batch in seen for n in ids(batch)]
            assert {1, 6} <= set(items)
            assert len(set(items)) == len(items) == 36

    async def test_what_is_left_over_is_one_step_older(self) -> None:
        async with self.pipe(max_staleness=1) as pipe:
            await pipe.start()
            await step(pipe)
            batch = await pipe.get_batch(4)
            assert {group.index: group.staleness for group in batch if group.index < 6} == {5: 1}

    async def test_in_strict_order_a_batch_waits_for_its_own(self) -> None:
        async with self.pipe(order="strict") as pipe:
            await pipe.start()
            batches = [await step(pipe) for _ in range(3)]
            assert [ids(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
            assert pipe.ledger.claimed == 14

    async def test_what_is_left_over_survives_a_crash(self, run_directory: str, tmp_path: Path) -> None:
        async with self.pipe(22, directory=run_directory) as pipe:
            await begin(pipe, trained=(trained := Trained()))
            batch = await pipe.get_batch(4)
            await train(pipe, trained, batch)
            await pipe.save(1)
            await anyio.sleep(10)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        async with self.pipe(22, directory=copy) as pipe:
            resumed = await begin(pipe, trained=(again := Trained()))
            assert (resumed.buffered, resumed.waiting) == (1, 1)
            await finish(pipe, again, 4)
        assert again.items == list(range(22))


class TestAsynchronous:
    @pytest.mark.parametrize(
        ("more", "most"),
        [
            ({"max_staleness": 2}, 12 + 2),
            ({"max_staleness": 2, "order": "strict"}, 12 + 2),
            ({"max_staleness": 0}, 4 + 2),
            ({"max_staleness": 2, "capacity": 13}, 13),
            ({}, 8 + 2),
        ],
    )
    async def test_so_many_more_may_be_begun_ahead(self, more: dict[str, Any], most: int) -> None:
        async with inline_pipeline(task(99, lasting({})), oversample=1.3, batch_groups=4, **more) as pipe:
            await pipe.start()
            await anyio.sleep(100)
            assert (await pipe.get_batch(4)).staleness == 0
            await anyio.sleep(100)
            assert pipe.ledger.claimed == most, "a third of 4 is 1.2, so 2"

    @pytest.mark.parametrize("policy", ["drop", "reroll", "mask"])
    async def test_the_bound_holds_all_the_same(self, policy: str) -> None:
        options: dict[str, Any] = {"max_staleness": 1, "staleness_policy": policy, "max_rerolls": 1000}
        run = lasting({n: 0.3 + (n * 7919) % 13 for n in range(120)})
        async with inline_pipeline(task(120, run), oversample=2.0, concurrency=9, **options) as pipe:
            await pipe.start()
            trained = Trained()
            async for batch in pipe.batches(groups=4):
                assert batch.staleness <= 1
                await train(pipe, trained, batch)
        assert trained.items == list(range(120))


@pytest.mark.parametrize("value", [0, 0.99, -1, float("nan"), float("inf"), 1001, "2", None, True])
def test_a_ratio_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="oversample=") as caught:
        PipelineOptions(oversample=value)
    assert caught.value.option == "oversample"


@pytest.mark.parametrize("policy", ["gate", "wait"])
def test_policies_that_pace_the_starts_allow_no_more(policy: Any) -> None:
    with pytest.raises(ConfigError, match=r"staleness_policy=.*oversample=1.5"):
        PipelineOptions(oversample=1.5, max_staleness=2, staleness_policy=policy, order="strict")


def test_a_bound_that_would_throw_all_of_it_away_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"oversample=1.5: max_staleness=0"):
        PipelineOptions(oversample=1.5, max_staleness=0, strategy="synchronous")
    PipelineOptions(oversample=1, max_staleness=0, strategy="synchronous")

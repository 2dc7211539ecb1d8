"""What a run shows: who holds the loop, statistics that add up, events in the log, a run on trio."""

from __future__ import annotations

import logging
import time

import anyio
import pytest

from pipeline import Context, Item, Rollout
from tests.support.runs import ids, pipeline, solve, task


def hog_the_loop() -> None:
    time.sleep(0.4)


async def test_the_watchdog_names_who_held_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def rude(item: Item, ctx: Context) -> Rollout:
        hog_the_loop()
        return Rollout(reward=1.0)

    with caplog.at_level(logging.WARNING, logger="forebay"):
        async with pipeline(task(1, rude), watchdog=0.1) as pipe:
            await pipe.start()
            await pipe.get_batch(1)
            await anyio.sleep(0.05)
    held = [record.getMessage() for record in caplog.records if "loop.held" in record.getMessage()]
    assert held
    assert "hog_the_loop" in held[0]
    assert "test_seeing.py" in held[0]


@pytest.mark.virtual_time
async def test_counts_add_up_at_every_completion() -> None:
    sums: list[bool] = []

    async def uneven(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(1 + item["n"] % 3)
        groups, rollouts = pipe.statistics().groups, pipe.statistics().rollouts
        parts = groups.waiting + groups.running + groups.parked + groups.buffered
        sums.append(groups.claimed == parts + groups.leased + groups.trained + groups.dropped)
        assert rollouts.in_flight <= 4
        if item["n"] == 5:
            raise ValueError("never works")
        return Rollout(reward=1.0, tokens=item["n"])

    async with pipeline(task(20, uneven), concurrency=4, inline=True) as pipe:
        await pipe.start()
        seen = [number async for batch in pipe.batches(groups=3) for number in ids(batch)]
        end = pipe.statistics()
    assert sorted(seen) == [number for number in range(20) if number != 5]
    assert all(sums)
    assert (end.groups.trained, end.groups.dropped, end.rollouts.failed) == (19, 1, 3)
    assert end.tasks["numbers"].totals.dropped == {"failed": 1}
    assert end.tasks["numbers"].source_length == end.tasks["numbers"].trained_length == sum(seen) / 19


async def test_metrics_are_flat_floats_and_absent_where_there_is_nothing_to_say() -> None:
    async with pipeline() as pipe:
        before = pipe.metrics()
        await pipe.start()
        await pipe.get_batch(4)
        after = pipe.metrics()
    assert all(type(value) is float for value in after.values())
    assert "batch/reward_mean" not in before
    assert after["batch/staleness_max"] == 0.0
    assert after["groups/leased"] == 4.0


async def test_progress_is_one_object_and_counts_the_window_since_the_last_batch(run_directory: str) -> None:
    async with pipeline(directory=run_directory, capacity=4) as pipe:
        progress = pipe.progress
        await pipe.start()
        batch = await pipe.get_batch(4)
        assert pipe.progress is progress
        assert progress.target_samples == {"numbers": 4}
        assert (progress.target_upto_future_step, progress.next_consumer_step) == (1, 1)
        assert pipe.progress.produced_samples == {"numbers": 0}
        await (await pipe.save(batch.step)).committed()
        assert pipe.progress.consumed_samples == {"numbers": 4}
    async with pipeline(directory=run_directory, capacity=4) as pipe:
        progress = pipe.progress
        await pipe.resume()
        assert pipe.progress is progress
        assert (progress.consumed_samples, progress.next_consumer_step) == ({"numbers": 4}, 2)


def test_a_run_on_trio_survives_a_resume(run_directory: str) -> None:
    seen: list[int] = []

    async def main() -> None:
        for until in (2, 3):
            async with pipeline(task(12, solve), directory=run_directory) as pipe:
                async with pipe.weight_update(version=(await pipe.resume()).version):
                    pass
                await pipe.start()
                async for batch in pipe.batches(groups=4, until=until):
                    seen.extend(ids(batch))
                    await pipe.save(batch.step)

    anyio.run(main, backend="trio")
    assert sorted(seen) == list(range(12))


@pytest.mark.virtual_time
async def test_a_trainer_that_always_finds_a_batch_still_lets_the_rollouts_have_a_turn() -> None:
    """It awaits nothing but ``get_batch``; each batch takes one of the four that are ready."""

    async def instant(item: Item, ctx: Context) -> Rollout:
        return Rollout(reward=1.0)

    async with pipeline(task(60, instant), capacity=4, concurrency=1, inline=True) as pipe:
        await pipe.start()
        await anyio.sleep(1)
        for _ in range(20):
            batch = await pipe.get_batch(1)
            await pipe.ack(batch.step)
            assert pipe.statistics().buffer.groups >= 1, "the buffer ran dry while the trainer took from it"

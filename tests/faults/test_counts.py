"""Counters add up: at every turn of the loop, after a resume, and after one without the buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Pipeline, Retry, Rollout, Task, ZeroVariance
from pipeline.ledger import IN_FLIGHT
from tests.support.crashes import Trained, begin, crashed_copy, inline_pipeline, train
from tests.support.runs import numbers

pytestmark = pytest.mark.virtual_time


async def moody(item: Item, ctx: Context) -> Rollout:
    """Fails at times, is too late at times, and some groups teach nothing."""
    chance = ctx.rng.random()
    await anyio.sleep(0.2 + 3 * chance**4)
    if chance > 0.8:
        raise ValueError("a bad day")
    return Rollout({"n": [item["n"]]}, reward=float(chance > 0.4), tokens=3)


def make(directory: str) -> Pipeline:
    given = Task(
        "numbers",
        source=numbers(60),
        run=moody,
        group_size=3,
        min_group=2,
        on_failure=Retry(attempts=2),
        timeout=1.5,
        group_timeout=4.0,
        filter=ZeroVariance(),
    )
    return inline_pipeline(given, directory=directory, concurrency=7, capacity=12, max_staleness=3, batch_groups=3)


def add_up(pipe: Pipeline) -> None:
    """Every claimed group is in one state; every attempt has ended in one way, or runs."""
    pipe.ledger.check()
    now = pipe.statistics()
    groups = now.groups
    assert groups.claimed == (
        groups.waiting
        + groups.running
        + groups.parked
        + groups.buffered
        + groups.leased
        + groups.trained
        + groups.dropped
    )
    for entry in pipe.ledger.entries.values():
        assert entry.in_flight == entry.members.count(IN_FLIGHT), f"uid {entry.uid}"
    assert now.rollouts.in_flight == sum(entry.in_flight for entry in pipe.ledger.entries.values())


async def watch(pipe: Pipeline) -> None:
    while True:
        add_up(pipe)
        await anyio.sleep(0.01)


async def live(pipe: Pipeline, trained: Trained, seconds: float) -> None:
    released: set[int] = set()
    async with anyio.create_task_group() as group:
        group.start_soon(watch, pipe)
        with anyio.move_on_after(seconds):
            async for batch in pipe.batches(groups=3):
                if batch.step % 4 == 0 and batch.step not in released:
                    released.add(batch.step)
                    batch.release()
                    continue
                await train(pipe, trained, batch)
                await anyio.sleep(0.5)
                if batch.step % 2 == 0:
                    await pipe.save(batch.step, replay_buffer=batch.step % 3 != 0)
        group.cancel_scope.cancel()


async def test_at_every_turn_and_over_crashes(tmp_path: Path) -> None:
    directory = str(tmp_path / "0")
    for life in range(1, 9):
        async with make(directory) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            add_up(pipe)
            await live(pipe, trained, 0.7 * life)
            add_up(pipe)
            crashed = crashed_copy(directory, tmp_path / str(life))
        directory = crashed if life % 2 else directory
    assert trained.batches


class TestWithoutTheBuffer:
    async def test_what_is_to_be_produced_again_is_in_no_sum(self, run_directory: str) -> None:
        def pipeline() -> Pipeline:
            async def run(item: Item, ctx: Context) -> Rollout:
                await anyio.sleep(1.0)
                return Rollout({"n": [item["n"]]}, reward=2.0, tokens=5)

            given = Task("numbers", source=numbers(40), run=run, shuffle=False)
            return inline_pipeline(given, directory=run_directory, concurrency=4, capacity=12)

        async with pipeline() as pipe:
            pipe.attach(trained=(trained := Trained()))
            await pipe.start()
            for _ in range(2):
                await train(pipe, trained, await pipe.get_batch(4))
            await pipe.ack(2)
            await anyio.sleep(1.5)
            totals = pipe.statistics().tasks["numbers"].totals
            assert (totals.produced, totals.trained) == (12, 8)
            await (await pipe.save(2, replay_buffer=False)).committed()
            assert pipe.statistics().tasks["numbers"].totals.produced == 12
        async with pipeline() as pipe:
            pipe.attach(trained=Trained())
            await pipe.resume()
            now, progress = pipe.statistics().tasks["numbers"], pipe.progress
            assert (now.totals.produced, now.totals.finished, now.totals.trained) == (8, 8, 8)
            assert (now.totals.tokens, now.totals.reward_sum, now.totals.reward_count) == (40, 16.0, 8)
            assert (now.reward_mean, now.source_length) == (2.0, 5.0)
            assert progress.consumed_samples == progress.target_samples == {"numbers": 8}
            window: list[dict[str, Any]] = [
                progress.produced_samples,
                progress.produced_tokens,
                progress.raw_rewards_sum,
                progress.raw_rewards_count,
            ]
            assert window == [{"numbers": 0}] * 4
            assert now.states["buffered"] == 0

    async def test_the_mean_of_nothing_is_absent(self, run_directory: str) -> None:
        given = Task("numbers", source=numbers(4), run=moody)
        async with inline_pipeline(given, directory=run_directory) as pipe:
            await pipe.start()
            await (await pipe.save(0, replay_buffer=False)).committed()
        async with inline_pipeline(given, directory=run_directory) as pipe:
            await pipe.resume()
            now = pipe.statistics().tasks["numbers"]
            assert (now.reward_mean, now.source_length, now.trained_length) == (None, None, None)
            assert not [name for name in pipe.metrics() if name.endswith("reward_mean")]

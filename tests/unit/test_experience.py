"""Pipelines whose rollouts fill a replay buffer, without a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import (
    ConfigError,
    Context,
    EndOfSource,
    Item,
    Limiter,
    Pipeline,
    ReplayBuffer,
    Rollout,
    RolloutFailed,
    RolloutInvalid,
    Slices,
    Starved,
    Task,
    UsageError,
)
from pipeline.engines.local import LocalEngine
from pipeline.wiring.folder import RunFolder
from pipeline.wiring.saving import Saver
from tasks import SequenceSource
from tests.support.experience import ROWS, Agent, block, contents, fed, filled, walk
from tests.support.runs import task


async def until_end(pipe: Pipeline, count: int = 4) -> int:
    """Sample until nothing comes any more; return how often."""
    steps = 0
    try:
        while True:
            await pipe.sample(count)
            steps += 1
            await pipe.ack(steps)
    except EndOfSource:
        return steps


async def test_every_row_of_every_episode_is_there_in_its_order() -> None:
    buffer = ReplayBuffer(1000)
    async with fed(buffer) as pipe:
        await pipe.start()
        await filled(pipe)
        found = contents(buffer)
        assert sorted(found) == [(index, place) for index in range(12) for place in range(2 * ROWS)]
        for index in range(12):
            assert [place for of, place in found if of == index] == list(range(2 * ROWS))
        episodes = buffer.sample(64, slices=Slices(length=2 * ROWS))
        obs = episodes["obs"]
        assert (obs[..., 0] == obs[:, :1, 0]).all(), "no slice crosses episodes that were added side by side"
        assert (obs[..., 1] == np.arange(2 * ROWS)).all()
        stats = pipe.statistics()
        assert (stats.groups.retired, stats.groups.claimed, stats.rows.added) == (12, 12, 12 * 2 * ROWS)
        assert all(pipe.ledger.state(uid) == "retired" for uid in range(12))
        pipe.ledger.check()
        assert pipe.metrics()["rows/size"] == 72.0


async def test_the_limiter_paces_rollouts_and_trainer_by_each_other() -> None:
    limiter = Limiter(min_size=6, ratio=2.0, error_buffer=12)
    buffer = ReplayBuffer(1000, limiter=limiter)
    async with fed(buffer, 20) as pipe:
        await pipe.start()
        steps = 0
        while True:
            try:
                await pipe.sample(4)
            except EndOfSource as error:
                assert "every source is at its end" in str(error)  # noqa: PT017
                break
            steps += 1
            sampled = steps * 4
            assert buffer.statistics().added * 2.0 - sampled <= 6 * 2.0 + 12
            await pipe.ack(steps)
        added = buffer.statistics().added
        assert added == 20 * 2 * ROWS
        assert added * 2.0 - steps * 4 >= 6 * 2.0 - 12
        assert added * 2.0 - (steps + 1) * 4 < 6 * 2.0 - 12, "it ends only where the limiter lets nothing out"


async def test_who_waits_for_each_other_is_told() -> None:
    """The limiter's range is smaller than a block and a batch together."""
    buffer = ReplayBuffer(100, limiter=Limiter(min_size=1, ratio=1.0, error_buffer=2.0))
    async with fed(buffer) as pipe:
        await pipe.start()
        with pytest.raises(Starved, match="no rollout can add more before that"):
            await until_end(pipe)


async def test_a_failing_rollout_reaches_the_trainer_that_waits() -> None:
    async def fails(item: Item, ctx: Context) -> Rollout:
        await ctx.extend(block(item, 0))
        raise ValueError("fell over")

    buffer = ReplayBuffer(100, limiter=Limiter(min_size=90))
    async with fed(buffer, run=fails, on_failure="fail_fast") as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match="fell over"):
            await pipe.sample(4)


async def test_rows_of_an_attempt_that_failed_stay_and_the_next_one_is_another_episode() -> None:
    async def falls_once(item: Item, ctx: Context) -> Rollout:
        await ctx.extend(block(item, ctx.attempt - 1))
        if ctx.attempt == 1:
            raise ValueError("fell over")
        return Rollout(reward=0.0)

    buffer = ReplayBuffer(100)
    async with fed(buffer, 5, run=falls_once) as pipe:
        await pipe.start()
        await filled(pipe)
        assert len(buffer) == 5 * 2 * ROWS
        assert buffer.statistics().episodes == 10
        assert buffer.statistics().open_episodes == 0
        totals = pipe.ledger.totals["numbers"]
        assert (totals.retired, totals.retired_early, totals.failed, totals.rows) == (5, 0, 5, 30)


async def test_an_episode_that_is_cut_by_a_weight_update_counts_as_done() -> None:
    reached = anyio.Event()

    async def hangs(item: Item, ctx: Context) -> Rollout:
        await ctx.extend(block(item, 0))
        if item.index == 0:
            reached.set()
            await anyio.sleep_forever()
        return Rollout(reward=0.0)

    buffer = ReplayBuffer(100)
    async with fed(buffer, 4, run=hangs, concurrency=1) as pipe:
        await pipe.start()
        await reached.wait()
        async with pipe.weight_update(version=1, running="abort"):
            pass
        await filled(pipe)
        totals = pipe.ledger.totals["numbers"]
        assert (totals.retired, totals.retired_early, totals.interrupted) == (4, 1, 1)
        assert sorted({of for of, _ in contents(buffer)}) == [0, 1, 2, 3]


async def test_rows_say_which_weights_made_them() -> None:
    """Those of a block are no older than the block before."""
    first, updated = anyio.Event(), anyio.Event()

    async def play(item: Item, ctx: Context) -> Rollout:
        await ctx.extend(block(item, 0))
        first.set()
        await updated.wait()
        await ctx.extend(block(item, 1))
        await ctx.extend(block(item, 2))
        return Rollout(reward=0.0)

    buffer = ReplayBuffer(100)
    async with fed(buffer, 1, run=play) as pipe:
        await pipe.start()
        await first.wait()
        async with pipe.weight_update(version=7):
            pass
        updated.set()
        await filled(pipe)
        assert buffer.ring.mark("#version", buffer.ring.keys()).tolist() == [0] * 6 + [7] * 3


async def test_evaluations_and_single_tries_add_nothing() -> None:
    buffer = ReplayBuffer(100)
    async with fed(buffer, 2) as pipe:
        await pipe.start()
        await filled(pipe)
        assert len(buffer) == 12
        found = await pipe.evaluate("numbers", items=2)
        assert len(found.rollouts) == 2
        assert len(buffer) == 12
    assert (await Pipeline.try_one(task(3, walk), 2)).reward == 2.0


async def test_the_synchronous_form_has_the_verb_too() -> None:
    def train() -> tuple[int, int]:
        buffer, agent = ReplayBuffer(1000, select={"select": "prioritized"}, limiter=Limiter(min_size=10)), Agent()
        with fed(buffer).sync() as pipe:
            pipe.attach(agent=agent)
            pipe.start()
            for step in range(1, 6):
                batch = pipe.sample(8, columns=["obs", "reward"])
                buffer.update_priorities(batch.keys, agent.train(batch))
                pipe.ack(step)
            return pipe.statistics().step, len(agent.seen)

    assert await anyio.to_thread.run_sync(train) == (5, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": 2}, "max_staleness=2: says how batches of groups are made"),
        ({"capacity": 8}, "capacity=8: says how batches"),
        ({"strategy": "synchronous"}, "strategy='synchronous': says how"),
        ({"oversample": 2.0}, "oversample=2.0: says how"),
    ],
)
def test_options_of_batches_of_groups_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fed(ReplayBuffer(10), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directory": "x"}, "directory='x': of a buffer that a pipeline fills"),
        ({"storage": "shared"}, "storage='shared': of a buffer"),
        ({"share_next_obs": True}, "share_next_obs=True: of a buffer"),
        ({"remove": "lifo"}, "remove="),
        ({"compress": {"obs": "zlib"}}, "compress="),
    ],
)
def test_buffers_that_a_run_cannot_fill_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fed(ReplayBuffer(10, **options))


def test_a_buffer_is_filled_by_one_run_and_from_the_beginning() -> None:
    buffer = ReplayBuffer(10)
    fed(buffer)
    with pytest.raises(UsageError, match="a pipeline's rollouts fill this buffer"):
        fed(buffer)
    for verb in (
        lambda: buffer.extend({"obs": [1.0]}),
        lambda: buffer.append({"obs": 1.0}),
        lambda: buffer.add(0.0, 0, 0.0, 0.0, False, False),
        lambda: buffer.end_episode(),
        lambda: buffer.clear(),
        lambda: buffer.load_state_dict({}),
    ):
        with pytest.raises(UsageError, match="would be in no journal"):
            verb()
    used = ReplayBuffer(10)
    used.append({"obs": 1.0})
    with pytest.raises(UsageError, match="no rollout of this run made"):
        fed(used)
    with pytest.raises(ConfigError, match="group_size=4: with buffer= every item is one episode"):
        Pipeline(task(3, walk, group_size=4), buffer=ReplayBuffer(10))


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("where", ["engine", "run", "open"])
async def test_a_run_that_comes_to_nothing_leaves_the_buffer_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, sync: bool
) -> None:
    buffer = ReplayBuffer(10)

    async def make() -> None:
        pipe = fed(buffer, directory=str(tmp_path))
        if sync:
            with pipe.sync():
                """It is not opened."""
        async with pipe:
            """Nor is it here."""

    def fail(*args: Any, **more: Any) -> Any:
        raise RuntimeError("no run")

    if where == "engine":
        monkeypatch.setattr(LocalEngine, "check", fail)
    elif where == "run":
        monkeypatch.setattr(Saver, "__init__", fail)
    else:
        monkeypatch.setattr(RunFolder, "open", fail)
    with pytest.raises(RuntimeError, match="no run"):
        await make()
    monkeypatch.undo()
    buffer.extend({"obs": [1.0]})
    assert len(buffer) == 1


async def test_verbs_of_groups_are_refused() -> None:
    async with fed(ReplayBuffer(100)) as pipe:
        with pytest.raises(UsageError, match=r"sample\(\) comes after start"):
            await pipe.sample(2)
        await pipe.start()
        with pytest.raises(UsageError, match=r"sample\(\) from it"):
            await pipe.get_batch(2)
        with pytest.raises(UsageError, match=r"put\(\): these rollouts fill a buffer"):
            await pipe.put("numbers", Rollout(reward=1.0))
        with pytest.raises(UsageError, match=r"submit\(\): these rollouts fill a buffer"):
            await pipe.submit("numbers", {"n": 1})
        with pytest.raises(UsageError, match=r"anyio\.fail_after"):
            await pipe.sample(2, timeout=3)
        with pytest.raises(ConfigError, match="would never end"):
            async with pipe.weight_update(version=1, running="finish"):
                raise AssertionError("was entered")
        with pytest.raises(ConfigError, match="gamma"):
            await pipe.sample(2, n_step=3)
    async with Pipeline(task(3), watchdog=None) as pipe:
        await pipe.start()
        with pytest.raises(UsageError, match="for a pipeline with buffer="):
            await pipe.sample(2)


async def test_rows_without_a_buffer_and_tensors_with_one_are_refused() -> None:
    async with Pipeline(task(3, walk, on_failure="fail_fast"), watchdog=None) as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match="buffer=ReplayBuffer"):
            await pipe.get_batch(1)

    async def returns(item: Item, ctx: Context) -> Rollout:
        return Rollout({"obs": [1.0]}, reward=0.0)

    async with fed(ReplayBuffer(10), run=returns) as pipe:
        await pipe.start()
        with pytest.raises(RolloutInvalid, match="add rows to it with"):
            await pipe.sample(1)


async def test_a_bad_block_is_the_attempts_failure_and_changes_nothing() -> None:
    async def play(item: Item, ctx: Context) -> Rollout:
        rows = block(item, 0)
        await ctx.extend(rows)
        await ctx.extend({"obs": rows["obs"], "reward": rows["reward"]})
        return Rollout(reward=0.0)

    buffer = ReplayBuffer(100)
    async with fed(buffer, 1, run=play, on_failure="fail_fast") as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match="terminated"):
            await pipe.sample(50)
        assert len(buffer) == ROWS


async def test_more_rows_at_once_than_the_buffer_holds_are_refused() -> None:
    async def play(item: Item, ctx: Context) -> Rollout:
        await ctx.extend(block(item, 0, 11))
        return Rollout(reward=0.0)

    async with fed(ReplayBuffer(10), 1, run=play, on_failure="fail_fast") as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match="11 rows at once, and the buffer holds capacity=10"):
            await pipe.sample(50)


async def test_rows_added_after_the_attempt_has_ended_are_refused() -> None:
    kept: list[Context] = []

    async def play(item: Item, ctx: Context) -> Rollout:
        kept.append(ctx)
        return Rollout(reward=0.0)

    buffer = ReplayBuffer(10)
    async with fed(buffer, 1, run=play) as pipe:
        await pipe.start()
        await filled(pipe)
        with pytest.raises(UsageError, match="attempt 1 has ended"):
            await kept[0].extend(block(kept[0].item, 0))
        assert len(buffer) == 0


async def test_a_source_that_learns_is_told_what_episodes_came_to() -> None:
    class Pool(SequenceSource):
        def __init__(self) -> None:
            super().__init__([{"n": n} for n in range(5)])
            self.told: dict[int, float] = {}

        def feedback(self, index: int, reward: float) -> None:
            self.told[index] = reward

    pool = Pool()
    async with Pipeline(Task("pool", source=pool, run=walk), buffer=ReplayBuffer(100), watchdog=None) as pipe:
        await pipe.start()
        await filled(pipe)
        assert pool.told == {index: float(index) for index in range(5)}
        assert pipe.progress.produced_samples == {"pool": 5}


async def test_an_attempt_that_had_added_nothing_yet_is_played_again_whatever_one_before_it_had_added() -> None:
    second = anyio.Event()

    async def play(item: Item, ctx: Context) -> Rollout:
        if ctx.attempt == 1:
            await ctx.extend(block(item, 0))
            raise ValueError("fell over")
        if ctx.attempt == 2:
            second.set()
            await anyio.sleep_forever()
        await ctx.extend(block(item, 1))
        return Rollout(reward=0.0)

    buffer = ReplayBuffer(100)
    async with fed(buffer, 1, run=play) as pipe:
        await pipe.start()
        await second.wait()
        async with pipe.weight_update(version=1, running="abort"):
            pass
        await filled(pipe)
        totals = pipe.ledger.totals["numbers"]
        assert (totals.retired, totals.retired_early, totals.interrupted, totals.failed) == (1, 0, 1, 1)
        assert contents(buffer) == [(0, place) for place in range(2 * ROWS)]

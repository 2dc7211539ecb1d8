"""Runs that fill a replay buffer, at odd moments: full queues, changed rows, waits that end late, saves that fail."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import (
    Context,
    Damaged,
    EndOfSource,
    Item,
    Limiter,
    Pipeline,
    ReplayBuffer,
    Rollout,
    RolloutFailed,
    Slices,
    Stopped,
    Task,
    WriteFailed,
)
from pipeline.checkpoint import verify
from tasks import SequenceSource
from tests.support.crashes import crashed_copy
from tests.support.experience import ROWS, Agent, block, contents, fed, filled, resumed, walk, written
from tests.support.runs import pipeline


def rewards(buffer: ReplayBuffer) -> list[float]:
    keys = buffer.ring.keys()
    values: list[float] = buffer.ring.storage.view("reward")[buffer.ring.slots(keys)].tolist()
    return values


@pytest.mark.parametrize("durability", ["kill", "none"])
async def test_rows_that_are_changed_before_the_first_save_are_saved_so(run_directory: str, durability: str) -> None:
    """They lie in segments as they were added, from that moment on."""
    buffer = ReplayBuffer(100)
    async with fed(buffer, 2, directory=run_directory, durability=durability) as pipe:
        await pipe.start()
        await filled(pipe)
        buffer.write_back(np.arange(5), {"reward": np.full(5, 77.0, np.float32)})
        await (await pipe.save(1)).committed()
        saved = rewards(buffer)
    assert saved[:5] == [77.0] * 5
    again = ReplayBuffer(100)
    async with fed(again, 2, directory=run_directory, durability=durability) as pipe:
        await resumed(pipe)
        assert rewards(again) == saved


async def test_a_trainer_waits_while_the_rollouts_wait_for_the_disk(run_directory: str) -> None:
    """They go on as soon as it has caught up: nobody waits for anybody else."""

    async def large(item: Item, ctx: Context) -> Rollout:
        for part in range(4):
            await ctx.extend({**block(item, part), "image": np.zeros((ROWS, 100_000), np.float32)})
        return Rollout(reward=0.0)

    buffer = ReplayBuffer(100, limiter=Limiter(min_size=30))
    options: dict[str, Any] = {"directory": run_directory, "write_queue_bytes": 1 << 20, "concurrency": 1}
    async with fed(buffer, 4, run=large, **options) as pipe:
        await pipe.start()
        assert len(await pipe.sample(4, columns=["obs"])) == 4


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_who_may_go_on_by_now_does_not_count_as_waiting(backend: str) -> None:
    """A draw lets a block in, whose rollout has not had its turn yet when the trainer waits again."""

    async def train() -> int:
        buffer = ReplayBuffer(1000, limiter=Limiter(min_size=3, ratio=1.0, error_buffer=4))
        steps = 0
        async with fed(buffer, 20, concurrency=2) as pipe:
            await pipe.start()
            try:
                while True:
                    await pipe.sample(1, where={"reward": (">=", 0)} if steps % 2 else None)  # in a thread, and not
                    steps += 1
            except EndOfSource:
                return steps

    for _ in range(5):
        assert anyio.run(train, backend=backend) >= 20 * 2 * ROWS - 4


async def test_who_waits_is_asked_again_at_each_look() -> None:
    buffer = ReplayBuffer(1000, limiter=Limiter(min_size=3, ratio=1.0, error_buffer=3))
    async with fed(buffer, 2, concurrency=2) as pipe:
        experience = pipe._run.state.experience
        assert experience is not None
        await pipe.start()
        await pipe._run.state.changed.wait_for(lambda: experience.held == 2)
        assert pipe._run.consumer._settled(lambda: False)
        buffer.sample(3)
        assert experience.held == 0
        assert not pipe._run.consumer._settled(lambda: False), "they have not had their turn yet"


async def test_several_waits_of_one_attempt_are_one() -> None:
    """Another attempt is about to add what the trainer waits for."""
    both, go_on = anyio.Event(), anyio.Event()

    async def play(item: Item, ctx: Context) -> Rollout:
        if item.index == 0:
            async with anyio.create_task_group() as group:
                for part in range(2):
                    group.start_soon(ctx.extend, block(item, part))
        else:
            await ctx.extend(block(item, 0))
            both.set()
            await go_on.wait()
        return Rollout(reward=0.0)

    class Holding(ReplayBuffer):
        def can_add(self, count: int = 1) -> bool:
            return len(self) < ROWS or go_on.is_set()

    buffer = Holding(100, limiter=Limiter(min_size=2 * ROWS))
    async with fed(buffer, 2, run=play, concurrency=2) as pipe:
        experience = pipe._run.state.experience
        assert experience is not None
        await pipe.start()
        async with anyio.create_task_group() as group:

            async def sample() -> None:
                assert len(await pipe.sample(2)) == 2

            group.start_soon(sample)
            await anyio.wait_all_tasks_blocked()
            assert experience.held == 1
            go_on.set()
            buffer.gate.changed()


async def test_sequences_that_are_not_there_yet_are_waited_for() -> None:
    buffer = ReplayBuffer(100)
    async with fed(buffer, 4) as pipe:
        await pipe.start()
        batch = await pipe.sample(2, slices=Slices(length=2 * ROWS))
        assert batch["obs"].shape[1] == 2 * ROWS
        with pytest.raises(EndOfSource, match=r"no row begins a sequence so long.*every source is at its end"):
            await pipe.sample(2, slices=Slices(length=2 * ROWS + 1))


async def test_a_source_that_learns_is_told_what_its_episodes_came_to(run_directory: str) -> None:
    class Learning(SequenceSource):
        def __init__(self) -> None:
            super().__init__([{"n": n} for n in range(6)])
            self.told: dict[int, float] = {}

        def feedback(self, index: int, value: float) -> None:
            self.told[index] = value

    async def play(item: Item, ctx: Context) -> Rollout:
        if item.index == 2 and ctx.attempt == 1:
            raise ValueError("fell over")
        return await walk(item, ctx)

    def learns(source: Learning) -> Pipeline:
        one = Task("numbers", source=source, run=play, shuffle=False)
        return pipeline(one, buffer=ReplayBuffer(100), directory=run_directory)

    first, second = Learning(), Learning()
    async with learns(first) as pipe:
        await pipe.start()
        await filled(pipe)
    assert first.told == {n: float(n) for n in range(6)}
    async with learns(second) as pipe:
        await resumed(pipe)
    assert second.told == first.told


@pytest.mark.parametrize("fault", ["encode", "wrote"])
async def test_rows_that_could_not_be_recorded_end_the_run(
    run_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The buffer holds them and the journal does not: with others behind them the run could not be recovered."""
    buffer = ReplayBuffer(100)
    async with fed(buffer, 4, directory=run_directory) as pipe:
        experience = pipe._run.state.experience
        assert experience is not None
        usual, calls = getattr(experience.feed, fault), itertools.count()

        def fails(*args: Any) -> Any:
            if next(calls) == 3:
                raise MemoryError("none is left")
            return usual(*args)

        monkeypatch.setattr(experience.feed, fault, fails)
        await pipe.start()
        await filled(pipe)
        with pytest.raises(Exception, match="none is left"):
            await pipe.sample(90)
        with pytest.raises(WriteFailed, match="could not be recorded"):
            await pipe.save(1)
        await written(pipe)
        killed = crashed_copy(run_directory, tmp_path / "killed")
    again = ReplayBuffer(100)
    async with fed(again, 4, directory=killed) as pipe:
        await resumed(pipe)
        await pipe.start()
        await filled(pipe)
        assert {index for index, _ in contents(again)} == {0, 1, 2, 3}
    assert verify(killed).whole


async def test_what_was_promised_and_is_missing_is_damage(run_directory: str, tmp_path: Path) -> None:
    """Not something that was let go: the generation is kept, and so are the rows behind it."""
    async with fed(ReplayBuffer(100), directory=run_directory, segment_bytes=2000) as pipe:
        await pipe.start()
        await filled(pipe)
        assert pipe._run.state.writer is not None
        await pipe._run.state.writer.sync()
        killed = crashed_copy(run_directory, tmp_path / "killed")
    sorted(Path(killed, "segments").iterdir())[1].unlink()
    async with fed(ReplayBuffer(100), directory=killed) as pipe:
        with pytest.raises(Damaged):
            await pipe.resume()


async def test_what_an_episode_kept_goes_with_it(run_directory: str) -> None:
    """It is not gone on with, so nobody asks for its partial rollout any more."""
    reached = anyio.Event()

    async def play(item: Item, ctx: Context) -> Rollout:
        await ctx.extend(block(item, 0))
        ctx.save_partial(Rollout(reward=0.0))
        reached.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with fed(ReplayBuffer(100), 1, run=play, directory=run_directory) as pipe:
        await pipe.start()
        await reached.wait()
        assert len(pipe._run.state.partials) == 1
        async with pipe.weight_update(version=1, running="abort"):
            pass
        await filled(pipe)
        assert len(pipe._run.state.partials) == 0


async def test_an_episode_cannot_be_parked() -> None:
    async def play(item: Item, ctx: Context) -> Rollout:
        ctx.park()
        return Rollout(reward=0.0)

    async with fed(ReplayBuffer(100), 1, run=play, on_failure="fail_fast") as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match="rows have their rewards in them"):
            await pipe.sample(1)


async def test_a_run_that_never_saves_forgets_where_rows_lie_that_are_gone(run_directory: str) -> None:
    async def one_by_one(item: Item, ctx: Context) -> Rollout:
        for place in range(300):
            await ctx.extend(block(item, place, 1))
        return Rollout(reward=0.0)

    buffer = ReplayBuffer(10)
    async with fed(buffer, 3, run=one_by_one, directory=run_directory) as pipe:
        await pipe.start()
        await filled(pipe)
        feed: Any = pipe._run.state.experience.feed  # type: ignore[union-attr]
        assert len(feed._blocks) < 150
        await (await pipe.save(1)).committed()
        found = contents(buffer)
    again = ReplayBuffer(10)
    async with fed(again, 3, directory=run_directory) as pipe:
        await resumed(pipe)
        assert contents(again) == found


async def test_no_trigger_saves_while_rows_are_drawn_by_another_verb(run_directory: str) -> None:
    """What the weights hold is not known then: a loader draws from the buffer itself."""
    buffer, agent = ReplayBuffer(100), Agent()
    async with fed(buffer, 4, directory=run_directory) as pipe:
        pipe.attach(agent=agent)
        await pipe.start()
        await filled(pipe)
        await pipe.ack(1)
        agent.train(buffer.sample(4))
        pipe.request_save()
        async with pipe.weight_update(version=1):
            pass
        assert pipe._run.triggers.pending is not None
        await pipe.ack(2)
        assert pipe._run.triggers.pending is None
    again = Agent()
    async with fed(ReplayBuffer(100), 4, directory=run_directory) as pipe:
        pipe.attach(agent=again)
        assert (await resumed(pipe)).step == 2
        assert len(again.seen) == 1


async def test_rows_that_come_while_a_save_is_written_are_in_the_next_one(
    run_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of where rows lie is replaced then, and goes on with what has come."""
    buffer, gates = ReplayBuffer(1000), [anyio.Event(), anyio.Event()]

    async def waits(item: Item, ctx: Context) -> Rollout:
        if item.index >= 3:
            await gates[item.index >= 6].wait()
        return await walk(item, ctx)

    async with fed(buffer, 9, run=waits, directory=run_directory, concurrency=9) as pipe:
        experience = pipe._run.state.experience
        assert experience is not None
        capture, changed = experience.feed.capture, pipe._run.state.changed

        def slow() -> Any:
            captured = capture()
            pieces, here = captured.pieces, anyio.from_thread

            def held() -> Any:
                here.run(changed.wait_for, lambda: buffer.ring.added >= 36)
                yield from pieces()

            monkeypatch.setattr(captured, "pieces", held)
            return captured

        await pipe.start()
        await changed.wait_for(lambda: buffer.ring.added >= 18)
        monkeypatch.setattr(experience.feed, "capture", slow)
        saving = await pipe.save(1)
        gates[0].set()
        await saving.committed()
        monkeypatch.setattr(experience.feed, "capture", capture)
        gates[1].set()
        await filled(pipe)
        await (await pipe.save(2)).committed()
        found = contents(buffer)
        assert len(found) == 54
    again = ReplayBuffer(1000)
    async with fed(again, 9, directory=run_directory) as pipe:
        await resumed(pipe)
        assert contents(again) == found


@pytest.mark.parametrize("drawn", [False, True])
async def test_a_trainer_that_waits_for_rows_is_stopped(run_directory: str, drawn: bool) -> None:
    """At once if the weights are known, and else when the time to stop is over: the newest generation stands."""
    never, buffer = anyio.Event(), ReplayBuffer(100)

    async def play(item: Item, ctx: Context) -> Rollout:
        await ctx.extend(block(item, 0))
        await never.wait()
        raise AssertionError

    async with fed(buffer, 1, run=play, directory=run_directory) as pipe:
        await pipe.start()
        await pipe.sample(1)
        if not drawn:
            await pipe.ack(1)
        async with anyio.create_task_group() as group:

            async def train() -> None:
                with pytest.raises(Stopped) as stopped:
                    await pipe.sample(1, slices=Slices(length=2 * ROWS))
                assert stopped.value.generation == (0 if drawn else 1)

            group.start_soon(train)
            await anyio.wait_all_tasks_blocked()
            pipe.request_save(then="stop", within=0.05 if drawn else 60)
    again = ReplayBuffer(100)
    async with fed(again, 1, directory=run_directory) as pipe:
        assert (await resumed(pipe)).step == (0 if drawn else 1)
        assert len(again) == ROWS


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_an_evaluation_gets_its_turn_while_the_rollouts_wait_for_the_limiter(concurrency: int) -> None:
    """They wait for the trainer, which waits for the evaluation; and no more of them begin meanwhile."""
    begun, buffer = list[int](), ReplayBuffer(100, limiter=Limiter(min_size=3, ratio=1.0, error_buffer=3))

    async def play(item: Item, ctx: Context) -> Rollout:
        if ctx.kind == "train":
            begun.append(item.index)
        return await walk(item, ctx)

    async with fed(buffer, run=play, concurrency=concurrency) as pipe:
        experience = pipe._run.state.experience
        assert experience is not None
        await pipe.start()
        await pipe._run.state.changed.wait_for(lambda: experience.held == concurrency)
        before = list(begun)
        with anyio.fail_after(10):
            found = await pipe.evaluate("numbers", items=4)
        assert len(found.rollouts) == 4
        assert begun == before
        with contextlib.suppress(EndOfSource):
            while True:
                await pipe.sample(3)
                assert len(begun) - pipe.ledger.totals["numbers"].retired <= concurrency
        assert buffer.ring.added == 12 * 2 * ROWS


async def test_an_evaluation_at_the_end_of_the_source_does_not_hide_the_end() -> None:
    examined = anyio.Event()

    async def play(item: Item, ctx: Context) -> Rollout:
        if ctx.kind == "evaluation":
            examined.set()
            await anyio.sleep_forever()
        return await walk(item, ctx)

    buffer = ReplayBuffer(100, limiter=Limiter(min_size=50))
    async with fed(buffer, 2, run=play) as pipe, anyio.create_task_group() as group:
        await pipe.start()
        await filled(pipe)
        group.start_soon(pipe.evaluate, "numbers")
        await examined.wait()
        with pytest.raises(EndOfSource):
            await pipe.sample(1)
        group.cancel_scope.cancel()

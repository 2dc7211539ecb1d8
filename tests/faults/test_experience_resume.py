"""A run that fills a replay buffer is killed, and goes on: every row once, and the consumer half as it was saved."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from pipeline import Context, Damaged, Item, Limiter, Pipeline, ReplayBuffer, Rollout, UsageError, WriteFailed
from pipeline.checkpoint import verify
from pipeline.store.files import OsFiles
from pipeline.store.segments import read_blocks
from tests.support.crashes import crashed_copy
from tests.support.disk import ScriptedFiles
from tests.support.experience import ROWS, Agent, block, contents, fed, filled, hop, reaches, resumed, walk, written
from tests.support.runs import pipeline, task

ALL = [(index, place) for index in range(12) for place in range(2 * ROWS)]


def make(**options: Any) -> ReplayBuffer:
    options.setdefault("capacity", 1000)
    return ReplayBuffer(options.pop("capacity"), select={"select": "prioritized"}, seed=3, **options)


def draws(buffer: ReplayBuffer, count: int = 20) -> list[list[int]]:
    return [buffer.sample(16).keys.tolist() for _ in range(count)]


async def train(pipe: Pipeline, buffer: ReplayBuffer, agent: Agent, steps: range) -> None:
    for _ in steps:
        batch = await pipe.sample(16)
        buffer.update_priorities(batch.keys, agent.train(batch))


@pytest.mark.parametrize("durability", ["kill", "power", "none"])
async def test_what_is_saved_comes_back_to_the_next_draw(run_directory: str, durability: str) -> None:
    buffer, agent = make(), Agent()
    async with fed(buffer, directory=run_directory, durability=durability) as pipe:
        pipe.attach(agent=agent)
        await pipe.start()
        await filled(pipe)
        await train(pipe, buffer, agent, range(7))
        await (await pipe.save(7)).committed()
        expected = draws(buffer)
    again, other = make(), Agent()
    async with fed(again, directory=run_directory, durability=durability) as pipe:
        pipe.attach(agent=other)
        assert (await resumed(pipe)).step == 7
        assert other.seen == agent.seen
        assert contents(again) == contents(buffer)
        assert draws(again) == expected
        await pipe.start()
        await filled(pipe)
        assert len(again) == len(ALL), "every item is done, and none is run again"
    assert verify(run_directory).whole


@pytest.mark.parametrize("durability", ["kill", "power"])
async def test_rows_that_no_generation_knows_of_are_not_lost(
    run_directory: str, tmp_path: Path, durability: str
) -> None:
    buffer = make()
    async with fed(buffer, directory=run_directory, durability=durability) as pipe:
        await pipe.start()
        await filled(pipe)
        await written(pipe)
        killed = crashed_copy(run_directory, tmp_path / "killed")
        found = contents(buffer)
    for _ in range(2):  # the second resume counts on the generation that the first one committed
        again = make()
        async with fed(again, directory=killed, durability=durability) as pipe:
            assert (await resumed(pipe)).step == 0
            assert contents(again) == found
            stats = again.statistics()
            assert (stats.episodes, stats.open_episodes) == (12, 0)
            await pipe.start()
            await filled(pipe)
            assert len(again) == len(ALL)
        assert verify(killed).whole


async def test_an_open_episode_of_a_dead_process_is_kept_and_never_gone_on_with(
    run_directory: str, tmp_path: Path
) -> None:
    """Of four that run, two have added rows: these are done; the other two are run again, from the start."""
    reached = anyio.Event()
    begun = 0

    async def hangs(item: Item, ctx: Context) -> Rollout:
        nonlocal begun
        if item.index % 2 == 0:
            await ctx.extend(block(item, 0))
        begun += 1
        if begun == 4:
            reached.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with fed(make(), 4, run=hangs, directory=run_directory, concurrency=4) as pipe:
        await pipe.start()
        await reached.wait()
        await written(pipe)
        killed = crashed_copy(run_directory, tmp_path / "killed")
    again = make()
    async with fed(again, 4, directory=killed) as pipe:
        assert (await resumed(pipe)).waiting == 2
        assert contents(again) == [(index, place) for index in (0, 2) for place in range(ROWS)]
        assert again.statistics().open_episodes == 0
        await pipe.start()
        await filled(pipe)
        totals = pipe.ledger.totals["numbers"]
        assert (totals.retired, totals.retired_early) == (4, 2)
        assert Counter(index for index, _ in contents(again)) == {0: ROWS, 2: ROWS, 1: 2 * ROWS, 3: 2 * ROWS}
        assert again.ring.following(np.array([0, ROWS])).tolist() == [ROWS, ROWS], "nothing was added to them"


async def cut_everywhere(directory: str, tmp_path: Path, **options: Any) -> list[str]:
    """Run everything, saving now and then; return what a kill after each event would have left."""
    copies, buffer, agent, steps = list[str](), make(), Agent(), itertools.count(1)
    async with fed(
        buffer, 6, directory=directory, concurrency=2, inline="eager", files=ScriptedFiles(), **options
    ) as pipe:
        pipe.attach(agent=agent)
        await pipe.start()
        apply = pipe._run.state.record

        def record(event: Any) -> Any:
            became = apply(event)
            copies.append(crashed_copy(directory, tmp_path / str(len(copies))))
            return became

        pipe._run.state.record = record  # type: ignore[method-assign]
        while not (pipe._run.producer.drained and not pipe.ledger.outstanding):
            await anyio.lowlevel.checkpoint()
            if len(buffer) and len(copies) % 3 == 0:
                step = next(steps)
                await train(pipe, buffer, agent, range(1))
                await (await pipe.save(step)).committed()
        copies.append(crashed_copy(directory, tmp_path / str(len(copies))))
    return copies


@pytest.mark.parametrize("after_crash", ["reuse", "discard"])
async def test_wherever_the_cut_falls_every_item_is_done_once(
    run_directory: str, tmp_path: Path, after_crash: Any
) -> None:
    copies = await cut_everywhere(run_directory, tmp_path, after_crash=after_crash)
    assert len(copies) > 20
    for killed in copies:
        buffer, agent = make(), Agent()
        async with fed(buffer, 6, directory=killed, after_crash=after_crash) as pipe:
            pipe.attach(agent=agent)
            found = await resumed(pipe)
            assert len(agent.seen) == found.step
            before = contents(buffer)
            await pipe.start()
            await filled(pipe)
            rows = contents(buffer)
            assert rows[: len(before)] == before
            assert max(Counter(rows).values()) == 1, "no row is there twice"
            for index in range(6):
                places = [place for of, place in rows if of == index]
                assert places == list(range(len(places)))
                assert places, "every item was played"
            assert pipe.ledger.totals["numbers"].retired == 6
            pipe.ledger.check()
        assert verify(killed).whole


async def test_what_was_discarded_is_played_again(run_directory: str, tmp_path: Path) -> None:
    """The buffer is what it was at the save, and so are the draws; two resumes later as well."""
    limited, gate = make(), anyio.Event()

    async def waits(item: Item, ctx: Context) -> Rollout:
        if item.index >= 6:
            await gate.wait()
        return await walk(item, ctx)

    async with fed(limited, run=waits, directory=run_directory, after_crash="discard", concurrency=6) as pipe:
        await pipe.start()
        await reaches(pipe, limited, 6 * 2 * ROWS)
        await (await pipe.save(1)).committed()
        saved, expected = contents(limited), draws(limited)
        gate.set()
        await filled(pipe)
        await written(pipe)
        killed = crashed_copy(run_directory, tmp_path / "killed")
    for _ in range(2):
        again = make()
        async with fed(again, directory=killed, after_crash="discard") as pipe:
            assert (await resumed(pipe)).step == 1
            assert contents(again) == saved
            assert draws(again) == expected
    again = make()
    async with fed(again, directory=killed, after_crash="discard") as pipe:
        await resumed(pipe)
        await pipe.start()
        await filled(pipe)
        assert sorted(contents(again)) == ALL


def lockstep() -> ReplayBuffer:
    """Blocks of three rows and batches of one, such that there is always room for one of them, and never for both."""
    return make(limiter=Limiter(min_size=3, ratio=0.5, error_buffer=1.0), capacity=30)


async def off_policy(directory: str | None, last: int, crash: int | None = None) -> list[list[Any]]:
    """Train up to step ``last``, saving at each; return what each step was trained on. The process that dies at step
    ``crash`` has trained it, and not saved it."""
    buffer, agent, trained = lockstep(), Agent(), list[list[Any]]()
    async with fed(buffer, 30, run=hop, directory=directory, after_crash="discard", concurrency=1) as pipe:
        pipe.attach(agent=agent)
        begun = (await resumed(pipe)).step
        await pipe.start()
        for step in range(begun + 1, last + 1):
            batch = await pipe.sample(1)
            buffer.update_priorities(batch.keys, agent.train(batch))
            trained.append([step, batch.keys.tolist(), batch["obs"].tolist(), batch.weights.tolist()])
            if step == crash:
                break
            await (await pipe.save(step)).committed()
    return trained


@pytest.mark.parametrize("crash", [1, 2, 7, 12, 20])
async def test_off_policy_training_goes_on_exactly(run_directory: str, crash: int) -> None:
    """Rollouts and draws take turns here, so that a run in peace is the same each time."""
    peace = await off_policy(run_directory + "-peace", 25)
    assert peace == await off_policy(None, 25)
    before = await off_policy(run_directory, 25, crash)
    after = await off_policy(run_directory, 25)
    assert before[:-1] + after == peace
    assert before == peace[:crash]


async def test_an_older_step_is_gone_back_to(run_directory: str) -> None:
    buffer, expected, sizes = make(), {}, {}
    async with fed(buffer, directory=run_directory, keep=None, concurrency=1) as pipe:
        await pipe.start()
        for step in (1, 2, 3):
            await reaches(pipe, buffer, 12 * step)
            await pipe.sample(4)
            await (await pipe.save(step)).committed()
            expected[step], sizes[step] = buffer.state_dict()["state"]["generator"], contents(buffer)
        await filled(pipe)
        whole = contents(buffer)
    again = make()
    async with fed(again, directory=run_directory, keep=None, concurrency=1) as pipe:
        assert (await resumed(pipe, 1)).step == 1
        assert again.state_dict()["state"]["generator"] == expected[1], "the draws go back with the weights"
        assert contents(again) == whole, "and what the rollouts made does not"


async def test_old_rows_go_and_their_segments_with_them(run_directory: str) -> None:
    buffer = make(capacity=20)
    options: dict[str, Any] = {"directory": run_directory, "segment_bytes": 2000, "keep": 1}
    async with fed(buffer, 60, concurrency=2, **options) as pipe:
        await pipe.start()
        for step in range(1, 15):
            await reaches(pipe, buffer, 20 * step)
            await (await pipe.save(step)).committed()
        await filled(pipe)
        await (await pipe.save(15)).committed()
        found = contents(buffer)
    files = list(Path(run_directory, "segments").iterdir())
    assert len(files) < 12, "of some 50 that were written"
    again = make(capacity=20)
    async with fed(again, 60, **options) as pipe:
        await resumed(pipe)
        assert contents(again) == found
    assert verify(run_directory).whole


async def test_many_small_blocks_become_few(run_directory: str) -> None:
    """Rows that come one by one do not make a list as long as the buffer."""

    async def one_by_one(item: Item, ctx: Context) -> Rollout:
        for place in range(20):
            await ctx.extend(block(item, place, 1))
        return Rollout(reward=0.0)

    buffer = make()
    async with fed(buffer, 30, run=one_by_one, directory=run_directory, keep=1) as pipe:
        await pipe.start()
        await filled(pipe)
        await (await pipe.save(1)).committed()
        found = contents(buffer)
    blocks = read_blocks(str(next(Path(run_directory, "generations").glob("*/blocks.msgpack"))))
    assert len(blocks) < 20
    assert sum(each.count for each in blocks) == len(found) == 600
    again = make()
    async with fed(again, 30, directory=run_directory) as pipe:
        await resumed(pipe)
        assert contents(again) == found


async def test_rows_that_are_overwritten_while_a_save_is_written_are_in_it(
    run_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With durability='none' they are nowhere but in the ring, and the next rollouts take their places."""
    go_on = anyio.Event()

    async def waits(item: Item, ctx: Context) -> Rollout:
        if item.index >= 3:
            await go_on.wait()
        return await walk(item, ctx)

    buffer = make(capacity=18)
    async with fed(buffer, 9, run=waits, directory=run_directory, durability="none", concurrency=9) as pipe:
        await pipe.start()
        await reaches(pipe, buffer, 18)
        saved = contents(buffer)
        feed = pipe._run.state.experience.feed  # type: ignore[union-attr]
        capture, captured = feed.capture, list[Any]()

        def slow() -> Any:
            captured.append(capture())
            pieces, taken = captured[-1].pieces, anyio.from_thread

            def held() -> Any:
                def late() -> Any:
                    taken.run(filled, pipe)  # the disk is slow, and all others play meanwhile
                    yield from pieces()

                return late()

            captured[-1].pieces = held
            return captured[-1]

        monkeypatch.setattr(feed, "capture", slow)
        saving = await pipe.save(1)
        go_on.set()
        await saving.committed()
        assert contents(buffer) != saved
    again = make(capacity=18)
    async with fed(again, 9, directory=run_directory, durability="none") as pipe:
        await resumed(pipe)
        assert contents(again) == saved


async def test_a_run_with_a_buffer_and_one_without_are_told_apart(run_directory: str) -> None:
    async with fed(make(), directory=run_directory) as pipe:
        await pipe.start()
        await filled(pipe)
        await (await pipe.save(1)).committed()
        with pytest.raises(UsageError, match="replay_buffer=False"):
            await pipe.save(1, replay_buffer=False)
    async with pipeline(task(), directory=run_directory) as plain:
        with pytest.raises(UsageError, match="build the Pipeline with buffer="):
            await plain.resume()
    async with fed(make(), directory=run_directory + "-b") as pipe:
        with pytest.raises(UsageError, match="copy its folder"):
            await pipe.resume(from_=run_directory)
    async with pipeline(task(), directory=run_directory + "-c") as plain:
        await plain.start()
    async with fed(make(), directory=run_directory + "-c") as pipe:
        with pytest.raises(UsageError, match="begun without a buffer"):
            await pipe.resume()
    async with fed(make(), directory=run_directory) as pipe:
        assert (await resumed(pipe)).step == 1, "nothing was harmed by all that"


async def test_rows_are_of_no_newer_weights_than_those_that_came_back(run_directory: str, tmp_path: Path) -> None:
    """Version 7 of a life whose weights were lost is no version 7 of this one."""
    go_on = anyio.Event()

    async def waits(item: Item, ctx: Context) -> Rollout:
        if item.index >= 2:
            await go_on.wait()
        await ctx.extend(block(item, 0))
        return Rollout(reward=0.0)

    buffer = make()
    async with fed(buffer, 6, run=waits, directory=run_directory, concurrency=2) as pipe:
        await pipe.start()
        await reaches(pipe, buffer, 2 * ROWS)
        await pipe.sample(2)
        async with pipe.weight_update(version=3):
            pass
        await (await pipe.save(3)).committed()
        async with pipe.weight_update(version=7):
            pass
        go_on.set()
        await filled(pipe)
        await written(pipe)
        assert buffer.ring.mark("#version", buffer.ring.keys()).tolist() == [0] * 12 + [7] * 6
        killed = crashed_copy(run_directory, tmp_path / "killed")
    again = make()
    async with fed(again, 6, directory=killed) as pipe:
        assert (await resumed(pipe)).step == 3
        assert again.ring.mark("#version", again.ring.keys()).tolist() == [0] * 12 + [3] * 6


class Tensors(Agent):
    """Has a file in every generation."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weight": np.zeros(10)}


class NoTrainer(OsFiles):
    """Has no room for what is attached, while it is told so."""

    full = False

    def create(self, path: str) -> int:
        if self.full and "/trainer/" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


async def test_a_save_that_fails_before_its_rows_are_written_lets_them_be_overwritten(run_directory: str) -> None:
    """Or else each row that is overwritten would be copied for a generation that nobody writes."""
    disk, buffer = NoTrainer(), make(capacity=18)
    async with fed(buffer, 9, directory=run_directory, durability="none", concurrency=1, files=disk) as pipe:
        pipe.attach(agent=Tensors())
        await pipe.start()
        await reaches(pipe, buffer, ROWS)
        await pipe.sample(2)
        disk.full = True
        with pytest.raises(WriteFailed, match="No space"):
            await pipe.save(1)
        assert buffer.ring.before_overwriting is None
        disk.full = False
        await filled(pipe)
        await (await pipe.save(1)).committed()
        assert buffer.ring.before_overwriting is None
        found = contents(buffer)
    again = make(capacity=18)
    async with fed(again, 9, directory=run_directory, durability="none") as pipe:
        pipe.attach(agent=Tensors())
        await resumed(pipe)
        assert contents(again) == found


async def test_a_damaged_block_that_no_event_names_is_found(run_directory: str) -> None:
    """With durability='none' generations alone say where rows lie."""
    buffer = make()
    async with fed(buffer, directory=run_directory, durability="none") as pipe:
        await pipe.start()
        await filled(pipe)
        await (await pipe.save(1)).committed()
    assert verify(run_directory).whole
    (segment,) = Path(run_directory, "segments").iterdir()
    (block_,) = read_blocks(str(next(Path(run_directory, "generations").glob("*1/blocks.msgpack"))))
    raw = bytearray(segment.read_bytes())
    raw[block_.offset + 200] ^= 1
    segment.write_bytes(raw)
    found = verify(run_directory)
    assert not found.whole
    assert any(str(block_.offset) in each.what and each.path.endswith(segment.name) for each in found.damages)
    async with fed(make(), directory=run_directory, durability="none") as pipe:
        with pytest.raises(Damaged, match=f"{segment.name} at byte {block_.offset}"):
            await pipe.resume()
    segment.unlink()
    assert any("missing" in each.what for each in verify(run_directory).damages)


async def test_what_a_newer_version_says_of_the_buffer_is_carried_along(run_directory: str) -> None:
    async with fed(make(), directory=run_directory) as pipe:
        await pipe.start()
        await filled(pipe)
        feed: Any = pipe._run.state.experience.feed  # type: ignore[union-attr]
        feed._unknown = {"later": [1, 2]}
        await (await pipe.save(1)).committed()
    async with fed(make(), directory=run_directory) as pipe:
        await resumed(pipe)
        await pipe.start()
        await (await pipe.save(2)).committed()
    states = sorted(Path(run_directory, "generations").glob("*/replay.json"))
    said = [json.loads(each.read_text()).get("later") for each in states]
    assert said == [None, [1, 2], [1, 2]]  # the start's, the first life's save, the second's

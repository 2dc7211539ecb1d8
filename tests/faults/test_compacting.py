"""Segments of which little is live are emptied into new ones, and nothing is lost on the way."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from pipeline import Context, Damaged, Item, Pipeline, Rollout, Task
from pipeline.checkpoint import verify
from pipeline.records import Moved
from pipeline.store.journal import read_journals
from pipeline.store.layout import Layout
from pipeline.testing import RecordingFiles, Replay
from pipeline.testing.recording import folder_in_memory
from tests.support.crashes import Trained, begin, finish, inline_pipeline, train
from tests.support.gates import turn
from tests.support.runs import numbers

pytestmark = pytest.mark.virtual_time

COUNT = 120
EVERY = 10  # of so many groups one waits for its reward


async def parks(item: Item, ctx: Context) -> Rollout:
    await anyio.sleep(1 + item["n"] / 10_000)
    if item["n"] % EVERY == 0:
        ctx.park()
    return Rollout({"n": [item["n"]]}, reward=1.0)


def make(directory: str, **options: Any) -> Pipeline:
    given = Task("numbers", source=numbers(COUNT), run=parks, shuffle=False)
    options.setdefault("capacity", COUNT)
    options.setdefault("keep", 1)
    return inline_pipeline(given, directory=directory, segment_bytes=4000, concurrency=8, **options)


async def most_of_it(directory: str, steps: int = 20, **options: Any) -> Trained:
    """Train step after step, a save after each."""
    trained = Trained()
    async with make(directory, save_every=1, **options) as pipe:
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=5, until=steps):
            await train(pipe, trained, batch)
    return trained


async def the_rest(directory: str, **options: Any) -> list[int]:
    """Resume, give every parked group its reward, and train what is left. Returns all items that were trained."""
    trained = Trained()
    async with make(directory, **options) as pipe:
        await begin(pipe, trained=trained)
        async with anyio.create_task_group() as group:

            async def reward() -> None:
                while pipe.ledger.claimed < COUNT or pipe.ledger.parked:
                    for uid in list(pipe.ledger.parked):
                        await pipe.reward(uid, 2.0)
                    await anyio.sleep(1)

            group.start_soon(reward)
            await finish(pipe, trained, 5)
    return trained.items


def moves(directory: str) -> list[Moved]:
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    return [each.event for each in read_journals(layout, run_tag=run.tag) if isinstance(each.event, Moved)]


async def test_what_waits_moves_and_the_old_segments_go(run_directory: str) -> None:
    await most_of_it(run_directory)
    # Ten segments of ten groups, a group parked in each: they would all be here.
    assert len(Layout(run_directory).list_segments()) <= 6
    assert len(moves(run_directory)) >= 4
    assert verify(run_directory).whole
    assert await the_rest(run_directory) == list(range(COUNT))


async def test_what_has_moved_moves_again(run_directory: str) -> None:
    """Life after life, from payloads that are in no memory."""
    await most_of_it(run_directory, 10)
    for life in range(3):
        before = len(moves(run_directory))
        await most_of_it(run_directory, 13 + 3 * life)
        assert len(moves(run_directory)) > before
        assert verify(run_directory).whole
    assert await the_rest(run_directory) == list(range(COUNT))


async def test_older_generations_find_it_where_it_was(run_directory: str, tmp_path: Path) -> None:
    await most_of_it(run_directory, keep=3, keep_every=4)
    assert moves(run_directory)
    for step in (0, 4, 8, 12, 16, 20):
        copy = str(tmp_path / f"{step}")
        shutil.copytree(run_directory, copy)
        async with make(copy, after_crash="discard") as pipe:  # without the events that moved it
            pipe.attach(trained=Trained())
            assert (await pipe.resume(step=step)).step == step
        assert await the_rest(copy) == list(range(COUNT))


async def test_killed_at_any_change() -> None:
    with folder_in_memory() as memory:
        directory = os.path.join(memory, "run")
        files = RecordingFiles(directory)
        await most_of_it(directory, files=files)
        replay, counts = Replay(os.path.join(memory, "replayed")), set()
        for upto in range(len(files.changes) * 2 // 3, len(files.changes), 3):
            replay.forward(files.changes, upto)
            copy = replay.copy(os.path.join(memory, "copy"))
            counts.add(len(moves(copy)))
            assert await the_rest(copy) == list(range(COUNT))
            shutil.rmtree(copy)
        assert len(counts) > 2


async def test_a_segment_that_cannot_be_read_is_left_alone(run_directory: str) -> None:
    """Its damage is told when the group is due, not by a background that dies of it."""
    trained = Trained()
    with capture_logs() as logs:
        async with make(run_directory, save_every=1) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=5, until=20):
                await train(pipe, trained, batch)
                if batch.step == 1:
                    path = Path(Layout(run_directory).segment(1, 0, 1))
                    content = bytearray(path.read_bytes())
                    content[200] ^= 0xFF
                    path.write_bytes(content)
    told = [line for line in logs if line["event"] == "segment.compacted" and line["log_level"] == "warning"]
    assert len(told) == 1
    assert "000001-0000-000001.fbs" in str(told[0]["error"])
    with pytest.raises(Damaged, match=r"000001-0000-000001\.fbs"):
        await the_rest(run_directory)


async def test_little_is_not_worth_it(run_directory: str) -> None:
    await most_of_it(run_directory, 5)
    assert moves(run_directory) == []


async def test_what_is_archived_stays_where_it_is(run_directory: str) -> None:
    await most_of_it(run_directory, archive="all")
    assert moves(run_directory) == []
    assert Layout(run_directory).list_segments()[0] == "000001-0000-000001.fbs"


async def test_memory_durability_writes_nothing_between_saves(run_directory: str) -> None:
    await most_of_it(run_directory, durability="none")
    assert moves(run_directory) == []
    assert await the_rest(run_directory) == list(range(COUNT))


def waits(n: int) -> bool:
    return n < 110 and n % 20 in (1, 2, 3)


def tight(directory: str) -> Pipeline:
    """A run whose first compaction copies three payloads: one that ends the fifth segment, and two into the sixth."""

    async def run(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(1 + item["n"] / 10_000)
        if waits(item["n"]):
            ctx.park()
        return Rollout({"n": [item["n"]]}, reward=1.0)

    count = 159
    given = Task("numbers", source=numbers(count), run=run, shuffle=False)
    # The queue takes two payloads at a time.
    small: dict[str, Any] = {"segment_bytes": 8000, "write_queue_bytes": 300, "concurrency": 8, "capacity": count}
    return inline_pipeline(given, directory=directory, keep=1, **small)


async def all_that_does_not_wait(pipe: Pipeline) -> int:
    """Train it, and save. Returns the step."""
    trained = Trained()
    await begin(pipe, trained=trained)
    steps = 159 - sum(map(waits, range(159)))
    async for batch in pipe.batches(groups=1, until=steps):
        trained.step(batch)
    await (await pipe.save(steps)).committed()
    return steps


async def test_copies_that_fill_the_queue_are_written_though_nothing_else_happens(run_directory: str) -> None:
    async with tight(run_directory) as pipe:
        await all_that_does_not_wait(pipe)
        await anyio.sleep(10)
        assert {move.segment for move in moves(run_directory)} == {5, 6}


@pytest.mark.parametrize("turns", [0, 2, 4, 6, 8])
async def test_a_save_in_the_midst_of_it_keeps_what_is_copied_into(run_directory: str, turns: int) -> None:
    """Nothing else in that segment is live, and no event names the copies yet when the generation is captured."""
    async with tight(run_directory) as pipe:
        steps = await all_that_does_not_wait(pipe)
        for _ in range(turns):
            await turn()
        await (await pipe.save(steps)).committed()
        await anyio.sleep(10)
        assert {move.segment for move in moves(run_directory)} == {5, 6}
        await (await pipe.save(steps)).committed()
    assert verify(run_directory).whole
    async with tight(run_directory) as pipe:
        assert (await begin(pipe, trained=Trained())).parked == 18

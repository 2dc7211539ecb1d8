"""Batches of a run can be had again from its folder alone, as the trainer had them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anyio
import pytest

from pipeline import Batch, Context, Damaged, Item, NotARun, Rollout, StoreError, Task, recorded_batches
from pipeline.store.segments import PayloadReader, Place
from tests.support.crashes import Trained, begin, crashed_copy, inline_pipeline, train, uneven
from tests.support.runs import numbers, task

pytestmark = pytest.mark.virtual_time


def content(batch: Batch) -> list[Any]:
    """Everything that a trainer sees of a batch."""
    return [
        (
            group.uid,
            group.task,
            group.index,
            group.oldest,
            group.newest,
            group.staleness,
            group.reward_mean,
            group.members,
            [(each.reward, each["n"].tolist()) for each in group.rollouts],
            [mask.tolist() for mask in group.staleness_mask],
        )
        for group in batch
    ]


async def life(directory: str, seen: dict[int, Any], trained: Trained, upto: int, given: Any, **options: Any) -> None:
    """Train up to a step, and note what the batches were."""
    async with inline_pipeline(given, directory=directory, segment_bytes=2000, archive="all", **options) as pipe:
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=4, until=upto):
            seen[batch.step] = content(batch)
            await train(pipe, trained, batch)
            if batch.step % 3 == 0:
                await pipe.save(batch.step)


async def grades(item: Item, ctx: Context) -> Rollout:
    """Groups of two; every fifth item parks and every seventh is short of a member."""
    await anyio.sleep(1 + float(ctx.rng.random()))
    if item["n"] % 7 == 6 and ctx.member == 1:
        raise ValueError("no")
    if item["n"] % 5 == 4:
        ctx.park()
    return Rollout({"n": [item["n"]] * (1 + ctx.member)}, reward=1.0, tokens=1 + ctx.member)


@pytest.mark.parametrize("options", [{}, {"order": "strict"}, {"max_staleness": 1}, {"max_staleness": 2}])
async def test_life_after_life(run_directory: str, options: dict[str, Any]) -> None:
    seen: dict[int, Any] = {}
    for number, upto in enumerate((4, 8, 11)):  # what comes after a save is trained again, perhaps otherwise
        await life(run_directory, seen, Trained(), upto, task(80, uneven(number)), **options)
    found = {batch.step: content(batch) for batch in recorded_batches(run_directory)}
    assert list(found) == list(range(1, 10))  # up to the newest generation
    assert found == {step: seen[step] for step in found}
    assert [batch.step for batch in recorded_batches(run_directory, 6)] == list(range(1, 7))


async def test_a_batch_is_read_at_once(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await life(run_directory, {}, Trained(), 6, task(80, uneven(0)))
    reads: list[int] = []
    read_many = PayloadReader.read_many

    def counted(self: PayloadReader, places: Iterable[Place]) -> dict[tuple[int, int], bytes]:
        found = read_many(self, places)
        reads.append(len(found))
        return found

    monkeypatch.setattr(PayloadReader, "read_many", counted)
    assert len(list(recorded_batches(run_directory))) == 6
    assert reads == [4] * 6


async def test_a_line_that_was_left_is_not_taken_for_this_one(run_directory: str) -> None:
    first: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    await life(run_directory, first, Trained(), 9, task(80, uneven(1)), keep=None)
    trained = Trained()
    async with inline_pipeline(task(80, uneven(2)), directory=run_directory, keep=None, archive="all") as pipe:
        pipe.attach(trained=trained)
        resumed = await pipe.resume(step=3)
        async with pipe.weight_update(version=resumed.version):
            pass
        await pipe.start()
        async for batch in pipe.batches(groups=4, until=6):
            seen[batch.step] = content(batch)
            await train(pipe, trained, batch)
        await (await pipe.save(6)).committed()
    found = {batch.step: content(batch) for batch in recorded_batches(run_directory)}
    assert found == {**{step: first[step] for step in (1, 2, 3)}, **seen}


async def test_groups_with_later_rewards_and_missing_members(run_directory: str) -> None:
    seen: dict[int, Any] = {}
    given = Task("numbers", source=numbers(60), run=grades, group_size=2, min_group=1, shuffle=False)
    trained = Trained()
    async with inline_pipeline(given, directory=run_directory, segment_bytes=900, archive="all", keep=1) as pipe:
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=4, until=10):
            seen[batch.step] = content(batch)
            await train(pipe, trained, batch)
            await pipe.save(batch.step)
            for uid in list(pipe.ledger.parked):
                for member, code in enumerate(pipe.ledger.entries[uid].members):
                    if code == 4:
                        await pipe.reward(uid, 10.0 + uid, member)
    assert {batch.step: content(batch) for batch in recorded_batches(run_directory)} == seen


async def test_what_was_let_go_is_said(run_directory: str) -> None:
    trained = Trained()
    async with inline_pipeline(task(80), directory=run_directory, segment_bytes=600, save_every=1, keep=3) as pipe:
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=4, until=12):
            await train(pipe, trained, batch)
    with pytest.raises(Damaged, match=r"step 1: .*segment is missing.*archive='all'"):
        list(recorded_batches(run_directory))
    there = [batch.step for batch in recorded_batches(run_directory, skip_missing=True)]
    assert there == [11, 12]


async def test_a_run_that_goes_on_can_be_read(run_directory: str) -> None:
    async with inline_pipeline(task(40), directory=run_directory, archive="all") as pipe:
        await begin(pipe)
        batch = await pipe.get_batch(4)
        before = content(batch)
        await (await pipe.save(batch.step)).committed()
        assert [content(each) for each in recorded_batches(run_directory)] == [before]
        copy = crashed_copy(run_directory, run_directory + ".copy")
    assert [content(each) for each in recorded_batches(copy)] == [before]


def test_no_run(tmp_path: Any, run_directory: str) -> None:
    with pytest.raises(NotARun):
        next(recorded_batches(run_directory))
    with pytest.raises(StoreError):
        next(recorded_batches(tmp_path))

"""What came after ``v1b`` in the same format opens in every version after it: inherited, partial, aged, run again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import Pipeline
from pipeline.ledger import STATES
from pipeline.records import Aged, Inherited, PartSaved, Reopened
from pipeline.store.frames import scan
from pipeline.store.journal import read_journal, read_journals
from pipeline.store.layout import JournalName, Layout
from tests.golden.make_v1 import RUN_ID, Learner
from tests.golden.make_v1c import EVERY_EVENT, OPTIONS, task
from tests.support.disk import says_no_machine, tree
from tests.support.runs import pipeline

HERE = Path(__file__).parent / "v1c"
TAG = int(RUN_ID[:16], 16)
SECOND = str(HERE / "journals" / "000002-0000.fbj")
FRAMES = [frame.offset for frame in scan(SECOND, run_tag=TAG)][2::3]

virtual = pytest.mark.virtual_time


def opened(directory: str) -> tuple[Pipeline, Learner]:
    return pipeline(task(), directory=directory, inline=True, staleness_policy="reroll", **OPTIONS), Learner()


def test_nothing_of_the_machine_that_made_it_is_in_the_files() -> None:
    says_no_machine(HERE, most=80_000)


def test_the_new_events_come_back_with_every_field() -> None:
    name = JournalName(9, 0, str(HERE / "every_event.fbj"))
    logged = list(read_journal(name, run_tag=TAG, promised=os.path.getsize(name.path)))
    assert [each.event for each in logged] == EVERY_EVENT


def test_the_run_holds_each_of_them() -> None:
    logged = [each.event for each in read_journals(Layout(str(HERE)), run_tag=TAG)]
    assert {Aged, Inherited, PartSaved} <= set(map(type, logged))
    assert [each for each in logged if isinstance(each, Reopened)] == [Reopened(6, "expired", [0], 3, 4, 6.0, 2)]


@virtual
async def test_every_item_and_every_partial_rollout_is_recovered(directory: str) -> None:
    pipe, learner = opened(directory)
    async with pipe:
        pipe.attach(learner=learner)
        resumed = await pipe.resume()
        assert (resumed.step, resumed.buffered, resumed.waiting, resumed.repeated) == (4, 3, 1, 1)
        pipe.ledger.check()
        found = {
            uid: (STATES[entry.state], list(entry.members), entry.attempts, entry.life, entry.rerolls, entry.deaths)
            for uid, entry in pipe.ledger.entries.items()
        }
        assert found == ITEMS
        partials = pipe._run.state.partials
        assert sorted((uid, member) for uid, kept in partials.by_uid.items() for member in kept) == PARTS
        assert pipe.ledger.trained.ranges() == [(0, 5), (7, 7), (9, 9)]


@virtual
async def test_an_older_step_is_resumed_with_what_was_finished_since(directory: str) -> None:
    pipe, learner = opened(directory)
    async with pipe:
        pipe.attach(learner=learner)
        resumed = await pipe.resume(step=1)
        assert (resumed.step, resumed.buffered, resumed.waiting) == (1, 9, 1)
        await finish(pipe, learner)


@virtual
async def test_the_run_goes_on_to_its_end_and_old_files_stay_as_they_are(directory: str) -> None:
    before = tree(directory)
    pipe, learner = opened(directory)
    async with pipe:
        pipe.attach(learner=learner)
        await pipe.resume()
        versions = await finish(pipe, learner)
    assert sorted(versions) == [6, 8, 10, 11]
    assert versions[11] == [[4, 4, 4, 4], [4, 4, 5, 5]]  # the second was gone on with
    after = tree(directory)
    assert {path: after[path] for path in before} == before


@virtual
@pytest.mark.parametrize("cut", FRAMES)
async def test_cut_after_any_frame_the_second_life_goes_on_to_its_end(directory: str, cut: int) -> None:
    for number in ("00000002", "00000003"):
        shutil.rmtree(Path(directory, "generations", number), ignore_errors=True)
    os.truncate(Path(directory, "journals", "000002-0000.fbj"), cut)
    pipe, learner = opened(directory)
    async with pipe:
        pipe.attach(learner=learner)
        assert (await pipe.resume()).step == 1
        await finish(pipe, learner)


async def finish(pipe: Pipeline, learner: Learner) -> dict[int, list[list[int]]]:
    """Train what is left, every item once; returns the versions of each group's tokens."""
    versions: dict[int, list[list[int]]] = {}
    async with pipe.weight_update(version=pipe.version):
        pass
    await pipe.start()
    async for batch in pipe.batches(groups=2):
        learner.train(batch.step, [group.index for group in batch])
        versions |= {each.uid: [rollout["versions"].tolist() for rollout in each.rollouts] for each in batch}
        async with pipe.weight_update(version=batch.step):
            pass
    pipe.ledger.check()
    assert sorted(index for _, index in learner.trained) == list(range(12))
    return versions


ITEMS: dict[int, tuple[Any, ...]] = {
    6: ("buffered", [2, 2], (2, 2), 1, 1, 0),
    8: ("buffered", [2, 2], (1, 2), 0, 0, 0),
    10: ("buffered", [2, 2], (1, 2), 0, 0, 0),
    11: ("waiting", [2, 0], (1, 2), 0, 0, 1),
}
PARTS = [(11, 1)]

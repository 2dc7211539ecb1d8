"""A run whose segments were removed and emptied opens in every version after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline import Pipeline
from pipeline.checkpoint import verify
from pipeline.checkpoint.manifest import decode_manifest
from pipeline.records import Moved
from pipeline.store.journal import Logged, read_journal, read_journals
from pipeline.store.layout import JournalName, Layout
from tests.golden.make_v1 import RUN_ID, Learner
from tests.golden.make_v1d import COUNT, EVERY_EVENT, OPTIONS, task
from tests.support.disk import says_no_machine, tree
from tests.support.runs import pipeline

HERE = Path(__file__).parent / "v1d"
TAG = int(RUN_ID[:16], 16)

virtual = pytest.mark.virtual_time


def test_nothing_of_the_machine_that_made_it_is_in_the_files() -> None:
    says_no_machine(HERE, most=80_000)


def test_the_new_event_comes_back_with_every_field() -> None:
    name = JournalName(9, 0, str(HERE / "every_event.fbj"))
    logged = list(read_journal(name, run_tag=TAG, promised=os.path.getsize(name.path)))
    assert [each.event for each in logged] == EVERY_EVENT


def test_the_run_holds_moves_in_both_lives_and_lacks_segments() -> None:
    moved = [each for each in read_journals(Layout(str(HERE)), run_tag=TAG) if isinstance(each.event, Moved)]
    assert moved == [
        Logged(1, 0, 188, Moved(0, 0, 7, 1024, 180)),
        Logged(2, 0, 14, Moved(16, 0, 1, 320, 187)),
        Logged(2, 0, 44, Moved(16, 0, 2, 1280, 187)),
    ]
    assert Layout(str(HERE)).list_segments() == [
        "000001-0000-000005.fbs",
        "000001-0000-000007.fbs",
        "000001-0000-000009.fbs",
        "000002-0000-000001.fbs",
        "000002-0000-000002.fbs",
        "000002-0000-000003.fbs",
    ]


def test_the_manifest_says_what_is_live() -> None:
    path = HERE / "generations" / "00000021" / "manifest.json"
    manifest = decode_manifest(path.read_bytes(), str(path))
    assert [(each.incarnation, each.segment) for each in manifest.journals] == [(1, 0), (2, 3)]
    assert [(info.name, info.live) for info in manifest.segments] == LIVE


def test_it_is_whole(directory: str) -> None:
    found = verify(directory)
    assert (found.damages, found.generations) == ([], 2)


@virtual
@pytest.mark.parametrize("step", [None, 19])
async def test_the_run_goes_on_to_its_end(directory: str, step: int | None) -> None:
    learner = Learner()
    options = {**OPTIONS, "keep": None}
    before = tree(directory)
    async with pipeline(task(), directory=directory, inline=True, **options) as pipe:
        pipe.attach(learner=learner)
        resumed = await pipe.resume(step=step)
        assert (resumed.step, resumed.parked) == (step or 20, 6)
        await finish(pipe, learner)
    assert sorted(index for _, index in learner.trained) == list(range(COUNT))
    after = tree(directory)
    assert {path: after.get(path) for path in before} == before


async def finish(pipe: Pipeline, learner: Learner) -> None:
    """Give what is parked its reward, and train all that is left."""
    async with pipe.weight_update(version=pipe.version):
        pass
    await pipe.start()
    for uid in list(pipe.ledger.parked):
        await pipe.reward(uid, 1.0)
    step = pipe.ledger.step
    while pipe.ledger.claimed < COUNT or step * 4 < COUNT:
        batch = await pipe.get_batch(4)
        learner.train(batch.step, [group.index for group in batch])
        assert [rollout["n"].tolist() for rollout in batch.rollouts] == [[group.index] for group in batch]
        await pipe.ack(batch.step)
        step = batch.step
        for uid in list(pipe.ledger.parked):
            await pipe.reward(uid, 1.0)
    pipe.ledger.check()


LIVE = [
    ("000002-0000-000002.fbs", 390),
    ("000002-0000-000003.fbs", 0),
    ("000001-0000-000005.fbs", 187),
    ("000001-0000-000007.fbs", 367),
    ("000001-0000-000009.fbs", 187),
]

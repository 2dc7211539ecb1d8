"""What came after ``v1`` in the same format opens in every version after it: parked, by hand, streamed, evaluated."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Pipeline
from pipeline.ledger import STATES
from pipeline.store.frames import scan
from pipeline.store.journal import read_journal
from pipeline.store.layout import JournalName
from tests.golden.make_v1 import RUN_ID, Learner
from tests.golden.make_v1b import EVERY_EVENT, OPTIONS, Levels, exam, tasks
from tests.support.disk import says_no_machine, tree
from tests.support.runs import pipeline

HERE = Path(__file__).parent / "v1b"

FIRST = str(HERE / "journals" / "000001-0000.fbj")
FRAMES = [frame.offset for frame in scan(FIRST, run_tag=int(RUN_ID[:16], 16)) if frame.offset > 192]

virtual = pytest.mark.virtual_time


def opened(directory: str, *texts: str) -> tuple[Pipeline, Levels]:
    given = tasks(*texts)
    source = given[0].source
    assert isinstance(source, Levels)
    return pipeline(given, directory=directory, inline=True, **OPTIONS), source


def items(pipe: Pipeline) -> dict[int, tuple[Any, ...]]:
    """Task, kind, index, state, members (2: finished, 4: unrewarded), rewards, those given later, content."""
    return {
        uid: (
            *(entry.task, entry.kind, entry.index, STATES[entry.state], list(entry.members)),
            *(entry.rewards, entry.given, entry.content),
        )
        for uid, entry in pipe.ledger.entries.items()
    }


def test_nothing_of_the_machine_that_made_it_is_in_the_files() -> None:
    says_no_machine(HERE, most=60_000)


def test_the_new_events_come_back_with_every_field() -> None:
    name = JournalName(8, 0, str(HERE / "every_event.fbj"))
    logged = list(read_journal(name, run_tag=int(RUN_ID[:16], 16), promised=os.path.getsize(name.path)))
    assert [each.event for each in logged] == EVERY_EVENT


@virtual
async def test_every_item_every_share_and_every_lesson_is_recovered(directory: str) -> None:
    pipe, source = opened(directory)
    async with pipe:
        pipe.attach(learner=Learner())
        resumed = await pipe.resume()
        assert (resumed.step, resumed.buffered, resumed.parked, resumed.waiting) == (1, 6, 1, 1)
        assert items(pipe) == ITEMS
        pipe.ledger.check()
        assert pipe.ledger.dropped.ranges() == [(9, 9)]
        assert source.told == TOLD
        assert pipe._run.state.sampler.mixture.shares == {"levels": 2.0, "letters": 3.0}
        totals = pipe.ledger.totals["levels"]
        assert (totals.finished, totals.reward_count, totals.reward_sum) == (10, 8, 9.5)


@virtual
async def test_the_results_of_evaluations_are_found_again(directory: str) -> None:
    pipe, _ = opened(directory)
    async with pipe:
        pipe.attach(learner=Learner())
        await pipe.resume()
        await pipe.start(weights_current=True)
        result = await pipe.evaluate(exam())
        assert [(each.index, each.reward, each.reused) for each in result] == [(n, 1.0, True) for n in range(3)]
        assert [rollout["text"].tolist() for rollout in result.rollouts] == [[120], [121], [122]]


@virtual
async def test_the_run_goes_on_to_its_end_and_old_files_stay_as_they_are(directory: str) -> None:
    before = tree(directory)
    pipe, source = opened(directory, "last")
    trained: dict[int, list[float]] = {}
    async with pipe:
        pipe.attach(learner=Learner())
        await pipe.resume()
        await pipe.start(weights_current=True)
        await pipe.reward(5, 2.5, member=1)

        async def people() -> None:
            while True:
                await anyio.sleep(5)
                for uid in list(pipe.ledger.parked):
                    await pipe.reward(uid, 1.5, member=1)

        async with anyio.create_task_group() as group:
            group.start_soon(people)
            async for batch in pipe.batches(groups=2):
                trained |= {each.uid: [rollout.reward for rollout in each.rollouts] for each in batch}
            group.cancel_scope.cancel()
        pipe.ledger.check()
    assert (trained[0], trained[5]) == ([0.0, 7.5], [0.0, 2.5])
    assert (trained[2], trained[10]) == ([1.0], [1.0])
    assert sorted(trained) == [0, 2, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14]
    assert len(source.told) == len(TOLD) + 4
    after = tree(directory)
    assert {path: after[path] for path in before} == before


def content(value: bytes) -> bytes:
    """What the journal keeps of a text as the stream gave it."""
    return b"\x81\xa4text" + bytes([0xA0 + len(value)]) + value


PAIR = b"\x81\xa8\x00forebay\x92\xa5tuple\x92\x01\x81\xa8\x00forebay\x92\xa3int\xb40x400000000000000000"
TOLD = [(1, 0.5), (3, 0.5), (0, 3.75)]
ITEMS: dict[int, tuple[Any, ...]] = {
    0: ("levels", "train", 0, "buffered", [2, 2], 7.5, ((1, 7.5),), b"\x82\xa1n\x00\xa4told\x00"),
    2: ("letters", "external", -1, "buffered", [2], 1.0, (), b"\x82\xa4text\xa7by hand\xa4pair" + PAIR),
    4: ("letters", "train", 0, "buffered", [2], 1.0, (), content(b"a")),
    5: ("levels", "train", 2, "parked", [2, 4], 0.0, (), b"\x82\xa1n\x02\xa4told\x00"),
    6: ("letters", "train", 1, "buffered", [2], 1.0, (), content("é".encode())),
    7: ("levels", "train", 3, "buffered", [2, 2], 1.0, (), b"\x82\xa1n\x03\xa4told\x00"),
    8: ("letters", "train", 2, "buffered", [2], 1.0, (), content("\U0001f600".encode())),
    10: ("letters", "train", 3, "waiting", [0], 0.0, (), content(b"more")),
}


@virtual
@pytest.mark.parametrize("cut", FRAMES)
async def test_cut_after_any_frame_the_first_life_goes_on_to_its_end(directory: str, cut: int) -> None:
    """What one verb did lies in one frame: half of it is never found."""
    shutil.rmtree(Path(directory, "generations", "00000001"))
    shutil.rmtree(Path(directory, "generations", "00000002"))
    Path(directory, "journals", "000002-0000.fbj").unlink()
    journal = Path(directory, "journals", "000001-0000.fbj")
    for segment in Path(directory, "segments").glob("000002-*"):
        segment.unlink()
    os.truncate(journal, cut)
    pipe, source = opened(directory, "last")
    trained: list[tuple[str, int, int]] = []
    async with pipe, anyio.create_task_group() as group:
        pipe.attach(learner=Learner())
        await pipe.resume()
        pipe.ledger.check()
        for entry in pipe.ledger.entries.values():
            assert entry.kind != "external" or entry.content is not None
        await pipe.start(weights_current=True)

        async def people() -> None:
            while True:
                await anyio.sleep(5)
                for uid in list(pipe.ledger.parked):
                    await pipe.reward(uid, 1.5, member=1)

        group.start_soon(people)
        async for batch in pipe.batches(groups=2):
            trained += [(each.task, each.epoch, each.index) for each in batch]
        pipe.ledger.check()
        group.cancel_scope.cancel()
    assert [each for each in sorted(trained) if each[0] == "levels"] == [
        ("levels", e, n) for e in (0, 1) for n in range(4)
    ]
    assert len(source.told) == 8

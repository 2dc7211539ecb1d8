"""A salvage of a run that is whole is a fork of it; one that is not keeps what the journals still say of each item."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Pipeline
from pipeline.checkpoint import salvage, verify
from pipeline.checkpoint.draws import Drawn, Draws
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.payloads import without_lost
from pipeline.checkpoint.remains import Hole, read_remains
from pipeline.ledger import ConsumerHalf
from pipeline.records import AnyEvent, Claimed, Dropped, EpochBegan, HeldItem, Opened, SourceMark
from pipeline.sampler import Sampler
from pipeline.sampler.order import shuffled
from pipeline.store.codec import PayloadHeader
from pipeline.store.files import OsFiles
from pipeline.store.journal import JournalPosition, Logged
from pipeline.store.layout import JournalName
from pipeline.store.writer import StoreWriter
from tests.golden import make_v1, make_v1b, make_v1c, make_v1d
from tests.support.disk import flush, new_run
from tests.support.runs import pipeline
from tests.support.salvaging import fingerprint, flip

HERE = Path(__file__).parents[1] / "golden"


def golden(version: str, directory: str) -> tuple[Pipeline, make_v1.Learner]:
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "v1": (make_v1.tasks, make_v1.OPTIONS),
        "v1b": (make_v1b.tasks, make_v1b.OPTIONS),
        "v1d": (make_v1d.task, make_v1d.OPTIONS),
        "v1c": (make_v1c.task, {**make_v1c.OPTIONS, "staleness_policy": "reroll"}),
    }
    given, options = made[version]
    return pipeline(given(), directory=directory, inline=True, **options), make_v1.Learner()


def copied(version: str, target: Path) -> str:
    shutil.copytree(HERE / version, target, ignore=shutil.ignore_patterns("every_event.fbj"))
    return str(target)


async def recovered(version: str, directory: str, **resume: Any) -> dict[str, Any]:
    """Everything that a resume finds."""
    pipe, learner = golden(version, directory)
    async with pipe:
        pipe.attach(learner=learner)
        resumed = await pipe.resume(**resume)
        pipe.ledger.check()
        state = pipe._run.state
        kept = {(uid, member): (part.oldest, part.attempt, part.blob) for uid, member, part in state.partials.items()}
        return {
            "ledger": {**pipe.ledger.snapshot(), "entries": entries(pipe)},
            "partials": kept,
            "cursors": state.sampler.cursors,
            "shares": (state.sampler.mixture.shares, state.sampler.mixture.drawn, state.sampler.inherited_shares),
            "pending": list(state.pending),
            "progress": pipe.progress,
            "learner": learner.trained,
            "resumed": (resumed.step, resumed.version, resumed.buffered, resumed.waiting, resumed.repeated),
        }


def entries(pipe: Pipeline) -> dict[int, dict[str, Any]]:
    """All but the incarnation in which a member finished last, which is another in another run."""
    found = pipe.ledger.snapshot()["entries"]
    return {uid: {name: value for name, value in entry.items() if name != "made"} for uid, entry in found.items()}


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("version", "step"),
    [*((version, step) for version in ("v1", "v1b", "v1c") for step in (None, 0, 1)), ("v1d", None), ("v1d", 19)],
)
async def test_a_salvage_of_a_whole_run_is_a_fork_of_it(tmp_path: Path, version: str, step: int | None) -> None:
    source = copied(version, tmp_path / "source")
    before = fingerprint(source)
    found = salvage(source, tmp_path / "salvaged", step=step)
    assert (found.losses, found.members_again) == ([], 0)
    assert fingerprint(source) == before
    fork = await recovered(version, str(tmp_path / "fork"), from_=source, step=step)
    # The fork has one more life behind it: a resume of its own makes them alike.
    assert await recovered(version, str(tmp_path / "salvaged")) == await recovered(version, str(tmp_path / "fork"))
    assert fork["resumed"][0] == found.step


@pytest.mark.virtual_time
@pytest.mark.parametrize("version", ["v1", "v1b", "v1c", "v1d"])
async def test_any_byte_may_be_damaged(tmp_path: Path, version: str) -> None:
    """Groups, partial rollouts, parked ones, streams, items by hand, a source that learns: what is left goes on."""
    source = Path(copied(version, tmp_path / "source"))
    listed: Counter[str] = Counter()
    files = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    places = [(path, at) for path in files for at in range(5, (source / path).stat().st_size, 1501)]
    for number, (path, at) in enumerate(places):
        damaged, target = tmp_path / f"damaged{number}", tmp_path / f"target{number}"
        shutil.copytree(source, damaged)
        flip(damaged / path, at)
        found = salvage(damaged, target)
        named = any(loss.path == str(path) for loss in found.losses)
        # What is not: a torn end, a payload that nothing needs any more, a field of the marker that has a default.
        assert named or path.parts[0] != "generations"
        listed[path.parts[0]] += named
        assert verify(str(target)).whole
        await recovered(version, str(target))
    assert min(listed[folder] for folder in ("generations", "journals", "segments")) > 0


def journal(folder: Path, events: list[AnyEvent], *, marks: tuple[int, ...] = ()) -> tuple[JournalName, int]:
    """Write a journal with a record for each event, and marks after some."""
    layout, run = new_run(folder)
    writer = StoreWriter(layout, OsFiles(), run_tag=run.tag, incarnation=1)
    for number, event in enumerate(events, 1):
        writer.append(event)
        flush(writer)
        if number in marks:
            writer.sync()
    writer.close()
    return layout.list_journals()[0], run.tag


EVENTS: list[AnyEvent] = [Opened(1), *(Claimed(uid, "t", 0, uid, uid) for uid in range(8))]


def numbers_of(name: JournalName, tag: int, promised: int = 0) -> list[Any]:
    """Sequence of each event, and (first, events) of each hole."""
    position = JournalPosition(incarnation=1, sequence=promised)
    return [
        (each.first, each.events) if isinstance(each, Hole) else each.sequence
        for each in read_remains(name, tag, position)
    ]


def test_holes_are_told_by_the_numbers_of_the_events(tmp_path: Path) -> None:
    name, tag = journal(tmp_path, EVENTS)
    assert numbers_of(name, tag) == list(range(1, 10))
    flip(Path(name.path), 3 * 128 + 20)
    flip(Path(name.path), 4 * 128 + 70)
    assert numbers_of(name, tag) == [1, 2, 3, (4, 2), 6, 7, 8, 9]
    holes = [each for each in read_remains(name, tag, None) if isinstance(each, Hole)]
    assert [(hole.offset, hole.bytes) for hole in holes] == [(384, 256)]


def test_a_torn_end_is_no_hole_unless_more_was_promised(tmp_path: Path) -> None:
    name, tag = journal(tmp_path, EVENTS)
    os.truncate(name.path, 8 * 128 + 70)
    assert numbers_of(name, tag, promised=8) == list(range(1, 9))
    assert numbers_of(name, tag, promised=9) == [*range(1, 9), (9, 1)]


def test_a_mark_tells_of_events_before_it(tmp_path: Path) -> None:
    name, tag = journal(tmp_path, EVENTS, marks=(9,))
    flip(Path(name.path), 8 * 128 + 70)
    assert numbers_of(name, tag) == [*range(1, 9), (9, 1)]


def test_a_record_of_another_run_is_no_event(tmp_path: Path) -> None:
    name, tag = journal(tmp_path, EVENTS)
    assert [each for each in read_remains(name, tag + 1, None) if isinstance(each, Logged)] == []


SIZE = 20
LINE = Manifest(
    tasks={
        "a": {"group_size": 3, "min_group": 2, "shuffle": True, "source": f"s ({SIZE} items, first item's digest x)"},
        "b": {"group_size": 1, "min_group": 1, "shuffle": False, "source": "s (endless, first item's digest none)"},
    }
)


def index_of(position: int, epoch: int = 0) -> int:
    return int(shuffled(7, epoch, np.array([position]), SIZE)[0])


def known(*events: AnyEvent, line: Manifest = LINE) -> tuple[Draws, Sampler]:
    draws, sampler = Draws(line, 7), Sampler((), 7)
    for event in events:
        draws.note(event, sampler)
        sampler.apply(event)
    return draws, sampler


def began(task: str, epoch: int = 0) -> EpochBegan:
    return EpochBegan(task, epoch, SIZE if task == "a" else -1, SourceMark())


def claim(uid: int, task: str, position: int) -> Claimed:
    return Claimed(uid, task, 0, position, index_of(position) if task == "a" else position, 3 if task == "a" else 1)


def test_a_payload_tells_which_item_of_a_hole_was_trained() -> None:
    draws, sampler = known(began("a"), claim(0, "a", 0), claim(3, "a", 3))
    filled = draws.fill(sampler, ConsumerHalf(trained=[(2, 2)]), {}, {2: Drawn("a", 0, index_of(1))}, 50)
    assert filled.events == [
        Claimed(2, "a", 0, 1, index_of(1), 3, 1),
        Claimed(50, "a", 0, 2, index_of(2), 3, 1),
    ]
    assert [each.uid for each in filled.again] == [50]


def test_what_was_trained_behind_the_last_event_moves_the_cursor_and_begins_epochs() -> None:
    draws, sampler = known()
    located = {7: Drawn("a", 1, index_of(1, epoch=1))}
    filled = draws.fill(sampler, ConsumerHalf(trained=[(7, 7)]), {}, located, 50)
    again = {(each.epoch, each.position) for each in filled.again}
    assert again == {(0, position) for position in range(SIZE)} | {(1, 0)}
    assert filled.events[-1] == Claimed(7, "a", 1, 1, index_of(1, epoch=1), 3, 2)


def test_what_may_have_been_trained_is_given_up_where_nothing_tells() -> None:
    half = ConsumerHalf(trained=[(2, 2)], trained_by_task={"a": (1, 3, 0), "b": (0, 0, 0)})
    draws, sampler = known(
        began("a"), began("b"), claim(0, "a", 0), claim(1, "b", 0), claim(5, "a", 3), claim(6, "b", 2)
    )
    filled = draws.fill(sampler, half, {}, {}, 50)
    # Uids 2, 3 and 4 were positions 1 and 2 of a, and 1 of b; one of a's was trained.
    assert [(each.task, each.position) for each in filled.again] == [("b", 1)]
    assert [(each.task, each.position) for each in filled.given_up] == [("a", 2)]
    assert Dropped(filled.given_up[0].uid, "discarded") in filled.events
    assert any(isinstance(each, Claimed) and each.uid == 2 for each in filled.events)


def test_one_task_alone_is_drawn_in_the_order_of_the_uids() -> None:
    line = Manifest(tasks={"b": LINE.tasks["b"]})
    draws, sampler = known(began("b"), claim(0, "b", 0), claim(4, "b", 4), line=line)
    filled = draws.fill(sampler, ConsumerHalf(trained=[(2, 2), (6, 6)]), {3: "failed"}, {}, 50)
    assert [each.position for each in filled.again] == [1, 5]
    assert filled.given_up == []
    uids = {each.position: each.uid for each in filled.events if isinstance(each, Claimed)}
    assert uids == {1: 50, 2: 2, 3: 3, 5: 51, 6: 6}
    assert [each for each in filled.events if isinstance(each, Dropped)] == [Dropped(3, "failed")]


def test_an_item_of_a_stream_cannot_be_had_again() -> None:
    draws, sampler = known(began("b"), Claimed(0, "b", 0, 0, 0, content=b"x"), Claimed(2, "b", 0, 2, 2, content=b"y"))
    filled = draws.fill(sampler, ConsumerHalf(), {}, {}, 50)
    assert (filled.again, [each.position for each in filled.given_up]) == ([], [1])


def test_an_item_without_some_of_its_payloads_is_what_the_others_make() -> None:
    members = bytes([2, 2, 3, 4])  # finished twice, given up, waits for its reward
    item = HeldItem(
        9, "a", 0, 4, 1, 4, 2, "train", None, members, (0, 0, 3, 0), (1, 1, 3, 1), life=1, deaths=2, order=8, oldest=3,
        newest=7, effective=2, rewards=5.0, tokens=60, given=((0, 4.0), (1, 1.0)), ages=(0, 3, 10, 1, 7, 20),
    )  # fmt: skip
    headers = {1: PayloadHeader(9, "a", member=1, reward=0.5, oldest=5, newest=7, tokens=20)}
    headers[3] = PayloadHeader(9, "a", member=3, oldest=4, newest=6, tokens=30)
    left = without_lost(item, {0}, headers)
    assert (list(left.members), left.life, left.deaths, left.order) == ([0, 2, 3, 4], 2, 0, 0)
    assert (left.oldest, left.newest, left.effective, left.rewards, left.tokens) == (4, 7, 2, 1.0, 50)
    assert (left.given, left.ages) == (((1, 1.0),), (1, 7, 20))
    nothing = without_lost(item, {0, 1, 3}, {})
    assert (list(nothing.members), nothing.oldest, nothing.rewards, nothing.tokens) == ([0, 0, 3, 0], None, 0.0, 0)

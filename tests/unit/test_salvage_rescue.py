"""Folding journals with holes: of each item its first events without a gap, and nothing that needs what is missing."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.rescue import Rescue, rescue
from pipeline.ledger import STATES, ConsumerHalf
from pipeline.records import AnyEvent, Claimed, Dropped, EpochBegan, Finished, Opened, Reopened, Started
from pipeline.store.files import OsFiles
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import Layout, RunFile
from pipeline.store.writer import StoreWriter
from tests.support.disk import flush, new_run
from tests.support.salvaging import flip

LENGTH = 20


def write(
    layout: Layout, run: RunFile, incarnation: int, events: list[AnyEvent], *, lost: tuple[int, ...] = ()
) -> None:
    """Write a journal, a record for each event; those in ``lost``, by their number, are damaged."""
    writer = StoreWriter(layout, OsFiles(), run_tag=run.tag, incarnation=incarnation)
    places = []
    for event in events:
        places.append(writer.journal_bytes)
        writer.append(event)
        flush(writer)
    writer.close()
    for number in lost:
        flip(Path(layout.journal(incarnation, 0)), places[number - 1] + 64)


def claim(uid: int) -> Claimed:
    return Claimed(uid, "t", 0, uid, uid)


def done(uid: int, tokens: int) -> list[AnyEvent]:
    return [Started(uid), Finished(uid, 0, 1, 1.0, 0, 0, 1, 0, 10, tokens)]


def folded(layout: Layout, run: RunFile, line: Manifest | None = None) -> Rescue:
    return rescue(layout, run.tag, line or Manifest(), [], ConsumerHalf())


def states(fold: Rescue) -> dict[int, tuple[str, int]]:
    """State and tokens of each item."""
    return {uid: (STATES[entry.state], entry.tokens) for uid, entry in fold.ledger.entries.items()}


def test_an_item_from_before_a_hole_stays_as_it_was_and_one_from_behind_it_is_all_there(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path)
    before: list[AnyEvent] = [Opened(1), EpochBegan("t", 0, LENGTH), claim(0), *done(0, 3), claim(1), Started(1)]
    hole: list[AnyEvent] = [Reopened(0, "expired"), claim(2), Started(2)]
    behind: list[AnyEvent] = [*done(0, 5), *done(1, 7), *done(2, 9), claim(3), *done(3, 11), claim(4), Started(4)]
    write(layout, run, 1, [*before, *hole, *behind], lost=(8, 9, 10))
    fold = folded(layout, run)
    assert states(fold) == {0: ("buffered", 3), 1: ("running", 0), 3: ("buffered", 11), 4: ("running", 0)}
    ((found, left_out),) = fold.holes
    assert (found.first, found.events, left_out) == (8, 3, 6)
    assert fold.ledger.totals["t"].finished == 2
    assert fold.sampler.cursors["t"].position == 5


def test_what_was_dropped_behind_a_hole_is_dropped(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path)
    events: list[AnyEvent] = [Opened(1), EpochBegan("t", 0, LENGTH), claim(0), claim(1), claim(2)]
    write(layout, run, 1, [*events, Dropped(0, "failed"), Dropped(1, "filtered")], lost=(4,))
    fold = folded(layout, run)
    assert set(fold.ledger.entries) == {2}
    assert (fold.ledger.state(0), fold.ended) == ("dropped", {1: "filtered"})


def test_a_later_journal_is_read_like_what_lies_behind_a_hole(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path)
    write(layout, run, 1, [Opened(1), EpochBegan("t", 0, LENGTH), claim(0), claim(1), claim(2)], lost=(4,))
    write(layout, run, 2, [Opened(2), *done(0, 3), *done(1, 5), claim(3), *done(3, 7)])
    # An item from behind the hole may be gone on with; of one from before it, events may be missing.
    assert states(folded(layout, run)) == {0: ("waiting", 0), 2: ("waiting", 0), 3: ("buffered", 7)}


def test_a_life_without_a_journal_is_a_hole_though_no_generation_tells_of_it(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path)
    write(layout, run, 1, [Opened(1), EpochBegan("t", 0, LENGTH), claim(0)])
    write(layout, run, 3, [Opened(3), claim(4)])
    fold = folded(layout, run)
    ((hole, _),) = fold.holes
    assert (hole.name.path, hole.offset) == (layout.journal(2, 0), None)
    assert fold.torn
    assert folded(layout, run, Manifest(base=3, incarnation=3)).holes == []  # that line needs none before it


def test_what_was_set_aside_stays_so_though_the_event_that_says_it_is_damaged(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path)
    write(layout, run, 1, [Opened(1), EpochBegan("t", 0, LENGTH), claim(0), claim(1), claim(2)])
    write(layout, run, 2, [Opened(2, discarded=[(1, 0, 3)]), claim(1), *done(1, 7)], lost=(1,))
    positions = [JournalPosition(incarnation=1, sequence=3), JournalPosition(incarnation=2, sequence=1)]
    fold = folded(layout, run, Manifest(incarnation=2, journals=positions))
    assert states(fold) == {0: ("running", 0), 1: ("buffered", 7)}
    assert fold.set_aside == 2


def test_an_epoch_whose_beginning_is_lost_is_begun_as_the_manifest_describes_it(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path)
    write(layout, run, 1, [Opened(1), EpochBegan("t", 0, LENGTH), claim(0)], lost=(2,))
    line = Manifest(tasks={"t": {"source": "rows (with a word) (20 items, first item's digest ab)"}})
    cursor = folded(layout, run, line).sampler.cursors["t"]
    assert (cursor.epoch, cursor.position, cursor.length) == (0, 1, LENGTH)
    assert (cursor.mark.kind, cursor.mark.length) == ("rows (with a word)", LENGTH)

"""Journals: cut or damaged anywhere, what is read is a prefix of what was written, or an error of ours."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from pipeline.errors import Damaged, NewerFormat, OtherRun, StoreError
from pipeline.records import (
    Added,
    Aged,
    AnyEvent,
    BatchHint,
    Claimed,
    Closed,
    Dropped,
    EpochBegan,
    Evaluated,
    Failed,
    Feedback,
    Finished,
    HeldItem,
    Inherited,
    Interrupted,
    Mixed,
    Moved,
    Opened,
    Parked,
    PartSaved,
    Reopened,
    Reserved,
    Rewarded,
    SourceMark,
    Started,
)
from pipeline.store.frames import EVENTS, SYNCED, encode_frame, scan
from pipeline.store.journal import encode_events, read_journal, read_journals
from pipeline.store.layout import JournalName, Layout, RunFile
from pipeline.store.writer import StoreWriter
from tests.support.disk import events_of, flush, new_run, new_writer

EVENTS_OF_ALL_KINDS: list[AnyEvent] = [
    Opened(1, 0, -1, 0, 0, 2**62, "host", 17, 1.5, [(1, 0, 3)], 3),
    Mixed({"a": 0.5, "é \U0001f600": 3.0}),
    EpochBegan("a", 0, -1, SourceMark("kind", -1, {0: "d0", 5: "d5"}), True),
    Claimed(2**63, "a", 0, 4, 2, 3, 2, "train", b"\x00content"),
    Claimed(1, "a", 0, 0, 9),
    Started(1, 2, 3, 7, "policy"),
    Failed(1, 2, 3, "timeout", "ValueError: \0 é", True, 0.25),
    Interrupted(1, 0, 1, "shutdown", True),
    Finished(1, 0, 2, -0.0, 5, 7, 3, 2**40, 100, 12, 0.125, "p"),
    PartSaved(1, 0, 2, 5, 7, 3, 2**40, 100),
    Parked(1, 1, 2, 5, 7, 3, 2**40, 100, 12, 0.125, "p"),
    Rewarded(1, 1, 2, -0.0),
    Mixed({"a": 5.0}, {"a": 0.5}),
    Feedback("a", 1, 9, 0.25),
    Evaluated("a", 7, 9, 2, 2**63 + 1, -0.0, 7, 8, "0f", 3, 2**40, 100, 12, 0.125),
    Aged(1, 0, {5: 40, 7: 2}),
    Added(1, 0, 2, 5, 2**40, 100, 7, 3, 2**40, 4096),
    Reserved(
        [(6, "a", 1, 2, 9), (2**40, "b", 0, 0, 0)],
        2**40 + 1,
        [EpochBegan("a", 1, 9)],
        {"a": (1, 4), "b": (0, 1)},
        {"a": 5},
    ),
    Reopened(1, "expired"),
    Reopened(1, "expired", [0, 2], 5, 7, -0.5, 12),
    Dropped(1, "quarantined"),
    BatchHint(4, [1, 2**63], [0, 2]),
    Closed(9.5),
    Inherited(
        [
            HeldItem(
                3,
                "a",
                0,
                1,
                2,
                2,
                1,
                "train",
                b"c",
                b"\x02\x00",
                (1, 0),
                (2, 1),
                1,
                2,
                3,
                4,
                5,
                6,
                7,
                8,
                0.5,
                9,
                ((0, 1, 0, 2, 64, 10),),
            )
        ],
        {"a": (0, 3, -1, SourceMark("kind", -1, {0: "d0"}), 0)},
        {"a": 0.5},
        {"a": 3},
        {"a": {"claimed": 4}},
        [(0, 2)],
        4,
    ),
    Moved(2**40, 1, 2, 64, 33_000),
]


@pytest.fixture
def run(tmp_path: Path) -> tuple[Layout, RunFile]:
    return new_run(tmp_path / "run")


def write(writer: StoreWriter, *batches: list[AnyEvent]) -> None:
    for batch in batches:
        for event in batch:
            writer.append(event)
        flush(writer)


def journal_of(layout: Layout) -> Path:
    (name,) = layout.list_journals()
    return Path(name.path)


def test_every_kind_of_event_comes_back_equal(run: tuple[Layout, RunFile]) -> None:
    writer = new_writer(*run)
    write(writer, EVENTS_OF_ALL_KINDS[:4], EVENTS_OF_ALL_KINDS[4:])
    writer.sync()
    writer.close()
    assert events_of(*run) == EVENTS_OF_ALL_KINDS
    assert {type(event) for event in EVENTS_OF_ALL_KINDS} == set(AnyEvent.__args__), "a new event belongs here too"
    numbers = [logged.sequence for logged in read_journals(run[0], run_tag=run[1].tag)]
    assert numbers == list(range(1, len(EVENTS_OF_ALL_KINDS) + 1))


@pytest.fixture
def small(run: tuple[Layout, RunFile]) -> tuple[Layout, RunFile, bytes, list[AnyEvent]]:
    """A journal of a few hundred bytes: four frames of events, a synced mark, and two frames after it."""
    writer = new_writer(*run)
    events: list[AnyEvent] = [Dropped(n, "expired") for n in range(7)]
    write(writer, events[:1], events[1:3], events[3:4], events[4:5])
    writer.sync()
    write(writer, events[5:6], events[6:])
    writer.close()
    return *run, journal_of(run[0]).read_bytes(), events


def test_every_prefix_of_a_journal_reads_as_a_prefix_of_its_events(
    small: tuple[Layout, RunFile, bytes, list[AnyEvent]],
) -> None:
    layout, run, raw, events = small
    path, counts = journal_of(layout), set()
    for cut in range(len(raw) + 1):
        path.write_bytes(raw[:cut])
        found = events_of(layout, run)
        assert found == events[: len(found)]
        counts.add(len(found))
    assert found == events
    assert counts == {0, 1, 3, 4, 5, 6, 7}, "an event is there as soon as its frame is whole"


def test_every_flipped_byte_is_damage_before_the_mark_and_ends_the_journal_after_it(
    small: tuple[Layout, RunFile, bytes, list[AnyEvent]],
) -> None:
    layout, run, raw, events = small
    path = journal_of(layout)
    frames = list(scan(str(path), run_tag=run.tag))
    ends = [frame.offset + 64 + frame.header.length for frame in frames]
    padding = {place for frame, end in zip(frames, ends, strict=True) for place in range(end, -(-end // 64) * 64)}
    mark = next(frame.offset for frame in frames if frame.header.kind == SYNCED)
    for place in range(len(raw)):
        for mask in (0x01, 0xFF):
            bad = bytearray(raw)
            bad[place] ^= mask
            path.write_bytes(bad)
            if place in padding:
                assert events_of(layout, run) == events
            elif place < mark:
                with pytest.raises(Damaged, match=f"{path} at byte {place // 128 * 128}:"):
                    events_of(layout, run)
            else:
                assert events_of(layout, run) == events[: 5 + max(0, place - mark - 64) // 128]


def test_every_flipped_byte_of_what_a_generation_counts_on_is_damage(run: tuple[Layout, RunFile]) -> None:
    writer = new_writer(*run)
    write(writer, [Dropped(1, "x" * 54)], [Dropped(2, "y" * 54)])
    writer.close()
    path = journal_of(run[0])
    raw = path.read_bytes()
    assert len(raw) == 2 * 128, "two frames without padding"
    for place in range(len(raw)):
        bad = bytearray(raw)
        bad[place] ^= 0x04
        path.write_bytes(bad)
        with pytest.raises(Damaged, match=f"{path} at byte {place // 128 * 128}:"):
            events_of(*run, promised=len(raw))


def test_a_journal_shorter_than_promised_is_damage(run: tuple[Layout, RunFile]) -> None:
    writer = new_writer(*run)
    write(writer, [Dropped(0, "x")], [Dropped(1, "x")])
    position, _ = writer.sync()
    writer.close()
    assert (position.incarnation, position.rank, position.sequence) == (1, 0, 2)
    path = journal_of(run[0])
    assert len(events_of(*run, promised=position.bytes)) == 2
    os.truncate(path, position.bytes - 1)
    assert len(events_of(*run)) in (1, 2)
    os.truncate(path, 128)
    with pytest.raises(Damaged, match=r"at byte 128"):
        events_of(*run, promised=position.bytes)


def test_a_missing_journal_that_a_generation_counts_on_is_damage(run: tuple[Layout, RunFile]) -> None:
    layout, marker = run
    writer = new_writer(layout, marker)
    write(writer, [Dropped(0, "x")])
    writer.close()
    promised = {(1, 0): 64, (2, 0): 64, (3, 0): 0}
    with pytest.raises(Damaged, match=r"000002-0000.fbj: missing"):
        list(read_journals(layout, run_tag=marker.tag, promised=promised))
    assert len(list(read_journals(layout, run_tag=marker.tag, promised={(1, 0): 64, (3, 0): 0}))) == 1


def test_journals_are_read_in_the_order_of_their_numbers(run: tuple[Layout, RunFile]) -> None:
    layout, marker = run
    for incarnation in (10, 9, 1, 1_000_000, 999_999):
        writer = new_writer(layout, marker, incarnation=incarnation)
        write(writer, [Dropped(incarnation, "x")])
        writer.close()
    (Path(layout.journals) / "notes.txt").write_text("no journal")
    (Path(layout.journals) / "000002-0000.fbj.bak").write_text("no journal")
    found = [logged.incarnation for logged in read_journals(layout, run_tag=marker.tag)]
    assert found == [1, 9, 10, 999_999, 1_000_000]


def test_a_journal_of_another_run_or_under_another_name_is_refused(run: tuple[Layout, RunFile], tmp_path: Path) -> None:
    layout, marker = run
    writer = new_writer(layout, marker)
    write(writer, [Dropped(0, "x")])
    writer.close()
    name = JournalName(1, 0, str(journal_of(layout)))
    other = new_run(tmp_path / "other")[1]
    with pytest.raises(OtherRun):
        list(read_journal(name, run_tag=other.tag))
    renamed = Path(layout.journal(7, 0))
    renamed.write_bytes(Path(name.path).read_bytes())
    with pytest.raises(Damaged, match=r"incarnation 1, rank 0.*says 7, 0"):
        list(read_journals(layout, run_tag=marker.tag))


def raw_frame(run: RunFile, payload: bytes, sequence: int = 1, number: int = 1) -> bytes:
    frame = encode_frame(EVENTS, payload, incarnation=1, rank=0, run_tag=run.tag, sequence=sequence, number=number)
    return b"".join(frame)


def test_an_unknown_event_is_a_newer_format(run: tuple[Layout, RunFile]) -> None:
    layout, marker = run
    path = Path(layout.journal(1, 0))
    path.write_bytes(raw_frame(marker, msgspec.msgpack.encode([["teleport", 1, 2]])))
    with pytest.raises(NewerFormat, match=r"at byte 0.*teleport"):
        events_of(layout, marker)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91\xa4", b"\xff" * 40, msgspec.msgpack.encode("no events")])
def test_a_whole_frame_with_no_events_in_it_is_an_error_of_ours(run: tuple[Layout, RunFile], payload: bytes) -> None:
    layout, marker = run
    Path(layout.journal(1, 0)).write_bytes(raw_frame(marker, payload))
    with pytest.raises(StoreError, match=r"at byte 0"):
        events_of(layout, marker)


def test_a_field_added_later_is_left_out_by_old_files_and_passed_over_by_old_readers(
    run: tuple[Layout, RunFile],
) -> None:
    """The rules of evolution: missing at the end takes the default, more at the end is ignored."""
    layout, marker = run
    short, long = ["done", 7, 0, 1, 0.5, 3, 4], ["drop", 7, "failed", "a field of the future", 9]
    Path(layout.journal(1, 0)).write_bytes(raw_frame(marker, msgspec.msgpack.encode([short, long]), number=2))
    finished, dropped = events_of(layout, marker)
    assert finished == Finished(7, 0, 1, 0.5, 3, 4, -1, 0, 0, 0, 0.0, "")
    assert dropped == Dropped(7, "failed")


def test_a_gap_in_the_numbers_of_events_is_damage(run: tuple[Layout, RunFile]) -> None:
    layout, marker = run
    one = encode_events([Dropped(0, "x")])
    Path(layout.journal(1, 0)).write_bytes(raw_frame(marker, one) + raw_frame(marker, one, sequence=3))
    with pytest.raises(Damaged, match=r"at byte 128: event 3 follows, but 2 was expected"):
        events_of(layout, marker)

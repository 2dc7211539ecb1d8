"""The disk fails at any call: the error is raised by every later call, and nothing unwritten is acknowledged."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import WriteFailed
from pipeline.locations import Location
from pipeline.records import Dropped, Finished
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import Layout, RunFile
from pipeline.store.segments import PayloadReader
from pipeline.store.writer import StoreWriter
from tests.support.disk import Killed, ScriptedFiles, events_of, flush, new_run, new_writer, no_space


def broken() -> OSError:
    return OSError(errno.EIO, "Input/output error")


class Life:
    """A writer's life: what it was given, and what it said is on the disk."""

    def __init__(self, layout: Layout, run: RunFile, files: ScriptedFiles) -> None:
        self.layout, self.run, self.files = layout, run, files
        self.writer: StoreWriter | None = None
        self.appended = self.acknowledged = 0
        self.failed_at = ""
        self.synced = JournalPosition(incarnation=1)

    def go(self) -> None:
        """Ten payloads in small segments, written in twos and synced now and then, and the end."""
        writer = self.writer = new_writer(self.layout, self.run, self.files, segment_bytes=300)
        for uid in range(10):
            place = writer.place(bytes([uid]) * 100, uid, 0, 0)
            writer.append(Finished(uid, 0, 1, 0.0, 0, 0, place.segment, place.offset, 100))
            self.appended += 1
            if uid % 2:
                batch = writer.take()
                writer.write(batch)
                writer.done(batch)
                self.acknowledged = self.appended
            if uid % 4 == 3:
                self.synced, _ = writer.sync()
        writer.close()


def lives(tmp_path: Path, error: Callable[[], BaseException], *, torn: bool = False, after: bool = False) -> list[Life]:
    """One life for each call that can fail, ended by it."""
    found = []
    for call in range(1, 100):
        layout, run = new_run(tmp_path / str(call))
        life = Life(layout, run, ScriptedFiles(call, error, torn=torn, after=after))
        expected = Killed if isinstance(error(), Killed) else WriteFailed
        try:
            life.go()
        except expected:
            life.failed_at = life.files.calls[call - 1]
            found.append(life)
        else:
            assert len(life.files.calls) < call, "a call failed and nobody was told"
            return found
    raise AssertionError("the scripted life makes too many calls")


FAULTS = pytest.mark.parametrize(
    ("error", "torn", "after"),
    [(no_space, False, False), (no_space, True, False), (broken, False, True)],
    ids=["full", "full, half written", "failed though done"],
)


@FAULTS
def test_a_failed_call_is_raised_by_every_later_call(
    tmp_path: Path, error: Callable[[], OSError], torn: bool, after: bool
) -> None:
    found = lives(tmp_path, error, torn=torn, after=after)
    assert len(found) > 25
    assert {life.failed_at for life in found} >= {"create", "write", "sync", "sync_directory", "close"}
    for life in found[1:]:  # the first could not even make its journal
        writer = life.writer
        assert writer is not None
        first = writer.error
        assert first is not None
        assert isinstance(first.__cause__, OSError)
        assert str(first.__cause__) in str(first)
        assert life.layout.directory in str(first)
        before = list(life.files.calls)
        writer.append(Dropped(1, "failed"))
        with pytest.raises(WriteFailed) as again:
            flush(writer)
        assert again.value is first
        with pytest.raises(WriteFailed):
            writer.sync()
        assert life.files.calls == before, "after a failure nothing more is written"
        writer.close()
        assert life.files.open == set(), "every descriptor is closed"


@FAULTS
def test_nothing_is_acknowledged_that_was_not_written(
    tmp_path: Path, error: Callable[[], OSError], torn: bool, after: bool
) -> None:
    for life in lives(tmp_path, error, torn=torn, after=after):
        check_journal(life)


def check_journal(life: Life) -> None:
    life.files.end()
    if not life.layout.list_journals():
        assert life.acknowledged == 0
        return
    found = events_of(life.layout, life.run, promised=life.synced.bytes)
    assert len(found) >= life.acknowledged
    assert len(found) >= life.synced.sequence
    assert [event.uid for event in found if isinstance(event, Finished)] == list(range(len(found)))
    reader = PayloadReader(life.layout, life.run.tag)
    for event in found:
        assert isinstance(event, Finished)
        place = Location(1, 0, event.segment, event.offset, event.length)
        assert reader.read_many([(event.uid, 0, place)]) == {(event.uid, 0): bytes([event.uid]) * 100}


@pytest.mark.parametrize("torn", [False, True])
def test_killed_at_any_call_the_journal_holds_what_was_acknowledged(tmp_path: Path, torn: bool) -> None:
    found = lives(tmp_path, Killed, torn=torn)
    assert len(found) > 25
    for life in found:
        check_journal(life)


def test_a_journal_that_cannot_be_made_is_a_failed_write(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path / "run")
    with pytest.raises(WriteFailed, match="could not create"):
        new_writer(layout, run, ScriptedFiles(1))
    new_writer(layout, run).close()
    with pytest.raises(WriteFailed, match="File exists"):
        new_writer(layout, run)


def test_an_event_that_cannot_be_encoded_leaves_no_gap_in_the_journal(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path / "run")
    writer = new_writer(layout, run)
    writer.append(Dropped(1, "failed"))
    flush(writer)
    writer.append(Dropped(2, "\ud83d"))
    with pytest.raises(WriteFailed, match="surrogates"):
        flush(writer)
    writer.append(Dropped(3, "failed"))
    with pytest.raises(WriteFailed):
        flush(writer)
    assert events_of(layout, run) == [Dropped(1, "failed")]
    writer.close()


def test_the_queue_is_counted_from_append_to_done(tmp_path: Path) -> None:
    writer = StoreWriter(*_layout(tmp_path), run_tag=1, incarnation=1, queue_bytes=1000)
    assert (writer.queued_bytes, writer.idle, writer.full) == (0, True, False)
    writer.place(b"x" * 500, 1, 0, 0)
    writer.append(Dropped(1, "failed"))
    first = writer.take()
    assert writer.idle
    assert writer.queued_bytes == first.cost > 500, "what is on its way still counts"
    writer.place(b"x" * 500, 2, 0, 0)
    writer.append(Dropped(2, "failed"))
    assert writer.full
    second = writer.take()
    assert (first.first, second.first) == (1, 2)
    writer.write(first)
    writer.done(first)
    assert not writer.full
    assert writer.queued_bytes == second.cost
    writer.write(second)
    writer.done(second)
    assert writer.queued_bytes == 0
    assert writer.take().cost == 0
    writer.close()


def _layout(tmp_path: Path) -> tuple[Layout, ScriptedFiles]:
    return new_run(tmp_path / "run")[0], ScriptedFiles()

"""The queue between the event loop and the files: what happened is written as it comes, off the loop.

Guarantees:

* events reach the journal in the order in which they were appended, payloads their segment before the event
  that names them;
* where a payload will lie is decided when it is queued, so its event can name the place at once;
* ``take`` and ``append`` belong to the loop's thread and never block; ``write``, ``sync`` and ``close`` block,
  belong to one other thread at a time, and touch only what they were handed;
* after a failed write or sync nothing more is written: the error is kept and raised by every later call;
* a forked child writes nothing: the files are its parent's, and where the parent writes on is the child's to guess.

The synchronous :class:`StoreWriter` is the seam: a thread drives it in real time, and a test may call it inline
over an injected file layer. :class:`WriterService` is the asynchronous shell around it.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

import msgspec

from pipeline.errors import WriteFailed
from pipeline.locations import Location
from pipeline.records import AnyEvent
from pipeline.store.files import FilesLike
from pipeline.store.frames import EVENTS, FOOTER, PAYLOAD, SYNCED, encode_frame, frame_bytes
from pipeline.store.journal import JournalPosition, encode_events
from pipeline.store.layout import Layout
from pipeline.store.segments import FooterBuilder, SegmentEntry, SegmentInfo

_EVENT_COST = 64  # bytes that a queued event is counted as
_SMALL = 4096  # bytes
_PIECE = 4 << 20  # bytes that are written at once: still in the cache after the checksum, and the disk begins early


class _Queued(msgspec.Struct, frozen=True, gc=False):
    location: Location
    uid: int
    member: int
    life: int
    blob: bytes | memoryview


class WriteBatch(NamedTuple):
    """What was queued at one moment; owned by whoever writes it."""

    first: int
    events: list[AnyEvent]
    payloads: list[_Queued]
    cost: int


class StoreWriter:
    """Writes one incarnation's journal and segments. See the module for who may call what."""

    def __init__(
        self,
        layout: Layout,
        files: FilesLike,
        *,
        run_tag: int,
        incarnation: int,
        rank: int = 0,
        segment_bytes: int = 64 << 20,
        queue_bytes: int = 256 << 20,
    ) -> None:
        self.incarnation, self.rank = incarnation, rank
        self._layout, self._files, self._run_tag = layout, files, run_tag
        self._segment_bytes, self._queue_bytes = segment_bytes, queue_bytes
        # The loop's side.
        self._events: list[AnyEvent] = []
        self._payloads: list[_Queued] = []
        self._payload_bytes = 0
        self.queued_in_all = 0
        """Bytes that were queued since the beginning, about as they take on the disk."""
        self._taken_events = self._taken_bytes = 0
        self._segment, self._offset = 1, 0
        # The writing side.
        self.written = 0
        self.journal_bytes = 0
        self.unsynced_bytes = 0
        """Bytes that were written since the last sync. The loop may look at it at any time."""
        self._open_segment = 0
        self._footer = FooterBuilder()
        self._segments: dict[int, SegmentInfo] = {}
        self._segment_handle = self._sealed_handle = -1  # of the two newest segments
        self._unsynced_folders = {layout.journals}
        self.error: WriteFailed | None = None
        self._process = os.getpid()
        self._journal_path = layout.journal(incarnation, rank)
        try:
            self._journal = files.create(self._journal_path)
        except OSError as error:
            raise self._failed("create", error) from error

    # -- the loop's side: never blocks ---------------------------------------------------------------------

    def append(self, event: AnyEvent) -> None:
        """Queue an event; its number in the journal is ``sequence`` afterwards."""
        self._events.append(event)
        self.queued_in_all += _EVENT_COST

    def place(self, blob: bytes | memoryview, uid: int, member: int, life: int) -> Location:
        """Queue a payload and return where it will lie."""
        if self._offset >= self._segment_bytes:
            self._segment, self._offset = self._segment + 1, 0
        size = len(blob)
        location = Location(self.incarnation, self.rank, self._segment, self._offset, size)
        self._offset += frame_bytes(size)
        self.queued_in_all += frame_bytes(size)
        self._payload_bytes += size + _EVENT_COST
        self._payloads.append(_Queued(location, uid, member, life, blob))
        return location

    @property
    def open_segment(self) -> int:
        """Number of the segment that the next payload goes to, or the one before; those below it have ended."""
        return self._segment

    @property
    def sequence(self) -> int:
        """Number of the last event that was queued, from 1."""
        return self._taken_events + len(self._events)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written or are on their way."""
        return self._taken_bytes + self._payload_bytes + len(self._events) * _EVENT_COST

    @property
    def full(self) -> bool:
        """Whether more is queued than may wait: producers then wait, never the trainer."""
        return self.queued_bytes >= self._queue_bytes

    @property
    def idle(self) -> bool:
        """Whether nothing is queued. What has been taken may still be on its way."""
        return not self._events and not self._payloads

    def take(self) -> WriteBatch:
        """Take everything that is queued, to be handed to :meth:`write`."""
        cost = self._payload_bytes + len(self._events) * _EVENT_COST
        batch = WriteBatch(self._taken_events + 1, self._events, self._payloads, cost)
        self._taken_events += len(self._events)
        self._taken_bytes += cost
        self._events, self._payloads, self._payload_bytes = [], [], 0
        return batch

    def done(self, batch: WriteBatch) -> None:
        """Note on the loop's side that ``batch`` has been written."""
        self._taken_bytes -= batch.cost

    # -- the writing side: blocks --------------------------------------------------------------------------

    def write(self, batch: WriteBatch) -> None:
        """Write a batch: payloads first, then the events in one frame.

        Raises:
            WriteFailed: it could not be written, or an earlier one could not.
        """
        self._guard()
        try:
            chunks: list[bytes | memoryview] = []
            gathered = 0
            for queued in batch.payloads:
                other = queued.location.segment != self._open_segment
                if other or gathered >= _PIECE:
                    self._write_segment(chunks)
                    chunks, gathered = [], 0
                if other:
                    self._next_segment(queued.location.segment)
                chunks.extend(self._frame(PAYLOAD, queued.blob, queued.uid, queued.member, queued.life))
                gathered += len(queued.blob)
                self._footer.add(
                    SegmentEntry(queued.uid, queued.member, queued.life, queued.location.offset, len(queued.blob))
                )
            self._write_segment(chunks)
            if batch.events:
                payload = encode_events(batch.events)
                frame = self._frame(EVENTS, payload, batch.first, len(batch.events))
                added = self._files.write(self._journal, frame)
                self.journal_bytes += added
                self.unsynced_bytes += added
                self.written = batch.first + len(batch.events) - 1
        except Exception as error:  # also an event that cannot be encoded: a journal with a gap could not be read
            raise self._failed("write", error) from error

    def sync(self) -> tuple[JournalPosition, list[SegmentInfo]]:
        """Make everything written so far survive a loss of power, and mark it so in the journal.

        Returns:
            The journal's position and this incarnation's segments, as synced.

        Raises:
            WriteFailed: nothing since the last call may be believed to be on the disk.
        """
        self._guard()
        try:
            self._check_there()
            self._sync_sealed()
            if self._segment_handle >= 0:
                self._files.sync(self._segment_handle)
            self._files.sync(self._journal)
            for folder in sorted(self._unsynced_folders):
                self._files.sync_directory(folder)
            self._unsynced_folders.clear()
            self.unsynced_bytes = 0
            position = JournalPosition(
                incarnation=self.incarnation, rank=self.rank, sequence=self.written, bytes=self.journal_bytes
            )
            mark = self._frame(SYNCED, b"", self.written)
            self.journal_bytes += self._files.write(self._journal, mark)
        except OSError as error:
            raise self._failed("sync", error) from error
        return position, [self._segments[number] for number in sorted(self._segments)]

    def close(self) -> None:
        """Seal the open segment and close the files.

        Raises:
            WriteFailed: that could not be done. What was written stays.
        """
        before = self.error
        try:
            if self._segment_handle >= 0 and before is None and os.getpid() == self._process:
                self._seal()
        except OSError as error:
            self._failed("seal", error)
        for name in ("_journal", "_sealed_handle", "_segment_handle"):
            handle = getattr(self, name)
            setattr(
                self, name, -1
            )  # whatever close says, or cuts it: it is closed, and who calls again closes the rest
            try:
                if handle >= 0:
                    self._files.close(handle)
            except OSError as error:
                if self.error is None:
                    self._failed("close", error)
        if self.error is not before:
            self._guard()

    def _frame(
        self, kind: int, payload: bytes | memoryview, sequence: int, number: int = 0, life: int = 0
    ) -> tuple[bytes | memoryview, ...]:
        return encode_frame(
            kind,
            payload,
            incarnation=self.incarnation,
            rank=self.rank,
            run_tag=self._run_tag,
            sequence=sequence,
            number=number,
            life=life,
        )

    def _check_there(self) -> None:
        """Refuse to call durable what has lost its name: a file that was removed can be written and synced still."""
        segment = self._layout.segment(self.incarnation, self.rank, self._open_segment)
        for handle, path in ((self._journal, self._journal_path), (self._segment_handle, segment)):
            try:
                there = handle < 0 or os.path.samestat(os.fstat(handle), os.stat(path))
            except FileNotFoundError:
                there = False
            if not there:
                raise FileNotFoundError(errno.ENOENT, "removed, or replaced, while it was written", path)

    def _write_segment(self, chunks: list[bytes | memoryview]) -> None:
        if chunks:
            if sum(map(len, chunks)) < _SMALL * len(chunks):  # one copy costs less than a long list of pieces
                chunks = [b"".join(chunks)]
            written = self._files.write(self._segment_handle, chunks)
            if written >= _PIECE:
                self._files.start_writing(self._segment_handle)
            before = self._segments[self._open_segment]
            self._segments[self._open_segment] = msgspec.structs.replace(before, bytes=before.bytes + written)
            self.unsynced_bytes += written

    def _next_segment(self, number: int) -> None:
        if self._segment_handle >= 0:
            self._seal()
            self._files.start_writing(self._segment_handle)
            self._sync_sealed()  # the one before, which is on the disk by now, or nearly so
            self._sealed_handle, self._segment_handle = self._segment_handle, -1
        path = self._layout.segment(self.incarnation, self.rank, number)
        self._segment_handle = self._files.create(path)
        self._open_segment, self._footer = number, FooterBuilder()
        self._segments[number] = SegmentInfo(name=os.path.basename(path), bytes=0)
        self._unsynced_folders.add(self._layout.segments)

    def _sync_sealed(self) -> None:
        """Sync and close the segment that was sealed last, if that has not been done."""
        if self._sealed_handle >= 0:
            self._files.sync(self._sealed_handle)
            handle, self._sealed_handle = self._sealed_handle, -1
            self._files.close(handle)

    def _seal(self) -> None:
        self._write_segment(list(self._frame(FOOTER, self._footer.encode(), 0, self._footer.count)))
        info = self._segments[self._open_segment]
        self._segments[self._open_segment] = msgspec.structs.replace(info, sealed=True)

    def _guard(self) -> None:
        if self.error is not None:
            raise self.error
        if os.getpid() != self._process:
            raise WriteFailed(f"{self._layout.directory}: belongs to process {self._process}; this is a fork of it")

    def _failed(self, verb: str, error: Exception) -> WriteFailed:
        self.error = WriteFailed(
            f"could not {verb} the journal or segments of {self._layout.directory}: {error}. "
            "Everything up to the last committed generation is safe; free space or mend the disk, then resume."
        )
        self.error.__cause__ = error
        return self.error

"""A buffer's folder: generations of its state, and segments with blocks of its rows. Everything here blocks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from pipeline.checkpoint.generations import Found, GenerationWriter, Stored, find_generations, of_kind, writing_in
from pipeline.checkpoint.manifest import REPLAY, SHARDS, Manifest, ShardInfo
from pipeline.checkpoint.trainer_state import CapturedState
from pipeline.clock import Clock
from pipeline.config import SavingOptions, without_secrets
from pipeline.errors import ForebayError
from pipeline.observe import events
from pipeline.observe.logs import RunContext, logger
from pipeline.replay.ahead import ahead
from pipeline.replay.incomplete import counts, warn_of_dropped
from pipeline.replay.job import Listing, Piece, SaveJob, files_of
from pipeline.store.block_sums import checksum_of
from pipeline.store.files import FilesLike, OsFiles
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import segment_key
from pipeline.store.segments import Block, SegmentInfo
from pipeline.store.writer import StoreWriter
from pipeline.wiring.collecting import DeadSegments, listed_segments
from pipeline.wiring.folder import RunFolder
from pipeline.wiring.life_end import ended
from pipeline.wiring.retention import Retention


class Saving:
    """A generation that is being written beside the trainer."""

    def __init__(self, generation: int, step: int) -> None:
        self.generation, self.step = generation, step
        self._done = threading.Event()
        self._claimed = threading.Lock()
        self._error: BaseException | None = None
        self._telling = threading.Lock()
        self._tell: list[Callable[[BaseException | None], None]] = []
        self.told = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """What it failed with."""
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is on the disk; return False if ``timeout`` seconds were over before.

        Raises:
            WriteFailed: it could not be written; the one before it stands.
        """
        if not self._done.wait(timeout):
            return False
        if self._error is not None:
            self.told = True
            raise self._error
        return True

    def wait_until_done(self) -> None:
        """Wait until it has ended, well or not."""
        self._done.wait()

    def claim(self) -> bool:
        """Return True to the first who asks: that one ends it."""
        return self._claimed.acquire(blocking=False)

    def end(self, error: BaseException | None = None) -> None:
        """Note how it ended."""
        self._error = error
        with self._telling:
            self._done.set()
        for tell in self._tell:
            tell(error)

    def when_ended(self, tell: Callable[[BaseException | None], None]) -> None:
        """Let somebody know how it ended, or has ended; in any thread."""
        with self._telling:
            if not self._done.is_set():
                self._tell.append(tell)
                return
        tell(self._error)

    def __repr__(self) -> str:
        return f"Saving(generation={self.generation}, step={self.step})"


class Keeping(NamedTuple):
    """What retention looks at."""

    options: SavingOptions
    clock: Clock
    log: Any


class Part(NamedTuple):
    """What this process has written of a generation's rows.

    Attributes:
        listing: where all of its rows lie.
        position: of the journal, with the segment that was being written.
        segments: those that the generation needs.
        incarnation: the life that wrote.
    """

    listing: Listing
    position: JournalPosition
    segments: list[SegmentInfo]
    incarnation: int

    @property
    def opens(self) -> tuple[int, int]:
        """The incarnation and the number of the segment that was being written."""
        return self.incarnation, self.position.segment


def together(parts: Sequence[Part]) -> list[SegmentInfo]:
    """Return what a manifest says of the segments that some parts of a generation need, each once."""
    found: dict[str, SegmentInfo] = {}
    for info in (info for part in parts for info in part.segments):
        other = found.get(info.name)
        if other is not None:  # what one rank had written lies with others as well
            size = max(info.bytes, other.bytes)
            info = msgspec.structs.replace(info, bytes=size, live=info.live + other.live)
        found[info.name] = info
    return list(found.values())


class ReplayStore:
    """The folder of one buffer, while this process holds it."""

    rank = 0
    """What the names of its segments have for a rank."""

    def __init__(self, options: SavingOptions, files: FilesLike | None = None, kind: str = REPLAY) -> None:
        assert options.directory is not None
        self.kind = kind
        self.options = options
        self.files: FilesLike = files or OsFiles()
        self.folder = RunFolder(options.directory, self.files)
        self.context = RunContext()
        self.log = logger(self.context)
        self.opened = False
        self.left_by: BaseException | None = None
        """What the script's body was left by."""
        self.shard: ShardInfo | None = None
        """What the save that has begun says of this process's rows, if they are transitions."""
        self.blocks: list[Block] = []
        """Those of the newest generation of this line."""
        self.parent = -1
        self.step: int | None = None
        """The step of the generation ``parent``."""
        self.incarnation = 0
        self.writing = threading.RLock()
        """Whoever has it may write segments, and is the only one. It is taken before the buffer's own lock."""
        self._writer: StoreWriter | None = None
        self._next = 0
        self._keeping = Keeping(options, Clock(time.monotonic, time.time), self.log)
        self._dead = DeadSegments(self.folder.layout)
        self._retention = Retention(self._keeping, self.files, self.folder.layout, reuses=False)

    def open(self) -> None:
        """Take the folder's lock.

        Raises:
            NotARun, Locked, StoreError: it cannot be used.
        """
        if self.opened:
            return
        self.folder.open()
        self.opened = True
        self.incarnation, self._next = self.folder.incarnation, self.folder.next_generation
        self.context.update(run=self.folder.run_id[:8], incarnation=self.incarnation)

    def close(self) -> None:
        """Give the lock back; the journal says how this life ended, if it has one."""
        if not self.opened:
            return
        self.opened = False
        try:
            try:
                if self._writer is not None and self._writer.error is None:
                    self._writer.append(ended(time.time(), self.left_by))
                    self._writer.write(self._writer.take())
            finally:
                self._drop_writer()
        finally:
            self.left_by = None  # it holds the script's frames
            self.folder.release()

    def find(self) -> Found:
        """Read every generation's manifest.

        Raises:
            UsageError: something else wrote them.
        """
        layout = self.folder.layout
        return of_kind(find_generations(layout, self.folder.run_id), self.kind, layout.directory)

    def begin(
        self, step: int, states: Sequence[CapturedState], attached: Sequence[str], *, like: Stored | None = None
    ) -> Generation:
        """Begin a generation: the trainer's tensors are read here, or its files taken over as they are in another.

        Raises:
            WriteFailed: they could not be written; nothing of it stays.
        """
        self.folder.keep()
        number = self._next
        self._next += 1
        writer = GenerationWriter(self.folder.layout, self.files, number)
        manifest = Manifest(
            kind=self.kind,
            run_id=self.folder.run_id,
            generation=number,
            parent=self.parent,
            step=step,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            attached=sorted(attached),
            options=without_secrets(self.options.to_dict()),
        )
        writer.begin_with(states, () if like is None else like.trainer_files())
        return Generation(writer, manifest, Saving(number, step))

    def adopt(self, stored: Stored, blocks: list[Block]) -> None:
        """Go on from a generation."""
        self.parent, self.step, self.blocks = stored.manifest.generation, stored.manifest.step, blocks

    def leave_unread(self, stored: Stored) -> None:
        """Take in that payloads of a generation were not read: the next saves read nothing either."""
        self._dead.promise(stored.manifest.segments)

    def commit(self, generation: Generation, job: SaveJob, unknown: dict[str, Any]) -> Stored:
        """Write the rows that are new, and commit.

        Raises:
            WriteFailed: the generation does not exist; those before it do. A retry writes the rows again.
        """
        begun = time.monotonic()
        manifest = generation.manifest
        try:
            stored, part = self._commit(generation, job, unknown)
        except BaseException as error:
            job.close()
            generation.writer.abandon()
            # Nothing may be believed that this writer wrote: the next one begins in files of its own.
            self.give_up()
            if self.kind in (REPLAY, SHARDS):  # rows are in memory as well until a generation counts on them
                self._remove_remains()
            self.log.error(
                events.GENERATION_FAILED, generation=manifest.generation, step=manifest.step, error=str(error)
            )
            raise
        self.adopt(stored, part.listing.blocks)
        said = {} if self.shard is None else counts(self.shard)
        self.log.info(
            events.GENERATION_COMMITTED,
            generation=manifest.generation,
            step=manifest.step,
            bytes=sum(info.bytes for info in stored.manifest.files),
            seconds=time.monotonic() - begun,
            reason=manifest.reason,
            **said,
        )
        if said:
            warn_of_dropped(self.log, manifest.step, said)
        self._retire(stored, part)
        return stored

    def _commit(self, generation: Generation, job: SaveJob, unknown: dict[str, Any]) -> tuple[Stored, Part]:
        part = self._written(job)
        self._add_files(generation.writer, job, part, unknown)
        if self.shard is not None:
            shard = msgspec.structs.replace(self.shard, bytes=sum(part.listing.live.values()))
            generation.manifest = msgspec.structs.replace(generation.manifest, shards=[shard])
        return self._exist(generation, [part]), part

    def _written(self, job: SaveJob) -> Part:
        """Write the rows that are new, and make them survive a loss of power."""
        with self.writing:
            kept = job.kept(self.blocks)
            with contextlib.closing(ahead(job.pieces())) as pieces:  # copied while the one before is written
                new = self.write(pieces)
            writer = self._open_writer()
            position, written = writer.sync()
            listing, open_segment = job.listing(kept, new), writer.open_segment
            incarnation = self.incarnation
        position = msgspec.structs.replace(position, segment=open_segment)
        segments = listed_segments(self._dead, self.folder.tag, written, listing.live, incarnation, open_segment)
        return Part(listing, position, segments, incarnation)

    def _add_files(
        self, writer: GenerationWriter, job: SaveJob, part: Part, unknown: dict[str, Any], prefix: str = ""
    ) -> None:
        """Write what a generation holds beside the rows."""
        with writing_in(writer.folder):
            for path, content in files_of(job, part.listing, unknown):
                writer.add(prefix + path, content)

    def _exist(self, generation: Generation, parts: Sequence[Part]) -> Stored:
        """Make a generation exist, whose rows lie as ``parts`` say; the first of them is this process's."""
        manifest = msgspec.structs.replace(
            generation.manifest,
            incarnation=parts[0].incarnation,
            journals=[part.position for part in parts],
            segments=together(parts),
            files=sorted(generation.writer.infos, key=lambda info: info.path),
            reusable=self._retention.reusable(generation.manifest),
        )
        return generation.writer.commit(manifest, keep=self.folder.keep)

    def _retire(self, stored: Stored, part: Part) -> None:
        """Remove what is not kept any more."""
        needed = dict.fromkeys(part.listing.used, 0) | part.listing.live
        self._retention.committed(stored, needed, {self.rank: part.opens}, self.folder.keep)

    def write(self, pieces: Iterable[Piece]) -> list[Block]:
        """Write some pieces; the caller has :attr:`writing`. They are there for good after :meth:`sync`, or a commit.

        Raises:
            WriteFailed: one could not be written; :meth:`give_up` is to follow.
        """
        writer = self._open_writer()
        return [self._write_piece(writer, piece) for piece in pieces]

    def sync(self) -> None:
        """Make what was written survive a loss of power; the caller has :attr:`writing`.

        Raises:
            WriteFailed: nothing since the last call may be believed to be there; :meth:`give_up` is to follow.
        """
        self._open_writer().sync()

    def give_up(self) -> None:
        """Believe nothing that was not synced: what comes next is written into files of its own."""
        with self.writing:
            self._drop_writer(failed=True)

    @property
    def unsynced_bytes(self) -> int:
        """Bytes that were written since the last sync."""
        return 0 if self._writer is None else self._writer.unsynced_bytes

    def _write_piece(self, writer: StoreWriter, piece: Piece) -> Block:
        place = writer.place(piece.blob, piece.first, 0, 0)
        batch = writer.take()
        writer.write(batch)
        writer.done(batch)
        at = (place.incarnation, place.rank, place.segment, place.offset, place.length)
        return Block(piece.first, piece.rows, *at, checksum_of(piece.blob))

    def _remove_remains(self) -> None:
        """Remove the segments that saves of this life wrote before they failed: they would take what a full disk has
        left. Those that a generation counts on stay; what cannot be removed now goes after the next commit."""
        layout = self.folder.layout
        with contextlib.suppress(OSError, ForebayError):
            self.folder.keep()
            found = find_generations(layout, self.folder.run_id)
            if found.damaged:  # it may be whole, and count on any of them
                return
            listed = {info.name for each in found.complete for info in each.manifest.segments}
            for name in layout.list_segments():
                incarnation, rank, _ = segment_key(name)
                own = rank == self.rank and self.folder.incarnation <= incarnation < self.incarnation
                if own and name not in listed:
                    self.files.unlink(os.path.join(layout.segments, name))

    def _open_writer(self) -> StoreWriter:
        if self._writer is None:
            self._writer = StoreWriter(
                self.folder.layout,
                self.files,
                run_tag=self.folder.tag,
                incarnation=self.incarnation,
                rank=self.rank,
            )
        return self._writer

    def _drop_writer(self, *, failed: bool = False) -> None:
        writer, self._writer = self._writer, None
        if failed:
            self.incarnation += 1
        if writer is not None:
            try:
                writer.close()
            except ForebayError:
                if not failed:
                    raise


class Generation:
    """A generation that is being written."""

    def __init__(self, writer: GenerationWriter, manifest: Manifest, saving: Saving) -> None:
        self.writer, self.manifest, self.saving = writer, manifest, saving
        self.number = 0
        """Of the save, among all that this process has begun."""

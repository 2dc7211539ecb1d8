"""Committing generations: the trainer's state, the consumer half and the journal positions as one thing.

``begin`` acks and captures, in one window without an await. Then the trainer's tensors are written, wherever blocking
is allowed; after that the trainer goes on, and ``finish`` flushes the journal, syncs and commits beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import anyio
import msgspec

from pipeline.checkpoint.generations import GenerationWriter, Stored, writing_in
from pipeline.checkpoint.lines import PRODUCER_FILE, encode_inherited, inherit, totals_anew
from pipeline.checkpoint.manifest import REPLAY_BUFFER, TRAINER_FOLDER, FileInfo, Manifest
from pipeline.checkpoint.trainer_state import CapturedState
from pipeline.checkpoint.triggers import CheckpointRequest
from pipeline.config import without_secrets
from pipeline.errors import ForebayError, WriteFailed
from pipeline.observe import events
from pipeline.sampler.progress import encode_progress, rolled_back
from pipeline.store.files import FilesLike
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import Layout, RunFile, SegmentKey
from pipeline.store.segments import Block, SegmentInfo
from pipeline.store.service import RunBlocking, WriterService
from pipeline.waiting import Signal
from pipeline.wiring.collecting import DeadSegments, listed_segments, live_segments
from pipeline.wiring.feed import RowsCapture
from pipeline.wiring.recovery import CONSUMER_FILE, PROGRESS_FILE
from pipeline.wiring.retention import Retention
from pipeline.wiring.state import RunState, window_marks

OWN_FILES = "files"
"""Folder of a generation for what the body of ``checkpoint`` writes."""


class Saving:
    """A generation that is being committed."""

    def __init__(self, generation: int | None, step: int) -> None:
        self.generation, self.step = generation, step
        self.error: ForebayError | None = None
        self.told = False
        """Whether ``committed`` has raised the error: then no verb raises it again, and a retry is a retry."""
        self.on_end: Callable[[ForebayError | None], None] = lambda error: None
        """Told how it ended."""
        self._done = anyio.Event()

    async def committed(self) -> None:
        """Return once it is on the disk.

        Raises:
            WriteFailed: it could not be written.
        """
        await self._done.wait()
        if self.error is not None:
            self.told = True
            raise self.error

    def end(self, error: ForebayError | None = None) -> None:
        """Note how it ended, and wake whoever waits."""
        self.error = error
        self._done.set()
        self.on_end(error)

    def __repr__(self) -> str:
        return f"Saving(generation={self.generation}, step={self.step})"


class Capture:
    """Everything that a generation holds, as of one moment; owned by whoever writes it."""

    def __init__(self, writer: GenerationWriter, saving: Saving, manifest: Manifest, sequence: int) -> None:
        self.writer, self.saving, self.manifest, self.sequence = writer, saving, manifest, sequence
        self.small: dict[str, bytes | memoryview] = {}
        self.states: list[CapturedState] = []
        self.links: list[tuple[str, FileInfo]] = []
        self.live: dict[SegmentKey, int] = {}
        """Bytes of what was live, by segment."""
        self.open_segment = 0
        """The number of the segment that was being written; those before it had ended."""
        self.rows: RowsCapture | None = None
        """The buffer of transitions, where rollouts fill one."""
        self.request: CheckpointRequest | None = None
        """What triggers had asked for, and this generation answers."""

    def write_trainer(self) -> None:
        """Write what reads the trainer's tensors. Blocks.

        Raises:
            WriteFailed: it could not be written; what was written of it is removed.
        """
        self.writer.begin_with(self.states, self.links)

    def own_folder(self) -> str:
        """Make the folder for files that somebody else writes into the generation. Blocks."""
        folder = os.path.join(self.writer.folder, OWN_FILES)
        os.makedirs(folder)
        return folder

    def abandon(self) -> None:
        """Remove what was written aside, as far as the disk lets us; the next commit tries again."""
        self.let_rows_go()
        self.writer.abandon()

    def let_rows_go(self) -> None:
        """Nothing more is written of it: rows of the buffer may be overwritten."""
        if self.rows is not None:
            self.rows.close()


class Saver:
    """Makes generations, one at a time: between :meth:`acquire` and the end of :meth:`finish`."""

    whole_only = ""
    """Why a generation without its buffer is refused; empty: it is not."""

    def __init__(self, state: RunState, files: FilesLike, layout: Layout, in_thread: RunBlocking[Any]) -> None:
        self._state, self._files, self._layout, self._in_thread = state, files, layout, in_thread
        self.busy = False
        """Whether a generation is being written."""
        self.no_more_verbs = False
        """Whether nobody will go on with a generation that a verb had begun when it was interrupted."""
        self.finishing = False
        """Whether a task is at :meth:`finish`, or about to be."""
        self._free = Signal()
        self._failed: Saving | None = None
        self.retention = Retention(state, files, layout)
        self._dead = DeadSegments(layout)
        self.committed = False
        """Whether this incarnation has committed a generation."""
        self.newest: tuple[int, int] | None = None
        """The number and the step of the newest generation that it has committed."""
        self.keep_lock: Callable[[], None] = lambda: None
        """Raises unless the folder is still this process's; called as a save begins and before its manifest. Blocks."""
        self.on_committed: Callable[[Stored], None] = lambda stored: None
        """Told of each generation once it is committed."""
        self.captured_step = -1
        """The step of the newest generation that is committed or being written."""
        self.parent = -1
        self.reclaimed = False
        """Whether uids of this line do not follow the draws."""
        self.base = 0
        """The incarnation in which this line inherited its state, if it did."""
        self.next_generation = 0
        self.journals: list[JournalPosition] = []
        """Positions of the journals of earlier incarnations."""

    async def acquire(self) -> None:
        """Wait until no generation is being written, and begin one. An error of the last one is kept.

        Raises:
            Locked: another process has taken the folder.
        """
        await self._free.wait_for(lambda: not self.busy)
        self.busy = True
        try:
            await self._in_thread(self.keep_lock)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End what :meth:`acquire` began."""
        self.busy = self.finishing = False
        self._free.notify()

    async def idle(self) -> None:
        """Wait until no generation is being written."""
        await self._free.wait_for(lambda: not self.busy or (self.no_more_verbs and not self.finishing))

    def raise_failed(self) -> None:
        """Raise the error of a generation that failed after its ``save`` had returned; once, and to one."""
        failed, self._failed = self._failed, None
        if failed is not None and failed.error is not None and not failed.told:
            raise failed.error

    def begin(
        self,
        reason: str,
        states: Sequence[CapturedState],
        attached: Sequence[str],
        *,
        replay_buffer: bool = True,
        external: str = "",
    ) -> Capture:
        """Capture everything as of now, without an await."""
        state = self._state
        assert state.writer is not None
        number = self.next_generation
        manifest = Manifest(
            run_id=state.run_id,
            generation=number,
            parent=self.parent,
            base=self.base,
            reclaimed=self.reclaimed,
            step=state.ledger.step,
            incarnation=state.incarnation,
            reason=reason,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            attached=sorted(attached),
            options=without_secrets(state.options.to_dict()),
            tasks={name: task.describe() for name, task in state.tasks.items()},
            external=external,
            left_out={} if replay_buffer else {REPLAY_BUFFER: "saved with replay_buffer=False"},
        )
        self.next_generation += 1
        self.captured_step = state.ledger.step
        capture = self._new_capture(manifest, Saving(number, state.ledger.step), state.writer.writer.sequence)
        capture.states = list(states)
        capture.live, capture.open_segment = live_segments(state), state.writer.writer.open_segment
        half, progress = state.consumer_half(), state.refresh_progress()
        if not replay_buffer:
            marks = {name: window_marks(each) for name, each in totals_anew(state.ledger).items()}
            half.leases, progress = [], rolled_back(progress, marks)
            capture.small[PRODUCER_FILE] = encode_inherited(inherit(state.ledger, state.sampler))
        capture.small[CONSUMER_FILE] = (
            msgspec.json.format(msgspec.json.encode({**state.unknown_half, **msgspec.to_builtins(half)})) + b"\n"
        )
        capture.small[PROGRESS_FILE] = encode_progress(progress, state.unknown_progress)
        if state.experience is not None:
            capture.rows = state.experience.feed.capture()
        return capture

    def _new_capture(self, manifest: Manifest, saving: Saving, sequence: int) -> Capture:
        return Capture(GenerationWriter(self._layout, self._files, manifest.generation), saving, manifest, sequence)

    async def finish(self, capture: Capture) -> Stored:
        """Write the rest, commit, remove what is not kept, and release. Runs beside the trainer.

        Raises:
            WriteFailed: the generation does not exist; those before it do.
        """
        state = self._state
        begun, self.finishing = state.clock.now(), True
        try:
            stored = await self._finish(capture)
            self.committed = True
            self.parent = stored.manifest.generation
            self.newest = stored.manifest.generation, stored.manifest.step
            capture.saving.end()  # it exists: nobody waits for old ones to go, which may take longer than its own sync
            state.log.info(
                events.GENERATION_COMMITTED,
                generation=stored.manifest.generation,
                step=stored.manifest.step,
                bytes=sum(info.bytes for info in stored.manifest.files),
                seconds=state.clock.now() - begun,
                reason=stored.manifest.reason,
            )
            await self._in_thread(lambda: self._retire(stored, capture))
            self.on_committed(stored)
        finally:
            self.release()
        return stored

    def _retire(self, stored: Stored, capture: Capture) -> None:
        opens = {self._state.options.rank: (self._state.incarnation, capture.open_segment)}
        self.retention.committed(stored, capture.live, opens, self.keep_lock)

    async def _finish(self, capture: Capture) -> Stored:
        state = self._state
        assert state.writer is not None
        try:
            if capture.rows is not None:
                await self._write_rows(capture, capture.rows, state.writer)
            position, written = await state.writer.sync()
            # The journal may have gone on since the capture; what counts is where it stood then.
            own = msgspec.structs.replace(position, sequence=capture.sequence, segment=capture.open_segment)
            stored: Stored = await self._in_thread(lambda: self._commit(capture, [*self.journals, own], written))
            return stored
        except BaseException as error:
            saving, self.captured_step = capture.saving, -1
            state.log.error(events.GENERATION_FAILED, generation=saving.generation, step=saving.step, error=str(error))
            with anyio.CancelScope(shield=True):
                await self._in_thread(capture.abandon)
            # However it ended, nobody is left waiting for it.
            why = state.writer.writer.error or repr(error)  # if that ended the run, the cancellation says nothing
            cut = WriteFailed(f"generation {saving.generation} was cut off before it was committed: {why}")
            saving.end(error if isinstance(error, ForebayError) else cut)
            raise

    async def _write_rows(self, capture: Capture, rows: RowsCapture, writer: WriterService) -> None:
        """Write those rows of the buffer that are in no segment, or in many small blocks; the rest is there."""
        assert self._state.experience is not None
        blocks, pieces = rows.kept(), rows.pieces()
        while (piece := await self._in_thread(lambda: next(pieces, None))) is not None:
            at = writer.writer.place(piece.blob, piece.first, 0, 0)
            blocks.append(Block.at(piece.first, piece.rows, at))
            await writer.flush()
        self._state.experience.feed.lie_in(blocks)
        files, live = await self._in_thread(lambda: rows.written(blocks))
        capture.small |= files
        for key, size in live.items():
            capture.live[key] = capture.live.get(key, 0) + size

    async def finish_later(self, capture: Capture) -> None:
        """:meth:`finish`, with the error kept for whoever waits for the saving, and for the next verb."""
        try:
            await self.finish(capture)
        except ForebayError:
            self._failed = capture.saving

    def _commit(self, capture: Capture, journals: Sequence[JournalPosition], written: Sequence[SegmentInfo]) -> Stored:
        writer = capture.writer
        with writing_in(writer.folder):
            for path, content in capture.small.items():
                writer.add(path, content)
            writer.adopt()
        manifest, segments = capture.manifest, list[SegmentInfo]()
        if REPLAY_BUFFER in manifest.left_out:  # it needs neither; the positions say how far the journals had come
            journals = [msgspec.structs.replace(each, bytes=0) for each in journals]
        else:
            segments = self._listed(capture, written)
        manifest = msgspec.structs.replace(
            manifest,
            journals=list(journals),
            segments=segments,
            files=sorted(writer.infos, key=lambda info: info.path),
            reusable=self.retention.reusable(manifest),
        )
        return writer.commit(manifest, keep=self.keep_lock)

    def _listed(self, capture: Capture, written: Sequence[SegmentInfo]) -> list[SegmentInfo]:
        """What the manifest says of the segments of this process, and of those that it still needs."""
        tag, own = RunFile(run_id=capture.manifest.run_id).tag, capture.manifest.incarnation
        return listed_segments(self._dead, tag, written, capture.live, own, capture.open_segment)


def link_trainer(capture: Capture, stored: Stored) -> None:
    """Let a generation take over the trainer's files of another by reference; all else it writes anew."""
    for info in stored.manifest.files:
        if info.path.split("/")[0] in (TRAINER_FOLDER, OWN_FILES):
            capture.links.append((os.path.join(stored.folder, info.path), info))

"""The verbs that make generations, in pieces that both forms of the pipeline use.

What touches the trainer's objects (``capture_states``, ``Capture.write_trainer``) is synchronous and belongs to the
trainer's thread; the rest belongs to the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from pipeline.checkpoint.trainer_state import CapturedState
from pipeline.checkpoint.triggers import CheckpointRequest, exit_by_code
from pipeline.errors import ForebayError, Stopped, StoreError, UsageError, WriteFailed
from pipeline.interfaces import Stateful
from pipeline.observe import events
from pipeline.store.service import RunBlocking
from pipeline.wiring.consuming import Consumer
from pipeline.wiring.saving import Capture, Saver, Saving
from pipeline.wiring.state import RunState
from pipeline.wiring.triggering import STOP_FILE, Triggers


class Checkpointing:
    """Saves when it is told to, by the trainer or by a trigger."""

    def __init__(
        self,
        state: RunState,
        consumer: Consumer,
        saver: Saver | None,
        triggers: Triggers,
        in_thread: RunBlocking[Any],
        stop_file: str | None,
    ) -> None:
        self._state, self._consumer, self._saver, self.triggers = state, consumer, saver, triggers
        self._in_thread, self._stop_file = in_thread, stop_file
        self.attached: dict[str, Stateful] = {}
        self.own_files = False
        """Whether generations of this run hold files that only the trainer can write."""
        self.stopped_by: str | None = None
        """Who had asked for the stop that was honoured, if one was."""
        self._left: CheckpointRequest | None = None

    # -- a generation, piece by piece -------------------------------------------------------------------------------

    def capture_states(self) -> list[CapturedState]:
        """Read what is attached; on the trainer's thread."""
        return [CapturedState(name, each.state_dict()) for name, each in self.attached.items()]

    async def acquire(self) -> bool:
        """Wait for the generation before. Returns whether there is a directory to save in."""
        if self._saver is None:
            return False
        if self._state.writer is None:
            raise UsageError("save() comes after start()")
        await self._saver.acquire()
        return True

    def fail(self, capture: Capture | None) -> None:
        """Give up a save that failed before it was captured or written. What triggers asked for still stands."""
        if self._saver is not None:
            self._saver.release()
            if capture is not None:
                capture.let_rows_go()
                self._saver.captured_step = -1
                self.triggers.give_back(capture.request)
                capture.saving.on_end(WriteFailed("the save was given up before it was written; the trainer was told"))

    def begin(
        self,
        step: int | None,
        reason: str,
        states: Sequence[CapturedState],
        *,
        replay_buffer: bool = True,
        external: str = "",
    ) -> Capture:
        """Ack ``step``, if there is one, and capture everything, in one window. What triggers asked for is in it."""
        assert self._saver is not None
        if not replay_buffer and self._state.experience is not None:
            raise UsageError("replay_buffer=False: these rollouts made the buffer's rows, which cannot be drawn again")
        if not replay_buffer and self._saver.whole_only:
            raise UsageError(f"replay_buffer=False: {self._saver.whole_only}")
        if self._state.experience is not None:
            self._state.experience.check_recorded()
        if step is not None:
            self._consumer.ack(step)
        capture = self._saver.begin(reason, states, list(self.attached), replay_buffer=replay_buffer, external=external)
        self.own_files |= bool(external)
        self.triggers.saved(self._state.ledger.step)
        self.triggers.hear()
        capture.request = self.triggers.take()
        self._answer_requests(capture)
        return capture

    def _answer_requests(self, capture: Capture) -> None:
        """Let who has asked over HTTP, or asks until this generation is there, know of it."""
        desk, saving = self.triggers.desk, capture.saving
        if desk is None:
            return
        ticket, stops = desk.begun(), capture.request is not None and capture.request.then == "stop"

        def ended(error: ForebayError | None) -> None:
            if error is not None:
                desk.failed(ticket, str(error), stops=stops)
            else:
                desk.ended(ticket, saving.generation, saving.step, stops=stops)

        saving.on_end = ended

    @staticmethod
    def check_external(path: str | os.PathLike[str] | None) -> str:
        """Return the path of the trainer's own checkpoint as text; empty if there is none.

        Raises:
            StoreError: it is not there.
        """
        if path is None:
            return ""
        if not os.path.lexists(path):
            raise StoreError(f"external={os.fspath(path)!r}: there is nothing; write it before save()")
        return os.fspath(path)

    async def finish_later(self, capture: Capture) -> None:
        """Do the rest of a save, beside the trainer; an error is kept for the next verb."""
        assert self._saver is not None
        await self._saver.finish_later(capture)

    async def commit(self, capture: Capture) -> Saving:
        """Do the rest of a save now."""
        assert self._saver is not None
        await self._saver.finish(capture)
        return capture.saving

    def memory_save(self, step: int) -> tuple[CheckpointRequest | None, Saving]:
        """``save`` without a directory: the ack alone. Returns what triggers had asked for as well."""
        self._consumer.ack(step)
        saving = Saving(None, step)
        saving.end()
        return self.triggers.take(), saving

    # -- what triggers ask for ----------------------------------------------------------------------------------------

    def answer(self, request: CheckpointRequest, *, known: bool) -> Literal["save", "settle", "leave"]:
        """Say what is to become of ``request``.

        ``save``: a generation is to be made. ``settle``: the newest one says the same already, or there can be none;
        rollouts that have finished since are in the journal, unless they are kept in memory until a save. ``leave``:
        the trainer is to make it.
        """
        saver, state = self._saver, self._state
        if saver is None or state.writer is None or not known:
            return "settle"
        if state.writing and saver.captured_step == state.ledger.step:
            return "settle"
        if not self.own_files:
            return "save"
        if request is not self._left:
            self._left = request
            state.log.warning(events.CHECKPOINT_LEFT, reason=request.reason)
        return "leave" if request.then == "continue" else "settle"

    def is_about_to_save(self) -> bool:
        """Whether a generation is being written, or will be as soon as the trainer's wait is cut for it."""
        if self._saver is not None and self._saver.busy:
            return True
        return self.triggers.pending is not None and self.triggers.known and not self.own_files

    async def settle(self, request: CheckpointRequest | None, saving: Saving | None) -> Stopped | None:
        """End a request that ``saving`` was made for, or that needed none. Returns what a stop is to raise.

        Raises:
            WriteFailed: the generation could not be written; the request stands.
        """
        if request is None:
            return None
        if request.then != "stop":
            if saving is None:
                self.answer_by_newest(stops=False)
            return None
        try:
            if saving is not None:
                await saving.committed()
            elif self._saver is not None:
                await self._saver.idle()
                self._saver.raise_failed()
        except BaseException:
            self.triggers.give_back(request)
            raise
        if STOP_FILE in request.reason and self._stop_file is not None:
            await self._in_thread(self._remove_stop_file)
        generation = self._saver.parent if self._saver is not None and self._saver.committed else None
        step = self._state.ledger.step
        self._state.log.info(events.RUN_STOPPED, reason=request.reason, step=step, generation=generation)
        self.stopped_by = request.reason
        self.answer_by_newest(stops=True)
        exit_by_code()
        return Stopped(request.code, request.reason, step, generation)

    def answer_by_newest(self, *, stops: bool) -> None:
        """Who has asked over HTTP is answered by what is saved already; what is being saved answers by itself, as
        will the first generation, where there is none yet."""
        desk, saver = self.triggers.desk, self._saver
        if desk is None or saver is None or (not stops and (saver.busy or saver.newest is None)):
            return
        if saver.newest is None:
            desk.failed(None, "the run has stopped before there was anything to save", stops=True)
        else:
            desk.ended(None, *saver.newest, stops=stops)

    def _remove_stop_file(self) -> None:
        assert self._stop_file is not None
        with suppress(OSError):  # a folder, or another user's: the run has saved, and stops all the same
            os.unlink(self._stop_file)

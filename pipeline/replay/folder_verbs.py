"""The verbs that every buffer with a folder has, whatever its rows are."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from pipeline.distributed import Ranks
from pipeline.replay.controlled import Controlled
from pipeline.replay.due import Due
from pipeline.replay.gate import Gate
from pipeline.replay.rank_due import RankDue
from pipeline.replay.saving import SaverOf
from pipeline.replay.store import ReplayStore, Saving


class FolderVerbs:
    """What a buffer is saved with, and how it ends."""

    gate: Gate
    _saver: SaverOf[Any, Any]
    _due: Due | None
    _own: Any
    """What is saved."""
    _forked: bool

    def _usable(self) -> None:
        """Raise unless the buffer may be used."""
        raise NotImplementedError

    def attach(self, **objects: Any) -> None:
        """Save and restore these with the buffer: anything with ``state_dict`` and ``load_state_dict``."""
        self._saver.attach(objects)

    def attach_own(self, **objects: Any) -> None:
        """Save and restore these with the buffer, of each rank its own: such as the random state of its environments.
        What is attached otherwise is the first rank's, for all of them. All ranks attach the same names.

        As many ranks as saved them take theirs back. Another number of ranks does not load them: ``resume`` says so in
        what it returns, and in the log. Without ``ranks`` it is :meth:`attach`. They are to be small, as they are
        copied.
        """
        self._saver.attach_own(objects)

    def save(self, step: int, *, wait: bool = False) -> Saving:
        """Commit the state of what is attached and of the buffer as one thing.

        Returns once the tensors of what is attached have been read, and goes on beside the trainer: only rows that are
        not on the disk yet are written. What it fails with later is raised by the next ``save_due``, ``save`` (which
        then saves nothing) or ``close``, or by ``Saving.wait``.

        Args:
            step: the trainer's step.
            wait: return when it is on the disk.

        Raises:
            UsageError: there is no directory, or it is in use and was not resumed; or the options name signals, and
                this is not the main thread. Nothing was saved.
            ServingError: nobody can listen where ``control=`` says. Nothing was saved.
            WriteFailed: it cannot be written. The generation before it stands, and nothing of the buffer has changed.
            StoppedExit: the run was asked to stop, and this save is committed.
        """
        self._usable()
        self.listen()
        due = self._due
        if due is not None:
            due.begin(step)
        saving = self._saver.save(step, self._own) if due is None or due.control is None else self._told(step, due)
        assert due is not None
        due.saved(step)
        if due.stopping:
            due.leave(saving)
        if wait:
            saving.wait()
        return saving

    def _told(self, step: int, due: Due) -> Saving:
        """Save, and let who has asked over HTTP know how it ends."""
        control, stops = due.control, due.stopping
        assert control is not None
        ticket = control.desk.begun()
        try:
            saving = self._saver.save(step, self._own)
        except BaseException as error:
            control.desk.failed(ticket, str(error) or repr(error), stops=stops)
            raise
        control.answer(ticket, saving, stops=stops)
        control.announce()
        return saving

    def listen(self) -> None:
        """Take the signals over that ask to stop, if this is the main thread and there is a directory; and listen to
        requests over HTTP, if they were asked for."""
        if self._due is not None:
            self._due.listen()

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """What is done here begins to :meth:`listen`; not any more, if it fails: nobody would act on a signal."""
        due, heard = self._due, self._due is None or self._due.listening
        try:
            yield
        except BaseException:
            if due is not None and not heard:
                due.deafen()
            raise
        if due is not None and due.control is not None:
            due.control.announce()

    def save_due(self, step: int | None = None) -> bool:
        """Whether a save is due: by the options ``save_every_s`` and ``save_every`` (of ``step``), by a signal, by a
        file ``stop`` in the folder, or by a request over HTTP (``control=``). After a signal, the file, or a request to
        stop, ``save`` does not return.

        Of a buffer with ``ranks``, all of them call it with the same steps, and what one rank hears it says on all of
        them at one step, this one or one soon to come; nobody waits for another one in it.

        Raises:
            UsageError: ``save_every`` needs the step, and so do ranks; theirs must not go back.
            WriteFailed: a save failed after it had returned.
            RankFailed, RankLost: so it did on another rank; or the process group's store cannot be reached.
        """
        due = self._due is not None and self._due.due(step)
        if not (due and self._due is not None and self._due.all_save):
            self._saver.raise_failed()  # else by the save, once it has begun
        return due

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is being written, and give back the folder and the signals. The rows stay, but cannot be saved
        any more; who waits for the limiter gives up. In a forked child it does nothing: the folder and the files are
        the parent's."""
        if self._forked:
            return
        self.gate.end_waits()
        try:
            self._saver.close()
        finally:
            if self._due is not None:
                self._due.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saver.store is not None:
            self._saver.store.left_by = error
        self.close()


def due_of(store: ReplayStore | None, statistics: Callable[[], Any], ranks: Ranks | None = None) -> Due | None:
    """Return what says when a save is due; None without a folder."""
    if store is None:
        return None
    options, stop_file = store.options, store.folder.layout.stop_file
    control = None if options.listens is None else Controlled(options.listens, store, statistics)
    return Due(options, stop_file, control) if ranks is None else RankDue(options, stop_file, ranks, control)


_buffers: weakref.WeakSet[FolderVerbs] = weakref.WeakSet()
_watching = False


def not_after_fork(buffer: FolderVerbs) -> None:
    """Let a forked child know that the buffer is not its own."""
    global _watching
    _buffers.add(buffer)
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_mark_forked)


def _mark_forked() -> None:
    for buffer in _buffers:
        buffer._forked = True
        buffer.gate = Gate()  # a thread of the parent may have held the lock, and is not here to give it back

"""The verbs that every buffer with a folder has, whatever its rows are."""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import Any, Self

from pipeline.replay.due import Due
from pipeline.replay.gate import Gate
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
            WriteFailed: it cannot be written. The generation before it stands, and nothing of the buffer has changed.
            StoppedExit: the run was asked to stop, and this save is committed.
        """
        self._usable()
        self.listen()
        saving = self._saver.save(step, self._own)
        assert self._due is not None
        self._due.saved(step)
        if self._due.stopping:
            self._due.leave(saving)
        if wait:
            saving.wait()
        return saving

    def listen(self) -> None:
        """Take the signals over that ask to stop, if this is the main thread and there is a directory."""
        if self._due is not None:
            self._due.listen()

    def save_due(self, step: int | None = None) -> bool:
        """Whether a save is due: by the options ``save_every_s`` and ``save_every`` (of ``step``), by a signal, or by a
        file ``stop`` in the folder. After the last two, ``save`` does not return. With neither option, only they count.

        Raises:
            UsageError: ``save_every`` needs the step.
            WriteFailed: a save failed after it had returned.
        """
        self._saver.raise_failed()
        return self._due is not None and self._due.due(step)

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
        self.close()


def due_of(store: ReplayStore | None) -> Due | None:
    """Return what says when a save is due; None without a folder."""
    return None if store is None else Due(store.options, store.folder.layout.stop_file)


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

"""When a save is due, and when the run is to stop."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from pipeline.checkpoint.triggers import SignalTrap
from pipeline.config import SavingOptions
from pipeline.control.desk import HTTP
from pipeline.errors import StoppedExit, UsageError
from pipeline.replay.controlled import Controlled
from pipeline.replay.store import Saving

STOP_FILE = "stop file"
_LOOK_EVERY_S = 1.0  # no notice reaches a machine whose shared file system another one wrote to


class Due:
    """Triggers of one buffer: seconds, steps, signals, the file ``stop`` in its folder, and requests over HTTP."""

    def __init__(self, options: SavingOptions, stop_file: str, control: Controlled | None = None) -> None:
        self._options, self._stop_file = options, stop_file
        self.control = control
        self._wanted = False  # over HTTP, and no more than a save
        self._trap: SignalTrap | None = None
        self._reason = self._where = ""
        self._code = 0
        self._since = self._looked = time.monotonic()
        self._step = 0

    def listen(self) -> None:
        """Take the signals over, if this is the thread that may, and listen to requests.

        Raises:
            UsageError: it is not, and the options name signals.
            ServingError: nobody can listen to requests there.
        """
        if self.control is not None:
            self.control.begin()
        numbers = self._options.stop_signals
        if self._trap is not None or not numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            if self._options.signals:
                raise UsageError("signals= needs a buffer that is resumed, or first saved, in the main thread")
            return
        self._trap = SignalTrap(numbers, ())
        self._trap.install()

    @property
    def listening(self) -> bool:
        """Whether the signals are taken over."""
        return self._trap is not None

    def begin(self, step: int) -> None:
        """A save is about to begin."""

    def saved(self, step: int) -> None:
        """Note that a save has begun."""
        self._since, self._step, self._wanted = time.monotonic(), step, False

    def due(self, step: int | None) -> bool:
        """Whether somebody wants a save now.

        Raises:
            UsageError: ``save_every`` counts steps, and there is none.
        """
        every = self._options.save_every
        if every is not None and step is None:
            raise UsageError(f"save_due(): save_every={every} counts steps: call save_due(step)")
        return self.stopping or self._wanted or self._due_by_time() or (step is not None and self._due_by_steps(step))

    @property
    def all_save(self) -> bool:
        """Whether others save where :meth:`due` says so, whatever becomes of it here."""
        return False

    @property
    def stopping(self) -> bool:
        """Whether the run is to stop at the save that has begun, or at the next one."""
        return self._hears_stop()

    def _due_by_time(self) -> bool:
        every = self._options.save_every_s
        return every is not None and time.monotonic() - self._since >= every

    def _due_by_steps(self, step: int) -> bool:
        every = self._options.save_every
        return every is not None and step // every > self._step // every

    def _hears_stop(self) -> bool:
        """Whether this process was asked to stop."""
        if self._trap is not None and self._trap.arrived:
            for name, _, code in self._trap.take():
                self._reason, self._code = name, code
        if self.control is not None and self.control.desk.asked:
            if self.control.desk.take() == "stop":
                self._reason = self._reason or HTTP
            else:
                self._wanted = True
        now = time.monotonic()
        if not self._reason and now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            if os.path.lexists(self._stop_file):
                self._reason = STOP_FILE
        return bool(self._reason)

    def leave(self, saving: Saving) -> None:
        """Wait for the save, and leave.

        Raises:
            StoppedExit: in any case, if it was committed.
        """
        saving.wait()
        if self._reason == STOP_FILE:
            with contextlib.suppress(OSError):  # whoever made it may have taken it back
                os.unlink(self._stop_file)
        reason, self._reason = self._reason + self._where, ""
        if self.control is not None:
            self.control.desk.ended(None, saving.generation, saving.step, stops=True)
            self.control.linger()
        raise StoppedExit(self._code, reason, saving.step, saving.generation)

    def deafen(self) -> None:
        """Give the signals back; what asked to stop, and was not heard, is sent again."""
        trap, self._trap = self._trap, None
        if trap is not None:
            trap.remove(again=trap.arrived or bool(self._reason))

    def close(self) -> None:
        """:meth:`deafen`, and take no more requests."""
        try:
            if self.control is not None:
                self.control.close()
        finally:
            self.deafen()

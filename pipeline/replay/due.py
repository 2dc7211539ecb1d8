"""When a save is due, and when the run is to stop."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from pipeline.checkpoint.triggers import SignalTrap
from pipeline.config import SavingOptions
from pipeline.errors import StoppedExit, UsageError
from pipeline.replay.store import Saving

_LOOK_EVERY_S = 1.0  # no notice reaches a machine whose shared file system another one wrote to


class Due:
    """Triggers of one buffer: seconds, steps, signals, and the file ``stop`` in its folder."""

    def __init__(self, options: SavingOptions, stop_file: str) -> None:
        self._options, self._stop_file = options, stop_file
        self._trap: SignalTrap | None = None
        self._reason = ""
        self._code = 0
        self._since = self._looked = time.monotonic()
        self._step = 0

    def listen(self) -> None:
        """Take the signals over, if this is the thread that may.

        Raises:
            UsageError: it is not, and the options name signals.
        """
        numbers = self._options.stop_signals
        if self._trap is not None or not numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            if self._options.signals:
                raise UsageError("signals= needs a buffer that is resumed, or first saved, in the main thread")
            return
        self._trap = SignalTrap(numbers, ())
        self._trap.install()

    def saved(self, step: int) -> None:
        """Note that a save has begun."""
        self._since, self._step = time.monotonic(), step

    def due(self, step: int | None) -> bool:
        """Whether somebody wants a save now.

        Raises:
            UsageError: ``save_every`` counts steps, and there is none.
        """
        options = self._options
        if options.save_every is not None and step is None:
            raise UsageError(f"save_due(): save_every={options.save_every} counts steps: call save_due(step)")
        if self.stopping:
            return True
        if options.save_every_s is not None and time.monotonic() - self._since >= options.save_every_s:
            return True
        every = options.save_every
        return every is not None and step is not None and step // every > self._step // every

    @property
    def stopping(self) -> bool:
        """Whether the run is to stop at the next save."""
        if self._trap is not None and self._trap.arrived:
            for name, _, code in self._trap.take():
                self._reason, self._code = name, code
        now = time.monotonic()
        if not self._reason and now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            if os.path.lexists(self._stop_file):
                self._reason = "stop file"
        return bool(self._reason)

    def leave(self, saving: Saving) -> None:
        """Wait for the save, and leave.

        Raises:
            StoppedExit: in any case, if it was committed.
        """
        saving.wait()
        if self._reason == "stop file":
            with contextlib.suppress(OSError):  # whoever made it may have taken it back
                os.unlink(self._stop_file)
        reason, self._reason = self._reason, ""
        raise StoppedExit(self._code, reason, saving.step, saving.generation)

    def close(self) -> None:
        """Give the signals back."""
        trap, self._trap = self._trap, None
        if trap is not None:
            trap.remove(again=True)

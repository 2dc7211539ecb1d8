"""How the training process hears that it should stop, and tells the process that started it how far it is.

The rule on both sides is that any of the two may be gone at any moment: a report that nobody reads any more is a
request to stop.
"""

from __future__ import annotations

import json
import os
import signal
from types import FrameType
from typing import Any, Final

LOCKED: Final = 75
"""The training process's exit code where another one writes in the directory."""

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A request to save and stop at the next step: Ctrl-C, SIGTERM, or a parent that is gone."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0

    def listen(self) -> None:
        """Take the signals over. A second Ctrl-C ends the process at once, which a run survives as it does a kill."""
        signal.signal(signal.SIGINT, self._interrupted)
        signal.signal(signal.SIGTERM, self._told)
        # The parent starts this process with them held back, so that none falls into its imports.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            os._exit(130)
        self.requested = True

    def _told(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


class Reports:
    """Writes one line of JSON for each event to a pipe; does nothing without one."""

    def __init__(self, descriptor: int | None, stop: Stop) -> None:
        self._descriptor, self._stop = descriptor, stop

    def __call__(self, event: str, **fields: Any) -> None:
        if self._descriptor is None:
            return
        line = json.dumps({"event": event, **fields}) + "\n"
        try:
            os.write(self._descriptor, line.encode())
        except BrokenPipeError:
            self._descriptor = None
            self._stop.requested = True

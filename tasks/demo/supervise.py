"""The parent's side: starts the training process, kills it, starts it again, and hands signals on.

The training process may end at any moment, killed by this one or by anybody, and this one may too: nothing that the run
needs is kept here.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import tasks
from tasks.demo.process import LOCKED, SIGNALS

PATIENCE = 4
"""How often it is started while one that lost its parent still saves."""

Report = dict[str, Any]


class Trainer:
    """One life of the training process."""

    def __init__(self, arguments: Sequence[str]) -> None:
        reading, writing = os.pipe()
        # Nothing of the folder that this was started in may stand in for our packages, a file tasks.py for one.
        root = str(Path(str(tasks.__file__)).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-P", "-m", "tasks.demo.train", *arguments, "--report-to", str(writing)]
        self.begun = time.monotonic()
        # It hears of signals once it can do something about them, and not in the middle of its imports.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[writing],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            os.close(writing)
        self._pipe = open(reading, "rb")  # noqa: SIM115  closed by `wait`

    def reports(self) -> Iterator[Report]:
        """Yield what it reports, until it ends."""
        for line in self._pipe:
            if line.endswith(b"\n"):
                yield json.loads(line)

    def kill_within(self, seconds: float) -> None:
        """Let it work for so long, or until its next report, and send SIGKILL."""
        select.select([self._pipe], [], [], seconds)
        self._process.kill()

    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Return its exit code once it has ended; negative for a signal."""
        self._pipe.close()
        return self._process.wait()


class Supervisor:
    """Sees a run through: the training process's lives, one after the other.

    Args:
        arguments: of the training process.
        tell: gets each report, and those of this class: ``killed``, ``stopping``.
        kill_due: after which step's report it is killed; None: never.
    """

    def __init__(
        self, arguments: Sequence[str], tell: Callable[[Report], None], kill_due: Callable[[int], bool] | None
    ) -> None:
        self._arguments, self._tell, self._kill_due = list(arguments), tell, kill_due
        self._trainer: Trainer | None = None
        self._telling = self._untold = False
        self.stopped_by: int | None = None
        """The signal that asked to stop."""
        self.seconds_to_resume: float | None = None
        self.error = ""

    def run(self) -> int:
        """Return the last training process's exit code."""
        code, tries, killed = 0, 0, False
        with self._signals():
            while self.stopped_by is None:
                code, was_killed = self._live(after_kill=killed)
                tries += code == LOCKED
                killed = killed or was_killed
                if not was_killed and (code != LOCKED or tries >= PATIENCE):
                    break
        return code

    def _live(self, *, after_kill: bool) -> tuple[int, bool]:
        """Run one training process to its end. Returns its exit code, and whether it was killed from here."""
        trainer = self._trainer = Trainer(self._arguments)
        last, killed = time.monotonic(), False
        for report in trainer.reports():
            now = time.monotonic()
            if report["event"] == "failed":
                self.error = report["error"]
            if report["event"] == "trained" and not killed:
                if after_kill and self.seconds_to_resume is None:
                    self.seconds_to_resume = now - trainer.begun
                if self._kill_due is not None and self._kill_due(report["step"]) and self.stopped_by is None:
                    trainer.kill_within((now - last) / 2)  # in the middle of the next step
                    self._kill_due, killed = None, True
                last = now
            self._report(report)
        code = trainer.wait()
        self._trainer = None
        if killed:
            self._report({"event": "killed"})
        return code, killed

    def _report(self, report: Report) -> None:
        """Tell it. A signal may come in the middle: of that is told behind it, as a stream is not written to within
        what is being written to it."""
        self._telling = True
        try:
            self._tell(report)
        finally:
            self._telling = False
        if self._untold:
            self._untold = False
            self._report({"event": "stopping"})

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """The first one: the training process saves and stops. The second: it ends now."""
        first, self.stopped_by = self.stopped_by is None, number
        if self._trainer is not None:
            # A terminal sends Ctrl-C to both; what is sent on is therefore SIGTERM, of which one is as good as two.
            self._trainer.signal(signal.SIGTERM if first else signal.SIGKILL)
        if first and self._telling:
            self._untold = True
        elif first:
            self._report({"event": "stopping"})


def _has_descriptor(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False

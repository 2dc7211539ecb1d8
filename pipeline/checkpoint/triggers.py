"""What asks for a checkpoint: requests that become one, and signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Literal, TypeAlias

import msgspec

from pipeline.errors import Stopped

Then: TypeAlias = Literal["continue", "stop"]

TWICE_AT_ONCE_S = 0.25
"""A launcher and what it started may both pass a signal on: a second one that comes this soon is the first again."""


class CheckpointRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wants a generation, and what is to follow it."""

    reason: str
    deadline: float
    """By the event loop's clock, in seconds."""
    then: Then = "continue"
    code: int = 0
    """Exit code of the process, if it is to stop."""

    def joined(self, other: CheckpointRequest) -> CheckpointRequest:
        """Return the one request that does for both: the earlier deadline, and a stop if either asks for one."""
        reasons = self.reason.split(", ")
        stops = [each for each in (self, other) if each.then == "stop"]
        return CheckpointRequest(
            reason=self.reason if other.reason in reasons else f"{self.reason}, {other.reason}",
            # A stop's deadline is what the launcher grants; that of a mere save must not bring it forward.
            deadline=min(each.deadline for each in stops or (self, other)),
            then="stop" if stops else "continue",
            code=next((each.code for each in stops if each.code), 0),
        )


def exit_by_code() -> None:
    """Let a :class:`~pipeline.Stopped` that nobody catches end the process by its exit code, without a traceback.

    Also where task groups have wrapped it. Other errors go to the hook that was there.
    """
    before = sys.excepthook
    if getattr(before, "_exits_by_code", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        stopped = only_stopped(error)
        if stopped is not None:
            raise SystemExit(stopped.code)
        before(kind, error, trace)

    hook._exits_by_code = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def only_stopped(error: BaseException) -> Stopped | None:
    """Return the stop that ``error`` is, or that a group holds which holds nothing else."""
    if isinstance(error, Stopped):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    found = [only_stopped(each) for each in error.exceptions]
    return found[0] if all(each is not None for each in found) else None


class SignalTrap:
    """Notes signals and wakes whoever reads :attr:`descriptor`; no more happens in a handler.

    A handler that was there before is called as well. If it wants to leave (``sys.exit``), its exit code is kept
    for later: first comes the save. The second signal of a kind leaves at once.
    """

    def __init__(self, stop: Iterable[int], save: Iterable[int]) -> None:
        self._stop, self._save = frozenset(stop), frozenset(save)
        self._before: dict[int, Any] = {}
        self._first: dict[int, float] = {}
        self._told: set[int] = set()
        self._arrived: deque[tuple[int, int]] = deque()
        self._process = os.getpid()
        self.descriptor, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def install(self) -> None:
        """Take the signals over. Only the main thread may."""
        for number in self._stop | self._save:
            self._before[number] = signal.signal(number, self._handle)

    def remove(self, *, again: bool) -> None:
        """Give the signals back to whoever had them. Where somebody took them over since, that one keeps them.

        Args:
            again: what asked to stop is sent once more, as nobody has acted on it: it was meant for the process.
        """
        taken, self._stop, self._save = self._stop, frozenset(), frozenset()
        if threading.current_thread() is threading.main_thread():  # else the handler stays, and hands everything on
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_DFL if before is None else before)
        self.close()
        if again:
            for number in taken & self._first.keys():
                if not callable(self._before[number]):  # who had a handler has been told
                    os.kill(os.getpid(), number)

    def close(self) -> None:
        """Close the pipe."""
        for descriptor in (self.descriptor, self._wake):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self._wake = -1

    def taken_over(self) -> list[str]:
        """Return the names of the signals that somebody else has taken over since; each once."""
        found = [
            number for number in (self._stop | self._save) - self._told if signal.getsignal(number) != self._handle
        ]
        self._told.update(found)
        return [signal.Signals(number).name for number in sorted(found)]

    @property
    def arrived(self) -> bool:
        """Whether a signal came that nobody has taken."""
        return bool(self._arrived)

    def take(self) -> list[tuple[str, Then, int]]:
        """Return what came since the last call: the signal's name, what is to follow, and the exit code."""
        with suppress(BlockingIOError, OSError):
            os.read(self.descriptor, 4096)
        taken: list[tuple[str, Then, int]] = []
        while self._arrived:  # one at a time: a handler may add to it meanwhile
            number, code = self._arrived.popleft()
            taken.append((signal.Signals(number).name, "stop" if number in self._stop else "continue", code))
        return taken

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if os.getpid() != self._process or number not in self._stop | self._save:
            # A forked child, or a pipeline that is closed: it is as if nobody had taken the signal over.
            self._pass_on(number, frame)
            return
        now = time.monotonic()
        first = self._first.setdefault(number, now)
        if number in self._stop and now - first > TWICE_AT_ONCE_S:
            self._pass_on(number, frame, leave=True)
            return
        if number in self._stop and first != now:
            return
        code = 128 + number
        if callable(before) and number != signal.SIGINT:  # Python's own raises KeyboardInterrupt: before any save
            try:
                before(number, frame)
            except SystemExit as leaving:
                code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
        self._arrived.append((number, code))
        with suppress(BlockingIOError, OSError):
            os.write(self._wake, b"\0")

    def _pass_on(self, number: int, frame: FrameType | None, *, leave: bool = False) -> None:
        before = self._before.get(number)
        if callable(before) and (not leave or number == signal.SIGINT):
            before(number, frame)
        elif before is not signal.SIG_IGN or leave:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

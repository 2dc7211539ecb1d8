"""Waiting for the end of a process, and what is said of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from typing import Any

import anyio
import anyio.to_thread

from pipeline.errors import WorkerDied

_MOST_LINES = 20
_LONGEST = 2000


async def ended(process: subprocess.Popen[Any]) -> None:
    """Return when a process has ended; where the system can say so it is not reaped, and its number nobody else's."""
    if process.returncode is not None:
        return
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        own = anyio.CapacityLimiter(1)
        await anyio.to_thread.run_sync(_wait, process, limiter=own, abandon_on_cancel=True)
        return
    try:
        await anyio.wait_readable(descriptor)
    finally:
        os.close(descriptor)


def _wait(process: subprocess.Popen[Any]) -> None:
    if not hasattr(os, "waitid"):
        process.wait()
        return
    with contextlib.suppress(ChildProcessError):  # somebody else takes the ends of this process's children
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def has_ended(process: subprocess.Popen[Any]) -> bool:
    """Whether a process has ended by now."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def kill_all(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a group, and all of the group: what it has started does not outlive it."""
    if process.returncode is None or not hasattr(os, "waitid"):  # once reaped, the number may be another's
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def death_of(process: subprocess.Popen[Any], doing: str, said: str, *, planned: bool) -> WorkerDied:
    """Return the error that says how a reaped process ended."""
    code, name = process.returncode, None
    if code is None or code >= 0:
        how = f"left with exit code {code}"
    else:
        name = _signal_name(-code)
        how = f"was killed by {name}"
        if -code == signal.SIGKILL and not planned:
            how += " (by somebody, or by the system for want of memory)"
    said = said.strip()
    tail = f". It said last:\n{said}" if said else ", and said nothing on stderr"
    return WorkerDied(
        f"worker process {process.pid} {how} {doing}{tail}",
        pid=process.pid,
        signal=name,
        code=None if name else code,
        stderr=said,
        planned=planned,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Tail:
    """Reads what a process writes to its stderr, passes it on, and remembers the last lines."""

    def __init__(self, descriptor: int, pass_on: Any) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self._pass_on = descriptor, pass_on
        self._lines: deque[bytes] = deque([b""], _MOST_LINES)

    async def follow(self) -> None:
        """Read until nobody writes any more."""
        while True:
            await anyio.wait_readable(self._descriptor)
            try:
                if not self._take():
                    return
            except BlockingIOError:
                continue

    def drain(self) -> None:
        """Read what is in the pipe by now; others than the process may go on writing into it."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                if not self._take():
                    return

    def _take(self) -> bool:
        data = os.read(self._descriptor, 1 << 16)
        if not data:
            return False
        self._pass_on(data)
        first, *more = data.split(b"\n")
        self._lines[-1] = (self._lines[-1] + first)[-_LONGEST:]
        self._lines.extend(line[:_LONGEST] for line in more)
        return True

    @property
    def text(self) -> str:
        """The last lines."""
        return b"\n".join(self._lines).decode("utf-8", "replace")

    def close(self) -> None:
        os.close(self._descriptor)

"""Who holds an event loop: the loop's side of :mod:`pipeline.observe.watchdog`, for asyncio and trio.

A stack is read from the innermost frame outwards to where the loop called into it. Frames outside of that belong
to whoever started the loop and hold nothing. When the loop itself is innermost (it waits for I/O, or tidies up)
nobody holds it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

# (module, function) through which a loop enters the code of others, and in which it is by itself.
ENTERS = {("asyncio.events", "_run"), ("trio._core._run", "unrolled_run"), ("asyncio.runners", "run")}
ALONE = {("asyncio.base_events", "_run_once"), ("trio._core._run", "run")}
MACHINERY = sys.stdlib_module_names | {"anyio", "outcome", "sniffio", "trio", "uvloop"}
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Place(NamedTuple):
    """A line of code that was running."""

    function: str
    file: str
    line: int


class LoopHandle(NamedTuple):
    """What may be asked of a running event loop from another thread."""

    call: Callable[[Callable[[], None]], object]
    """Run a function on the loop soon; RuntimeError when the loop has ended."""
    running: Callable[[], bool]
    """Whether the loop runs; RuntimeError when it has ended."""
    task: Callable[[], str]
    """Name of the task that runs now, or nothing."""


def running_loop() -> LoopHandle:
    """Return a handle on the event loop that runs in this thread: asyncio's or trio's.

    Raises:
        RuntimeError: none does.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        if "trio" not in sys.modules:
            raise
        return _trio_loop()

    def running() -> bool:
        if loop.is_closed():
            raise RuntimeError("Event loop is closed")
        return loop.is_running()

    def task() -> str:
        current = asyncio.current_task(loop)
        return current.get_name() if current is not None else ""

    return LoopHandle(loop.call_soon_threadsafe, running, task)


def _trio_loop() -> LoopHandle:
    import trio

    token = trio.lowlevel.current_trio_token()

    def running() -> bool:
        token.run_sync_soon(_nothing, idempotent=True)
        return True

    return LoopHandle(token.run_sync_soon, running, str)


def _nothing() -> None:
    pass


def thread_clock() -> Callable[[], float]:
    """Return a clock of the processor time that this thread uses, to be read from other threads.

    Where the system has none (macOS) it is that of the process.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time
    return functools.partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


def holder(frame: FrameType | None) -> Place | None:
    """Return who holds the loop, from the innermost ``frame`` of its thread; None if nobody does.

    That is the innermost frame of neither the standard library, nor the event loops, nor this library. When
    there is none the holder is ours: then it is the innermost of this library, or the innermost at all.
    """
    inside: list[FrameType] = []
    while frame is not None:
        at = (_module(frame), frame.f_code.co_name)
        if at in ENTERS:
            break
        if at in ALONE:
            return None
        inside.append(frame)
        frame = frame.f_back
    if frame is None or not inside:
        return None
    theirs = (f for f in inside if not _ours(f) and _module(f).partition(".")[0] not in MACHINERY)
    found = next(theirs, None) or next(filter(_ours, inside), inside[0])
    code = found.f_code
    return Place(code.co_qualname, code.co_filename, found.f_lineno or code.co_firstlineno)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)

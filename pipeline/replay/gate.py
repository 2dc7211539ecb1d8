"""Waiting for a buffer, in threads and in tasks alike."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from pipeline.errors import ClosedError, TimedOut

Predicate = Callable[[], object]


class Gate:
    """A lock, and a condition on what it guards. Whoever changes that calls :meth:`changed`, without the lock."""

    def __init__(self, lock: Any = None) -> None:
        """Args:
        lock: for threads of this process, an ``RLock``, or one like it that keeps out others as well.
        """
        self.lock = lock or threading.RLock()
        self._condition = threading.Condition(self.lock)
        self._threads = 0
        self._tasks: list[tuple[Predicate, anyio.Event, Any, int]] = []
        self._ends = 0  # how often all waits were ended

    def look(self) -> None:
        """Take in what was done up to now, if others than threads of this process do something."""

    @property
    def waiters(self) -> int:
        """How many threads and tasks wait."""
        return self._threads + len(self._tasks)

    def wait(self, predicate: Predicate, timeout: float | None, why: Callable[[], str]) -> None:
        """Return once ``predicate`` holds; the caller has the lock, and it is given back while this waits.

        Raises:
            TimedOut: it did not hold in ``timeout`` seconds.
            ClosedError: the wait was ended.
        """
        if predicate():
            return
        self._threads += 1
        ends = self._ends
        try:
            if timeout != 0:
                self._enlist()
            if timeout == 0 or not self._condition.wait_for(lambda: predicate() or self._ends > ends, timeout):
                waited = (
                    f"Waited {timeout:g} s; with timeout=None it would wait"
                    if timeout
                    else "With timeout= it would wait"
                )
                raise TimedOut(f"{why()}. {waited}", predicate)
            self._check_ended(predicate, ends)
        finally:
            self._threads -= 1
            self._dismiss()

    async def wait_for(self, predicate: Predicate) -> None:
        """As :meth:`wait`, for a task without the lock, which on return holds for this turn of its loop at the least,
        if all others are tasks of that loop."""
        ends = self._ends
        while True:
            with self.lock:
                self._check_ended(predicate, ends)
                if predicate():
                    return
                waiter = (predicate, anyio.Event(), anyio.lowlevel.current_token(), threading.get_ident())
                self._tasks.append(waiter)
                self._enlist()
            try:
                await waiter[1].wait()
            finally:
                with self.lock:
                    self._tasks.remove(waiter)
                    self._dismiss()

    def _enlist(self) -> None:
        """Take in that somebody is about to wait; the lock is held."""

    def _dismiss(self) -> None:
        """Take in that somebody waits no longer; the lock is held."""

    def _check_ended(self, predicate: Predicate, ends: int) -> None:
        if self._ends > ends and not predicate():
            raise ClosedError("the buffer was closed while this waited for its limiter; nothing was changed")

    def end_waits(self) -> None:
        """Let whoever waits in this process give up. Others may wait afterwards."""
        with self.lock:
            self._ends += 1
            self._wake(lambda predicate: True)

    def changed(self) -> None:
        """Wake whoever may go on now."""
        if self._threads or self._tasks:
            self._wake(lambda predicate: predicate())

    def _wake(self, may: Callable[[Predicate], object]) -> None:
        with self.lock:
            self._condition.notify_all()
            ready = [each for each in self._tasks if may(each[0])]
        for _, event, token, thread in ready:
            if thread == threading.get_ident():
                event.set()
            else:
                _set_soon(token, event)


@contextlib.contextmanager
def holding(locks: Sequence[Any]) -> Iterator[None]:
    """Have the locks of several buffers. Whoever waits for one of them has none of the others meanwhile, so that nobody
    waits for each other, in whatever order locks are taken elsewhere."""
    first = 0
    while True:
        with contextlib.ExitStack() as held:
            held.enter_context(locks[first])
            busy = None
            for number, lock in enumerate(locks):
                if number == first:
                    continue
                if not lock.acquire(blocking=False):
                    busy = number
                    break
                held.push(lock)
            if busy is None:
                yield
                return
        first = busy


def _set_soon(token: Any, event: anyio.Event) -> None:
    """Set an event of another thread's loop without waiting for that loop: it may be busy, or be waiting for us."""
    native = getattr(token, "native_token", token)  # before anyio 4.11 it is the loop itself
    soon = native.run_sync_soon if hasattr(native, "run_sync_soon") else native.call_soon_threadsafe  # trio, asyncio
    with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits in it any more
        soon(event.set)

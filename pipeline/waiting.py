"""Waiting for a condition, without looking again and again.

A waiter hands its predicate to the signal, and whoever changes the state evaluates it: a waiter is woken once, when
there is something for it, and a state change that concerns nobody costs a comparison. A waiter that is cancelled
after it was woken has taken nothing, so it wakes the others to look for themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio


class Signal:
    """A condition variable for one event loop; all methods but :meth:`wait_for` are synchronous."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[tuple[Callable[[], object], anyio.Event]] = []

    def notify(self) -> None:
        """Wake every waiter whose predicate holds now. Call it after each change of state."""
        if self._waiters:
            for predicate, event in self._waiters:
                try:
                    if predicate():
                        event.set()
                except Exception:  # it is the waiter's, and raised again where it waits
                    event.set()

    @property
    def waiters(self) -> int:
        """How many tasks wait."""
        return len(self._waiters)

    async def wait_for(self, predicate: Callable[[], object]) -> None:
        """Return once ``predicate`` holds. It must be cheap and change nothing; it may raise, which ends the wait."""
        while not predicate():
            event = anyio.Event()
            waiter = (predicate, event)
            self._waiters.append(waiter)
            try:
                await event.wait()
            except BaseException:
                self._waiters.remove(waiter)
                if event.is_set():
                    self.notify()
                raise
            self._waiters.remove(waiter)

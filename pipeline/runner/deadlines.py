"""Cuts attempts that last too long, for the cost of two dictionary operations each.

A cancel scope's own deadline sets and cancels a timer for every attempt, four times the cost of the rest of it. But
attempts with one timeout end in the order in which they began, so a single timer for the first of them does: when it
goes off, the first may be another one, and then it waits for that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

import anyio

Key = TypeVar("Key")


class TimeLimit(Generic[Key]):
    """What runs under one timeout, in the order in which it began. :meth:`watch` is a task of the owner's."""

    __slots__ = ("_cut", "_now", "_running", "_timeout", "_wake")

    def __init__(self, timeout: float, now: Callable[[], float], cut: Callable[[Key], None]) -> None:
        """Args:
        timeout: seconds.
        now: the event loop's clock.
        cut: called for what has lasted ``timeout`` seconds; it is forgotten before.
        """
        self._timeout, self._now, self._cut = timeout, now, cut
        # A plain dict walks over the holes of removed keys at its front; this one is a linked list.
        self._running: OrderedDict[Key, float] = OrderedDict()
        self._wake: anyio.Event | None = None

    def begin(self, key: Key) -> float:
        """Count from now on, and return when ``key`` will be cut."""
        deadline = self._running[key] = self._now() + self._timeout
        if self._wake is not None:
            self._wake.set()
        return deadline

    def end(self, key: Key) -> None:
        """Stop counting; what was cut already is ignored."""
        self._running.pop(key, None)

    async def watch(self) -> NoReturn:
        """Cut what lasts too long, for ever."""
        while True:
            if not self._running:
                self._wake = anyio.Event()
                await self._wake.wait()
                self._wake = None
                continue
            key, deadline = next(iter(self._running.items()))
            left = deadline - self._now()
            if left > 0:
                await anyio.sleep(left)
            else:
                del self._running[key]
                self._cut(key)

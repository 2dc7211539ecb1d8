"""Which server gets the next request: the one with the fewest in flight, of those that are well.

Plain methods change the state; whoever has to wait for a place waits in :meth:`Servers.place`, in the order of coming.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import msgspec

_LONGEST_REST_S = 30.0


class Server(msgspec.Struct, eq=False):
    """One of several servers of a model.

    Attributes:
        url: where its API begins.
        in_flight, most: requests now, and how many there were at once at most.
        failures: how many in a row came to nothing; 0 once one is answered.
        rests_until: time before which others come first.
    """

    url: str
    in_flight: int = 0
    most: int = 0
    answered: int = 0
    failures: int = 0
    rests_until: float = 0.0


class Servers:
    """Places for requests: at most ``concurrency`` at a time at each server."""

    def __init__(self, urls: Sequence[str], concurrency: int, now: Callable[[], float]) -> None:
        self.all = [Server(url) for url in urls]
        self.concurrency = concurrency
        self._now = now
        self._waiting: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, avoid: Server | None = None) -> AsyncIterator[Server]:
        """Wait for a place at a server, and have it. ``avoid``: the one that has just failed; another one if there
        is one with a place."""
        server = self._take(avoid)  # nobody waits while there is a place
        if server is None:
            server = await self._wait(avoid)
        try:
            yield server
        finally:
            self._give_back(server)

    async def _wait(self, avoid: Server | None) -> Server:
        waiter = _Waiter(avoid)
        self._waiting.append(waiter)
        try:
            await waiter.event.wait()
        except BaseException:
            if waiter.server is None:
                self._waiting.remove(waiter)
            else:  # it was given one in the same moment
                self._give_back(waiter.server)
            raise
        assert waiter.server is not None
        return waiter.server

    def _take(self, avoid: Server | None) -> Server | None:
        free = [each for each in self.all if each.in_flight < self.concurrency]
        if not free:
            return None
        now = self._now()
        # Those that are well come first; of those that rest, the one whose rest ends soonest.
        server = min(free, key=lambda each: (each is avoid, max(each.rests_until - now, 0.0), each.in_flight))
        server.in_flight += 1
        server.most = max(server.most, server.in_flight)
        return server

    def _give_back(self, server: Server) -> None:
        server.in_flight -= 1
        while self._waiting:
            waiter = self._waiting[0]
            waiter.server = self._take(waiter.avoid)
            if waiter.server is None:
                return
            self._waiting.popleft()
            waiter.event.set()

    def well(self, server: Server) -> None:
        """Note that a server answered."""
        server.answered += 1
        server.failures, server.rests_until = 0, 0.0

    def failed(self, server: Server) -> None:
        """Note that a server did not answer, or with an error of its own: it rests, longer each time in a row."""
        server.failures += 1
        server.rests_until = self._now() + min(2.0 ** (server.failures - 1), _LONGEST_REST_S)


class _Waiter:
    def __init__(self, avoid: Server | None) -> None:
        self.avoid = avoid
        self.event = anyio.Event()
        self.server: Server | None = None

"""A client's end of a connection that goes through a relay on the machine of the process that serves."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

from pipeline.errors import NotServed, PeerLost
from pipeline.serve.memory import share
from pipeline.serve.relay import Frame, Heard
from pipeline.serve.wire import close_all, encode
from pipeline.waiting import Signal


class Calls(NamedTuple):
    """How a client reaches its connection in a relay. Each may raise PeerLost: the relay has ended."""

    send: Callable[[Sequence[bytes]], Awaitable[None]]
    listen: Callable[[], Awaitable[Heard]]
    leave: Callable[[], None]
    """Does not wait."""


class FarWire:
    """Does for a :class:`~pipeline.serve.link.Link` what a :class:`~pipeline.serve.wire.Wire` does."""

    def __init__(self, calls: Calls, absent: str, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        """Args:
        calls: how to reach the relay.
        absent: what to say if nobody serves there.
        in_thread: does what blocks beside the loop.
        """
        self._calls, self._absent, self._in_thread = calls, absent, in_thread
        self._queue: list[bytes] = []
        self._frames: deque[Frame] = deque()
        self._changed = Signal()
        self._over = self.closed = False

    @property
    def stream(self) -> Self:
        """What is entered while the connection is used."""
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._calls.leave()

    async def drop(self) -> None:
        """End the connection at once."""
        self.close()
        self._calls.leave()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Queue a message."""
        assert not fds, "only the process that serves sends memory"
        if not self.closed:
            self._queue.append(encode(message))
            self._changed.notify()

    def send_now(self, message: Any) -> None:
        """Queue the first word; it goes with what comes next."""
        self.send(message)

    async def write(self) -> None:
        """Send what is queued, until the other end is gone."""
        with suppress(PeerLost):
            while True:
                await self._changed.wait_for(lambda: self._queue)
                bodies, self._queue = self._queue, []
                await self._calls.send(bodies)

    async def read(self) -> tuple[bytes, list[int]]:
        """Return the next message and the descriptor of its memory, which is the caller's to close.

        Raises:
            PeerLost: the other end is gone.
            NotServed: nobody was there.
        """
        if not self._frames and self._queue:  # the first word, before anybody writes
            bodies, self._queue = self._queue, []
            await self._calls.send(bodies)
        while not self._frames:
            if self._over:
                raise PeerLost("the connection ended")
            heard = await self._calls.listen()
            if heard.absent:
                raise NotServed(f"{self._absent} ({heard.absent})")
            self._frames.extend(heard.frames)
            self._over = heard.over
        body, memory = self._frames.popleft()
        if memory is None:
            return body, []
        fd, _ = await self._in_thread(lambda: share([memory.data]))
        if self.closed:
            close_all([fd])
            raise PeerLost("the connection ended")
        return body, [fd]

    def close(self) -> None:
        """Take no more messages."""
        self.closed = True
        self._queue.clear()
        self._frames.clear()

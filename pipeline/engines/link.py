"""An asynchronous end of a socket between a process and a worker: sends in order, never waits to send."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import anyio

from pipeline.engines.values import Packer
from pipeline.engines.wire import AnyMessage, Frame, Outgoing, Receiver


class Link:
    """Takes over ``sock``. :meth:`read` and :meth:`write` are tasks of the owner's, who closes it after their end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._receiver = Receiver(sock)
        self._queue: deque[Outgoing] = deque()
        self._more: anyio.Event | None = None
        self._broken = False  # nobody is at the other end any more: whoever reads will see it

    def send(self, message: AnyMessage, packer: Packer | None = None) -> None:
        """Send at once what goes, and leave the rest to :meth:`write`."""
        if self._broken:
            return
        self._queue.append(Outgoing(message, packer))
        if len(self._queue) == 1:
            self._flush()
        if self._queue and self._more is not None:
            self._more.set()

    def _flush(self) -> bool:
        """Send what goes now. Returns whether that was all."""
        try:
            while self._queue:
                self._queue[0].send(self._sock)
                self._queue.popleft()
        except BlockingIOError:
            return False
        except OSError:
            self._broken = True
            self._drop()
        return True

    async def write(self) -> NoReturn:
        """Send what the socket did not take at once, for ever."""
        while True:
            while not self._flush():
                await anyio.wait_writable(self._sock)
            self._more = anyio.Event()
            await self._more.wait()

    async def read(self, take: Callable[[Frame], None]) -> None:
        """Hand every frame that comes to ``take``, until the other end is closed."""
        while True:
            await anyio.wait_readable(self._sock)
            try:
                self._receive(take)
            except BlockingIOError:
                continue
            except EOFError:
                return

    def drain(self, take: Callable[[Frame], None]) -> None:
        """Hand on what has come by now; nobody may be reading."""
        try:
            while True:
                self._receive(take)
        except (BlockingIOError, EOFError):
            return

    def _receive(self, take: Callable[[Frame], None]) -> None:
        for frame in self._receiver.receive():
            take(frame)

    def close(self) -> None:
        """Close the socket, and let go what was not sent."""
        self._drop()
        self._receiver.close()
        self._sock.close()

    def _drop(self) -> None:
        while self._queue:
            self._queue.popleft().close()

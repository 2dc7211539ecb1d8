"""What goes over the socket: frames of MessagePack, with descriptors beside them.

A frame is its length, the number of descriptors that belong to it, and a message. Descriptors travel with the first
bytes of their frame and arrive in order, so the n-th that came belongs to the n-th that was announced, however the
bytes were cut. Nothing here knows what the messages mean.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.abc
import msgspec

from pipeline.errors import PeerLost
from pipeline.forking import not_for_children
from pipeline.waiting import Signal

PROTOCOL = 1
"""Version of the messages; both sides must speak the same."""
FAREWELL = 0
"""The id of what answers no request: the server's first word and its last."""

_HEAD = struct.Struct("<II")
_MOST = 1 << 28
_ENDED = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class Request(msgspec.Struct, array_like=True):
    """A verb of the client. The first is ``hello``, whose shape never changes."""

    id: int
    verb: str
    args: dict[str, Any] = {}


class ErrorNote(msgspec.Struct, array_like=True):
    """An error on its way: the name of its class, and what it is built from."""

    name: str
    message: str
    cause: str = ""
    details: dict[str, Any] = {}


class Now(msgspec.Struct, array_like=True, frozen=True):
    """How the pipeline stands; comes with every answer."""

    version: int = 0
    step: int = 0
    next_step: int = 1


class Answer(msgspec.Struct, array_like=True):
    """What became of a request. ``size`` bytes of payloads lie in the memory whose descriptor comes with it."""

    id: int
    value: Any = None
    error: ErrorNote | None = None
    now: Now = Now()
    size: int = 0


encode = msgspec.msgpack.Encoder().encode


class Wire:
    """One end of a connection. One task reads, one runs :meth:`write`; anyone on the loop may :meth:`send`."""

    def __init__(self, stream: anyio.abc.UNIXSocketStream) -> None:
        self._stream = stream
        self._bytes = bytearray()
        self._fds: deque[int] = deque()
        self._queue: deque[tuple[bytes, Sequence[int]]] = deque()
        self._changed = Signal()
        self._amid = self.closed = False
        not_for_children(self.socket)

    @property
    def stream(self) -> anyio.abc.UNIXSocketStream:
        """What is entered while the connection is used."""
        return self._stream

    @property
    def socket(self) -> socket.socket:
        """The socket itself."""
        raw: socket.socket = self._stream.extra(anyio.abc.SocketAttribute.raw_socket)
        return raw

    def peer(self) -> tuple[int, int]:
        """Return the process at the other end, and its user, as the kernel says."""
        found = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        process, user, _ = struct.unpack("3i", found)
        return process, user

    def hung_up(self) -> bool:
        """Whether the other end has closed, though there may be something of it to read."""
        if self.closed:
            return True
        asked = select.poll()
        asked.register(self.socket, 0)
        return bool(asked.poll(0))

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Queue a message. The descriptors are the wire's from here on, and closed once they are sent."""
        if self.closed:
            close_all(fds)
            return
        self._queue.append((encode(message), fds))
        self._changed.notify()

    def send_encoded(self, body: bytes) -> None:
        """Queue what is a message already."""
        if not self.closed:
            self._queue.append((body, ()))
            self._changed.notify()

    async def write(self) -> None:
        """Send what is queued, until the other end is gone."""
        with suppress(*_ENDED):
            while True:
                await self._changed.wait_for(lambda: self._queue)
                body, fds = self._queue.popleft()
                self._amid = True
                try:
                    head = _HEAD.pack(len(body), len(fds))
                    if fds:
                        await self._stream.send_fds(head, list(fds))
                        await self._stream.send(body)
                    else:
                        await self._stream.send(head + body)
                finally:
                    close_all(fds)
                self._amid = False

    def send_now(self, message: Any) -> None:
        """Say the first or the last word, if it can be said without waiting."""
        if not self._amid and not self.closed:
            body = encode(message)
            with suppress(OSError):
                self.socket.send(_HEAD.pack(len(body), 0) + body, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    async def read(self) -> tuple[bytes, list[int]]:
        """Return the next message and its descriptors, which are the caller's to close.

        Raises:
            PeerLost: the other end is gone, or says what cannot be.
        """
        length, count = _HEAD.unpack(await self._exactly(_HEAD.size))
        if length > _MOST or count > 1:
            raise PeerLost("what came over the socket is no message of this protocol")
        body = await self._exactly(length)
        if count > len(self._fds):
            raise PeerLost("a message came without the memory that belongs to it")
        return body, [self._fds.popleft() for _ in range(count)]

    async def _exactly(self, size: int) -> bytes:
        while len(self._bytes) < size:
            try:
                data, fds = await self._stream.receive_fds(65536, 8)
            except _ENDED:
                raise PeerLost("the connection ended") from None
            for fd in fds:
                os.set_inheritable(fd, False)
            self._fds.extend(fds)
            self._bytes += data
        taken = bytes(self._bytes[:size])
        del self._bytes[:size]
        return taken

    async def drop(self) -> None:
        """End the connection at once."""
        self.close()
        await anyio.aclose_forcefully(self._stream)

    def close(self) -> None:
        """Let go of every descriptor that was not sent or not taken."""
        self.closed = True
        close_all(self._fds)
        self._fds.clear()
        for _, fds in self._queue:
            close_all(fds)
        self._queue.clear()


def close_all(fds: Sequence[int] | deque[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)

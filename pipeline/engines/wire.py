"""Messages between a process and its workers, and how they lie on a socket.

A frame is 16 bytes (length of the message, whether its body comes apart, length of the body), the message in
MessagePack, and the body. A body of 256 KB and more goes through memory without a name, whose descriptor travels with
the frame: it is written once, and read where it lies. A smaller one follows the message on the socket: that costs less.

Both ends use this module. A socket that would block raises ``BlockingIOError``; nothing is lost by that.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
import sys
from collections import deque
from typing import Any, NamedTuple, TypeAlias

import msgspec

from pipeline.engines.naming import Named
from pipeline.engines.values import Packer
from pipeline.interfaces import AttemptFacts

APART_FROM = 256 << 10
_HEAD = struct.Struct("<IIQ")
_CHUNK = 64 << 10
_MOST_BUFFERS = 512  # of one call of the system
_DESCRIPTORS = socket.CMSG_SPACE(16 * array.array("i").itemsize)
_CLOSED_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # as numbers: an enum's & costs as much as a call
_CUT_SHORT = int(socket.MSG_CTRUNC)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages. Values in them are what a :class:`~pipeline.engines.values.Packer` made."""


class Load(Message, frozen=True, tag=1):
    """To a worker: what task number ``task`` runs, before its first attempt."""

    task: int
    name: str
    run: Named
    resource: Named | None = None


class Attempt(Message, frozen=True, tag=2):
    """To a worker: run an attempt. ``left``: seconds to its deadline."""

    call: int
    task: int
    item: tuple[int, int, int]
    """Epoch, index, uid."""
    content: Any
    facts: AttemptFacts
    left: float | None = None


class Invoke(Message, frozen=True, tag=3):
    """To a worker: call a function."""

    call: int
    function: Named
    args: Any


class Cancel(Message, frozen=True, tag=4):
    """To a worker: cut an attempt."""

    call: int


class Answer(Message, frozen=True, tag=5):
    """To a worker: what it asked for. ``error``: name of the type, and message."""

    call: int
    ask: int
    value: Any = None
    error: tuple[str, str] | None = None


class Stop(Message, frozen=True, tag=6):
    """To a worker: close what is open, and leave."""


class Ready(Message, frozen=True, tag=7):
    """From a worker: it can be given work."""


class Ask(Message, frozen=True, tag=8):
    """From a worker: a verb of the attempt's context, whose answer it waits for."""

    call: int
    ask: int
    verb: str
    value: Any = None


class Tell(Message, frozen=True, tag=9):
    """From a worker: a verb of the attempt's context, without an answer."""

    call: int
    verb: str
    value: Any = None


class Done(Message, frozen=True, tag=10):
    """From a worker: what was returned."""

    call: int
    value: Any
    parked: bool = False


class Raised(Message, frozen=True, tag=11):
    """From a worker: what was raised. ``why``: ``error``, or what the worker found: ``too deep``, ``unloadable``."""

    call: int
    type_name: str
    text: str
    traceback: str = ""
    why: str = "error"


AnyMessage: TypeAlias = Load | Attempt | Invoke | Cancel | Answer | Stop | Ready | Ask | Tell | Done | Raised

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyMessage).decode


class Frame(NamedTuple):
    """A message that came, and the bytes behind it."""

    message: AnyMessage
    body: Any


class Outgoing:
    """A frame on its way; the memory of its tensors must not change before it has been sent."""

    def __init__(self, message: AnyMessage, packer: Packer | None = None) -> None:
        head = encode(message)
        parts = packer.parts if packer is not None else []
        size = packer.size if packer is not None else 0
        self._descriptor = _written_apart(parts) if size >= APART_FROM else None
        apart = self._descriptor is not None
        self._parts = [memoryview(_HEAD.pack(len(head), apart, size) + head)]
        if not apart:
            self._parts += [memoryview(part) for part in parts]

    def send(self, sock: socket.socket) -> None:
        """Send what is left of it.

        Raises:
            BlockingIOError: the socket takes no more now.
            OSError: there is nobody at the other end.
        """
        while self._parts:
            given: list[Any] = []
            if self._descriptor is not None:
                given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._descriptor]))]
            sent = sock.sendmsg(self._parts[:_MOST_BUFFERS], given)
            self.close()
            self._parts = _without(self._parts, sent)

    def close(self) -> None:
        """Let the memory go that has not been sent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _without(parts: list[memoryview], sent: int) -> list[memoryview]:
    done = 0
    while done < len(parts) and sent >= len(parts[done]):
        sent -= len(parts[done])
        done += 1
    left = parts[done:]
    if sent:
        left[0] = left[0][sent:]
    return left


def _written_apart(parts: list[Any]) -> int | None:
    """Write buffers into memory without a name. Returns its descriptor, or None where there is none to be had."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("forebay")
    except OSError:
        return None
    try:
        left = [memoryview(part) for part in parts]
        while left:  # written, not mapped: no page is cleared first, and none faults
            left = _without(left, os.writev(descriptor, left[:_MOST_BUFFERS]))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)
    return mmap.mmap(descriptor, size)


def kept(body: Any) -> Any:
    """Return a body that may be held for long: before Python 3.13 one that came apart holds a descriptor."""
    return bytearray(body) if isinstance(body, mmap.mmap) and sys.version_info < (3, 13) else body


class Receiver:
    """Takes frames from a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()
        self._descriptors: deque[int] = deque()

    def receive(self) -> list[Frame]:
        """Take what has come, once, and return the frames that are whole by now.

        Raises:
            BlockingIOError: nothing has come, and the socket does not block.
            EOFError: nobody is at the other end, and all has been taken.
        """
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(_CHUNK, _DESCRIPTORS, _CLOSED_ON_EXEC)
        except ConnectionResetError:
            raise EOFError from None
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._descriptors += array.array("i", raw[: len(raw) - len(raw) % 4])
        if not data:
            raise EOFError
        if flags & _CUT_SHORT:
            raise OSError("descriptors were lost between two processes: too many files are open")
        self._data += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        data = self._data
        if len(data) < _HEAD.size:
            return None
        length, apart, size = _HEAD.unpack_from(data)
        end = _HEAD.size + length
        if len(data) < end + (0 if apart else size):
            return None
        with memoryview(data) as whole, whole[_HEAD.size : end] as head:
            message = decode(head)
        body: Any = None
        if apart:
            descriptor = self._descriptors.popleft()
            try:
                body = _mapped(descriptor, size)
            finally:
                os.close(descriptor)
        elif size:
            body, end = data[end : end + size], end + size
        del data[:end]
        return Frame(message, body)

    def close(self) -> None:
        """Let go what came and was not asked for."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

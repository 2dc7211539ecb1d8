"""The inside of a Ray actor: a worker whose messages are the arguments and the results of the actor's methods.

Knows nothing of Ray, whose actor (in :mod:`pipeline.engines.ray_engine`) hands its calls on to here.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, TypeAlias

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np

from pipeline.engines.local import LocalEngine
from pipeline.engines.values import Packer
from pipeline.engines.wire import AnyMessage, Frame, decode, encode
from pipeline.engines.worker.asynchronous import AsyncWorker
from pipeline.engines.worker.plain import PlainWorker

Packed: TypeAlias = tuple[bytes, Any]
"""A message as it travels: in MessagePack, and the bytes behind it, in one array or None."""
_MOST_LISTENERS = 4


def packed(message: AnyMessage, packer: Packer | None = None) -> Packed:
    """Return a message as it travels; the bytes are a copy, and may lie in memory that others map."""
    if packer is None or not packer.size:
        return encode(message), None
    parts = [np.frombuffer(part, np.uint8) for part in packer.parts]
    return encode(message), np.concatenate(parts)


class Relay:
    """A worker of either kind. :meth:`live` is a task of the actor's, and the other methods come on its event loop."""

    def __init__(self, *, asynchronous: bool) -> None:
        self._asynchronous = asynchronous
        self._said: list[Packed] = []
        self._listeners: deque[anyio.Event] = deque()
        self._deliver: Callable[[Frame], None] | None = None
        self._ready = anyio.Event()

    async def live(self) -> None:
        """Serve until told to stop."""
        await (self._live_async() if self._asynchronous else self._live_plain())

    async def ready(self) -> int:
        """Wait until it serves. Returns the process."""
        await self._ready.wait()
        return os.getpid()

    async def exchange(self, frames: list[Packed]) -> list[Packed]:
        """Take messages in. Returns all that was said since the last time, of whatever call; waits until something is.

        Whoever has come first is told first. Those who wait beyond a few are told nothing, and need not come again.
        """
        for frame in frames:
            self.take(frame)
        if not self._said:
            wake = anyio.Event()
            self._listeners.append(wake)
            if len(self._listeners) > _MOST_LISTENERS:
                self._listeners.popleft().set()
            await wake.wait()
        said, self._said = self._said, []
        return said

    def take(self, frame: Packed) -> None:
        """Take in a message that nothing is returned for."""
        assert self._deliver is not None
        head, body = frame
        self._deliver(Frame(decode(head), None if body is None else bytearray(body)))

    def say(self, message: AnyMessage, packer: Packer | None = None) -> None:
        """Say something of a call."""
        self._said.append(packed(message, packer))
        if self._listeners:
            self._listeners.popleft().set()

    async def _live_async(self) -> None:
        async with LocalEngine() as engine, anyio.create_task_group() as group:
            worker = AsyncWorker(self.say, engine, group)
            self._deliver = worker.take
            self._ready.set()
            await worker.stopped.wait()
            group.cancel_scope.cancel("the worker was told to stop")

    async def _live_plain(self) -> None:
        line = _ThreadLine(self.say)
        self._deliver = line.frames.put
        self._ready.set()
        await anyio.to_thread.run_sync(_serve, line, limiter=anyio.CapacityLimiter(1))


def _serve(line: _ThreadLine) -> None:
    with ExitStack() as resources:
        PlainWorker(line, resources).serve()


class _ThreadLine:
    """Between the event loop of an actor and the thread of its plain runners."""

    def __init__(self, say: Callable[..., None]) -> None:
        self.frames: SimpleQueue[Frame] = SimpleQueue()
        self._say = say

    def say(self, message: AnyMessage, packer: Packer | None = None) -> None:
        anyio.from_thread.run_sync(self._say, message, packer)

    def hear(self) -> Frame:
        return self.frames.get()

"""Between a client on another machine and the socket of the process that serves: what a client sends goes into a
connection of its own here, and what comes out of that waits for the client to fetch it.

Knows nothing of Ray, whose actor (:mod:`pipeline.serve.ray_gate`) hands its calls on to here. For the server a client
from far away is one of this machine; and when it is not heard from, its connection ends as if it had been killed.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import anyio
import numpy as np

from pipeline.errors import PeerLost
from pipeline.serve.wire import Wire, close_all
from pipeline.waiting import Signal

LISTEN_S = 2.0
"""Seconds that a client listens at once: then it is told that there is nothing, and listens again."""
SILENT_S = 10.0
"""Seconds without a word after which a client counts as killed."""

Frame: TypeAlias = tuple[bytes, "np.ndarray | None"]
"""A message, and the memory that came with it."""


class Heard(NamedTuple):
    """What a client is told when it listens."""

    frames: list[Frame]
    over: bool = False
    """Whether the connection has ended, and all was told."""
    absent: str = ""
    """Why there was no connection."""


class _Session:
    """One client's connection."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.wire: Wire | None = None
        self.absent = ""
        self.ended = self.told = False
        self.changed = Signal()
        self.scope = anyio.CancelScope()

    def listening(self, *, now: bool) -> None:
        """Note whether the client listens; from the moment on at which it does not, its time runs."""
        self.scope.deadline = math.inf if now else anyio.current_time() + SILENT_S


class Relay:
    """Connections of clients, by the names that these have chosen. All on one event loop."""

    def __init__(self, address: str) -> None:
        """``address``: of the socket where the run is served."""
        self._address = address
        self._sessions: dict[str, _Session] = {}

    async def talk(self, name: str) -> None:
        """Hold a connection until either side ends it, or the client is not heard from."""
        session = self._sessions[name] = _Session()
        try:
            with session.scope:
                session.listening(now=False)
                await self._talk(session)
        finally:
            session.ended = True
            session.changed.notify()
            with anyio.move_on_after(SILENT_S):
                await session.changed.wait_for(lambda: session.told)
            del self._sessions[name]

    async def _talk(self, session: _Session) -> None:
        try:
            stream = await anyio.connect_unix("\0" + self._address[1:])
        except OSError as error:
            session.absent = str(error)
            return
        async with stream, anyio.create_task_group() as group:
            wire = session.wire = Wire(stream)
            try:
                group.start_soon(wire.write)
                session.changed.notify()
                while True:
                    body, fds = await wire.read()
                    session.frames.append((body, _memory(fds)))
                    session.changed.notify()
            except PeerLost:
                group.cancel_scope.cancel("the connection ended")
            finally:
                wire.close()

    async def send(self, name: str, bodies: Sequence[bytes]) -> None:
        """Send a client's messages; nothing, if its connection has ended."""
        session = self._sessions.get(name)
        if session is not None:
            await session.changed.wait_for(lambda: session.wire is not None or session.ended)
            if session.wire is not None:
                for body in bodies:
                    session.wire.send_encoded(body)

    async def listen(self, name: str) -> Heard:
        """Return what has come for a client, or nothing after a while."""
        session = self._sessions.get(name)
        if session is None:
            return Heard([], over=True)
        session.listening(now=True)
        with anyio.move_on_after(LISTEN_S):
            await session.changed.wait_for(lambda: session.frames or session.ended)
        session.listening(now=False)
        frames = list(session.frames)
        session.frames.clear()
        session.told = session.ended
        session.changed.notify()
        return Heard(frames, session.ended, session.absent)

    async def leave(self, name: str) -> None:
        """End a client's connection."""
        session = self._sessions.get(name)
        if session is not None:
            session.told = True
            session.scope.cancel("the client has left")
            session.changed.notify()


def _memory(fds: Sequence[int]) -> Any:
    """Return the memory that a descriptor is of; it is closed, and the map holds what is there."""
    if not fds:
        return None
    try:
        size = os.fstat(fds[0]).st_size
        return np.frombuffer(mmap.mmap(fds[0], size, prot=mmap.PROT_READ) if size else b"", np.uint8)
    finally:
        close_all(fds)

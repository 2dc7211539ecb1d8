"""Listens to requests over HTTP, on an event loop in a thread of its own: so it answers while the trainer computes, and
is the same for a pipeline and for a buffer, which has no loop."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

from pipeline.config import Control
from pipeline.control.desk import PENDING, Desk, Ticket
from pipeline.control.http import Refused, answer, read_request
from pipeline.control.place import Place, remove_place, write_place
from pipeline.control.routes import Asked, check_who, route
from pipeline.errors import ServingError
from pipeline.forking import not_for_children
from pipeline.observe import events
from pipeline.store.layout import Layout
from pipeline.waiting import Signal

MOST_AT_ONCE = 32
"""Connections; others are told to come again."""
REQUEST_S = 10.0
"""Seconds that a request may take to arrive, and an answer to leave."""
STATUS_S = 5.0
"""Seconds after which it is said that the run does not answer."""
LINGER_S = 1.0
"""Seconds that the end waits for answers that are on their way."""
_AFTERWARDS_S = 0.5
_AFTERWARDS_BYTES = 64 << 10
_REST_S = 1.0  # after a connection could not be taken: descriptors may be short


class ControlServer:
    """Hears requests for one run's desk. Methods are called by the run's owner, and block."""

    def __init__(self, options: Control, desk: Desk, log: Any, rank: int = 0) -> None:
        self._options, self.desk, self._log, self._rank = options, desk, log, rank
        self.look: Callable[[], dict[str, Any]] = dict
        """Returns how the run stands; called in a thread, and may raise."""
        self._context: AbstractContextManager[BlockingPortal] | None = None
        self._portal: BlockingPortal | None = None
        self._told: tuple[Layout, Place] | None = None
        self._port, self._busy = 0, 0
        self._changed, self._closing = Signal(), False

    @property
    def address(self) -> str:
        """``http://HOST:PORT``; empty before :meth:`begin`."""
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"http://{host}:{self._port}" if self._port else ""

    @property
    def listening(self) -> bool:
        """Whether it listens."""
        return self._portal is not None

    def begin(self) -> None:
        """Listen from now on.

        Raises:
            ServingError: nobody can listen there.
        """
        self._context = start_blocking_portal("asyncio", name="forebay control")
        self._portal = portal = self._context.__enter__()
        try:
            listeners = portal.call(self._listen)
        except OSError as error:
            self._leave()
            where = f"{self._options.host}:{self._wanted}"
            raise ServingError(f"control: {where} cannot be listened at: {error}. Choose another port, or 0") from None
        except BaseException:
            self._leave()
            raise
        self.desk.tell = functools.partial(self._soon, self._changed.notify)
        portal.start_task_soon(self._serve, listeners)

    @property
    def _wanted(self) -> int:
        """The port to listen at: with a number, each rank has its own."""
        return self._options.port + self._rank if self._options.port else 0

    def announce(self, layout: Layout, incarnation: int) -> None:
        """Say in the log and in the run's folder where this is."""
        options = self._options
        place = Place(
            address=self.address,
            rank=self._rank,
            host=socket.gethostname(),
            process=os.getpid(),
            incarnation=incarnation,
            loopback=options.on_loopback,
            token=options.token is not None,
        )
        self._told = (layout, place)
        try:
            write_place(layout, place)
        except OSError as error:
            self._log.warning(events.CONTROL_FAILED, address=self.address, error=f"{layout.directory}: {error}")
        self._log.info(events.CONTROL_OPENED, address=self.address, token=place.token)

    def close(self, why: str) -> None:
        """Take no more requests; those who wait are told how it has ended. Takes a second at the most."""
        self.desk.close(why)
        told, self._told = self._told, None
        if told is not None:
            remove_place(*told)
        if self._portal is not None:
            self._soon(self._end)
            self._leave()

    def linger(self) -> None:
        """Wait for answers that are on their way, a second at the most: the process is about to end."""
        if self._portal is not None:
            with contextlib.suppress(RuntimeError):
                self._portal.call(self._answered)

    def _leave(self) -> None:
        context, self._context, self._portal = self._context, None, None
        if context is not None:
            context.__exit__(None, None, None)

    def _soon(self, do: Callable[[], None]) -> None:
        portal = self._portal
        if portal is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                portal.start_task_soon(do)

    # -- on the loop -------------------------------------------------------------------------------------------

    async def _listen(self) -> Any:
        host = "127.0.0.1" if self._options.host == "localhost" else self._options.host
        listeners = await anyio.create_tcp_listener(local_host=host, local_port=self._wanted)
        for each in listeners.listeners:
            not_for_children(each.extra(anyio.abc.SocketAttribute.raw_socket))
        self._port = listeners.extra(anyio.abc.SocketAttribute.local_port)
        return listeners

    def _end(self) -> None:
        self._closing = True
        self._changed.notify()

    async def _answered(self) -> None:
        with anyio.move_on_after(LINGER_S):
            await self._changed.wait_for(lambda: not self._busy)

    async def _serve(self, listeners: Any) -> None:
        async with listeners, anyio.create_task_group() as group:
            group.start_soon(self._accept, listeners)
            await self._changed.wait_for(lambda: self._closing)
            await self._answered()
            group.cancel_scope.cancel("the run has ended")

    async def _accept(self, listeners: Any) -> None:
        while True:
            try:
                await listeners.serve(self._meet)
            except OSError as error:
                self._log.warning(events.CONTROL_FAILED, address=self.address, error=str(error))
                await anyio.sleep(_REST_S)

    async def _meet(self, stream: anyio.abc.SocketStream) -> None:
        self._busy += 1
        try:
            async with stream:
                await self._talk(stream)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # who asked has left
        finally:
            self._busy -= 1
            self._changed.notify()

    async def _talk(self, stream: anyio.abc.SocketStream) -> None:
        try:
            said = await self._answer(stream)
        except Refused as refused:
            said = answer(refused.status, {"error": str(refused)}, refused.headers)
        except Exception as error:
            self._log.warning(events.CONTROL_FAILED, address=self.address, error=repr(error))
            said = answer(500, {"error": repr(error)}, {})
        if said is None:
            return
        with anyio.move_on_after(REQUEST_S):
            await stream.send(said)
            await stream.send_eof()
        # Closed with something unread, the connection would be reset, and the answer perhaps be lost.
        with anyio.move_on_after(_AFTERWARDS_S), contextlib.suppress(anyio.EndOfStream):
            left = _AFTERWARDS_BYTES
            while left > 0:
                left -= len(await stream.receive())

    async def _answer(self, stream: anyio.abc.SocketStream) -> bytes | None:
        if self._busy > MOST_AT_ONCE:
            raise Refused(503, f"{MOST_AT_ONCE} others are asking; come again")
        with anyio.move_on_after(REQUEST_S) as scope:
            request = await read_request(stream)
        if scope.cancelled_caught:
            raise Refused(408, f"a request is to arrive within {REQUEST_S:g} s")
        if request is None:
            return None
        check_who(request, self._options, self._port)
        asked = route(request, self.desk)
        if asked.ticket is None:
            return answer(200, await self._status(), {})
        return await self._about(asked, asked.ticket)

    async def _about(self, asked: Asked, ticket: Ticket) -> bytes:
        if asked.made:
            where = f"/checkpoint/{ticket.id}"
            return answer(202, {**ticket.described(), "rank": self._rank, "ask": where}, {"Location": where})
        with anyio.move_on_after(asked.wait_s):
            await self._changed.wait_for(lambda: ticket.state != PENDING)
        return answer(200, ticket.described(), {})

    async def _status(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with anyio.move_on_after(STATUS_S) as scope:
            found = await anyio.to_thread.run_sync(self.look, abandon_on_cancel=True)
        if scope.cancelled_caught:
            raise Refused(503, f"the run did not answer within {STATUS_S:g} s: something holds its event loop, or lock")
        return {**found, "rank": self._rank, "process": os.getpid(), "host": socket.gethostname()}

"""One connection of a client: requests out, answers in, each to whoever waits for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.abc
import msgspec

from pipeline.errors import ClosedError, NotServed, PeerLost
from pipeline.serve.far import FarWire
from pipeline.serve.notes import error_of
from pipeline.serve.ray_gate import open_far
from pipeline.serve.where import Place
from pipeline.serve.wire import FAREWELL, PROTOCOL, Answer, Now, Request, Wire, close_all

_GOODBYE_S = 5.0
_decode = msgspec.msgpack.Decoder(Answer).decode


class Reply:
    """An answer that has come, with what came beside it. To be closed."""

    def __init__(self, answer: Answer, fds: list[int]) -> None:
        self.id, self.value, self.size = answer.id, answer.value, answer.size
        self._fds = fds

    def fd(self) -> int:
        """Return the descriptor of the memory that came with it.

        Raises:
            PeerLost: none did.
        """
        if not self._fds:
            raise PeerLost("a batch came without the memory that belongs to it")
        return self._fds[0]

    def close(self) -> None:
        """Close the descriptors. What is mapped stays."""
        close_all(self._fds)
        self._fds = []


class _Waiter:
    def __init__(self) -> None:
        self.event = anyio.Event()
        self.answer: Answer | None = None
        self.fds: list[int] = []


class Link:
    """A client's connection. Belongs to the event loop."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._waiters: dict[int, _Waiter] = {}
        self._last = FAREWELL
        self._error: BaseException | None = None
        self._goodbye = anyio.Event()
        self.now = Now()
        """How the pipeline stands, as of the last answer."""
        self.told: dict[str, Any] = {}
        """What it said when we came."""

    async def open(self, *, part: tuple[int, int] | None, step: int | None) -> None:
        """Connect, and say who we are.

        Raises:
            NotServed: nobody is there, or not whom we look for.
            UsageError: the run is not where the trainer is.
        """
        wire = await (open_far(self._place) if self._place.far else self._open_near())
        try:
            await self._greet(wire, part, step)
        except BaseException:
            await wire.drop()
            raise
        self._wire = wire

    async def _open_near(self) -> Wire:
        try:
            stream = await anyio.connect_unix("\0" + self._place.address[1:])
        except OSError as error:
            raise NotServed(f"{self._place.absent} ({error})") from None
        wire = Wire(stream)
        process, user = wire.peer()
        if user != os.geteuid():
            await wire.drop()
            raise NotServed(f"{self._place.address}: user {user} listens there (process {process}), and not you")
        return wire

    async def _greet(self, wire: Wire | FarWire, part: tuple[int, int] | None, step: int | None) -> None:
        hello = {"protocol": PROTOCOL, "run": self._place.run_id, "part": part, "step": step}
        wire.send_now(Request(FAREWELL, "hello", hello))
        try:
            body, fds = await wire.read()
        except PeerLost as lost:
            raise NotServed(f"{self._place.address}: somebody listens there, and hung up") from lost
        close_all(fds)
        answer = _decode(body)
        if answer.error is not None:
            raise error_of(answer.error)
        self.told, self.now = answer.value, answer.now

    async def body(self, ready: Callable[[], None]) -> None:
        """What the supervisor runs: reads and writes until it is told to stop, or the connection ends."""
        try:
            async with self._wire.stream, anyio.create_task_group() as group:
                group.start_soon(self._wire.write)
                group.start_soon(self._part_in_time, group.cancel_scope)
                ready()
                await self._read()
                group.cancel_scope.cancel("the connection ended")
        finally:
            self._end(ClosedError("the client is closed; connect() again"))
            self._wire.close()

    async def _part_in_time(self, scope: anyio.CancelScope) -> None:
        """After our goodbye the producer ends the connection; it is not waited for without end."""
        await self._goodbye.wait()
        await anyio.sleep(_GOODBYE_S)
        scope.cancel("the producer does not hear us")

    async def _read(self) -> None:
        while True:
            try:
                body, fds = await self._wire.read()
            except PeerLost:
                if self._goodbye.is_set():
                    return
                self._end(PeerLost(f"the process that served {self._place.run_id or self._place.address} ended"))
                return
            try:
                answer = _decode(body)
            except msgspec.MsgspecError as error:
                close_all(fds)
                self._end(PeerLost(f"what came from the producer is no answer: {error}"))
                return
            if answer.id == FAREWELL and answer.error is not None:
                close_all(fds)
                self._end(error_of(answer.error))
                return
            self.now = answer.now
            waiter = self._waiters.pop(answer.id, None)
            if waiter is None:  # nobody waits any more
                close_all(fds)
                continue
            waiter.answer, waiter.fds = answer, fds
            waiter.event.set()

    def _end(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        for waiter in self._waiters.values():
            waiter.event.set()
        self._waiters.clear()

    def tell(self, verb: str, **args: Any) -> None:
        """Say something that needs no answer; nothing if the connection has ended, with which it has happened."""
        if self._error is None:
            self._last += 1
            self._wire.send(Request(self._last, verb, args))

    async def ask(self, verb: str, args: dict[str, Any]) -> Reply:
        """Ask, and wait for the answer. Cancelled, the request is cancelled over there, and nothing of it stays.

        Raises:
            ForebayError: what the verb raised.
            ClosedError: the pipeline was closed, or this client.
            PeerLost: the producer ended.
        """
        self.require_open()
        self._last += 1
        of = self._last
        waiter = self._waiters[of] = _Waiter()
        try:
            self._wire.send(Request(of, verb, args))
            await waiter.event.wait()
        except BaseException:
            self._waiters.pop(of, None)
            close_all(waiter.fds)
            self.tell("cancel", of=of)
            raise
        if waiter.answer is None:
            self.require_open()
            raise AssertionError("the connection has ended, and nobody says why")
        if waiter.answer.error is not None:
            close_all(waiter.fds)
            raise error_of(waiter.answer.error)
        return Reply(waiter.answer, waiter.fds)

    def require_open(self) -> None:
        """Raise what ended the connection, if it has."""
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error.__cause__

    def say_goodbye(self, *, failed: bool) -> None:
        """Tell the producer that we leave."""
        with suppress(Exception):
            self.tell("goodbye", failed=failed)
        self._goodbye.set()

"""The serving side of HTTP/1.1 over a stream: as much of it as clients of chat servers use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
import msgspec

MOST_BYTES = 256 << 20
"""Bytes of a request's body that are taken."""


class Asked(msgspec.Struct, frozen=True):
    """A request: its method, path and body, and its headers by names in lower case."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str] = {}


class Answer(msgspec.Struct, frozen=True):
    """What is answered."""

    status: int
    body: bytes
    kind: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


async def serve_connection(stream: anyio.abc.ByteStream, answer: Callable[[Asked], Awaitable[Answer]]) -> None:
    """Answer the requests of one connection, one after the other, until it ends.

    While an answer is made, a client that hangs up cancels that.
    """
    import h11

    connection = h11.Connection(h11.SERVER)
    gone = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
    async with stream:
        try:
            while True:
                asked = await _request(connection, stream)
                if asked is None:
                    return
                found = await _while_there(stream, connection, lambda asked=asked: answer(asked))  # type: ignore[misc]
                if found is None:
                    return
                await stream.send(_encoded(connection, found))
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return
                connection.start_next_cycle()
        except (*gone, h11.ProtocolError):
            return


async def _request(connection: Any, stream: anyio.abc.ByteStream) -> Asked | None:
    import h11

    head, body, size = None, [], 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                await stream.send(connection.send(h11.InformationalResponse(status_code=100, headers=[])))
            try:
                connection.receive_data(await stream.receive(1 << 16))
            except anyio.EndOfStream:
                connection.receive_data(b"")
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            size += len(event.data)
            if size > MOST_BYTES:
                return None
            body.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            return Asked(head.method.decode(), head.target.decode(), b"".join(body), headers)
        else:
            return None


async def _while_there(
    stream: anyio.abc.ByteStream, connection: Any, make: Callable[[], Awaitable[Answer]]
) -> Answer | None:
    """Return the answer; None: the client has hung up meanwhile."""
    made: list[Answer] = []
    async with anyio.create_task_group() as group:

        async def look() -> None:
            try:
                while True:  # a client may send its next request early
                    connection.receive_data(await stream.receive(1 << 16))
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                group.cancel_scope.cancel()

        group.start_soon(look)
        made.append(await make())
        group.cancel_scope.cancel()
    return made[0] if made else None


def _encoded(connection: Any, answer: Answer) -> bytes:
    import h11

    headers = [("content-type", answer.kind), ("content-length", str(len(answer.body))), *answer.headers]
    parts = [
        connection.send(h11.Response(status_code=answer.status, headers=headers)),
        connection.send(h11.Data(data=answer.body)),
        connection.send(h11.EndOfMessage()),
    ]
    return b"".join(part or b"" for part in parts)


def as_json(status: int, value: Any, **headers: str) -> Answer:
    """Return an answer in JSON."""
    named = tuple((name.replace("_", "-"), each) for name, each in headers.items())
    return Answer(status, msgspec.json.encode(value), headers=named)

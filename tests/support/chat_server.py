"""A server that speaks the API of chat completions over a real socket, and says what a test tells it to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.abc
import h11

T = TypeVar("T")
CUT = object()
Answer = Callable[[dict[str, Any]], Awaitable["Said"]]


class Said:
    """What is answered: a status, headers, and a body; or, with ``cut``, less of the body than was announced."""

    def __init__(
        self, body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None, cut: bool = False
    ) -> None:
        self.raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status, self.headers, self.cut = status, dict(headers or {}), cut


class Stream(Said):
    """An answer that is streamed: the events as they are made, as values or bytes; at ``CUT`` the connection breaks."""

    def __init__(self, events: AsyncIterator[Any]) -> None:
        super().__init__(b"")
        self.events = events


class ChatServer:
    """Counts requests, and how many there are at once."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = self.dropped = 0
        self._came = anyio.Condition()

    async def came(self, count: int) -> None:
        """Return when so many requests have come."""
        async with self._came:
            while len(self.requests) < count:
                await self._came.wait()

    async def _serve(self, stream: anyio.abc.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER)
        async with stream:
            try:
                while await self._one(connection, stream):
                    connection.start_next_cycle()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, h11.ProtocolError):
                pass

    async def _one(self, connection: h11.Connection, stream: anyio.abc.SocketStream) -> bool:
        """Answer one request; return whether another may come over the connection."""
        body = b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive())
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
            elif isinstance(event, h11.ConnectionClosed):
                return False
        said = await self._answered(json.loads(body), stream)
        if said is None:
            return False
        if isinstance(said, Stream):
            return await self._stream(said, connection, stream)
        headers = {"content-type": "application/json", "content-length": str(len(said.raw)), **said.headers}
        await stream.send(connection.send(h11.Response(status_code=said.status, headers=list(headers.items()))) or b"")
        data = said.raw[: len(said.raw) // 2] if said.cut else said.raw
        await stream.send(connection.send(h11.Data(data=data)) or b"")
        if said.cut:
            return False
        await stream.send(connection.send(h11.EndOfMessage()) or b"")
        return connection.our_state is h11.DONE

    async def _stream(self, said: Stream, connection: h11.Connection, stream: anyio.abc.SocketStream) -> bool:
        """Send the events as they are made; return whether another request may come over the connection."""
        head = h11.Response(status_code=200, headers=[("content-type", "text/event-stream")])
        await stream.send(connection.send(head) or b"")

        async def send() -> bool:
            try:
                async for event in said.events:
                    if event is CUT:
                        return False
                    data = event if isinstance(event, bytes) else json.dumps(event).encode()
                    await stream.send(connection.send(h11.Data(data=b"data: " + data + b"\n\n")) or b"")
                await stream.send(connection.send(h11.EndOfMessage()) or b"")
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):  # the client has hung up
                return False
            return connection.our_state is h11.DONE

        return bool(await self._while_there(send, stream))

    async def _answered(self, request: dict[str, Any], stream: anyio.abc.SocketStream) -> Said | None:
        async with self._came:
            self.requests.append(request)
            self._came.notify_all()
        return await self._while_there(lambda: self.answer(request), stream)

    async def _while_there(self, make: Callable[[], Awaitable[T]], stream: anyio.abc.SocketStream) -> T | None:
        """Return what is made; None: the client has hung up meanwhile."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        made: list[T] = []
        try:
            async with anyio.create_task_group() as group:

                async def look() -> None:  # a client that hangs up is noticed while the answer is being made
                    try:
                        await stream.receive()
                    except (anyio.EndOfStream, anyio.BrokenResourceError):
                        self.dropped += 1
                    group.cancel_scope.cancel()

                group.start_soon(look)
                made.append(await make())
                group.cancel_scope.cancel()
        finally:
            self.at_once -= 1
        return made[0] if made else None


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[ChatServer]:
    """A server at a free port, until the end of the block."""
    server = ChatServer(answer)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    server.url = f"http://127.0.0.1:{port}/v1"
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, server._serve)
        yield server
        group.cancel_scope.cancel()


def reply(text: str | None, *, finish: str = "stop", usage: int | None = None, **choice: Any) -> Said:
    """A reply of one choice. ``choice``: more fields of it; ``tool_calls`` are the message's."""
    calls = choice.pop("tool_calls", None)
    prompt = choice.pop("prompt_token_ids", None)
    message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    found: dict[str, Any] = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy"}
    found["choices"] = [{"index": 0, "message": message, "finish_reason": finish, **choice}]
    if prompt is not None:
        found["prompt_token_ids"] = prompt
    if usage is not None:
        found["usage"] = {"prompt_tokens": 1, "completion_tokens": usage, "total_tokens": 1 + usage}
    return Said(found)


def called(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    """A call of a tool, as a model makes it."""
    return {"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def toy(text: str, ids: list[int], *, prompt: list[int], finish: str = "stop", **more: Any) -> Said:
    """A reply with token ids and log-probs as vLLM gives them: token i has the log-prob -i / 10."""
    content = [{"token": str(each), "logprob": -each / 10, "top_logprobs": []} for each in ids]
    return reply(text, finish=finish, prompt_token_ids=prompt, token_ids=ids, logprobs={"content": content}, **more)

"""A server for agents that own their loop: it speaks the API that they know, and records each attempt's tokens."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import msgspec

from pipeline.errors import ChatError, ChatLimit, RequestRefused, UsageError
from pipeline.records import Rollout
from pipeline.runner.context import Context
from tasks.chat.clients import ChatClient
from tasks.chat.http_side import Answer, Asked, as_json, serve_connection
from tasks.chat.text import decoded
from tasks.chat.traces import Tokens

_OURS = ("logprobs", "token_ids", "prompt_token_ids", "meta_info")
"""What is asked for the sake of the record; an agent that did not ask for it is not told."""
_NOT_PASSED = ("messages", "model", "stream_options", "logprobs", "return_token_ids", "return_meta_info")
_ENDED = "this attempt has ended, or never began"
_FINAL = {"x_should_retry": "false"}
"""Tells the agent's client that retries were made already."""


class Recording:
    """What an agent and its model said during one attempt.

    Attributes:
        base_url: what the agent's client is to be given as its server; any key will do.
        failure: why the newest request came to nothing; None if it was answered.
    """

    def __init__(self, base_url: str, ctx: Context, max_requests: int | None, *, fails_once: bool = False) -> None:
        self.base_url, self._most = base_url, max_requests
        self.failure: ChatError | None = None
        self._fails_once = fails_once
        self._ctx = weakref.ref(ctx)  # an attempt that fails says nothing, and is not to be kept for that
        self._where = f"{ctx.item}, member {ctx.member}"
        self._tokens = Tokens()
        self._chats: list[list[dict[str, Any]]] = []

    @property
    def requests(self) -> int:
        """How many were answered."""
        return len(self._tokens.turns)

    def rollout(self, reward: float, info: Mapping[str, Any] | None = None) -> Rollout:
        """Return all of it as a rollout: a trace for each conversation that went on from its own tokens. What a
        sub-agent said, and what followed when an agent had shortened its history, are traces of their own.

        ``info["chats"]`` has the messages of each request that no later one went on from.
        """
        return self._tokens.rollout(reward, {"chats": self._chats, **(info or {})})

    def _may(self) -> None:
        if self._fails_once and self.failure is not None and not isinstance(self.failure, RequestRefused):
            raise RequestRefused(f"not tried again: {self.failure}")
        if self._most is not None and self.requests >= self._most:
            raise ChatLimit(f"max_requests={self._most} requests of this attempt were answered", what="turns")

    def _take(self, asked: Mapping[str, Any], reply: Mapping[str, Any], version: int) -> None:
        said = self._tokens.take(reply, f"request {self.requests + 1}, {self._where}", version)
        messages = [*asked.get("messages", ()), said]
        begun = next((at for at, chat in enumerate(self._chats) if messages[: len(chat)] == chat), None)
        if begun is not None:
            del self._chats[begun]
        self._chats.append(messages)


class Recorder:
    """Serves attempts on a port of this machine; a ``Task(resource=)``. See :func:`recorder`."""

    def __init__(self, client: ChatClient, host: str, max_requests: int | None) -> None:
        self.client = client
        self._host, self._most = host, max_requests
        self._address = ""
        self._shared = secrets.token_urlsafe(16)
        self._recordings: weakref.WeakValueDictionary[str, Recording] = weakref.WeakValueDictionary()
        self._by_attempt: weakref.WeakKeyDictionary[Context, Recording] = weakref.WeakKeyDictionary()
        self._group: anyio.abc.TaskGroup | None = None
        self._listener: Any = None

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        self._listener = await anyio.create_tcp_listener(local_host=self._host, local_port=0)
        port = self._listener.extra(anyio.abc.SocketAttribute.local_port)
        self._address = f"http://{self._host}:{port}"
        self._group = await anyio.create_task_group().__aenter__()
        self._group.start_soon(self._listener.serve, self._serve)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)
        await self._listener.aclose()
        self._address = ""
        self._recordings.clear()
        self._by_attempt.clear()
        await self.client.__aexit__(kind, error, trace)

    def base_url_of(self, ctx: Context) -> str:
        """Return where the agent of an attempt finds its server; what ``ctx.base_url`` gives."""
        return self.recording(ctx).base_url

    def recording(self, ctx: Context) -> Recording:
        """Return what is recorded of an attempt; it begins with the first call for it.

        Raises:
            UsageError: the recorder is not open.
        """
        self._require_open()
        found = self._by_attempt.get(ctx)
        if found is None:
            name = secrets.token_urlsafe(16)  # whoever knows it may talk as this attempt
            found = Recording(f"{self._address}/{name}/v1", ctx, self._most)
            self._recordings[name] = self._by_attempt[ctx] = found
        return found

    @property
    def shared_url(self) -> str:
        """One address for all attempts: a request says in the header ``X-Session-ID`` which recording it belongs to.

        Raises:
            UsageError: the recorder is not open.
        """
        self._require_open()
        return f"{self._address}/{self._shared}/v1"

    def session(self, ctx: Context, name: str) -> Recording:
        """Return a new recording of an attempt, which may have several, for requests to :attr:`shared_url`.

        It ends when nobody holds it any more. After a request for which the servers failed it answers no other, so that
        an agent whose own client tries again does not multiply the attempts that the client's options allow.

        Args:
            ctx: of the attempt.
            name: what the header says. Whoever knows it may talk as this attempt.
        """
        found = self._recordings[name] = Recording(self.shared_url, ctx, self._most, fails_once=True)
        return found

    def _require_open(self) -> None:
        if not self._address:
            raise UsageError("chat recorder: not open; Task(resource=recorder) opens it, or `async with recorder:`")

    def rollout(self, ctx: Context, reward: float, info: Mapping[str, Any] | None = None) -> Rollout:
        """End the recording of an attempt, and return it as :meth:`Recording.rollout` does."""
        self.recording(ctx)
        return self._by_attempt.pop(ctx).rollout(reward, info)

    # -- serving -----------------------------------------------------------------------------------------------

    async def _serve(self, stream: anyio.abc.ByteStream) -> None:
        await serve_connection(stream, self._answer)

    async def _answer(self, asked: Asked) -> Answer:
        name, _, verb = asked.path.removeprefix("/").partition("?")[0].partition("/")
        recording = self._recordings.get(asked.headers.get("x-session-id", "") if name == self._shared else name)
        if recording is None:
            return _error(404, _ENDED)
        if (asked.method, verb) == ("GET", "v1/models"):
            model = {"id": self.client.model, "object": "model", "created": 0, "owned_by": "forebay"}
            return as_json(200, {"object": "list", "data": [model]})
        if (asked.method, verb) != ("POST", "v1/chat/completions"):
            return _error(404, f"{asked.method} /{verb}: there are POST /v1/chat/completions and GET /v1/models")
        try:
            body = decoded(asked.body)
        except ValueError as error:
            return _error(400, f"no JSON: {error}")
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return _error(400, "messages: a list is needed")
        if body.get("n") not in (None, 1):
            return _error(400, "n: one choice at a time is recorded")
        return await self._forwarded(recording, body)

    async def _forwarded(self, recording: Recording, body: dict[str, Any]) -> Answer:
        ctx = recording._ctx()
        if ctx is None:
            return _error(404, _ENDED)
        stream = body.pop("stream", False)
        wanted = {name for name in _OURS if body.get(name if name == "logprobs" else f"return_{name}")}
        fields = {name: each for name, each in body.items() if name not in _NOT_PASSED}
        try:
            recording._may()
            version = ctx.version_now
            reply = await self.client.request(body["messages"], key=ctx.key, extra_body=fields)
            recording._take(body, reply, version)
            recording.failure = None
        except ChatError as error:
            recording.failure = recording.failure if recording._fails_once and recording.failure else error
            return _error(400 if isinstance(error, RequestRefused | ChatLimit) else 502, str(error))
        told = _without(reply, wanted)
        return _streamed(told) if stream else as_json(200, told)


def recorder(client: ChatClient, *, host: str = "127.0.0.1", max_requests: int | None = None) -> Recorder:
    """Return a server for agents that own their loop, in any framework that speaks the API of chat completions.

    ::

        async def solve(item, ctx):
            agent = SomeFramework(base_url=ctx.base_url, api_key="none", model="policy")
            answer = await agent.run(item["question"])
            return ctx.resource.rollout(ctx, reward=score(answer, item))


        task = Task("qa", source=source, run=solve, resource=chat.recorder(chat.client(url, model="policy")))

    Each attempt has an address of its own. Requests go to the client's servers under its model's name, and wait and are
    tried again as its own; the agent's client is told not to. Ids, log-probs and masks are kept as
    :class:`~tasks.chat.Session` keeps them. A streamed reply comes as one piece.

    Args:
        client: whom to ask; opened and closed with the recorder.
        host: the address to listen at.
        max_requests: of one attempt; the next one is refused.
    """
    return Recorder(client, host, max_requests)


def _without(reply: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    hidden = [name for name in _OURS if name not in wanted]
    told = {name: each for name, each in reply.items() if name not in hidden}
    told["choices"] = [{n: each for n, each in choice.items() if n not in hidden} for choice in reply["choices"]]
    return told


def _streamed(reply: dict[str, Any]) -> Answer:
    """Return a reply as the events of a stream: one with all of it, and the end."""
    choices = []
    for choice in reply["choices"]:
        delta = dict(choice["message"])
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
        choices.append({**{n: each for n, each in choice.items() if n != "message"}, "delta": delta})
    event = {**reply, "object": "chat.completion.chunk", "choices": choices}
    body = b"data: " + msgspec.json.encode(event) + b"\n\ndata: [DONE]\n\n"
    return Answer(200, body, "text/event-stream")


def _error(status: int, message: str) -> Answer:
    return as_json(status, {"error": {"message": message, "type": "forebay", "code": status}}, **_FINAL)

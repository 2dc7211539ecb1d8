"""A client of one or several servers that serve the same model."""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.lowlevel

from pipeline.clock import running_clock
from pipeline.config.base import MOST, Options
from pipeline.errors import ChatError, ConfigError, RequestRefused, ServerFailed, UsageError
from pipeline.runner.context import Context
from tasks.chat.growing import Events, Growing
from tasks.chat.sampled import ASKED
from tasks.chat.servers import Server, Servers
from tasks.chat.session import Session
from tasks.chat.text import decoded, parsed

_PASSING = (408, 409, 425, 429)  # beside everything from 500 on: the same request may be answered later


class ChatOptions(Options, frozen=True, kw_only=True):
    """How requests are made.

    Args:
        concurrency: requests in flight at one server. Those beyond it wait, and the time is not counted as theirs.
        timeout_s: seconds for one request, from when it is sent to the end of the reply.
        connect_timeout_s: seconds of these for the connection.
        attempts: how often a request is made at most, the first time included, at whichever servers.
        backoff_s: seconds before the second attempt, twice as many before each later one, each times a number from a
            half to one. What a server says in ``Retry-After`` is waited instead.
        backoff_most_s: the longest of these pauses, but for what a server says.
        token_ids: whether to ask for token ids and log-probs. A server that refuses unknown fields needs False.
        continues: whether a reply that was cut, by a weight update, a kill or a broken connection, is gone on with. The
            servers then have to stream token ids of prompt and reply with chats, and to take token ids as the prompt of
            ``/completions``: vLLM does.
        keep_tokens: with ``continues``, after how many tokens of a reply what there is of it is kept for the case of a
            kill, again and again.
        api_key: sent to the servers.
    """

    concurrency: int = 256
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    attempts: int = 4
    backoff_s: float = 0.5
    backoff_most_s: float = 30.0
    token_ids: bool = True
    continues: bool = False
    keep_tokens: int = 256
    api_key: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("concurrency", "attempts", "keep_tokens"):
            self._at_least(option, 1)
        for option in ("timeout_s", "connect_timeout_s", "backoff_s", "backoff_most_s"):
            if not 0 <= getattr(self, option) <= MOST:
                raise ConfigError.of(option, getattr(self, option), "seconds, not negative, are needed")
        if self.continues and not self.token_ids:
            raise ConfigError.of("continues", True, "token_ids=True is needed with it: a reply is continued by its ids")


def client(
    urls: str | Sequence[str], *, model: str, options: ChatOptions | Mapping[str, Any] | None = None, **more: Any
) -> ChatClient:
    """Return a client, for ``Task(resource=)``; it is opened there.

    Args:
        urls: where the API begins, of one server or of several that serve the same model: ``http://gpu1:8000/v1``.
        model: the name that they know it by.
        options: how requests are made; or single ones of :class:`ChatOptions` by name.
        more: what else, goes into each request: ``temperature=1.0``, ``max_tokens=512``.

    Raises:
        ConfigError: an option is out of range.
    """
    given = {name: more.pop(name) for name in list(more) if name in ChatOptions.__struct_fields__}
    if options is not None and given:
        raise ConfigError(f"{', '.join(given)}: give it in options=, or without that", option=next(iter(given)))
    return ChatClient(urls, model, ChatOptions.of(options or given), more)


class ChatClient:
    """Asks servers; an async context manager. See :func:`client`.

    Whoever shares it may enter it, several tasks by ``Task(resource=client)`` among them; the last one closes it.
    """

    def __init__(
        self, urls: str | Sequence[str], model: str, options: ChatOptions, sampling: Mapping[str, Any]
    ) -> None:
        self.urls = [urls] if isinstance(urls, str) else list(urls)
        if not self.urls or not all(isinstance(url, str) and "://" in url for url in self.urls):
            raise ConfigError.of("urls", urls, "addresses such as http://localhost:8000/v1 are needed")
        self.model, self.options, self.sampling = model, options, dict(sampling)
        self._openai: Any = None
        self._clients: dict[str, Any] = {}
        self._servers: Servers | None = None
        self._users, self._loop = 0, None
        self._opening: anyio.Lock | None = None
        self.requests = 0
        """How many were sent, retries included."""

    @property
    def servers(self) -> Servers:
        """The servers, and what is known of them.

        Raises:
            UsageError: the client is not open.
        """
        if self._servers is None:
            raise UsageError("chat client: not open; `async with client:` comes first, or Task(resource=client)")
        return self._servers

    async def __aenter__(self) -> Self:
        loop: Any = anyio.lowlevel.current_token()
        if self._loop != loop:
            if self._users:
                raise UsageError("chat client: it is open already, on another event loop; make a client for each")
            self._loop, self._opening = loop, anyio.Lock()
        self._users += 1
        try:
            assert self._opening is not None
            async with self._opening:
                if self._servers is None:
                    # Importing openai and reading certificates take a second, which is not the event loop's.
                    self._openai, self._clients = await anyio.to_thread.run_sync(self._made)
                    self._servers = Servers(self.urls, self.options.concurrency, anyio.current_time)
        except BaseException:
            self._users -= 1
            raise
        return self

    def _made(self) -> tuple[Any, dict[str, Any]]:
        """Return the module and a client of each server."""
        try:
            import openai
        except ImportError as error:
            raise ImportError("tasks.chat needs the extra llm: pip install 'forebay[llm]'") from error
        clients = {
            url: openai.AsyncOpenAI(
                base_url=url,
                api_key=self.options.api_key,
                max_retries=0,  # they are made here, and nowhere else
                http_client=http_client(openai, self.options.connect_timeout_s),
            )
            for url in set(self.urls)
        }
        return openai, clients

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if self._users:
            return
        clients, self._clients, self._servers = self._clients, {}, None
        with anyio.CancelScope(shield=True):
            for each in clients.values():
                await each.close()

    def session(self, ctx: Context | None = None, **options: Any) -> Session:
        """Return a new conversation; see :class:`~tasks.chat.Session`, which takes the options.

        Args:
            ctx: of the attempt; without one, versions are 0 and nothing is kept of an interrupted conversation.
        """
        return Session(self, ctx, **options)

    async def request(
        self, messages: Sequence[Mapping[str, Any]], *, key: str = "", growing: Growing | None = None, **body: Any
    ) -> dict[str, Any]:
        """Return a server's reply to a chat completion, decoded.

        Args:
            messages: the conversation.
            key: what the pauses between attempts follow from, beside their number: a label of the attempt.
            growing: takes in a streamed reply, and what it has by then is not asked for again; then an empty dict is
                returned.
            body: more fields of the request, before those of the client.

        Raises:
            RequestRefused: a server refuses it, and would again.
            ServerFailed: none answered in as many attempts as are allowed.
        """
        fields = {"model": self.model, **self.sampling, **body}
        if self.options.token_ids:
            fields.setdefault("logprobs", True)
        extra = {**(ASKED if self.options.token_ids else {}), **fields.pop("extra_body", {})}
        if growing is None:
            send = partial(self._plain, messages, fields, extra)
        else:
            send = partial(self._streamed, messages, {**extra, **fields}, growing)
        failed: Server | None = None
        for attempt in range(1, self.options.attempts + 1):
            async with self.servers.place(failed) as server:
                try:
                    reply = await self._ask(server, send)
                    self.servers.well(server)
                    return reply
                except _Passing as passing:
                    failed, why = server, passing
                    if passing.ill:
                        self.servers.failed(server)
            if attempt < self.options.attempts:
                await anyio.sleep(why.after_s if why.after_s is not None else self._pause(attempt, key))
        raise ServerFailed(
            f"{failed.url if failed else ''}: {why}; {self.options.attempts} attempts were made, at "
            f"{len(self.urls)} server{'s' * (len(self.urls) > 1)}. Look at the server's log, or raise attempts="
        ) from why.__cause__

    def _pause(self, attempt: int, key: str) -> float:
        whole = min(self.options.backoff_s * 2.0 ** (attempt - 1), self.options.backoff_most_s)
        return whole * (0.5 + 0.5 * random.Random(f"{key}/{attempt}").random())

    async def _ask(self, server: Server, send: Callable[[Any], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Let a request be sent to a server, in its time, and say what went wrong in words of ours."""
        try:
            with anyio.fail_after(self.options.timeout_s):
                return await send(self._clients[server.url])
        except (_Passing, ChatError):
            raise
        except Exception as error:
            why = self._why(server, error)
            if why is None:
                raise
            raise why from error

    def _why(self, server: Server, error: Exception) -> Exception | None:
        openai = self._openai
        if isinstance(error, TimeoutError):
            return _Passing(f"no reply within {self.options.timeout_s:g} s", ill=True)
        if isinstance(error, openai.APIStatusError):
            return _of_status(server, error)
        if isinstance(error, openai.APIConnectionError):
            return _Passing(f"no connection, or one that broke ({error.__cause__ or error})", ill=True)
        if isinstance(error, _http(openai).TransportError):  # in the middle of a stream
            return _Passing(f"the connection broke ({error})", ill=True)
        if isinstance(error, (ValueError, openai.APIError)):
            return _Passing(f"the reply is no JSON ({error})", ill=False)
        return None

    async def _plain(
        self, messages: Sequence[Mapping[str, Any]], fields: dict[str, Any], extra: dict[str, Any], client: Any
    ) -> dict[str, Any]:
        self.requests += 1
        # The messages in extra_body count: through others openai looks part by part, a quarter of a request's time.
        raw = await client.chat.completions.with_raw_response.create(
            messages=[], extra_body={**extra, "messages": list(messages)}, **fields
        )
        return _checked(decoded(raw.content))

    async def _streamed(
        self, messages: Sequence[Mapping[str, Any]], fields: dict[str, Any], growing: Growing, client: Any
    ) -> dict[str, Any]:
        """Ask for a streamed chat, or for a completion that goes on from what there is."""
        if growing.done:  # and only the end of the stream was cut off
            return {}
        ids = growing.begin()
        if growing.full(fields):
            return {}
        self.requests += 1
        if ids is None:
            asking, body = client.chat.completions, {**fields, "messages": list(messages)}
        else:
            # The prompt in extra_body counts; openai would look through the other one id by id.
            asking, body = client.completions, {**growing.completion(fields), "prompt": ids}
        named: dict[str, Any] = {"messages": []} if ids is None else {"prompt": ""}
        events = Events()
        async with asking.with_streaming_response.create(
            model=body.pop("model"), stream=True, extra_body=body, **named
        ) as response:
            async for data in response.iter_bytes():
                for event in events.of(data):
                    growing.take(_event(event))
        if not growing.done:
            raise _Passing(f"the stream ended before the reply ({growing.finish_reason or 'no word why'})", ill=False)
        return {}


class _Passing(Exception):
    """An attempt came to nothing, and another one may not."""

    def __init__(self, message: str, *, ill: bool, after_s: float | None = None) -> None:
        super().__init__(message)
        self.ill, self.after_s = ill, after_s


def _of_status(server: Server, error: Any) -> Exception:
    status, said = error.status_code, str(error)[:500]
    if status >= 500 or status in _PASSING:
        after = _retry_after(error.response.headers.get("retry-after"))
        return _Passing(f"answered {status} ({said})", ill=status != 429, after_s=after)
    return RequestRefused(f"{server.url}: answered {status}, and would again: {said}")


def _retry_after(said: str | None) -> float | None:
    """Return the seconds that ``Retry-After`` says, in either of its forms (RFC 9110, section 10.2.3)."""
    if said is None:
        return None
    try:
        return max(0.0, float(said))
    except ValueError:
        try:
            return max(0.0, parsedate_to_datetime(said).timestamp() - running_clock().wall())
        except (ValueError, TypeError):
            return None


def _checked(reply: Any) -> dict[str, Any]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(reply, dict) or not isinstance(first, dict) or not isinstance(first.get("message"), dict):
        raise _Passing("the reply has no choice with a message", ill=False) from ChatError(repr(reply)[:200])
    return reply


def _event(data: bytes) -> dict[str, Any]:
    said = parsed(data)
    if not isinstance(said, dict) or said.get("error") is not None:
        raise _Passing(f"the stream said {data[:200]!r}", ill=True)
    return said


def http_client(openai: Any, connect_timeout_s: float) -> Any:
    """Return the HTTP client of one server: no limit but the seconds that a connection may take."""
    timeout = openai.Timeout(None, connect=connect_timeout_s)
    return openai.DefaultAsyncHttpxClient(limits=_no_limits(openai), timeout=timeout)


def _no_limits(openai: Any) -> Any:
    """Return limits of the pool of connections that never let a request wait there: places are given out here."""
    return _http(openai).Limits(max_connections=None, max_keepalive_connections=None)


def _http(openai: Any) -> Any:
    """Return the module of the HTTP client that openai is built on."""
    for name in ("httpx2", "httpx"):
        module = sys.modules.get(name)
        if module is not None and issubclass(openai.DefaultAsyncHttpxClient, module.AsyncClient):
            return module
    raise ImportError("tasks.chat: openai is built on an HTTP client that is not known here; pin openai below it")

"""One conversation: its messages, its tokens as the server sampled them, its limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from pipeline.errors import ChatLimit, ConfigError, ReplyInvalid
from pipeline.records import Rollout
from pipeline.runner.context import Context
from tasks.chat.growing import Growing, can_go_on
from tasks.chat.text import cleaned
from tasks.chat.tools import tools_of
from tasks.chat.traces import Tokens, TokenTrace, Turn

if TYPE_CHECKING:
    from tasks.chat.clients import ChatClient

_TURNS, _CUT = "turn_ends", "cut"
_AT_ONCE = 16
"""Calls of tools of one reply that run at the same time."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a model answered.

    Attributes:
        text: "" if it only called tools.
        message: as it is in the conversation.
        finish_reason: as the server says: ``stop``, ``length``, ``tool_calls``.
        tool_calls: as the server says.
        parsed: with ``schema=``, what the text says.
        stopped: what limit ended :meth:`Session.run` before the model did: ``turns``, ``tokens`` or ``time``; else "".
    """

    text: str
    message: dict[str, Any]
    finish_reason: str
    tool_calls: list[dict[str, Any]] = []
    parsed: Any = None
    stopped: str = ""


class Session:
    """A conversation of one attempt.

    ::

        talk = ctx.resource.session(ctx, system="You are terse.", tools=[search], max_turns=8)
        reply = await talk.run(item["question"])
        return talk.rollout(reward=score(reply.text))

    Messages are those of the API. Token ids, log-probs and masks are what the server said of each turn; what it did
    not say is left out, and ``info["unknown_tokens"]`` counts the replies of which it is.

    What was said is kept before each request but the first, see :meth:`keep`. An attempt that was interrupted begins
    anew, and as long as it says the same as before it is given the replies, and the results of tools, that were kept.
    """

    def __init__(
        self,
        client: ChatClient,
        ctx: Context | None = None,
        *,
        system: str | None = None,
        messages: Iterable[Mapping[str, Any]] = (),
        tools: Iterable[Any] = (),
        max_turns: int | None = None,
        max_tokens: int | None = None,
        timeout_s: float | None = None,
        keep: bool = True,
        continues: bool | None = None,
        parse: Callable[[str], Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> None:
        """Args:
        client: whom to ask.
        ctx: of the attempt.
        system, messages: what the conversation begins with.
        tools: functions that the model may call, or :class:`~tasks.chat.Tool`.
        max_turns: replies at most.
        max_tokens: tokens that all replies may have together.
        timeout_s: seconds for all of it, from now on.
        keep: whether an attempt that is interrupted goes on from what was said. One session of an attempt can: others
            are to have False, as they would be given each other's replies.
        continues: as of the client's options, if it is to be another here.
        parse: makes a message, without its role, of the text of a reply that was gone on with, so that replies that may
            call tools can be; without it they are asked for anew, as the text alone does not say what was called.
        sampling: more fields of each request: ``temperature=0.7``.

        Raises:
            ConfigError: a limit is no positive number, or a tool cannot be described.
        """
        _check_limits(max_turns, max_tokens, timeout_s)
        self._client, self._ctx = client, ctx
        self._tools, self._sampling = tools_of(tools), sampling
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._until = float("inf") if timeout_s is None else anyio.current_time() + timeout_s
        first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = cleaned([*first, *map(dict, messages)])
        self._tokens = Tokens()
        self._stopped = ""
        self._keeps = keep
        self._continues, self._parse = client.options.continues if continues is None else continues, parse
        self._growing: Growing | None = None
        self._asked: list[dict[str, Any]] = []
        self._kept, self._known, self._cut = _kept(ctx) if keep else ([], Tokens(), None)

    @property
    def turns(self) -> int:
        """How many replies there are."""
        return len(self._tokens.turns)

    @property
    def used_tokens(self) -> int:
        """How many tokens they have, as the server counts."""
        return self._tokens.used

    # -- talking -----------------------------------------------------------------------------------------------

    async def complete(
        self, content: str | Sequence[Mapping[str, Any]] | None = None, *, schema: Any = None, **sampling: Any
    ) -> Reply:
        """Say something, and return the model's reply; both are in the conversation then.

        Args:
            content: what the user says: text, or the parts of a message; None: nothing is added.
            schema: a type, such as a ``msgspec.Struct``, that the reply is to be one of, in JSON: ``reply.parsed``.
            sampling: more fields of this request.

        Raises:
            ChatLimit: no turn, token or time is left; nothing was asked.
            ReplyInvalid: the reply contradicts itself, or is none of ``schema``.
            RequestRefused, ServerFailed: as of the client.
        """
        body = {**self._sampling, **sampling}
        self._limit(body)
        asked = list(self.messages)
        if content is not None:
            asked.append({"role": "user", "content": cleaned(content)})
        if self._tools:
            body.setdefault("tools", [tool.spec for tool in self._tools.values()])
        if schema is not None:
            body.setdefault("response_format", _format_of(schema))
        reply = self._again(asked) or await self._ask(asked, body)
        if schema is None:
            return reply
        try:
            return msgspec.structs.replace(reply, parsed=msgspec.json.decode(reply.text, type=schema))
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise ReplyInvalid(f"{self._where()}: the reply is no {schema!r}: {error}") from error

    async def _ask(self, asked: list[dict[str, Any]], body: Mapping[str, Any]) -> Reply:
        version = self._version()
        growing = self._growing = self._to_grow(asked, body)
        if self.turns:
            self.keep()
        with anyio.CancelScope(deadline=self._until) as scope:
            try:
                key = "" if self._ctx is None else self._ctx.key
                raw = await self._client.request(asked, key=key, growing=growing, **body)
            except anyio.get_cancelled_exc_class():
                if growing is not None:
                    self.keep()
                raise
        if scope.cancelled_caught:
            raise self._no_more("time", "the time of the conversation is over")
        self._growing = None
        if growing is None:
            message = self._tokens.take(raw, self._where(), version)
        else:
            message = self._tokens.take(growing.reply(self._parse), self._where(), growing.version, growing.versions)
        self.messages = [*asked, message]
        return _reply_of(message, self._tokens.turns[-1].finish_reason)

    def _version(self) -> int:
        return 0 if self._ctx is None else self._ctx.version_now

    def _to_grow(self, asked: list[dict[str, Any]], body: Mapping[str, Any]) -> Growing | None:
        """Return what takes in the reply, if that can be gone on with; it begins with what was kept of it."""
        cut, self._cut = self._cut, None
        fields = {**self._client.sampling, **body}
        fields.update(fields.get("extra_body") or {})
        if not self._continues or not can_go_on(fields, self._parse is not None):
            return None
        every = self._client.options.keep_tokens if self._ctx is not None and self._keeps else 0
        growing = Growing(self._version, self._where(), every=every, keep=self.keep)
        if cut is not None and cut.asked == asked:
            growing.restore(cut.trace, cut.text, cut.finish_reason)
        self._asked = asked
        return growing

    def _again(self, asked: list[dict[str, Any]]) -> Reply | None:
        """Return the reply that an interrupted attempt had to the same words."""
        at = len(asked)
        if at >= len(self._kept) or self._kept[:at] != asked or self._kept[at].get("role") != "assistant":
            self._kept = []
            return None
        self.messages = self._kept[: at + 1]
        self._tokens = self._known.cut(self.turns + 1)
        return _reply_of(self.messages[-1], self._tokens.turns[-1].finish_reason)

    async def run(self, content: str | Sequence[Mapping[str, Any]] | None = None, **sampling: Any) -> Reply:
        """Say something, call the tools that the model asks for, tell it what they returned, and so on until it calls
        none or a limit is met; return its last reply, whose ``stopped`` says which limit it was.

        Raises:
            ChatLimit: nothing was left to begin with.
            ReplyInvalid, RequestRefused, ServerFailed: as :meth:`complete`.
        """
        reply = await self.complete(content, **sampling)
        while reply.tool_calls:
            self.messages = [*self.messages, *await self._called(reply.tool_calls)]
            try:
                reply = await self.complete(**sampling)
            except ChatLimit as limit:
                return msgspec.structs.replace(reply, stopped=limit.what)
        return reply

    async def _called(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        at, count = len(self.messages), len(calls)
        known = self._kept[at : at + count]
        if (
            self._kept[:at] == self.messages
            and len(known) == count
            and all(each.get("role") == "tool" for each in known)
        ):
            return known  # a tool may do something that is to be done once
        told = [""] * len(calls)
        waiting = iter(enumerate(calls))

        async def work() -> None:
            for place, call in waiting:
                function = call.get("function") or {}
                tool = self._tools.get(function.get("name", ""))
                if tool is None:
                    told[place] = (
                        f"error: there is no tool {function.get('name')!r}; there are {', '.join(self._tools)}"
                    )
                else:
                    told[place] = await tool.call(function.get("arguments") or "{}")

        async with anyio.create_task_group() as group:
            for _ in range(min(_AT_ONCE, len(calls))):
                group.start_soon(work)
        return [
            {"role": "tool", "tool_call_id": call.get("id", ""), "content": cleaned(said)}
            for call, said in zip(calls, told, strict=True)
        ]

    def _limit(self, body: dict[str, Any]) -> None:
        """Look whether anything is left, and let the request have no more tokens than are."""
        if self._max_turns is not None and self.turns >= self._max_turns:
            raise self._no_more("turns", f"max_turns={self._max_turns} replies are there")
        if anyio.current_time() >= self._until:
            raise self._no_more("time", "the time of the conversation is over")
        if self._max_tokens is not None:
            left = self._max_tokens - self.used_tokens
            if left <= 0:
                raise self._no_more("tokens", f"max_tokens={self._max_tokens} tokens were sampled")
            name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
            body[name] = min(left, body.get(name) or self._client.sampling.get(name) or left)

    def _no_more(self, what: str, why: str) -> ChatLimit:
        self._stopped = what
        return ChatLimit(f"{self._where()}: {why}; end it with rollout(), or allow more", what=what)

    def _where(self) -> str:
        whose = "" if self._ctx is None else f", {self._ctx.item}, member {self._ctx.member}"
        return f"turn {self.turns + 1}{whose}"

    def keep(self) -> None:
        """Keep what was said so far, for the case that the attempt is interrupted from now on.

        This is done before each request but the first. Call it when the last reply is there, if what follows takes
        long: a judge, say.
        """
        if self._ctx is None or not self._keeps:
            return
        cut = None if self._growing is None else self._growing.kept()
        if cut is None and len(self.messages) <= len(self._kept):
            return
        said = {"messages": self.messages, _TURNS: msgspec.to_builtins(self._tokens.turns)}
        tokens = self._tokens
        if cut is not None:
            asked = self._asked[len(self.messages) :]
            said[_CUT] = {"asked": asked, "text": cleaned(cut[1]), "finish_reason": cut[2]}
            tokens = Tokens([*tokens.traces, cut[0]], tokens.turns)
        self._ctx.save_partial(tokens.rollout(0.0, said))

    # -- what came of it ---------------------------------------------------------------------------------------

    def rollout(self, reward: float, info: Mapping[str, Any] | None = None) -> Rollout:
        """Return the conversation as a rollout.

        Traces have ``prompt_ids`` [p], ``completion_ids``, ``completion_mask``, ``logprobs`` and ``versions`` [c]. A
        turn whose prompt did not go on from the tokens before it, because the server rendered the history anew, began
        another trace; ``info["breaks"]`` counts them. ``info["messages"]`` is the conversation. Without token ids there
        is no trace: nothing is made up.
        """
        said = {"messages": self.messages, "stopped": self._stopped}
        return self._tokens.rollout(reward, {**said, **(info or {})})


def _check_limits(max_turns: int | None, max_tokens: int | None, timeout_s: float | None) -> None:
    for option, value in (("max_turns", max_turns), ("max_tokens", max_tokens)):
        if value is not None and (value.__class__ is not int or value < 1):
            raise ConfigError.of(option, value, "a whole number of at least 1 is needed, or None")
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError.of("timeout_s", timeout_s, "seconds, more than 0, are needed, or None")


class _Cut(msgspec.Struct, frozen=True):
    """A reply that was cut: to what, its tokens, its text, and why it ended if it had."""

    asked: list[dict[str, Any]]
    trace: TokenTrace
    text: str
    finish_reason: str


def _kept(ctx: Context | None) -> tuple[list[dict[str, Any]], Tokens, _Cut | None]:
    """Return the messages and the tokens that an interrupted attempt has kept, and the reply that was cut."""
    partial = None if ctx is None else ctx.partial
    if partial is None or _TURNS not in partial.info:
        return [], Tokens(), None
    traces = [TokenTrace.of(trace.tensors) for trace in partial.traces]
    turns = msgspec.convert(partial.info[_TURNS], list[Turn])
    messages, said = list(partial.info["messages"]), partial.info.get(_CUT)
    cut = None if said is None else _Cut([*messages, *said["asked"]], traces.pop(), said["text"], said["finish_reason"])
    return messages, Tokens(traces, turns), cut


def _reply_of(message: dict[str, Any], finish_reason: str) -> Reply:
    return Reply(
        text=message.get("content") or "",
        message=message,
        finish_reason=finish_reason,
        tool_calls=message.get("tool_calls") or [],
    )


def _format_of(schema: Any) -> dict[str, Any]:
    name = getattr(schema, "__name__", "reply")
    return {"type": "json_schema", "json_schema": {"name": name, "schema": msgspec.json.schema(schema), "strict": True}}

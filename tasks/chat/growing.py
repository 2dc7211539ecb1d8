"""A reply while it comes: what is known of it when it is cut, so that a server can go on from there.

A reply begins as a streamed chat. If it is cut, by a weight update, a kill or a broken connection, and the server said
the token ids of the prompt and of every chunk, the next request is one for a completion whose prompt are these very
ids: nothing is turned into tokens again. ``docs/decisions/0021-continued-replies.md`` says why it is done like this.

What is kept ends with the last chunk that had text. Tokens after it, whose text the server holds back (half a
character), are sampled again: a trace never has them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.errors import ReplyInvalid
from tasks.chat.sampled import sampled
from tasks.chat.text import cleaned
from tasks.chat.traces import TokenTrace

CHAT_ONLY = {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs", "max_tokens"),
    *("max_completion_tokens", "stream", "stream_options", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "reasoning_effort"),
}
"""Fields of a chat that a completion has not, or has under another name."""
_GRAMMARS = {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
_LIMITS = ("max_completion_tokens", "max_tokens")


def can_go_on(fields: Mapping[str, Any], parses: bool) -> bool:
    """Return whether a reply to a request can be gone on with.

    Not with a grammar, which would begin anew in the middle; not with ``stop``, as servers hold back the text that may
    become one; and with tools only where the caller can read calls of tools in the text, as completions do not.
    """
    calls = fields.get("tool_choice") in (None, "auto", "none") and (parses or not fields.get("tools"))
    return calls and not _GRAMMARS & fields.keys() and not fields.get("stop") and fields.get("n") in (None, 1)


class Growing:
    """One reply, from its first request to its end.

    Attributes:
        prompt_ids: what the server put before it; None: it does not say.
        ids, versions: its tokens, and the version of the weights that made each.
        logprobs: of each token; None: the server does not say.
        message: what was said so far.
        requests: how many were made for it.
    """

    def __init__(
        self, version: Callable[[], int], where: str, *, every: int = 0, keep: Callable[[], None] | None = None
    ) -> None:
        """Args:
        version: returns that of the weights in use now.
        where: what it is a reply to, for messages.
        every, keep: how many tokens after which ``keep`` is called, again and again; 0: never.
        """
        self._version, self.where = version, where
        self._every, self._keep = every, keep
        self.requests = 0
        self._anew()

    def _anew(self) -> None:
        self.version = self._version()
        self.prompt_ids: list[int] | None = None
        self.ids: list[int] = []
        self.versions: list[int] = []
        self.logprobs: list[float] | None = []
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        self.finish_reason = ""
        self._usage: Any = None
        self._known = self._plain = True
        self._whole, self._text = 0, 0  # tokens and characters up to the last chunk that had text
        self._kept_at = 0
        self._first = False

    @property
    def done(self) -> bool:
        """Whether the server said why it ended, and did not give it up."""
        return self.finish_reason not in ("", "abort")

    # -- from request to request --------------------------------------------------------------------------------

    def begin(self) -> list[int] | None:
        """Begin a request. Return the ids that are its prompt, or None: it is a chat, and everything is as new."""
        self.requests += 1
        if not (self._whole and self.prompt_ids is not None and self._known and self._plain):
            self._anew()
            return None
        self.version = self._version()
        del self.ids[self._whole :], self.versions[self._whole :]
        if self.logprobs is not None:
            del self.logprobs[self._whole :]
        self.message["content"] = self.message["content"][: self._text]
        self.finish_reason, self._first = "", True
        return [*self.prompt_ids, *self.ids]

    def completion(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a chat as those of a completion that goes on: with what is left of its tokens."""
        found = {name: each for name, each in fields.items() if name not in CHAT_ONLY}
        # llama.cpp gives none for 0; vLLM takes the most that there is room for, for None, and 16 without it.
        found["logprobs"] = (fields.get("top_logprobs") or 1) if fields.get("logprobs") else None
        most = _most(fields)
        found["max_tokens"] = None if most is None else most - len(self.ids)
        if fields.get("min_tokens"):
            found["min_tokens"] = max(0, fields["min_tokens"] - len(self.ids))
        return found

    def full(self, fields: Mapping[str, Any]) -> bool:
        """Whether it has all the tokens that it may, and only the word that it ended was cut off."""
        most = _most(fields)
        if most is None or len(self.ids) < most:
            return False
        self.finish_reason = "length"
        return True

    # -- chunk by chunk -----------------------------------------------------------------------------------------

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in a chunk, of a chat or of a completion.

        Raises:
            ReplyInvalid: it contradicts itself, or what was asked.
        """
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices:
            self._usage = event.get("usage") or self._usage
            return
        choice = choices[0]
        found = sampled(event, choice, self.where)
        if found.prompt_ids is not None:
            self._prompt(found.prompt_ids)
        before = len(self.message.get("content") or "")
        self._say(choice)
        text = self.message.get("content") or ""
        self._sampled(found.ids or [], found.logprobs)
        if len(text) > before:
            self._known = self._known and bool(found.ids)
            if not "\ud800" <= text[-1] <= "\udbff":  # half a character may come as half a pair
                self._whole, self._text = len(self.ids), len(text)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if self.done:
            self._whole, self._text = len(self.ids), len(text)
        if self._every and self._whole >= self._kept_at + self._every and self._keep is not None:
            self._kept_at = self._whole
            self._keep()

    def _prompt(self, given: list[int]) -> None:
        if self.prompt_ids is None:
            self.prompt_ids = given
        elif self.ids and self._first and given != [*self.prompt_ids, *self.ids]:
            raise ReplyInvalid(
                f"{self.where}: the server was to go on from {len(self.prompt_ids) + len(self.ids)} token ids, and "
                f"says that it went on from {len(given)} others. Use continues=False with this server"
            )
        self._first = False

    def _sampled(self, ids: Sequence[int], logprobs: list[float] | None) -> None:
        if ids:
            self.ids.extend(ids)
            self.versions.extend([self.version] * len(ids))
            if self.logprobs is None or logprobs is None:
                self.logprobs = None
            else:
                self.logprobs.extend(logprobs)

    def _say(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta")
        if delta is None:
            self.message["content"] += choice.get("text") or ""
            return
        for name, each in delta.items():
            if name == "tool_calls":
                _merge_calls(self.message.setdefault(name, []), each or [])
            elif isinstance(each, str) and name != "role":
                self.message[name] = (self.message.get(name) or "") + each
            elif each is not None:
                self.message[name] = each
            self._plain = self._plain and (name in ("role", "content") or not each)

    # -- what came of it ----------------------------------------------------------------------------------------

    def reply(self, parse: Callable[[str], Mapping[str, Any]] | None) -> dict[str, Any]:
        """Return it as a server says it that does not stream.

        Args:
            parse: makes the message of the text of a reply that was gone on with.
        """
        message = cleaned(self.message)
        if self.requests > 1 and self._plain and parse is not None:
            message = {"role": "assistant", **parse(message["content"])}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        if self._known and self.ids:
            choice["token_ids"] = self.ids
            if self.logprobs is not None:
                choice["logprobs"] = {"content": [{"logprob": each} for each in self.logprobs]}
        usage = {"completion_tokens": len(self.ids)} if self.ids else self._usage
        return {"choices": [choice], "prompt_token_ids": self.prompt_ids, "usage": usage}

    def kept(self) -> tuple[TokenTrace, str, str] | None:
        """Return what can be gone on from: its tokens, its text, and why it ended if it has; None: nothing."""
        if not (self._whole and self.prompt_ids is not None and self._known and self._plain):
            return None
        trace, end = TokenTrace(self.prompt_ids), self._whole
        logprobs = None if self.logprobs is None else self.logprobs[:end]
        trace.add(trace.prompt_ids, self.ids[:end], logprobs, self.version, self.versions[:end])
        return trace, self.message["content"][: self._text], self.finish_reason if self.done else ""

    def restore(self, trace: TokenTrace, text: str, finish_reason: str) -> None:
        """Go on from what an interrupted attempt had kept."""
        self.prompt_ids, self.ids = trace.prompt_ids.tolist(), trace.completion_ids.tolist()
        self.versions = trace.versions.tolist()
        self.logprobs = None if trace.logprobs is None else trace.logprobs.tolist()
        self.message["content"], self.finish_reason = text, finish_reason
        self._whole = self._kept_at = len(self.ids)
        self._text, self.requests = len(text), 1


def _most(fields: Mapping[str, Any]) -> int | None:
    return next((fields[name] for name in _LIMITS if fields.get(name) is not None), None)


def _merge_calls(calls: list[dict[str, Any]], pieces: Sequence[Mapping[str, Any]]) -> None:
    """Add pieces of calls of tools, each with its call's ``index``, to those that are there."""
    for piece in pieces:
        at = piece.get("index", len(calls))
        while len(calls) <= at:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[at], piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""


class Events:
    """Server-sent events out of bytes: those with ``data:`` on one line, which is how chat servers send them.

    Lines end at a line feed alone: text may hold other characters that end a line for Python.
    """

    def __init__(self) -> None:
        self._left = b""

    def of(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are whole now."""
        *lines, self._left = (self._left + data).split(b"\n")
        found = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        return [each for each in found if each != b"[DONE]"]

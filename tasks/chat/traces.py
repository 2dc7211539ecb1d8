"""Traces out of the turns of a conversation: a turn's prompt goes on from the tokens before it, or begins a trace."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.records import Rollout, Trace
from tasks.chat.sampled import sampled

_KINDS = {
    "prompt_ids": ("q", np.int64),
    "completion_ids": ("q", np.int64),
    "completion_mask": ("b", np.bool_),
    "logprobs": ("f", np.float32),
    "versions": ("q", np.int64),
}
"""How each tensor's values are held, and its dtype. Arrays become tensors by a copy; lists of a long conversation would
hold the event loop for milliseconds each time."""


class TokenTrace:
    """The tokens of turns that go on from each other.

    Attributes:
        prompt_ids: what came before the first reply.
        completion_ids: all after it: the replies, and between them what tools and the user said, as the server
            rendered it.
        completion_mask: which of them were sampled.
        logprobs: of each that was; 0 for the others. None once a server left them out.
        versions: of the weights that made each.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self.prompt_ids = array("q", prompt_ids)
        self.completion_ids, self.completion_mask = array("q"), array("b")
        self.logprobs: array[float] | None = array("f")
        self.versions = array("q")

    def goes_on(self, prompt: array[int]) -> bool:
        """Whether a later turn's prompt begins with these very tokens."""
        begun, count = len(self.prompt_ids), len(self.prompt_ids) + len(self.completion_ids)
        return prompt[begun:count] == self.completion_ids and prompt[:begun] == self.prompt_ids

    def add(
        self,
        prompt: array[int],
        ids: list[int],
        logprobs: list[float] | None,
        version: int,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Take in a turn that goes on from this; ``versions`` of its tokens, if they are not all ``version``."""
        between = prompt[len(self.prompt_ids) + len(self.completion_ids) :]
        sampled_by = [version] * len(ids) if versions is None else versions
        self.completion_ids += between
        self.completion_ids.extend(ids)
        self.completion_mask.extend([0] * len(between) + [1] * len(ids))
        self.versions.extend([*[sampled_by[0] if ids else version] * len(between), *sampled_by])
        if self.logprobs is None or logprobs is None:
            self.logprobs = None
        else:
            self.logprobs.extend([0.0] * len(between) + logprobs)

    def cut(self, length: int) -> TokenTrace:
        """Return what it was when the completion was so long."""
        found = TokenTrace(self.prompt_ids)
        found.completion_ids, found.versions = self.completion_ids[:length], self.versions[:length]
        found.completion_mask = self.completion_mask[:length]
        found.logprobs = None if self.logprobs is None else self.logprobs[:length]
        return found

    def trace(self) -> Trace:
        """Return it as tensors, named as the community does."""
        held = {name: getattr(self, name) for name in _KINDS}
        return Trace({name: np.array(each, _KINDS[name][1]) for name, each in held.items() if each is not None})

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> TokenTrace:
        """Return what :meth:`trace` was made of."""
        found = cls([])
        for name, (code, _) in _KINDS.items():
            values = tensors.get(name)
            setattr(found, name, None if values is None else array(code, np.asarray(values).tolist()))
        return found


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """Where a turn ended: its trace, or -1 where its tokens are unknown; how long its completion was then; how many
    tokens the server counted in the reply, and why that ended."""

    trace: int
    length: int
    used: int
    finish_reason: str
    broke: bool = False


class Tokens:
    """All traces of one conversation, turn by turn."""

    def __init__(self, traces: list[TokenTrace] | None = None, turns: list[Turn] | None = None) -> None:
        self.traces = traces or []
        self.turns = turns or []

    @property
    def breaks(self) -> int:
        """How often a prompt went on from no tokens before it."""
        return sum(turn.broke for turn in self.turns)

    @property
    def unknown(self) -> int:
        """How many replies came without token ids."""
        return sum(turn.trace < 0 for turn in self.turns)

    @property
    def used(self) -> int:
        """How many tokens all replies have."""
        return sum(turn.used for turn in self.turns)

    def take(
        self, reply: Mapping[str, Any], where: str, version: int, versions: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Take in a turn, and return its message.

        Args:
            reply: of the server, decoded.
            where: what it is a reply to, for messages.
            version: of the weights that were in use when it was asked for.
            versions: of each token, for a reply that was gone on with.

        Raises:
            ReplyInvalid: it contradicts itself; nothing was taken in.
        """
        choice = reply["choices"][0]
        found = sampled(reply, choice, where)
        finish = choice.get("finish_reason") or ""
        if found.prompt_ids is None or found.ids is None:
            counted = (reply.get("usage") or {}).get("completion_tokens")
            used = len(found.ids) if found.ids is not None else counted if isinstance(counted, int) else 0
            self.turns.append(Turn(-1, 0, used, finish))
        else:
            prompt = array("q", found.prompt_ids)
            trace, at, broke = self._trace_of(prompt)
            trace.add(prompt, found.ids, found.logprobs, version, versions)
            self.turns.append(Turn(at, len(trace.completion_ids), len(found.ids), finish, broke))
        return {name: each for name, each in choice["message"].items() if each is not None}

    def _trace_of(self, prompt: array[int]) -> tuple[TokenTrace, int, bool]:
        """Return the trace that a prompt goes on from or a new one, its place, and whether that breaks off another."""
        # The newest that fits: agents may talk in turns, and each goes on from its own.
        at = next((at for at in reversed(range(len(self.traces))) if self.traces[at].goes_on(prompt)), -1)
        broke = bool(self.traces) and at < 0
        if at < 0:
            at = len(self.traces)
            self.traces.append(TokenTrace(prompt))
        return self.traces[at], at, broke

    def cut(self, turns: int) -> Tokens:
        """Return what it was after so many turns."""
        first = self.turns[:turns]
        ends: dict[int, int] = {turn.trace: turn.length for turn in first if turn.trace >= 0}
        return Tokens([self.traces[at].cut(end) for at, end in ends.items()], first)

    def rollout(self, reward: float, info: Mapping[str, Any]) -> Rollout:
        """Return all of it as a rollout; what is known of its turns is put before ``info``."""
        oldest = min((min(each.versions) for each in self.traces if each.versions), default=None)
        known = {
            "turns": len(self.turns),
            "finish_reason": self.turns[-1].finish_reason if self.turns else "",
            "breaks": self.breaks,
            "unknown_tokens": self.unknown,
            "used_tokens": self.used,
        }
        traces = [each.trace() for each in self.traces]
        return Rollout(traces, reward=reward, info={**known, **info}, oldest=oldest, tokens=self.used)

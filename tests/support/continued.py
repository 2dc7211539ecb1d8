"""A scripted model that streams its replies as vLLM does, and goes on from token ids; and what tests ask of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from pipeline import Item, Rollout
from tasks.chat.growing import Growing
from tests.support.chat_server import CUT, Said, Stream

FIRST_ID = 1000
HANG, BREAK = "hang", "break"


class Model:
    """Says the same words to everybody: token ``1000 + n`` is the n-th letter of them, and its log-prob says with which
    weights it was sampled: ``-(version + n / 1000)``.

    Args:
        words: a turn's reply, and the next turn's, and so on.
        size: letters of a chunk.
    """

    def __init__(self, *words: str, size: int = 1) -> None:
        self.words, self.size = words, size
        self.version = 0
        self.stop_at: dict[int, tuple[int, str]] = {}
        """By the number of a request, from 0: after how many chunks it hangs or breaks."""
        self.asked: list[dict[str, Any]] = []
        self.sampled = 0
        """Letters that were sent."""
        self._moved = anyio.Condition()

    async def has_sampled(self, count: int) -> None:
        """Return when so many letters were."""
        async with self._moved:
            while self.sampled < count:
                await self._moved.wait()

    async def __call__(self, request: dict[str, Any]) -> Said:
        number = len(self.asked)
        self.asked.append(request)
        assert request["stream"]
        assert request["return_token_ids"]
        if "messages" in request:
            prompt = prompt_of(request["messages"])
            turn = sum(each["role"] == "assistant" for each in request["messages"])
            said = 0
        else:
            prompt, (turn, said) = request["prompt"], self._gone_on(request["prompt"])
        return Stream(self._events(number, prompt, turn, said, request))

    def _gone_on(self, prompt: list[int]) -> tuple[int, int]:
        """Return which turn a prompt stops in the middle of, and how many of its letters it has."""
        assert prompt[-1] >= FIRST_ID, "a reply is gone on with, and no prompt"
        turn, said = -1, 0
        for before, now in zip([0, *prompt], prompt, strict=False):
            turn += before < FIRST_ID <= now
            said = said + 1 if before >= FIRST_ID <= now else 1
        return turn, said

    async def _events(
        self, number: int, prompt: list[int], turn: int, said: int, request: dict[str, Any]
    ) -> AsyncIterator[Any]:
        chat = "messages" in request
        words, most = self.words[turn], request.get("max_tokens")
        end = len(words) if most is None else min(len(words), said + most)
        stop, how = self.stop_at.get(number, (-1, ""))
        if chat:  # a chunk of its own has the prompt's ids, and no token
            yield {"prompt_token_ids": prompt, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        for at, begin in enumerate(range(said, end, self.size)):
            if at == stop:
                if how == HANG:
                    await anyio.sleep_forever()
                yield CUT
            places = range(begin, min(begin + self.size, end))
            async with self._moved:
                self.sampled += len(places)
                self._moved.notify_all()
            choice = self._choice(words, places, end, chat)
            yield {"choices": [choice if chat or at else {**choice, "prompt_token_ids": prompt}]}
        if stop >= 0 and how == HANG and number in self.stop_at:
            await anyio.sleep_forever()
        yield b"[DONE]"

    def _choice(self, words: str, places: range, end: int, chat: bool) -> dict[str, Any]:
        text = words[places[0] : places[-1] + 1]
        logprobs = [-(self.version + each / 1000) for each in places]
        last = places[-1] + 1 == end
        reason = ("stop" if end == len(words) else "length") if last else None
        said: dict[str, Any] = {"index": 0, "token_ids": [FIRST_ID + each for each in places], "finish_reason": reason}
        if chat:
            content = [{"token": "x", "logprob": each} for each in logprobs]
            return {**said, "delta": {"content": text}, "logprobs": {"content": content}}
        return {**said, "text": text, "logprobs": {"tokens": ["x"] * len(places), "token_logprobs": logprobs}}


def prompt_of(messages: list[dict[str, Any]]) -> list[int]:
    """The ids of a conversation: the bytes of what users say, and the letters of what was replied."""
    found: list[int] = []
    for each in messages:
        if each["role"] == "assistant":
            found += [FIRST_ID + at for at in range(len(each["content"]))]
        else:
            found += [*each["content"].encode(), 10]
    return found


def check(rollout: Rollout, words: list[str], *, first: str = "a") -> list[int]:
    """Check that every letter is there once, with the log-prob that it was sampled with and the version of the weights
    that it was sampled by; return these versions."""
    (trace,) = rollout.traces
    ids, mask = trace["completion_ids"].tolist(), trace["completion_mask"].tolist()
    assert trace["prompt_ids"].tolist() == [*first.encode(), 10]
    sampled = [each for each, was in zip(ids, mask, strict=True) if was]
    assert sampled == [FIRST_ID + at for each in words for at in range(len(each))]
    assert [each["content"] for each in rollout.info["messages"] if each["role"] == "assistant"] == words
    versions: list[int] = []
    for each, was, logprob, version in zip(
        ids, mask, trace["logprobs"].tolist(), trace["versions"].tolist(), strict=True
    ):
        if was:
            assert abs(logprob + version + (each - FIRST_ID) / 1000) < 1e-5, (each, logprob, version)
            versions.append(version)
    assert rollout.tokens == len(sampled)
    assert rollout.oldest == min(versions)
    return versions


async def solve(item: Item, ctx: Any) -> Rollout:
    """Two turns."""
    talk = ctx.resource.session(ctx)
    await talk.complete("a")
    await talk.complete("b")
    made: Rollout = talk.rollout(reward=1.0)
    return made


@contextmanager
def heard(monkeypatch: pytest.MonkeyPatch, chunks: int) -> Iterator[anyio.Event]:
    """An event that is set once a client has taken in so many chunks with tokens."""
    came, left, take = anyio.Event(), [chunks], Growing.take

    def taken(self: Growing, event: Any) -> None:
        take(self, event)
        left[0] -= bool(event["choices"] and event["choices"][0].get("token_ids"))
        if left[0] == 0:
            came.set()

    with monkeypatch.context() as patch:
        patch.setattr(Growing, "take", taken)
        if chunks == 0:
            came.set()
        yield came

"""Rewards: weighted functions with limits of their own, and judgement by another model."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from pipeline.errors import ConfigError, ReplyInvalid, UsageError

if TYPE_CHECKING:
    from tasks.chat import ChatClient


class Score(msgspec.Struct, frozen=True):
    """One part of a reward.

    Args:
        function: ``def`` or ``async def``; returns a finite number. A ``def`` runs in a thread.
        weight: what its number is multiplied with.
        name: in :class:`Scored`; by default the function's.
        timeout_s: seconds that it may take.
        concurrency: how many of it run at a time.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    name: str = ""
    timeout_s: float = 60.0
    concurrency: int = 64

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError.of("function", self.function, "a function is needed")
        if not math.isfinite(self.weight):
            raise ConfigError.of("weight", self.weight, "a finite number is needed")
        if not self.timeout_s > 0:
            raise ConfigError.of("timeout_s", self.timeout_s, "seconds, more than 0, are needed")
        if self.concurrency.__class__ is not int or self.concurrency < 1:
            raise ConfigError.of("concurrency", self.concurrency, "a whole number of at least 1 is needed")
        if not self.name:
            name = getattr(self.function, "__name__", type(self.function).__name__.lower())
            msgspec.structs.force_setattr(self, "name", name)


class Scored(msgspec.Struct, frozen=True):
    """A reward, and what each part gave before its weight."""

    reward: float
    parts: dict[str, float]


class Rubric:
    """A reward of weighted parts, which are worked out at the same time.

    ::

        rubric = Rubric(correct, Score(polite, weight=0.2, concurrency=8))


        async def solve(item, ctx):
            ...
            async with ctx.scoring():
                scored = await rubric(reply.text, item["answer"])
            return talk.rollout(scored.reward, {"scores": scored.parts})
    """

    def __init__(self, *scores: Score | Callable[..., Any]) -> None:
        """Raises:
        ConfigError: there is none, or two have one name.
        """
        self.scores = [each if isinstance(each, Score) else Score(each) for each in scores]
        names = [each.name for each in self.scores]
        if not names or len(set(names)) < len(names):
            raise ConfigError.of("scores", names, "one at least, each with a name of its own, is needed")
        self._places: list[anyio.CapacityLimiter] | None = None

    async def __call__(self, *args: Any, **named: Any) -> Scored:
        """Return the reward; each function is called with these arguments.

        Raises:
            UsageError: a function returned what is no finite number.
            TimeoutError: one took longer than it may.
            Exception: one raised.
        """
        if self._places is None:
            self._places = [anyio.CapacityLimiter(each.concurrency) for each in self.scores]
        found: dict[str, float] = {}
        try:
            async with anyio.create_task_group() as group:
                for score, places in zip(self.scores, self._places, strict=True):
                    group.start_soon(self._one, score, places, partial(score.function, *args, **named), found)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first that failed ended the others
        parts = {score.name: found[score.name] for score in self.scores}
        return Scored(sum(score.weight * parts[score.name] for score in self.scores), parts)

    async def _one(
        self, score: Score, places: anyio.CapacityLimiter, call: Callable[[], Any], found: dict[str, float]
    ) -> None:
        if not _is_async(score.function):
            call = _threaded(call)
        async with places:
            try:
                with anyio.fail_after(score.timeout_s):
                    value = await call()
            except TimeoutError as error:
                raise TimeoutError(f"score {score.name!r}: more than {score.timeout_s:g} s") from error
        try:
            found[score.name] = float(value)
        except (TypeError, ValueError):
            found[score.name] = math.nan
        if not math.isfinite(found[score.name]):
            raise UsageError(f"score {score.name!r}: it returned {value!r}, where a finite number is needed")


def _is_async(function: Callable[..., Any]) -> bool:
    called = type(function).__call__ if not inspect.isroutine(function) else function
    return inspect.iscoroutinefunction(called)


def _threaded(call: Callable[[], Any]) -> Callable[[], Any]:
    async def run() -> Any:
        # One that hangs is left to itself: a thread cannot be ended.
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)

    return run


class Judge:
    """Lets another model judge, and reads the number that it gives. A function for :class:`Score`.

    ::

        judge = Judge(client, "Question: {question}\\nAnswer: {answer}\\nEnd with a line `Score: N`, N from 0 to 10.")
        rubric = Rubric(Score(judge, name="judge", concurrency=16))
        scored = await rubric(question=item["question"], answer=reply.text)
    """

    def __init__(
        self,
        client: ChatClient,
        prompt: str,
        *,
        low: float = 0.0,
        high: float = 10.0,
        attempts: int = 3,
        **sampling: Any,
    ) -> None:
        """Args:
        client: of the model that judges; open by then.
        prompt: what it is asked, with the fields of the call in braces.
        low, high: between which its number lies; the score is 0 at ``low`` and 1 at ``high``.
        attempts: how often it is asked at most, if it gives no such number.
        sampling: more fields of the requests.

        Raises:
            ConfigError: an argument is out of range.
        """
        if not low < high:
            raise ConfigError.of("low", low, f"a number below high={high} is needed")
        if attempts.__class__ is not int or attempts < 1:
            raise ConfigError.of("attempts", attempts, "a whole number of at least 1 is needed")
        self._client, self._prompt, self._sampling = client, prompt, sampling
        self._low, self._high, self._attempts = low, high, attempts

    async def __call__(self, **fields: Any) -> float:
        """Return a score from 0 to 1.

        Raises:
            ReplyInvalid: no reply had a number from ``low`` to ``high``.
            RequestRefused, ServerFailed: as of the client.
        """
        said: list[str] = []
        for _ in range(self._attempts):
            reply = await self._client.session().complete(self._prompt.format(**fields), **self._sampling)
            given = _number(reply.text)
            if given is not None and self._low <= given <= self._high:
                return (given - self._low) / (self._high - self._low)
            said.append(reply.text[-80:])
        raise ReplyInvalid(
            f"judge: no `Score:` with a number from {self._low:g} to {self._high:g} in {self._attempts} replies; "
            f"they end with {said}"
        )


_SCORE = re.compile(r"score\W{0,8}(-?\d+(?:\.\d+)?)", re.IGNORECASE)


def _number(text: str) -> float | None:
    found = _SCORE.findall(text)
    return float(found[-1]) if found else None

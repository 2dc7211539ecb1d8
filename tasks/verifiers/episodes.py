"""Environments of ``verifiers.v1``: one attempt is one episode, of one agent or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import msgspec

from pipeline.errors import EnvironmentFailed
from pipeline.records import Item, Rollout
from pipeline.runner.context import Context
from tasks.chat import Recorder, Recording
from tasks.verifiers.plain import plain

_NO_KEY = "FOREBAY_NO_API_KEY"
"""Names the environment variable where the package looks for a key: none is sent to a recorder."""


class Episodes:
    """Plays an ``Env``; a ``Task(resource=)``, which holds the recorder and the environment's own servers open.

    Of an environment with several agents, traces are those of the agents that are trained, each by its agent's name,
    and the reward is the mean of their traces' rewards. Scoring is part of the episode here, and keeps the slot.

    Attributes:
        name: the environment's own.
    """

    def __init__(
        self,
        env: Any,
        recorder: Recorder,
        sampling: Mapping[str, Any] | None,
        reward: Callable[[Any], float] | None,
    ) -> None:
        self._env, self._recorder = env, recorder
        self.name: str = env.config.env_id
        self._sampling, self._reward = dict(sampling or {}), reward
        self._stack = AsyncExitStack()
        self._model: Any = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._recorder)
            await stack.enter_async_context(self._env.serving())
            self._model = self._context()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model = None
        await self._stack.__aexit__(kind, error, trace)

    def _context(self) -> Any:
        import verifiers.v1 as vf

        # One address for all: the package keeps a client for each that it was ever given.
        client = vf.EvalClientConfig(base_url=self._recorder.shared_url, api_key_var=_NO_KEY)
        return vf.ModelContext(self._recorder.client.model, client, vf.SamplingConfig(**self._sampling))

    async def run(self, item: Item, ctx: Context) -> Rollout:
        """Play one episode."""
        recordings: dict[str, Recording] = {}

        def minted(trace: Any) -> None:
            recordings[trace.id] = self._recorder.session(ctx, trace.id)

        def given_up(trace: Any) -> None:
            del recordings[trace.id]

        episode = await self._env.run_episode(item.content, self._model, on_trace=minted, on_discard=given_up)
        if not self._env.complete(episode):
            self._fail(item, ctx, episode, recordings)
        return self._rollout(episode, recordings)

    def _fail(self, item: Item, ctx: Context, episode: Any, recordings: Mapping[str, Recording]) -> None:
        cause = next((each.failure for each in recordings.values() if each.failure is not None), None)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        said = "; ".join(f"{error.type}: {error.message}" for error in errors[:3]) or "no error is named"
        raise EnvironmentFailed(
            f"{item}, member {ctx.member}: environment {episode.env.id!r} gave its episode up: {said[:2000]}"
        ) from cause

    def _rollout(self, episode: Any, recordings: Mapping[str, Recording]) -> Rollout:
        trained = [each for each in episode.traces if each.agent.trainable]
        parts = [recordings[each.id].rollout(each.reward) for each in trained]
        reward = self._reward(episode) if self._reward is not None else _mean([each.reward for each in trained])
        versions = [each.oldest for each in parts if each.oldest is not None]
        traces = [
            msgspec.structs.replace(tokens, agent=each.agent.name)
            for each, part in zip(trained, parts, strict=True)
            for tokens in part.traces
        ]
        info = {
            "environment": episode.env.id,
            "task": episode.task.key,
            "agents": [_of_trace(each) for each in episode.traces],
            "chats": [chat for part in parts for chat in part.info["chats"]],
            "rewards": {name: _mean(values) for name, values in _rewards(trained).items()},
            "metrics": {name: _mean(values) for name, values in _metrics(trained).items()},
            **{name: sum(part.info[name] for part in parts) for name in ("turns", "breaks", "unknown_tokens")},
        }
        oldest = min(versions, default=None)
        return Rollout(traces, reward=reward, info=info, oldest=oldest, tokens=sum(part.tokens for part in parts))


def _of_trace(trace: Any) -> dict[str, Any]:
    """Return what is kept of an agent's part: plain values."""
    return {
        "agent": trace.agent.name,
        "trained": trace.agent.trainable,
        "reward": trace.reward,
        "rewards": {name: each.value for name, each in trace.rewards.items() if each is not None},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "stopped": trace.stop_condition or "",
        "info": plain(trace.info),
    }


def _rewards(traces: list[Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for trace in traces:
        for name, each in trace.rewards.items():
            if each is not None:
                found.setdefault(name, []).append(each.value)
    return found


def _metrics(traces: list[Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in trace.metrics.items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return found


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0

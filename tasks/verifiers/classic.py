"""Environments of the interface before ``verifiers.v1``: an ``Environment`` and its ``Rubric``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import anyio.to_thread

from pipeline.errors import EnvironmentFailed
from pipeline.records import EVALUATION, Item, Rollout
from pipeline.runner.context import Context
from tasks.chat import Recorder
from tasks.verifiers.groups import Groups
from tasks.verifiers.plain import plain


class Classic:
    """Plays an ``Environment``; a ``Task(resource=)``, which holds the recorder open.

    Attributes:
        name: the environment's own.
        grouped: whether its rubric scores the members of a group together.
    """

    def __init__(self, env: Any, recorder: Recorder, sampling: Mapping[str, Any] | None, group_size: int) -> None:
        self._env, self._recorder = env, recorder
        self._sampling = dict(sampling or {})
        self.name: str = getattr(env, "env_id", "") or type(env).__name__
        self.grouped = _grouped(env)
        self._groups = Groups(group_size)
        self._stack = AsyncExitStack()
        self._client_of: Callable[[str], Any] | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._recorder)
            # Imports and certificates take a second, which is not the event loop's.
            client, adapter = await anyio.to_thread.run_sync(_client)
            await stack.enter_async_context(client)
            self._client_of = lambda url: adapter(client.with_options(base_url=url))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client_of = None
        await self._stack.__aexit__(kind, error, trace)

    def base_url_of(self, ctx: Context) -> str:
        """Return where the environment finds the model in an attempt; what ``ctx.base_url`` gives."""
        return self._recorder.base_url_of(ctx)

    async def run(self, item: Item, ctx: Context) -> Rollout:
        """Play one rollout, and score it."""
        if not self.grouped or ctx.kind == EVALUATION or ctx.key.startswith("try_one/"):
            state = await self._played(item, ctx)
            async with ctx.scoring():  # the slot is another attempt's meanwhile
                await self._score([state])
            return self._rollout(ctx, state)
        known = self._groups.known(ctx)
        if known is not None:
            return known
        state = await self._played(item, ctx)
        async with ctx.scoring():
            return await self._groups.score(ctx, state, self._score, lambda: self._rollout(ctx, state))

    async def _played(self, item: Item, ctx: Context) -> Any:
        assert self._client_of is not None
        client = self._client_of(ctx.base_url)
        state = await self._env.rollout(dict(item.content), client, self._recorder.client.model, self._sampling)
        error = state.get("error")
        if error is not None:
            said = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
            raise EnvironmentFailed(
                f"{item}, member {ctx.member}: {type(self._env).__name__} gave its rollout up: {said[:2000]}"
            ) from (self._recorder.recording(ctx).failure or (error if isinstance(error, BaseException) else None))
        return state

    async def _score(self, states: Sequence[Any]) -> None:
        rubric, alone = self._env.rubric, not self.grouped
        if not self._env.score_rollouts:
            await rubric.dummy_score_group(list(states))
        elif alone:
            await rubric.score_rollout(states[0])
        else:
            await rubric.score_group(list(states))
        for state in states:
            await rubric.cleanup(state)

    def _rollout(self, ctx: Context, state: Any) -> Rollout:
        info = {
            "environment": type(self._env).__name__,
            "example": plain(state.get("example_id")),
            "rewards": {},
            "metrics": plain(state.get("metrics") or {}),
            "stopped": str(state.get("stop_condition") or ""),
            "truncated": bool(state.get("is_truncated")),
        }
        return self._recorder.rollout(ctx, float(state.get("reward") or 0.0), info)


def _client() -> tuple[Any, Any]:
    """Return a client of a recorder, of which all attempts share the connections, and what adapts it to the package."""
    import openai
    from verifiers.clients import OpenAIChatCompletionsClient

    # The recorder tries again, and nobody else; it says itself when a request has taken too long.
    client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=None)
    return client, OpenAIChatCompletionsClient


def _grouped(env: Any) -> bool:
    """Whether any of the environment's rewards is one of a whole group; an EnvGroup says it of its parts alone."""
    parts = getattr(env, "envs", None)
    if isinstance(parts, list | tuple):
        return any(map(_grouped, parts))
    return bool(getattr(env, "requires_group_rollouts", False))

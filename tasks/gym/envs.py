"""Environments as resources of a task, seeded random actions, and episodes of vector environments."""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio.lowlevel
import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from tasks.gym.episodes import Episode, Policy, action_seed, at_least_one, decide
from tasks.gym.vector import VectorRows
from tasks.sources import EnvSeeds

Env = gymnasium.Env[Any, Any]


@asynccontextmanager
async def gym_env(env_id: str | Callable[..., Env], **kwargs: Any) -> AsyncIterator[Env]:
    """Open an environment and close it at the end, whatever happens in between.

    ::

        Task("balance", source=EnvSeeds(1), run=play, resource=lambda: gym_env("CartPole-v1"))

    Args:
        env_id: a name for ``gymnasium.make``, or a function that makes the environment.
        kwargs: passed on to either.
    """
    env: Env = env_id(**kwargs) if callable(env_id) else gymnasium.make(env_id, **kwargs)
    try:
        yield env
    finally:
        env.close()


def make_env(env_id: str | Callable[..., Env], **kwargs: Any) -> Callable[[], AbstractAsyncContextManager[Env]]:
    """Return ``lambda: gym_env(env_id, **kwargs)``: a ``resource=`` of which each slot opens its own.

    ::

        Task("balance", source=EnvSeeds(1), run=play, resource=make_env("CartPole-v1"))
    """
    return functools.partial(gym_env, env_id, **kwargs)


def random_actions(space: gymnasium.Space[Any], seed: int) -> Callable[[Any], Any]:
    """Return a policy of random actions that repeats exactly: it samples from a copy of ``space``, seeded.

    ::

        warm_up = random_actions(envs.action_space, seed=42)
    """
    own = copy.deepcopy(space)
    own.seed(action_seed(seed))
    return lambda obs: own.sample()


async def vector_episodes(
    envs: VectorEnv[Any, Any, Any],
    policy: Policy,
    *,
    seed: int | Sequence[int] | None,
    autoreset_mode: AutoresetMode | str | None = None,
    yield_every: int = 1,
) -> AsyncGenerator[Episode, None]:
    """Step a vector environment for ever and yield its episodes as they end.

    ::

        async with contextlib.aclosing(vector_episodes(envs, policy, seed=1)) as episodes:
            async for run in episodes:
                ...

    Short episodes end first: to evaluate, take the same number of episodes of each environment.

    Args:
        envs: in any autoreset mode.
        policy: called with the batch of observations; returns a batch of actions, or ``(actions, extras)``.
        seed: an integer gives environment i the seed ``EnvSeeds(seed).item(i)``; a vector environment that is
            written as one piece gets the integer itself. A sequence is passed on.
        autoreset_mode: if ``envs.metadata`` does not say.
        yield_every: the event loop gets a turn each time so many calls were made.

    Raises:
        ConfigError: the mode is not known, or a space cannot be stored.
        RolloutInvalid: an observation, action or extra cannot be stored.
    """
    at_least_one("yield_every", yield_every)
    rows = VectorRows.of(envs, autoreset_mode, episodes=True)
    obs, _ = envs.reset(seed=_seeds(envs, seed))
    rows.start(obs)
    calls = 0
    while True:
        if calls % yield_every == 0:
            await anyio.lowlevel.checkpoint()
        calls += 1
        actions, extras = await decide(policy, obs)
        obs, reward, terminated, truncated, info = envs.step(actions)
        rows.step(actions, obs, reward, terminated, truncated, info, extras=extras)
        if (waiting := rows.waiting).any():
            obs, _ = envs.reset(options={"reset_mask": waiting})
            rows.reset(waiting, obs)
        for run in rows.finished():
            yield run


def _seeds(envs: VectorEnv[Any, Any, Any], seed: int | Sequence[int] | None) -> Any:
    """Return what ``envs.reset(seed=...)`` takes."""
    if seed is None:
        return None
    if not isinstance(seed, (int, np.integer)):
        return list(seed)
    many = isinstance(envs.unwrapped, (AsyncVectorEnv, SyncVectorEnv))  # others have no environments to seed
    return EnvSeeds(int(seed)).take(envs.num_envs) if many else int(seed)

"""One environment, one episode: what a rollout function of a control task needs."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio.lowlevel
import gymnasium
import numpy as np

from pipeline.errors import ConfigError
from pipeline.records import Rollout, Trace
from tasks.gym.arrays import Array, Named, named, named_extras, plain_info, renamed, stacked

# ``policy(obs)`` returns an action, or ``(action, {name: extra})``; it may be asynchronous.
Policy: TypeAlias = Callable[[Any], Any | Awaitable[Any]]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Episode:
    """T transitions of one environment, from a reset to an end.

    The observations are kept once each: ``obs`` before every action, ``final_obs`` after the last one, which is
    right to bootstrap from where ``truncated[-1]``. All arrays are copies.
    """

    tensors: Mapping[str, Array]
    """``obs`` [T, ...], ``action`` [T, ...], ``reward`` [T] float32, ``terminated`` and ``truncated`` [T] bool,
    ``final_obs`` [...], and the policy's extras [T, ...]. Of a ``Dict`` or ``Tuple`` space, one array per leaf:
    ``obs.camera``, ``final_obs.camera``, ``action.0``. dtypes are the environment's and the policy's."""
    total: float
    """The undiscounted return, summed in float64."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """The plain values (numbers, texts, and lists and dicts of them) of the last transition's info."""
    env: int = 0
    """The index of the environment in its vector environment."""
    number: int = 0
    """The episode's number in its environment."""

    def __getitem__(self, name: str) -> Array:
        """Return the tensor ``name``.

        Raises:
            KeyError: there is none; the message names those that there are.
        """
        if name not in self.tensors:
            raise KeyError(f"{name!r}; there are {', '.join(self.tensors)}")
        return self.tensors[name]

    @property
    def length(self) -> int:
        """T: how many transitions there are; one less than there are observations."""
        return len(self.tensors["reward"])

    @property
    def obs(self) -> Array:
        """[T, ...]: what the policy saw before each action."""
        return self["obs"]

    @property
    def action(self) -> Array:
        """[T, ...]."""
        return self["action"]

    @property
    def reward(self) -> Array:
        """[T] float32."""
        return self["reward"]

    @property
    def terminated(self) -> Array:
        """[T] bool: the environment ended; nothing follows, and nothing is to be bootstrapped."""
        return self["terminated"]

    @property
    def truncated(self) -> Array:
        """[T] bool: the episode was cut; its value goes on at ``final_obs``."""
        return self["truncated"]

    @property
    def final_obs(self) -> Array:
        """[...]: what the environment showed after the last action."""
        return self["final_obs"]

    def observations(self, name: str = "obs") -> Array:
        """Return all T + 1 observations, [T + 1, ...]; from 1 on they are the next observations."""
        return np.concatenate([self[name], self["final_" + name][None]])

    def rollout(self, info: Mapping[str, Any] | None = None, *, agent: str = "", policy: str = "") -> Rollout:
        """Return a rollout of one trace: its reward is the undiscounted return, its ``tokens`` are T.

        Args:
            info: plain values to keep beside it. None: this episode's own.
            agent: the trace's agent.
            policy: the name of the policy that made it.
        """
        return Rollout(
            traces=Trace(self.tensors, agent, policy),
            reward=self.total,
            info=self.info if info is None else info,
            tokens=self.length,
        )


def build_episode(
    steps: Sequence[Named],
    rewards: Sequence[float],
    final_obs: Named,
    *,
    terminated: bool,
    truncated: bool,
    info: Any = None,
    env: int = 0,
    number: int = 0,
) -> Episode:
    """Return an episode of T = ``len(steps)`` transitions and T + 1 observations; T may be 0.

    Args:
        steps: per transition, the leaves of ``obs``, ``action`` and the extras.
        rewards: one per transition.
        final_obs: the leaves of ``obs`` after the last one.
        terminated: whether the last transition ended the episode.
        truncated: whether it was cut there.
        info: the last transition's info.
        env: index of the environment.
        number: the episode's number in it.

    Raises:
        RolloutInvalid: names or shapes changed on the way.
    """
    if steps:
        tensors = stacked(steps)
        stacked([renamed(steps[-1], "obs", "obs"), final_obs])  # the last observation is like the others
    else:
        tensors = {name: np.empty((0, *array.shape), array.dtype) for name, array in final_obs.items()}
    flags = np.zeros((2, len(steps)), dtype=bool)
    flags[:, -1:] = [[terminated], [truncated]]
    tensors |= {"reward": np.array(rewards, dtype=np.float32), "terminated": flags[0], "truncated": flags[1]}
    tensors |= {"final_" + name: array for name, array in final_obs.items()}
    return Episode(tensors=tensors, total=float(sum(rewards)), info=plain_info(info), env=env, number=number)


async def decide(policy: Policy, obs: Any) -> tuple[Any, Named]:
    """Return the policy's action as it gave it, and copies of its extras."""
    given = policy(obs)
    if inspect.isawaitable(given):
        given = await given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        return given[0], named_extras(given[1])
    return given, {}


async def episode(
    env: gymnasium.Env[Any, Any],
    policy: Policy,
    *,
    seed: int | None,
    max_steps: int | None = None,
    yield_every: int = 32,
) -> Episode:
    """Run one episode and return it.

    ::

        async def play(item, ctx):
            run = await episode(ctx.resource, policy, seed=item["seed"])
            return run.rollout()

    ``seed`` alone decides what is random: it resets the environment and seeds its action space.

    Args:
        env: an environment, wrapped as you like; it may hand out the same array each time.
        policy: called with the environment's own observation; returns an action, or ``(action, extras)`` with
            extras a dict of numbers or arrays to store per transition (log-probs, values). It may be
            asynchronous. A two-tuple that ends in a dict is always read as ``(action, extras)``.
        seed: None resets without one: the environment's generators go on from where they were.
        max_steps: cut after so many transitions; the last one is then marked truncated.
        yield_every: the event loop gets a turn each time so many transitions were made.

    Raises:
        ConfigError: ``max_steps`` or ``yield_every`` is below 1.
        RolloutInvalid: an observation, action or extra cannot be stored.
    """
    at_least_one("max_steps", max_steps)
    at_least_one("yield_every", yield_every)
    if seed is not None:
        env.action_space.seed(action_seed(seed))
    obs, info = env.reset(seed=seed)
    steps: list[Named] = []
    rewards: list[float] = []
    terminated = truncated = False
    while not (terminated or truncated):
        if len(steps) % yield_every == 0:
            await anyio.lowlevel.checkpoint()
        before = named("obs", obs)  # copied before anyone can write to it again
        action, extras = await decide(policy, obs)
        steps.append({**before, **named("action", action), **extras})
        obs, reward, ended, cut, info = env.step(action)
        rewards.append(float(reward))
        terminated, truncated = bool(ended), bool(cut) or len(steps) == max_steps
    return build_episode(steps, rewards, named("obs", obs), terminated=terminated, truncated=truncated, info=info)


def at_least_one(option: str, value: int | None) -> None:
    """Check an option that counts something; None passes.

    Raises:
        ConfigError: it is below 1.
    """
    if value is not None and value < 1:
        raise ConfigError.of(option, value, "must be at least 1")


def action_seed(seed: int) -> int:
    """Return the seed of an action space that goes with an environment's seed, and is independent of it."""
    return int(np.random.SeedSequence([seed, 1]).generate_state(1)[0] >> 1)

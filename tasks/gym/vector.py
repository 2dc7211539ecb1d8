"""The transitions of a vector environment that are to be stored, right in all three autoreset modes.

What a call returns for an environment whose episode ends at it (https://farama.org/Vector-Autoreset-Mode):

=========== ============================ ============================== ===========================
mode        observation of that call     the next call                  stored as its next obs
=========== ============================ ============================== ===========================
NEXT_STEP   the final one                is the reset: its action is    the call's observation
                                         ignored, and no row comes of
                                         it
SAME_STEP   the next episode's first     goes on                        ``info["final_obs"]``
DISABLED    the final one                follows after the caller's     the call's observation
                                         reset
=========== ============================ ============================== ===========================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import ArrayLike, NDArray

from pipeline.errors import ConfigError, RolloutInvalid, UsageError
from pipeline.replay.finals import final_of, is_own_object
from tasks.gym.arrays import Named, named, named_extras, renamed
from tasks.gym.episodes import Episode, build_episode
from tasks.gym.modes import check_space, env_info, mode_of
from tasks.gym.rows import Cut, Ended, Rows


class _Call(NamedTuple):
    """What is kept of a call for as long as an episode that it belongs to is open."""

    leaves: Named
    reward: NDArray[np.float64]


class VectorRows:
    """Turns what a vector environment returns, call by call, into the rows to store and whole episodes.

    ::

        rows = VectorRows.of(envs)
        obs, _ = envs.reset(seed=seeds)
        rows.start(obs)
        while True:
            action = policy(obs)
            obs, reward, terminated, truncated, info = envs.step(action)
            add(rows.step(action, obs, reward, terminated, truncated, info))
            if rows.waiting.any():  # only ever in mode DISABLED
                obs, _ = envs.reset(options={"reset_mask": rows.waiting})
                rows.reset(rows.waiting, obs)

    ``terminated`` and ``truncated`` stay apart; where both are set, the discount is 0. Everything is copied.

    Args:
        num_envs: N.
        autoreset_mode: Gymnasium's, or its name; :meth:`of` reads it from the environment.
        shared_obs: leave ``next_obs`` out, for storages that take it from the next row of the environment, and
            give the final observation of each row that ends an episode apart, so that a truncated episode is
            never bootstrapped from the first observation of the next one; :func:`shared_next_obs` puts both
            together again.
        episodes: also keep whole episodes, which :meth:`finished` hands out. All N environments' calls are held
            back to the start of the oldest open episode.

    Raises:
        ConfigError: ``num_envs`` is below 1, or there is no such mode.
    """

    def __init__(
        self,
        num_envs: int,
        autoreset_mode: AutoresetMode | str | None = None,
        *,
        shared_obs: bool = False,
        episodes: bool = False,
    ) -> None:
        if num_envs < 1:
            raise ConfigError.of("num_envs", num_envs, "must be at least 1")
        self._mode = mode_of(autoreset_mode)
        self._size, self._shared, self._keeps = num_envs, shared_obs, episodes
        self._obs: Named = {}  # per leaf, [N, ...]: what each environment showed last; never written to again
        self._over = np.zeros(num_envs, dtype=bool)  # the episode has ended and the next has not begun
        self._number = np.full(num_envs, -1, dtype=np.int64)
        self._total = np.zeros(num_envs, dtype=np.float64)
        self._length = np.zeros(num_envs, dtype=np.int64)
        self._calls: deque[_Call] = deque()  # kept calls; the newest is call number self._made - 1
        self._made = 0
        self._start = np.zeros(num_envs, dtype=np.int64)  # number of the first call of the open episode
        self._finished: list[Episode] = []
        self._lent: list[tuple[int, Any, Named]] = []  # final observations of the last call, as given and copied

    @classmethod
    def of(
        cls,
        envs: VectorEnv[Any, Any, Any],
        autoreset_mode: AutoresetMode | str | None = None,
        *,
        shared_obs: bool = False,
        episodes: bool = False,
    ) -> Self:
        """Build for ``envs``, in the mode that its ``metadata["autoreset_mode"]`` says unless one is given.

        Raises:
            ConfigError: no mode is known, or another one is given than the environment says; or a space of the
                environment holds what is no array (texts, graphs, sequences).
        """
        stated = (envs.metadata or {}).get("autoreset_mode")
        if autoreset_mode is not None and stated is not None and mode_of(autoreset_mode) != mode_of(stated):
            raise ConfigError.of("autoreset_mode", autoreset_mode, f"the environment says that it is {stated}")
        check_space("observation", envs.single_observation_space)
        check_space("action", envs.single_action_space)
        mode = stated if autoreset_mode is None else autoreset_mode
        return cls(envs.num_envs, mode, shared_obs=shared_obs, episodes=episodes)

    @property
    def waiting(self) -> NDArray[np.bool_]:
        """[N] bool: the environments that the caller must reset before the next call (mode DISABLED)."""
        return self._over & (self._mode is AutoresetMode.DISABLED)

    def start(self, obs: Any) -> list[Cut]:
        """Begin an episode in every environment, with what ``envs.reset()`` returned.

        Returns:
            the open episodes that were cut, as :meth:`reset` does.
        """
        return self._restart(np.ones(self._size, dtype=bool), self._batch("obs", obs))

    def reset(self, env_mask: ArrayLike, obs: Any) -> list[Cut]:
        """Begin an episode in the environments of ``env_mask`` [N] bool; the others go on.

        ``obs`` is what ``envs.reset(options={"reset_mask": env_mask})`` returned, all N observations. An episode
        that was open is cut: its rows have been given out, :meth:`finished` will not have it, and its counters
        start anew.

        Returns:
            the episodes cut after a row, by environment. A storage with ``shared_obs`` must mark the last row of
            each as truncated and keep the final observation given here; any other may.

        Raises:
            UsageError: before :meth:`start`.
            ConfigError: ``env_mask`` has another shape.
        """
        self._check_started("reset")
        mask = np.array(env_mask, dtype=bool)
        if mask.shape != (self._size,):
            raise ConfigError(f"env_mask has shape {mask.shape}, not ({self._size},)", option="env_mask")
        return self._restart(mask, _chosen(mask, self._batch("obs", obs), self._obs))

    def step(
        self,
        action: Any,
        obs: Any,
        reward: ArrayLike,
        terminated: ArrayLike,
        truncated: ArrayLike,
        info: Any = None,
        *,
        extras: Mapping[str, Any] | None = None,
    ) -> Rows:
        """Take in a call of ``envs.step(action)`` and return the transitions that came of it.

        Args:
            action: what was given, [N, ...].
            obs: what came back, [N, ...], nested as the space is.
            reward: [N].
            terminated: [N].
            truncated: [N].
            info: needed in mode SAME_STEP, for ``final_obs``.
            extras: more values to store per row, [N, ...] each, by name.

        Raises:
            UsageError: before :meth:`start`; or in mode DISABLED with environments :attr:`waiting`.
            ConfigError: mode SAME_STEP, and no ``final_obs`` in ``info`` for an episode that ended.
            RolloutInvalid: something cannot be stored, or has not N rows; or ``final_obs`` of the call before was
                overwritten meanwhile.
        """
        self._check_turn()
        dead, cut = self._flags("terminated", terminated), self._flags("truncated", truncated)
        came = self._batch("obs", obs)
        call = _Call(
            {**self._obs, **self._batch("action", action), **self._checked(named_extras(extras))},
            self._checked({"reward": np.array(reward, dtype=np.float64)})["reward"],
        )
        live = ~self._over  # an environment that is over was reset by this call (NEXT_STEP)
        ended = (dead | cut) & live
        same_step = self._mode is AutoresetMode.SAME_STEP
        following = self._with_finals(came, ended, info) if same_step and ended.any() else came
        self._total[live] += call.reward[live]
        self._length[live] += 1
        rows = self._rows(call, following, live, ended, dead, cut)
        self._keep(call, following, rows.ended, info)
        self._obs = came
        self._begin(ended if same_step else ~live)
        self._over = np.zeros_like(ended) if same_step else ended
        return rows

    def finished(self) -> list[Episode]:
        """Return the episodes that have ended since the last call of this, in the order of their ends.

        Raises:
            UsageError: built without ``episodes=True``.
        """
        if not self._keeps:
            raise UsageError("no episodes are kept: build with episodes=True")
        episodes, self._finished = self._finished, []
        return episodes

    def _restart(self, mask: NDArray[np.bool_], shown: Named) -> list[Cut]:
        cuts = [
            Cut(
                int(env),
                int(self._number[env]),
                float(self._total[env]),
                int(self._length[env]),
                {name: array[env].copy() for name, array in self._obs.items()},
            )
            for env in np.flatnonzero(mask & ~self._over & (self._length > 0))
        ]
        self._obs = shown
        self._begin(mask)
        return cuts

    def _begin(self, mask: NDArray[np.bool_]) -> None:
        self._number[mask] += 1
        self._total[mask] = 0.0
        self._length[mask] = 0
        self._over[mask] = False
        self._start[mask] = self._made

    def _rows(
        self,
        call: _Call,
        following: Named,
        live: NDArray[np.bool_],
        ended: NDArray[np.bool_],
        dead: NDArray[np.bool_],
        cut: NDArray[np.bool_],
    ) -> Rows:
        index = np.flatnonzero(live)
        tensors = {name: array[index] for name, array in call.leaves.items()}
        tensors["reward"] = call.reward[index].astype(np.float32)
        tensors["terminated"], tensors["truncated"] = dead[index], cut[index]
        tensors["discount"] = np.where(dead[index], np.float32(0), np.float32(1))
        finals: Named = {}
        if self._shared:
            finals = {name: array[ended] for name, array in following.items()}
        else:
            tensors |= renamed({name: array[index] for name, array in following.items()}, "obs", "next_obs")
        reports = tuple(
            Ended(
                int(env),
                int(self._number[env]),
                float(self._total[env]),
                int(self._length[env]),
                bool(dead[env]),
                bool(cut[env]),
            )
            for env in np.flatnonzero(ended)
        )
        return Rows(env=index, episode=self._number[index], tensors=tensors, final_obs=finals, ended=reports)

    def _keep(self, call: _Call, following: Named, ended: tuple[Ended, ...], info: Any) -> None:
        """Keep the call while an open episode needs it, and build the episodes that ended at it."""
        self._made += 1
        if not self._keeps:
            return
        self._calls.append(call)
        first = self._made - len(self._calls)
        for end in ended:
            env = end.env
            span = list(islice(self._calls, int(self._start[env]) - first, None))
            part = env_info(info, env)
            built = build_episode(
                [{name: array[env] for name, array in kept.leaves.items()} for kept in span],
                [float(kept.reward[env]) for kept in span],
                {name: array[env].copy() for name, array in following.items()},
                terminated=end.terminated,
                truncated=end.truncated,
                info=part.get("final_info", part),
                env=env,
                number=end.episode,
            )
            self._finished.append(built)
        for _ in range(first, int(self._start.min())):
            self._calls.popleft()

    def _with_finals(self, came: Named, ended: NDArray[np.bool_], info: Any) -> Named:
        """Return ``came`` with the final observations of the environments that ended put in (SAME_STEP)."""
        real = {name: array.copy() for name, array in came.items()}
        for env in np.flatnonzero(ended):
            final = final_of(info, int(env))
            if final is None:
                raise ConfigError(
                    f"autoreset_mode SAME_STEP, but info has no final_obs for environment {env}, whose episode "
                    "ended: either the environment is in another mode, or a wrapper dropped it",
                    option="autoreset_mode",
                )
            leaves = named("obs", final)
            if leaves.keys() != real.keys() or any(real[n][env].shape != leaf.shape for n, leaf in leaves.items()):
                shapes = {name: leaf.shape for name, leaf in leaves.items()}
                raise RolloutInvalid(f"final_obs of environment {env} is not like its observations: {shapes}")
            for name, leaf in leaves.items():
                real[name][env] = leaf
            if is_own_object(info):
                self._lent.append((int(env), final, leaves))
        return real

    def _check_turn(self) -> None:
        """Check that a call may come, and that no final observation of the last one was overwritten.

        An environment that writes to the array that it gave has done so in its reset too, before anyone saw the
        array: SyncVectorEnv does not copy it.
        """
        self._check_started("step")
        if self.waiting.any():
            raise UsageError(f"environments {np.flatnonzero(self.waiting).tolist()} have ended: reset them first")
        lent, self._lent = self._lent, []
        for env, final, leaves in lent:
            now = named("obs", final)
            if any(not np.array_equal(now[name], leaf, equal_nan=True) for name, leaf in leaves.items()):
                raise RolloutInvalid(
                    f"final_obs of environment {env} was written to after it had been given: the environment "
                    "re-uses its array, and in mode SAME_STEP its reset overwrites the final observation, so "
                    "the next obs of the last row was wrong. Copy the observations in a wrapper, or use "
                    "another mode"
                )

    def _batch(self, name: str, value: Any) -> Named:
        leaves = self._checked(named(name, value))
        if name == "obs" and self._obs and leaves.keys() != self._obs.keys():
            raise RolloutInvalid(f"obs had the parts {sorted(self._obs)} and now has {sorted(leaves)}")
        return leaves

    def _checked(self, leaves: Named) -> Named:
        for name, array in leaves.items():
            if array.shape[:1] != (self._size,):
                raise RolloutInvalid(f"{name} has shape {array.shape}; the first axis must be {self._size} long")
        return leaves

    def _flags(self, name: str, value: ArrayLike) -> NDArray[np.bool_]:
        return self._checked({name: np.array(value, dtype=bool)})[name]

    def _check_started(self, verb: str) -> None:
        if not self._obs:
            raise UsageError(f"{verb} before start: give start() what envs.reset() returned")


def _chosen(mask: NDArray[np.bool_], yes: Named, no: Named) -> Named:
    """Return ``yes`` in the rows of ``mask`` and ``no`` in the others, as new arrays."""
    merged = {name: array.copy() for name, array in no.items()}
    for name, array in yes.items():
        merged[name][mask] = array[mask]
    return merged

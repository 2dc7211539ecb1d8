"""What :class:`~tasks.gym.VectorRows` gives out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.errors import ConfigError
from tasks.gym.arrays import Array, Named


class Ended(NamedTuple):
    """An episode that ended at a call: its environment, its number there, return and length."""

    env: int
    episode: int
    total: float
    """Undiscounted, summed in float64."""
    length: int
    terminated: bool
    truncated: bool


class Cut(NamedTuple):
    """An episode that was cut by a reset in its middle, after ``length`` rows."""

    env: int
    episode: int
    total: float
    length: int
    final_obs: Named
    """What the environment showed last, per leaf of ``obs``: the next observation of the episode's last row."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Rows:
    """The n transitions that came of one call of a vector environment; n may be less than its size."""

    env: NDArray[np.int64]
    """[n]: which environment each row is of."""
    episode: NDArray[np.int64]
    """[n]: the number, from 0, of the row's episode in its environment. Rows of one episode are those with the
    same (env, episode); an episode that was reset before its first transition uses up a number."""
    tensors: Named
    """``obs``, ``action``, ``next_obs`` [n, ...], ``reward`` [n] float32, ``terminated`` and ``truncated`` [n]
    bool, ``discount`` [n] float32 (0 where terminated, else 1), and extras; per leaf where a space is nested
    (``obs.camera``, ``next_obs.camera``). They are the caller's."""
    final_obs: Named = field(default_factory=dict)
    """With ``shared_obs`` only, in place of ``next_obs``: the final observations of the rows that end an
    episode, in their order, per leaf of ``obs``."""
    ended: tuple[Ended, ...] = ()
    """The episodes that ended at this call, by environment."""

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name]

    def __len__(self) -> int:
        return len(self.env)


def shared_next_obs(obs: Array, ends: ArrayLike, final_obs: Array) -> Array:
    """Return the next observations [n, ...] of the rows of *one* environment that were stored without them.

    Args:
        obs: [n, ...], in the order in which they came.
        ends: [n] bool, terminated or truncated, or the last row of a :class:`Cut` episode. The last row must be an
            end, or it has no next observation yet: leave it out, or put the observation that is shown now behind
            ``final_obs``.
        final_obs: [number of ends, ...], or one more; see :class:`Rows`.

    Raises:
        ConfigError: the numbers do not match.
    """
    marks = np.array(ends, dtype=bool)
    if len(marks) and len(final_obs) == int(marks.sum()) + 1:
        marks[-1] = True
    if len(marks) != len(obs) or len(final_obs) != int(marks.sum()) or not marks[-1:].all():
        raise ConfigError(
            f"{len(obs)} observations, {len(marks)} flags with {int(marks.sum())} ends, {len(final_obs)} final "
            "observations: one is needed for each end, and the last row must be one",
            option="final_obs",
        )
    following = np.roll(obs, -1, axis=0)
    following[marks] = final_obs
    return following

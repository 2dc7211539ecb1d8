"""N-step returns that never cross an episode's end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.errors import ConfigError


class NStep(NamedTuple):
    """The n-step view of T rows; index k starts from the same state as row k of the 1-step view."""

    returns: NDArray[np.float64]
    """[T]: the discounted sum of the rewards from row k on."""
    bootstrap_index: NDArray[np.int64]
    """[T]: the last row that was summed. *Its next observation* is the one to bootstrap from."""
    discount: NDArray[np.float64]
    """[T]: what the bootstrapped value is multiplied with; 0 where the episode terminated."""


def n_step(rewards: ArrayLike, terminated: ArrayLike, truncated: ArrayLike, gamma: float, n: int) -> NStep:
    """Sum up to ``n`` rewards from each row on, stopping after a row that ends an episode.

    With ``m`` the number of rewards really summed from row k (n, or fewer before an end or the last row)::

        returns[k] = rewards[k] + gamma * rewards[k + 1] + ... + gamma ** (m - 1) * rewards[k + m - 1]
        bootstrap_index[k] = k + m - 1
        discount[k] = 0 if terminated[k + m - 1] else gamma**m
        target[k] = returns[k] + discount[k] * value(next_obs[bootstrap_index[k]])

    as in Sutton and Barto, *Reinforcement Learning*, 2nd edition, section 7.1, with the sum cut at an end. A
    truncated row cuts the sum and keeps the bootstrap; so does the last row if it ends nothing. For one episode
    with its T + 1 observations, ``next_obs[j]`` is ``observations[j + 1]``.

    Args:
        rewards: [T], any number type; computed in float64.
        terminated: [T] bool: nothing follows this row.
        truncated: [T] bool: the episode was cut after this row.
        gamma: discount per transition, from 0 to 1.
        n: most rewards summed, at least 1.

    The rows are one episode, or several of *one* environment, one after the other; rows of several environments
    are to be taken apart first (:meth:`tasks.gym.VectorRows.finished` does). T may be 0.

    Raises:
        ConfigError: shapes differ, or ``gamma`` or ``n`` is out of range.
    """
    reward, dead, cut = _columns(rewards, terminated, truncated)
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError.of("gamma", gamma, "a number from 0 to 1 is needed")
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ConfigError.of("n", n, "an integer of at least 1 is needed")
    returns, last = np.zeros_like(reward), np.arange(len(reward))
    start, ends = np.arange(len(reward)), dead | cut  # start: rows whose sum still goes on
    for ahead in range(n):
        start = start[start + ahead < len(reward)]
        if not len(start):
            break
        row = start + ahead
        returns[start] += gamma**ahead * reward[row]
        last[start] = row
        start = start[~ends[row]]
    summed = last - np.arange(len(reward)) + 1
    discount = np.where(dead[last], 0.0, np.float64(gamma) ** summed)
    return NStep(returns, last, discount)


def _columns(
    rewards: ArrayLike, terminated: ArrayLike, truncated: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    reward = np.asarray(rewards, dtype=np.float64)
    dead, cut = np.asarray(terminated, dtype=bool), np.asarray(truncated, dtype=bool)
    if reward.ndim != 1 or dead.shape != reward.shape or cut.shape != reward.shape:
        raise ConfigError(
            "rewards, terminated and truncated must be of one shape [T]; they are "
            f"{reward.shape}, {dead.shape} and {cut.shape}",
            option="rewards",
        )
    return reward, dead, cut

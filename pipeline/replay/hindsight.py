"""Rows that are given out with another goal; see :class:`~pipeline.config.Hindsight`.

Only the batch is changed: what is stored stays as it was. :class:`~pipeline.replay.sampling.Sampler` calls this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.following import earlier_or_later_rows, last_rows, later_rows
from pipeline.buffer.transitions.layout import RowLayout
from pipeline.buffer.transitions.ring import Ring
from pipeline.config import Fields, Hindsight
from pipeline.errors import ConfigError
from pipeline.replay.arguments import numbers

Ints = np.ndarray
_PICK: dict[str, Callable[[Ring, Ints, np.random.Generator], Ints]] = {
    "future": later_rows,
    "final": lambda ring, keys, rng: last_rows(ring, keys),
    "episode": earlier_or_later_rows,
}


class Relabelling(NamedTuple):
    """The columns that play a part, checked."""

    options: Hindsight
    goals: tuple[str, ...]
    achieved: str

    @classmethod
    def of(cls, options: Hindsight, layout: RowLayout, fields: Fields) -> Relabelling:
        """Raises:
        ConfigError: a column is not there, or goals are not like what is achieved.
        """
        there = layout.schema.names
        goals = (options.goal,) if isinstance(options.goal, str) else options.goal
        if not goals:
            names = [f"{each}.desired_goal" for each in (fields.obs, fields.next_obs)]
            goals = tuple(name for name in names if name in there) or (names[0],)
        achieved = layout.column(options.achieved or f"{fields.next_obs}.achieved_goal")
        for name in goals:
            goal = layout.column(name)
            if (goal.dtype, goal.shape) != (achieved.dtype, achieved.shape) or goal.torch_only is not None:
                raise ConfigError(
                    f"hindsight: {achieved} cannot be a goal: {goal}; both must have one shape and dtype that numpy "
                    "knows",
                    option="goal",
                )
        reward = layout.column(fields.reward)
        if reward.shape or reward.numpy is None:
            raise ConfigError(f"hindsight: {reward}; one number in each row is needed", option="fields")
        return cls(options, tuple(goals), achieved.name)

    def choose(self, ring: Ring, keys: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return which of the drawn rows [m] are relabelled, and the keys [m] of the rows whose achievement they
        get."""
        number = int(self.options.ratio * len(keys) + 0.5)
        chosen = np.sort(rng.permutation(len(keys))[:number])
        return chosen, _PICK[self.options.strategy](ring, keys[chosen], rng)

    def apply(self, arrays: Arrays, chosen: Ints, own: np.ndarray, goal: np.ndarray, columns: Fields) -> Ints | None:
        """Put goals, rewards and ends into the columns of a batch.

        Args:
            arrays: of the batch.
            chosen: [m] places of the relabelled rows.
            own: [m, ...] what they achieved themselves.
            goal: [m, ...] their new goals.
            columns: names of columns.

        Returns:
            [m] bool, whether the rows terminated, if that was asked.

        Raises:
            ConfigError: a function returned something else than it is to.
        """
        options = self.options
        rewards = _called("reward", options.reward, own, goal)
        ended = None if options.terminated is None else _called("terminated", options.terminated, own, goal) != 0
        for name in self.goals:
            if name in arrays:
                arrays[name][chosen] = goal
        if columns.reward in arrays:
            arrays[columns.reward][chosen] = _fitting(rewards, arrays[columns.reward].dtype)
        if ended is not None:
            for name in (columns.terminated, columns.done):
                if name in arrays:
                    column = arrays[name]
                    column[chosen] = ended.reshape(-1, *(1,) * (column.ndim - 1))
        return ended


def _called(name: str, function: Any, own: np.ndarray, goal: np.ndarray) -> np.ndarray:
    array = numbers(name, function(own.copy(), goal.copy()))
    if array.shape == (len(own), 1):
        array = array[:, 0]
    wrong = "" if array.shape == (len(own),) else f"shape {list(array.shape)}"
    if not wrong and not np.isfinite(array).all():
        wrong = f"{array[~np.isfinite(array)][0]}"
    if wrong:
        raise ConfigError(f"hindsight: {name} returned {wrong}; [{len(own)}] finite numbers are needed", option=name)
    return array


def _fitting(rewards: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    with np.errstate(all="ignore"):
        cast = rewards.astype(dtype)
    fits = np.isfinite(cast).all() if dtype.kind == "f" else np.array_equal(cast, rewards)
    if not fits:
        raise ConfigError(f"hindsight: a reward that the column's {dtype} cannot hold", option="reward")
    return cast

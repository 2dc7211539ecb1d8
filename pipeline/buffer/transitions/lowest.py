"""The lowest of many values, and of equals the oldest, after any number of changes."""

from __future__ import annotations

from typing import Any

import numpy as np

Ints = np.ndarray
_FAN = 32
_NEVER = np.iinfo(np.int64).max


class Lowest:
    """Values with ages by slot, ordered by (value, age). A tournament: each node names the slot that wins among its
    children, so that a change costs one comparison of 32 on each level."""

    def __init__(self, capacity: int, dtype: np.dtype[Any]) -> None:
        """Args:
        capacity: how many slots.
        dtype: float64, int64 or uint64; what is not a number must not come.
        """
        padded = -(-capacity // _FAN) * _FAN
        most = np.inf if dtype.kind == "f" else np.iinfo(dtype).max
        self._values = np.full(padded, most, dtype)
        self._ages = np.full(padded, _NEVER, np.int64)  # an empty slot loses even against the largest value
        self._winners: list[Ints] = []
        count = padded // _FAN
        while True:
            self._winners.append(np.zeros(-(-count // _FAN) * _FAN if count > 1 else 1, np.int64))
            if count <= 1:
                break
            count = len(self._winners[-1]) // _FAN
        self._fold(np.arange(padded // _FAN))

    def set(self, slots: Ints, values: np.ndarray, ages: Ints | None = None) -> None:
        """Set the values of slots, and their ages if they have another row."""
        if not len(slots):
            return
        self._values[slots] = values
        if ages is not None:
            self._ages[slots] = ages
        self._fold(np.unique(slots // _FAN))

    def _fold(self, nodes: Ints) -> None:
        for level, winners in enumerate(self._winners):
            if level:
                nodes = np.unique(nodes // _FAN)
            below = nodes[:, None] * _FAN + np.arange(_FAN)
            children = below if level == 0 else self._winners[level - 1][below]
            values = self._values[children]
            least = values == values.min(axis=1, keepdims=True)
            first = np.where(least, self._ages[children], _NEVER).argmin(axis=1)
            winners[nodes] = children[np.arange(len(nodes)), first]

    def first(self) -> int:
        """Return the slot of the lowest."""
        return int(self._winners[-1][0])

    def value(self, slot: int) -> Any:
        """Return the value of a slot."""
        return self._values[slot]

    def values(self, count: int) -> np.ndarray:
        """Return the values of the first ``count`` slots; not to be written to."""
        return self._values[:count]


def lowest_of(values: np.ndarray, ages: Ints, count: int) -> Ints:
    """Return the places of the ``count`` lowest of ``values`` [n], by (value, age), in any order."""
    if count >= len(values):
        return np.arange(len(values))
    border = np.partition(values, count - 1)[count - 1]
    below, equal = np.flatnonzero(values < border), np.flatnonzero(values == border)
    missing = count - len(below)
    oldest = equal[np.argpartition(ages[equal], missing - 1)[:missing]] if missing < len(equal) else equal
    return np.concatenate([below, oldest])

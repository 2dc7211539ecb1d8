"""Sums, least and largest of many values, exact after any number of changes, and the place at which a mass falls.

A node is always computed from its children, never changed by a difference: so nothing drifts. Each has 32 children,
so that one operation on arrays serves a level.
"""

from __future__ import annotations

import numpy as np

FAN = 32
Floats = np.ndarray
Ints = np.ndarray


class SumTree:
    """``capacity`` values, not negative, 0 at first. All methods take and return arrays; bounds are the caller's."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._sums = [np.zeros(-(-capacity // FAN) * FAN)]
        self._least, self._most = [np.empty(0)], [np.empty(0)]  # of the level of values: they are in `_sums`
        count = len(self._sums[0]) // FAN
        while True:
            padded = -(-count // FAN) * FAN if count > 1 else 1
            self._sums.append(np.zeros(padded))
            self._least.append(np.full(padded, np.inf))
            self._most.append(np.zeros(padded))
            if count <= 1:
                break
            count = padded // FAN

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._sums[-1][0])

    @property
    def least(self) -> float:
        """The least value above 0; infinity if there is none."""
        return float(self._least[-1][0])

    @property
    def most(self) -> float:
        """The largest value."""
        return float(self._most[-1][0])

    @property
    def values(self) -> Floats:
        """All values [capacity]; not to be written to."""
        return self._sums[0][: self.capacity]

    def set(self, places: Ints, values: Floats) -> None:
        """Set values; of a place that is named twice the last one counts."""
        self._sums[0][places] = values
        nodes = places
        for level in range(1, len(self._sums)):
            nodes = nodes // FAN
            if level > 1 and len(nodes) > 64:
                nodes = np.unique(nodes)
            self._fold(level, nodes)

    def fill(self, begin: int, end: int, values: float | Floats) -> None:
        """Set the values of the places ``begin`` to ``end``, that one excluded."""
        if end <= begin:
            return
        self._sums[0][begin:end] = values
        for level in range(1, len(self._sums)):
            begin, end = begin // FAN, (end - 1) // FAN + 1
            self._fold(level, slice(begin, end))

    def _fold(self, level: int, nodes: Ints | slice) -> None:
        """Compute nodes of a level from their children."""
        below = self._sums[level - 1].reshape(-1, FAN)[nodes]
        self._sums[level][nodes] = below.sum(axis=1)
        if level == 1:
            self._least[1][nodes] = np.where(below > 0, below, np.inf).min(axis=1)
            self._most[1][nodes] = below.max(axis=1)
        else:
            self._least[level][nodes] = self._least[level - 1].reshape(-1, FAN)[nodes].min(axis=1)
            self._most[level][nodes] = self._most[level - 1].reshape(-1, FAN)[nodes].max(axis=1)

    def find(self, masses: Floats) -> Ints:
        """Return for each mass, from 0 to the total, the least place at which the sum up to and with it is larger.

        A place whose value is 0 is never returned, whatever rounding does; the total must not be 0.
        """
        nodes = np.zeros(len(masses), np.int64)
        left = masses.astype(np.float64)
        rows = np.arange(len(masses))
        for level in range(len(self._sums) - 2, -1, -1):
            children = self._sums[level].reshape(-1, FAN)[nodes]
            upto = np.cumsum(children, axis=1)
            # The last child with a value ends the search: rounding may leave a mass beyond the sum of a node.
            beyond = np.minimum(left, np.nextafter(upto[:, -1], 0))
            chosen = (upto <= beyond[:, None]).sum(axis=1)
            left = np.maximum(beyond - (upto[rows, chosen] - children[rows, chosen]), 0)
            nodes = nodes * FAN + chosen
        return nodes

"""Sums, least and largest of many values, exact after any number of changes, and the place at which a mass falls.

A node is always computed from its children, never changed by a difference: so nothing drifts. Each has 16 children,
so that one operation on arrays serves a level. Where numba is installed, a large tree is walked by compiled loops
(:mod:`~pipeline.buffer.transitions.compiled`), which add in the same order and so come to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

FAN = 16
Floats = np.ndarray
Ints = np.ndarray
_THREE = np.arange(3)[:, None]
_SMALL = 10_000  # values below which a tree is not worth the second that it takes to import a compiler


def level_sizes(capacity: int) -> list[int]:
    """Return how many places each level has, the values first; each but the last a multiple of what a node has."""
    sizes = [-(-capacity // FAN) * FAN]
    while sizes[-1] > 1:
        count = sizes[-1] // FAN
        sizes.append(-(-count // FAN) * FAN if count > 1 else 1)
    return sizes


class SumTree:
    """``capacity`` values, not negative, 0 at first. All methods take and return arrays; bounds are the caller's."""

    def __init__(
        self,
        capacity: int,
        *,
        fast: bool | None = None,
        memory: Callable[[int], Floats] = np.zeros,
        fresh: bool = True,
    ) -> None:
        """Args:
        capacity: how many values.
        fast: whether compiled loops are used; by default where they can be had, and it is worth while.
        memory: gives out room for so many numbers, which are 0.
        fresh: whether that is so; else they are those of a tree of this capacity, which goes on.
        """
        self.capacity = capacity
        sizes = level_sizes(capacity)
        starts = np.cumsum([0, *sizes])
        self._starts = starts[:-1].astype(np.int64)
        """Where each level begins in the arrays of all, the values first."""
        # Where nodes begin with a cache line, each is in two of them and not in three.
        self._flat = memory(int(starts[-1]) + 8)
        self._flat = self._flat[-(self._flat.ctypes.data // 8) % 8 :][: starts[-1]]
        inner = int(starts[-1]) - sizes[0]
        self._bounds = memory(2 * inner).reshape(2, inner)
        """The least of the values above 0, and the largest one with its sign changed: so that both are a minimum."""
        if fresh:
            self._bounds[0] = np.inf
        self._divide(self._flat[: sizes[0]], self._flat[sizes[0] :], sizes)
        self._loops = _loops() if fast or (fast is None and capacity >= _SMALL) else None

    def _divide(self, values: Any, inner: Floats, sizes: Sequence[int]) -> None:
        """Name each level in the arrays of all levels above the values."""
        self._fan = np.arange(FAN)[:, None]
        ends = np.cumsum(sizes[1:]).tolist()
        spans = [slice(end - size, end) for end, size in zip(ends, sizes[1:], strict=True)]
        self._sums = [values, *(inner[span] for span in spans)]
        # Of the values themselves there is no least and largest.
        self._both = [[], *(list(self._bounds[:, span]) for span in spans)]

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._sums[-1][0])

    @property
    def least(self) -> float:
        """The least value above 0; infinity if there is none."""
        return float(self._bounds[0, -1])

    @property
    def most(self) -> float:
        """The largest value."""
        return -float(self._bounds[1, -1])

    @property
    def values(self) -> Floats:
        """All values [capacity]; not to be written to."""
        values: Floats = self._sums[0][: self.capacity]
        return values

    def set(self, places: Ints, values: Floats) -> None:
        """Set values; of a place that is named twice the last one counts."""
        if self._loops is not None:
            places, values = np.ascontiguousarray(places, np.int64), np.ascontiguousarray(values, np.float64)
            if len(places) != len(values):  # compiled loops read beyond an array
                raise ValueError(f"{len(values)} values for {len(places)} places")
            self._loops.write(self._flat, self._bounds, self._starts, places, values)
            return
        self._sums[0][places] = values
        nodes: Ints | slice = places
        for level in range(1, len(self._sums)):
            if isinstance(nodes, slice) or 4 * len(self._sums[level]) <= len(nodes):
                nodes = slice(0, len(self._sums[level - 1]) // FAN)
            else:
                nodes = nodes // FAN
            self._fold(level, nodes)

    def empty(self) -> None:
        """Make all values 0."""
        if self.total > 0:  # else no page need be taken for that
            self.fill(0, self.capacity, 0.0)

    def fill(self, begin: int, end: int, values: float | Floats) -> None:
        """Set the values of the places ``begin`` to ``end``, that one excluded."""
        if end <= begin:
            return
        self._sums[0][begin:end] = values
        if self._loops is not None:
            self._loops.fold(self._flat, self._bounds, self._starts, begin, end)
            return
        for level in range(1, len(self._sums)):
            begin, end = begin // FAN, (end - 1) // FAN + 1
            self._fold(level, slice(begin, end))

    def _fold(self, level: int, nodes: Ints | slice) -> None:
        """Compute nodes of a level from their children."""
        # [FAN, n]: an operation goes along many nodes at once, which are more than the children of one.
        sums, both = self._sums[level - 1], self._both[level - 1]
        if isinstance(nodes, slice):
            children = sums.reshape(-1, FAN)[nodes].T
            bounds = [each.reshape(-1, FAN)[nodes].T for each in both]
        else:
            where = nodes * FAN + self._fan
            children = sums.take(where)
            bounds = [each.take(where) for each in both]
        self._put(level, nodes, children, bounds)

    def _put(self, level: int, nodes: Ints | slice, children: Floats, bounds: list[Floats]) -> None:
        """Set nodes of a level, of which the children [FAN, n] are given."""
        # In this order, and not in one that an implementation of `sum` chooses: see `compiled`, whose bits these are.
        sums = children[:8] + children[8:]
        sums = sums[:4] + sums[4:]
        sums = sums[:2] + sums[2:]
        self._sums[level][nodes] = sums[0] + sums[1]
        if level == 1:
            bounds = [np.where(children > 0, children, np.inf), -children]
        for to, each in zip(self._both[level], bounds, strict=True):
            to[nodes] = np.minimum.reduce(each, axis=0)

    def find(self, masses: Floats) -> Ints:
        """Return for each mass, from 0 to the total, the least place at which the sum up to and with it is larger.

        A place whose value is 0 is never returned, whatever rounding does; the total must not be 0.
        """
        if self._loops is not None:
            nodes = np.zeros(len(masses), np.int64)
            self._loops.find(self._flat, self._starts, np.ascontiguousarray(masses, np.float64), nodes)
            return nodes
        left, nodes = masses, np.zeros(len(masses), np.int64)
        which = np.arange(len(masses))
        for level in range(len(self._sums) - 2, -1, -1):
            first = nodes * FAN
            children = self._sums[level].take(first + self._fan, mode="clip")
            # In this order, and not in one that costs less here: see `compiled`, whose bits these are.
            halves = children.reshape(4, 2, 2, -1)
            halves = halves[:, 0] + halves[:, 1]
            chosen, left = _passed(halves[:3, 0] + halves[:3, 1], left)
            chosen *= 4
            within, left = _passed(children[chosen + _THREE, which], left)
            chosen += within
            value = children[chosen, which]
            while not np.minimum.reduce(value, initial=1.0) > 0:  # rounding left a mass beyond the sum of those before
                beyond = value <= 0
                chosen -= beyond
                value = children[chosen, which]
                left = np.where(beyond, value, left)
            nodes = first + chosen
        places: Ints = nodes
        return places


def _passed(values: Floats, masses: Floats) -> tuple[Ints, Floats]:
    """Return how many of three values [3, n], added up, each mass [n] is beyond, and what is left of it then."""
    first = values[0]
    second = first + values[1]
    third = second + values[2]
    beyond = [first <= masses, second <= masses, third <= masses]
    count = np.add.reduce(beyond, axis=0, dtype=np.int64)
    return count, masses - np.where(beyond[2], third, np.where(beyond[1], second, np.where(beyond[0], first, 0.0)))


def _loops() -> Any:
    """Return the module of compiled loops; None without numba. What is not compiled yet is compiled now, for seconds:
    the first draw may be one that an event loop waits for."""
    try:
        from pipeline.buffer.transitions import compiled
    except ImportError:
        return None
    compiled.warm()
    return compiled

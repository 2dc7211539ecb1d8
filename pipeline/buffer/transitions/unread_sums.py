"""Sums of values that stay in a file: only what is above them is in memory, a fifteenth of them and their bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.buffer.transitions.elsewhere import Numbers, OldestFirst, pieces
from pipeline.buffer.transitions.given import check_masses
from pipeline.buffer.transitions.sums import FAN, Floats, Ints, SumTree, level_sizes

_AT_ONCE = FAN << 14
_MANY = 64  # of so many values, one


class _Leaves:
    """The values of a tree by their place, of numbers that begin in some place and go round."""

    def __init__(self, numbers: Numbers, begin: int, capacity: int, of: Callable[[Floats], Floats]) -> None:
        self._numbers, self._begin, self._capacity, self._of = numbers, begin, capacity, of
        self._places, self._values = np.empty(0, np.int64), np.empty(0)  # of those that were set since, in their order

    def __setitem__(self, places: Ints, values: Floats) -> None:
        every = np.concatenate([places[::-1], self._places])  # of those that are named twice, the last one first
        self._places, which = np.unique(every, return_index=True)
        self._values = np.concatenate([values[::-1], self._values])[which]

    def __getitem__(self, places: Ints | slice) -> Floats:
        if isinstance(places, slice):
            begin, end, _ = places.indices(self._capacity)
            return self.piece(begin, end)
        return self.take(places)

    def take(self, places: Ints, mode: str = "raise") -> Floats:
        """Return the values at places, in the form of these; 0 where there are none."""
        rows = np.where(places < self._capacity, (places - self._begin) % self._capacity, self._capacity)
        there = rows < len(self._numbers)
        found = np.zeros(places.shape)
        found[there] = self._of(self._numbers.at(rows[there])[:, 0].astype(np.float64, copy=False))
        if len(self._places):
            at = np.minimum(np.searchsorted(self._places, places), len(self._places) - 1)
            found = np.where(self._places[at] == places, self._values[at], found)
        return found

    def piece(self, begin: int, end: int) -> Floats:
        """Return the values of places that follow each other, some of which may be beyond the last."""
        found, size = np.zeros(max(0, end - begin)), len(self._numbers)
        # The first number is that of place `_begin`; where the places end they go on at 0.
        for first, place in ((0, self._begin), (self._capacity - self._begin, 0)):
            low, high = max(begin, place), min(end, place + size - first, self._capacity)
            if low < high:
                read = self._numbers.read(first + low - place, high - low)
                found[low - begin : high - begin] = self._of(read.astype(np.float64, copy=False))
        low, high = np.searchsorted(self._places, (begin, end))
        found[self._places[low:high] - begin] = self._values[low:high]
        return found


class UnreadSums(SumTree):
    """As a :class:`SumTree` whose values were set, to the same bits. When many are changed, all are read."""

    def __init__(
        self, capacity: int, numbers: Numbers, begin: int, *, of: Callable[[Floats], Floats], name: str
    ) -> None:
        """Args:
        capacity: how many values; those that there are no numbers for are 0.
        numbers: the values before ``of``; that many at the most.
        begin: the place of the first of them. The others follow, and go on at 0 after the last place; but if they are
            :class:`OldestFirst` their slots are their places.
        of: what makes values of numbers, one by one.
        name: what they are called in an error.

        Raises:
            ValueError: one of the numbers is negative, or no number, or infinite, or their sum is.
        """
        check_masses(name, pieces(numbers))
        self.capacity = capacity
        placed = numbers.by_slot if isinstance(numbers, OldestFirst) else numbers
        self._unread: Any = _Leaves(placed, begin, capacity, of)
        self._loops = None
        sizes = level_sizes(capacity)
        self._bounds = np.zeros((2, sum(sizes[1:])))
        self._bounds[0] = np.inf
        self._divide(self._unread, np.zeros(sum(sizes[1:])), sizes)
        for first in range(0, sizes[0], _AT_ONCE):
            end = min(first + _AT_ONCE, sizes[0])
            nodes = slice(first // FAN, end // FAN)
            self._put(1, nodes, self._unread.piece(first, end).reshape(-1, FAN).T, [])
        for level in range(2, len(sizes)):
            self._fold(level, slice(0, sizes[level - 1] // FAN))

    @property
    def values(self) -> Floats:
        """As of a :class:`SumTree`, for looking at some of them: what is taken is read."""
        values: Floats = super().values if self._unread is None else self._unread
        return values

    def set(self, places: Ints, values: Floats) -> None:
        if self._unread is not None and _MANY * len(places) >= self.capacity:
            self._read_all()
        super().set(places, values)

    def fill(self, begin: int, end: int, values: float | Floats) -> None:
        self._read_all()
        super().fill(begin, end, values)

    def _read_all(self) -> None:
        if self._unread is not None:
            values = self._unread.piece(0, self.capacity)
            self._unread = None
            SumTree.__init__(self, self.capacity)
            super().fill(0, self.capacity, values)

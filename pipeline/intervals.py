"""A set of integers that are mostly neighbours, kept as ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class IntervalSet:
    """Integers as sorted, disjoint ranges ``[first, last]``: millions of uids in a few numbers."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._count = 0
        for first, last in sorted(ranges):
            if self._lasts and first <= self._lasts[-1] + 1:
                self._count += max(0, last - self._lasts[-1])
                self._lasts[-1] = max(self._lasts[-1], last)
            else:
                self._firsts.append(first)
                self._lasts.append(last)
                self._count += last - first + 1

    def add(self, value: int) -> None:
        """Add one integer; one that is in already changes nothing."""
        place = bisect_right(self._firsts, value)
        if place and value <= self._lasts[place - 1]:
            return
        self._count += 1
        joins_left = place > 0 and self._lasts[place - 1] == value - 1
        joins_right = place < len(self._firsts) and self._firsts[place] == value + 1
        if joins_left and joins_right:
            self._lasts[place - 1] = self._lasts.pop(place)
            del self._firsts[place]
        elif joins_left:
            self._lasts[place - 1] = value
        elif joins_right:
            self._firsts[place] = value
        else:
            self._firsts.insert(place, value)
            self._lasts.insert(place, value)

    def add_range(self, first: int, last: int) -> None:
        """Add every integer from ``first`` to ``last``, both included."""
        low, high = bisect_left(self._lasts, first - 1), bisect_right(self._firsts, last + 1)
        gone = sum(self._lasts[i] - self._firsts[i] + 1 for i in range(low, high))
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high], self._lasts[low:high] = [first], [last]
        self._count += last - first + 1 - gone

    def update(self, values: Iterable[int]) -> None:
        """Add many; those that are neighbours are added as one range."""
        first = last = None
        for value in sorted(values):
            if last is None or value > last + 1:
                if first is not None and last is not None:
                    self.add_range(first, last)
                first = value
            last = value
        if first is not None and last is not None:
            self.add_range(first, last)

    def __contains__(self, value: int) -> bool:
        place = bisect_right(self._firsts, value)
        return place > 0 and value <= self._lasts[place - 1]

    def __len__(self) -> int:
        return self._count

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges, both ends included, in order."""
        return list(zip(self._firsts, self._lasts, strict=True))

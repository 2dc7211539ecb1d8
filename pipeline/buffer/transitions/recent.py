"""The keys of the rows that came last, by their numbers: so that what is asked of these costs no look at all others."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

Ints = np.ndarray
_MOST = 1 << 14


class Recent:
    """Blocks of keys, one after the other, of some thousands of rows."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._blocks: list[Ints] = []
        self._held = 0

    def add(self, first: int, keys: Ints) -> None:
        """Take in the keys of rows, -1: it was not kept; the first of them has the number ``first``."""
        self._firsts.append(first)
        self._blocks.append(keys)
        self._held += len(keys) + 8  # a block of one row takes more than the row does
        if self._held > 2 * _MOST:
            while self._held > _MOST and len(self._blocks) > 1:
                self._held -= len(self._blocks[0]) + 8
                del self._firsts[0], self._blocks[0]

    def since(self, first: int) -> Ints | None:
        """Return the keys of all rows from a number on that were kept; None: it is too long ago."""
        if not self._firsts or first < self._firsts[0]:
            return None
        at = bisect_right(self._firsts, first) - 1
        keys = np.concatenate(self._blocks[at:])[first - self._firsts[at] :]
        kept: Ints = keys[keys >= 0]
        return kept

    def of(self, numbers: Ints) -> Ints | None:
        """Return the keys of rows by their numbers, if they were kept; None: one is too long ago."""
        found = []
        for number in numbers.tolist():
            if not self._firsts or number < self._firsts[0]:
                return None
            at = bisect_right(self._firsts, number) - 1
            found.append(self._blocks[at][number - self._firsts[at]])
        keys = np.array(found, np.int64)
        return keys[keys >= 0]

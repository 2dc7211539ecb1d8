"""The first rows of an order, without a look at all rows each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.buffer.transitions.ring import Ring

Ints = np.ndarray
_LEAST = 1024


class Best:
    """Some rows, and a bound: every other row that is there comes after all of these, as its rank is not below the
    bound, and those of the same rank are older.

    So the first rows of all are the first of these, as long as there are enough: rows that go are left out, and of new
    ones those below the bound join. When too few are left all rows are looked at again: that takes as many rows to go
    as were held beyond those that are asked for.
    """

    def __init__(self, ring: Ring, ranks: Callable[[Ints], np.ndarray]) -> None:
        """Args:
        ring: of the rows.
        ranks: gives what rows are ordered by, the lowest first and of equals the oldest.
        """
        self._ring, self._ranks = ring, ranks
        self._keys = np.empty(0, np.int64)
        self._bound: Any = None  # None: these are all rows
        self._as_of = (-1, -1)  # rows that were added, and changes of columns

    def among(self, count: int, open_: Callable[[Ints], Ints]) -> Ints:
        """Return keys, oldest first, among which the first ``count`` of all rows are that may be drawn.

        Args:
            count: how many.
            open_: gives those of the keys whose rows may be drawn; one that may not never may again.
        """
        ring = self._ring
        if self._as_of[1] == ring.rewritten and self._as_of[0] >= 0:
            self._keys = open_(self._keys[ring.alive(self._keys)])
            self._join(count, open_)
            if len(self._keys) >= count:
                return self._keys
        return self._look(count, open_)

    def _join(self, count: int, open_: Callable[[Ints], Ints]) -> None:
        ring, added = self._ring, self._as_of[0]
        if added < ring.added:
            new = open_(ring.newest(added, ring.added - added))
            if self._bound is not None:
                new = new[self._ranks(new) < self._bound]
            self._keys = np.concatenate([self._keys, new[np.argsort(ring.serials(new))]])
            self._as_of = ring.added, ring.rewritten
        if len(self._keys) > 8 * self._room(count):
            self._keep(self._keys, self._room(count))

    def _look(self, count: int, open_: Callable[[Ints], Ints]) -> Ints:
        """Look at all rows; return those that may be drawn."""
        ring, most = self._ring, self._room(count)
        self._as_of = ring.added, ring.rewritten
        self._bound, left_out = None, False
        keys, ranks = np.empty(0, np.int64), np.empty(0, np.uint8)
        for piece in ring.pieces():
            new = open_(piece)
            own = self._ranks(new)
            if left_out:
                before = self._before_bound(own)
                new, own = new[before], own[before]
            keys, ranks = np.concatenate([keys, new]), np.concatenate([ranks, own]) if len(ranks) else own
            if len(keys) > most:
                which, left_out = self._first(ranks, most), True
                keys, ranks = keys[which], ranks[which]
        self._use(keys)
        return keys

    def _room(self, count: int) -> int:
        return max(8 * count, 4 * int(self._ring.size**0.5), _LEAST)

    def _keep(self, keys: Ints, most: int) -> None:
        """Hold the first ``most`` of keys, which are in the order of their age."""
        self._use(keys if most >= len(keys) else keys[self._first(self._ranks(keys), most)])

    def _use(self, keys: Ints) -> None:
        self._keys = keys
        if self._bound is not None and self._bound != self._bound:  # too few are numbers: nothing is said of new rows
            self._as_of = -1, -1

    def _before_bound(self, ranks: np.ndarray) -> Ints:
        """Whether rows that are younger than all that are held come before the last of these."""
        bound = self._bound
        before: Ints = ranks == ranks if bound != bound else ranks < bound
        return before

    def _first(self, ranks: np.ndarray, most: int) -> Ints:
        """Return which rows the first ``most`` are of more, in the order of their age as these are; the last of them
        is the bound. What is no number comes last."""
        self._bound = border = np.partition(ranks, most - 1)[most - 1]
        if border != border:
            below, equal = np.flatnonzero(ranks == ranks), np.flatnonzero(ranks != ranks)
        else:
            below, equal = np.flatnonzero(ranks < border), np.flatnonzero(ranks == border)
        return np.sort(np.concatenate([below, equal[: most - len(below)]]))

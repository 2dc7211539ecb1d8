"""Numbers of rows that lie on the disk in another order than that of the slots of these.

Each row has a place, its number in the files, and a slot. Which slot that is the files say for each place; the reverse
would be as long as the rows are many. So it is looked for: for a few slots all files are gone through once, and where
numbers of all rows are wanted in the order of the slots, once for every eighth of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pipeline.buffer.transitions.elsewhere import ByName, Numbers, pieces
from pipeline.buffer.transitions.given import wholes
from pipeline.replay.row_set import RowSet

Ints = np.ndarray
_WINDOWS = 8
"""How often all rows are gone through at the most, where numbers are wanted in the order of the slots."""
_LEAST = 1 << 22
"""So many slots are looked at together at the least."""
_KNOWN = 1 << 16
"""Of so many slots, about, the places are remembered."""
_AHEAD = 1 << 18
"""So many rows of an order are looked up together at the most."""


def window_of(rows: int) -> int:
    """Return how many slots of so many rows are looked at together."""
    return max(_LEAST, -(-rows // _WINDOWS))


class Slots:
    """The slots of rows, by their places. Subclasses say where they are read."""

    told: Callable[[int], None] = staticmethod(lambda count: None)
    """Told of the bytes that are read, where all are gone through for numbers of all rows."""

    def __init__(self, count: int) -> None:
        """Args:
        count: how many rows there are; their slots are those from 0 on.
        """
        self.count = count
        self._known: tuple[Ints, Ints] = np.empty(0, np.int64), np.empty(0, np.int64)  # slots, which rise, and places
        self._last = self._known

    def pieces(self) -> Iterator[tuple[int, Ints]]:
        """Yield the slots of all rows piece by piece, each with the place of its first row; -1: none, the row does not
        count."""
        raise NotImplementedError

    def pieces_with(self, slots: Ints) -> Iterator[tuple[int, Ints]]:
        """As :meth:`pieces`; rows in other slots than some may be left out."""
        return self.pieces()

    def pieces_between(self, low: int, high: int) -> Iterator[tuple[int, Ints]]:
        """As :meth:`pieces_with`, of the slots from one up to another."""
        return self.pieces()

    def note(self, slots: Ints, places: Ints) -> None:
        """Take in the places of slots that are soon asked for."""
        self._last = slots, places

    def places(self, slots: Ints) -> Ints:
        """Return the places [n] of the rows in slots, in any order."""
        if np.array_equal(slots, self._last[0]):
            return self._last[1]
        named, which = np.unique(slots, return_inverse=True)
        known, places = self._known
        at = np.searchsorted(known, named)
        new = np.flatnonzero(known[np.minimum(at, len(known) - 1)] != named) if len(known) else np.arange(len(named))
        found = np.empty(len(named), np.int64)
        found[new] = self._found(named[new])
        old = np.delete(np.arange(len(named)), new)
        found[old] = places[at[old]]
        if len(known) + len(new) > _KNOWN:
            self._known = named, found
        elif len(new):
            self._known = np.insert(known, at[new], named[new]), np.insert(places, at[new], found[new])
        return found[which]

    def _found(self, slots: Ints) -> Ints:
        """Return the places of slots, which rise; all rows are gone through."""
        found, missing = np.full(len(slots), -1, np.int64), len(slots)
        if not missing:
            return found
        mask = (1 << max(16, (16 * len(slots)).bit_length())) - 1  # few of the others are taken for one of these
        likely = np.zeros(mask + 1, bool)
        likely[slots & mask] = True
        for first, own in self.pieces_with(slots):
            rows = np.flatnonzero(likely[own & mask])
            at = np.minimum(np.searchsorted(slots, own[rows]), len(slots) - 1)
            named = np.flatnonzero(slots[at] == own[rows])
            found[at[named]] = first + rows[named]
            missing -= len(named)
            if missing <= 0:
                break
        return found


class BySlot:
    """Numbers in the order of the slots of rows, of those in the order of their places. Read from the first on, they
    are had for few looks at all."""

    def __init__(self, slots: Slots, numbers: Numbers) -> None:
        self._slots, self._numbers = slots, numbers
        self._begin, self._window = 0, np.empty(0)

    def __len__(self) -> int:
        return self._slots.count

    def at(self, places: Ints) -> np.ndarray:
        """As of any numbers; ``places`` are slots."""
        return self._numbers.at(self._slots.places(places))

    def read(self, begin: int, count: int) -> np.ndarray:
        """As of any numbers."""
        parts, end = [], begin + count
        while begin < end:
            if not self._begin <= begin < self._begin + len(self._window):
                self._look(begin)
            part = self._window[begin - self._begin : end - self._begin]
            parts.append(part.copy())
            begin += len(part)
        if end == len(self):  # nobody goes on from here
            self._window = self._window[:0].copy()
        return np.concatenate(parts) if parts else self._numbers.read(0, 0)

    def _look(self, begin: int) -> None:
        size = window_of(len(self))
        width = min(size, len(self) - begin)
        self._window = self._window[:0].copy()  # not two of them
        window: Any = None
        for first, slots in self._slots.pieces_between(begin, begin + width):
            values = self._numbers.read(first, len(slots))
            self._slots.told(slots.nbytes)
            if window is None:
                window = np.zeros(width, values.dtype)
            rows = np.flatnonzero((slots >= begin) & (slots < begin + width))
            window[slots[rows] - begin] = values[rows]
        self._begin, self._window = begin, window


class Named(ByName):
    """An order that is given by numbers which tell the slots of rows, and not whether these are there."""

    def __init__(self, slots: Slots, given: Numbers, own: Numbers, capacity: int) -> None:
        """Args:
        slots: of the rows.
        given: the order.
        own: the numbers of the rows, by their places.
        capacity: how many slots there are; a number leaves its slot when it is divided by that.
        """
        self._slots, self._given, self._own, self._capacity = slots, given, own, capacity
        self._begin, self._held = 0, np.empty(0, np.int64)  # what was looked up last
        self._ahead = 1

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, part: slice) -> Ints:
        begin, end, _ = part.indices(len(self))
        if begin >= end:
            return np.empty(0, np.int64)
        if begin < self._begin or end > self._begin + len(self._held):
            count = min(max(end - begin, self._ahead), len(self) - begin)
            self._begin, self._held = begin, self._keys(self._given.read(begin, count).astype(np.int64))
            self._ahead = min(8 * count, _AHEAD)  # of those that are gone there may be many
        return self._held[begin - self._begin : end - self._begin]

    def _keys(self, numbers: Ints) -> Ints:
        slots = numbers % self._capacity
        filled = np.flatnonzero(slots < self._slots.count)
        keys = np.full(len(numbers), -1, np.int64)
        places = self._slots.places(slots[filled])
        there = self._own.at(places)[:, 0] == numbers[filled]
        keys[filled[there]] = places[there]
        return keys

    def check(self, name: str, most: int) -> None:
        """As of any order."""
        named = RowSet(self._capacity)  # when an epoch begins, its rows are in different slots
        for first, piece in pieces(self._given):
            named.add(wholes(name, piece, 0, most, first=first).astype(np.int64) % self._capacity)
        if len(self) > len(named):
            raise ValueError(f"{name}: a row is there more than once")

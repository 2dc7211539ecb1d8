"""Columns of rows that were changed after the rows had been written to the disk.

A row is written once, in a block. What is changed of it later is part of every generation, column by column, until the
row goes: so it is at most as large as the changed columns of the rows that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from pipeline.buffer.transitions.given import wholes
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import Slots

Ints = np.ndarray


class Written:
    """Which rows of a ring differ from what lies in blocks, by column. Methods do not lock."""

    def __init__(self, ring: Ring, captured: int = 0) -> None:
        self._ring = ring
        self._changed: dict[str, Ints] = {}  # by column, and slot: 1 + the key of the row that was changed there
        self.captured = captured
        """How many of all rows that were ever added are in blocks, or on the way there."""

    def write(self, keys: Ints, arrays: Mapping[str, np.ndarray]) -> None:
        """Set columns of rows that are there; of a key that is named twice the last one counts.

        Args:
            keys: [n] of the rows.
            arrays: [n, ...] by column, in the dtypes of the columns.
        """
        if not len(keys):
            return
        unread = self._ring.storage.unread
        if unread is not None:
            unread.rows(self._ring.slots(keys))
        self._put(keys, arrays)

    def _put(self, keys: Ints, arrays: Mapping[str, np.ndarray]) -> None:
        ring = self._ring
        ring.about_to_change(keys)  # a generation that is being written wants them as they were
        ring.storage.write(ring.slots(keys), arrays)
        ring.changed(keys, tuple(arrays))
        self._note(keys[ring.serials(keys) < self.captured], arrays)

    def _note(self, keys: Ints, names: Iterable[str]) -> None:
        if len(keys):
            for name in names:
                if name not in self._changed:
                    self._changed[name] = np.zeros(self._ring.capacity, np.int64)
                self._changed[name][self._ring.slots(keys)] = keys + 1

    def _names(self) -> list[str]:
        return sorted(self._changed)

    def _marks(self, name: str) -> Ints:
        return self._changed[name]

    def _keys(self, name: str) -> Ints:
        marks = self._marks(name)
        keys = marks[np.flatnonzero(marks)] - 1
        there: Ints = keys[self._ring.alive(keys)]
        return there[np.argsort(self._ring.serials(there))]

    def state(self) -> list[tuple[str, Ints, np.ndarray]]:
        """Return (column, keys [m], values [m, ...]) of every column that was changed, oldest row first; copies."""
        found = []
        for name in self._names():
            keys = self._keys(name)
            if len(keys):
                found.append((name, keys, self._ring.storage.view(name)[self._ring.slots(keys)]))
        return found

    def among(self, slots: Slots, keys: Ints) -> list[tuple[str, Ints]]:
        """Return (column, which [m]) of the rows in ``slots`` [n], whose keys are given: those that were changed."""
        found = [(name, np.flatnonzero(self._marks(name)[slots] == keys + 1)) for name in self._names()]
        return [(name, which) for name, which in found if len(which)]

    def columns(self) -> list[str]:
        """Return the columns of :meth:`state`."""
        return [name for name in self._names() if len(self._keys(name))]

    def load(self, state: Iterable[tuple[str, Ints, np.ndarray]]) -> None:
        """Take back what :meth:`state` gave, after the ring took back its rows."""
        self.clear()
        self.captured = self._ring.added
        if self._ring.storage.unread is not None:
            self._ring.storage.unread.written = self
        for name, keys, values in state:
            wholes(f"written keys of {name}", keys, 0, self._ring.keys_end - 1)
            there = self._ring.alive(keys)
            if there.any():  # of rows that lie on the disk alone as well: what is brought in leaves these
                self._put(keys[there], {name: values[there]})

    def clear(self) -> None:
        """Take in that no row and no column is left."""
        self._changed = {}

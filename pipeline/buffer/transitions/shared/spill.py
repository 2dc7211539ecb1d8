"""Rows that a save has not come to yet, and that are about to be overwritten: they are set aside first, by whichever
process overwrites them."""

from __future__ import annotations

import numpy as np

from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.shared.header import SAVE_END, SAVE_NEXT, SPILLED, Header
from pipeline.buffer.transitions.shared.memory import SharedMemory
from pipeline.buffer.transitions.storage import TransitionStorage


class Spill:
    """A second place for each slot, in a memory of its own; pages are taken for rows that are set aside, and given back
    when the save is done.

    The caller has the lock. Should the owner die in the midst of a save, rows up to the end of that are still set aside
    once: that takes memory, which goes with the last process.
    """

    def __init__(self, descriptor: int, capacity: int, header: Header) -> None:
        self._words, self._capacity = header.words, capacity
        self._memory = SharedMemory(descriptor, 0)
        self._memory.joining = True  # no more is ever taken than there are rows
        self._aside = TransitionStorage(capacity, None, self._memory)

    def begin(self, first: int, end: int, schema: Schema) -> TransitionStorage:
        """Set aside, from now on, rows of keys from ``first`` to ``end`` before they are lost; return where."""
        self.end()
        self._shape(schema)
        words = self._words
        words[SPILLED] = words[SAVE_NEXT] = first
        words[SAVE_END] = end
        return self._aside

    def saved(self, upto: int) -> None:
        """Take in that rows before ``upto`` may be lost."""
        self._words[SAVE_NEXT] = upto

    @property
    def upto(self) -> int:
        """Rows from the first one up to this key, that one excluded, were set aside, unless they were saved before."""
        return self._words[SPILLED]

    def end(self) -> None:
        """Give the memory back."""
        self._words[SAVE_END] = 0
        self._memory.give_back()

    def set_aside(self, upto: int, storage: TransitionStorage) -> None:
        """Copy the rows of keys before ``upto`` out of ``storage``, as far as a save wants them."""
        words = self._words
        if not words[SAVE_END]:
            return
        begin, end = max(words[SPILLED], words[SAVE_NEXT]), min(upto, words[SAVE_END])
        if begin >= end or storage.schema is None:
            return
        self._shape(storage.schema)
        slots = np.arange(begin, end) % self._capacity
        for part in np.split(slots, np.flatnonzero(slots[1:] == 0) + 1):
            where = slice(int(part[0]), int(part[-1]) + 1)
            self._aside.records[where] = storage.records[where]
            for name, column in storage.large.items():
                self._aside.large[name][where] = column[where]
        words[SPILLED] = end

    def _shape(self, schema: Schema) -> None:
        if self._aside.schema != schema:
            self._aside.shape(schema)

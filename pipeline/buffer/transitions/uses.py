"""How often each row was drawn, where that is bounded."""

from __future__ import annotations

import numpy as np

from pipeline.buffer.transitions.elsewhere import Numbers, pieces
from pipeline.buffer.transitions.given import wholes
from pipeline.buffer.transitions.ring import Ring

Ints = np.ndarray


class Uses:
    """How often the row in each slot was drawn; one that was drawn ``most`` times has no use left."""

    def __init__(self, ring: Ring, most: int) -> None:
        self.ring, self.most = ring, most
        self._counts = ring.array("uses", np.uint32)
        self._before: Numbers | None = None  # what each row had been drawn before, if that lies elsewhere
        self.taken = np.empty(0, np.int64)
        """The keys of the last :meth:`take`."""

    def added(self, first: int, count: int) -> None:
        """Take in that rows were added."""
        self._counts[self.ring.slots(self.ring.newest(first, count))] = 0

    def left(self, keys: Ints, drawn: Ints | None = None) -> Ints:
        """Return how many uses rows that are there have left: [n] int64, those among ``drawn`` taken off."""
        left: Ints = self.most - self._counts[self.ring.slots(keys)].astype(np.int64)
        if self._before is not None:
            left -= self._before.at(keys - self.ring.oldest)[:, 0].astype(np.int64)
        if drawn is not None and len(drawn):
            names, times = np.unique(drawn, return_counts=True)
            at = np.minimum(np.searchsorted(names, keys), len(names) - 1)
            left -= np.where(names[at] == keys, times[at], 0)
        return left

    def take(self, keys: Ints) -> None:
        """Count rows as drawn, each as often as it is named."""
        slots = self.ring.slots(keys)
        self.ring.changing("uses", slots)
        np.add.at(self._counts, slots, np.uint32(1))
        self.taken = keys

    def begin(self) -> None:
        """Let :meth:`give_back` mean what is taken from now on."""
        self.taken = np.empty(0, np.int64)

    def give_back(self) -> None:
        """Undo the last :meth:`take`."""
        slots = self.ring.slots(self.taken)
        self.ring.changing("uses", slots)
        np.subtract.at(self._counts, slots, np.uint32(1))

    def values(self) -> Ints:
        """Return how often each row was drawn, oldest first: [size] uint32."""
        values: Ints = self._counts[self.ring.slots(self.ring.keys())]
        return values

    def load(self, values: Ints | Numbers | None) -> None:
        """Take back what :meth:`values` gave, after the ring took back its rows; None: nothing was drawn yet. What is
        no array stays where it is."""
        if values is not None and not isinstance(values, np.ndarray):
            for first, piece in pieces(values):
                wholes("used", piece, 0, np.iinfo(np.uint32).max, first=first)
            self._before = values
            return
        if values is not None:
            wholes("used", values, 0, np.iinfo(np.uint32).max)
        self._counts[:] = 0
        if values is not None and self.ring.size:
            self._counts[self.ring.slots(self.ring.keys())] = values[-self.ring.size :]

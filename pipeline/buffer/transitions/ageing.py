"""Drawing what is stale more rarely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.drawing import Drawer, Floats, Ints
from pipeline.buffer.transitions.elsewhere import pieces
from pipeline.buffer.transitions.given import MOST, whole
from pipeline.buffer.transitions.layout import VERSION
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.sums import SumTree
from pipeline.buffer.transitions.unread_sums import UnreadSums
from pipeline.config import StalenessWeighted
from pipeline.errors import Starved

_MOST = 400.0  # half-lives: 2^400 and 2^-400, times as many rows as there can be, are far from the ends of float64


class AgeingDrawer(Drawer):
    """Row i in proportion to ``2^(v_i / half_life)``; see :class:`~pipeline.config.StalenessWeighted`.

    Masses are relative to a version that moves when the newest one is far from it: so what a row's mass is follows from
    its own version and from that one alone, in whatever order rows came.
    """

    def __init__(self, ring: Ring, options: StalenessWeighted, new_tree: Callable[[int], SumTree] = SumTree) -> None:
        super().__init__(ring)
        self._half_life = options.half_life
        self._new_tree = new_tree
        self._tree = new_tree(ring.capacity)
        self._reference = 0
        self._pending = ring.added  # rows from this key on are not in the tree yet

    def added(self, first: int, count: int) -> None:
        self._pending = min(self._pending, first)

    def _settle(self) -> None:
        """Put the rows that are new into the tree."""
        first, self._pending = self._pending, self.ring.added
        self._place(self.ring.newest(first, self.ring.added - first))

    def _place(self, keys: Ints) -> None:
        if not len(keys):
            return
        versions = self.ring.mark(VERSION, keys).astype(np.int64)
        if self._refer(int(versions.max())):
            keys = self.ring.keys()
            versions = self.ring.mark(VERSION, keys).astype(np.int64)
        self._tree.set(self.ring.slots(keys), self._masses(versions))

    def _refer(self, newest: int) -> bool:
        """Have masses be relative to a newer version, if the newest one is far from it; return whether they are."""
        far = (newest - self._reference) / self._half_life > _MOST
        if far:
            self._reference = newest
        return far

    def _masses(self, versions: Ints) -> Floats:
        masses: Floats = np.exp2(np.maximum((versions - self._reference) / self._half_life, -_MOST))
        return masses

    def _any(self, rng: np.random.Generator, count: int) -> Ints:
        self._settle()
        if not self.ring.size:
            raise Starved("the buffer is empty: add rows first")
        return self.ring.key_at(self._tree.find(rng.random(count) * self._tree.total))

    def looks_at(self, count: int) -> int:
        return count + self.ring.added - self._pending

    def mass(self, keys: Ints) -> Floats:
        self._settle()
        mass: Floats = self._tree.values[self.ring.slots(keys)]
        return mass

    def state(self) -> dict[str, Any]:
        self._settle()
        return {"reference": self._reference}

    def load(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self._reference = whole("reference", state.get("reference", 0), 0, MOST)
        versions = self.ring.elsewhere(VERSION)
        self._tree = self._new_tree(self.ring.capacity if versions is None else 1)  # one or the other is in memory
        self._tree.empty()
        if versions is None:
            self._place_all()
            return
        self._pending = self.ring.added
        self._refer(max((int(piece.max()) for _, piece in pieces(versions)), default=0))
        ring = self.ring
        self._tree = UnreadSums(ring.capacity, versions, ring.oldest % ring.capacity, of=self._masses, name="versions")

    def rebuild(self) -> None:
        self._tree.fill(0, self._tree.capacity, 0.0)
        self._place_all()

    def _place_all(self) -> None:
        self._pending = self.ring.added
        if self.ring.size:
            self._place(self.ring.keys())

    def clear(self) -> None:
        self._tree, self._pending, self._reference = self._new_tree(self.ring.capacity), self.ring.added, 0

    @property
    def numbers(self) -> tuple[float, ...]:
        return self._reference, self._pending

    @numbers.setter
    def numbers(self, numbers: Sequence[float]) -> None:
        self._reference, self._pending = map(int, numbers)

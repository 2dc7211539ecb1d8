"""Drawing rows a bounded number of times each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.drawing import Drawer, Floats, Ints, Starts, rounds
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.sums import SumTree
from pipeline.buffer.transitions.unread_sums import UnreadSums
from pipeline.buffer.transitions.uses import Uses
from pipeline.buffer.transitions.windows import Window
from pipeline.config import Uniform
from pipeline.errors import Starved


class ConsumingDrawer(Drawer):
    """Each row alike that has uses left: as if one row were drawn after the other."""

    def __init__(self, ring: Ring, options: Uniform, new_tree: Callable[[int], SumTree] = SumTree) -> None:
        super().__init__(ring)
        assert options.uses is not None
        self._window = Window.of(ring, options)
        self._uses = Uses(ring, options.uses)
        self._new_tree = new_tree
        self._tree = new_tree(ring.capacity)  # 1 where a row has uses left
        self._pending = ring.added  # rows from this key on are not in the tree yet

    def added(self, first: int, count: int) -> None:
        self._uses.added(first, count)
        self._pending = min(self._pending, first)

    def _settle(self) -> None:
        """Put the rows that are new into the tree."""
        keys = self.ring.newest(self._pending, self.ring.added - self._pending)
        self._pending = self.ring.added
        if len(keys):
            self._mark(keys)

    def _mark(self, keys: Ints) -> None:
        self._tree.set(self.ring.slots(keys), (self._uses.left(keys) > 0).astype(np.float64))

    def draw(self, rng: np.random.Generator, count: int, starts: Starts | None = None) -> Ints:
        self._settle()
        drawn = np.empty(0, np.int64)
        for tries in rounds(count, self.ring.size):
            drawn = self._accepted(drawn, self._any(rng, tries), starts)[:count]
            if len(drawn) == count:
                break
        else:
            drawn = self._rest(rng, drawn, count, starts)
        self._uses.take(drawn)
        self._mark(drawn)
        return drawn

    def looks_at(self, count: int) -> int:
        listed = self._window is not None or self._tree.total < 8 * count  # then trying may not find enough
        return max(count, self.ring.size) if listed else count + self.ring.added - self._pending

    def before(self) -> Any:
        self._uses.begin()

    def undo(self, before: Any) -> None:
        self._uses.give_back()
        self._mark(self._uses.taken)

    def _any(self, rng: np.random.Generator, count: int) -> Ints:
        if self._window is not None:
            first, end = self._window.bounds()
            return rng.integers(first, end, count)
        if not self._tree.total > 0:
            raise Starved(f"every row was drawn {self._uses.most} times; add rows")
        return self.ring.key_at(self._tree.find(rng.random(count) * self._tree.total))

    def _accepted(self, drawn: Ints, more: Ints, starts: Starts | None) -> Ints:
        """Return ``drawn`` and those of ``more``, in their order, that can be drawn after them."""
        if self._window is not None:
            more = more[self._window.holds(more)]
        if starts is not None:
            more = more[starts.mask(more)]
        keys = np.concatenate([drawn, more])
        kept: Ints = keys[_times_before(keys) < self._uses.left(keys)]
        return kept

    def _rest(self, rng: np.random.Generator, drawn: Ints, count: int, starts: Starts | None) -> Ints:
        """Draw what is missing out of a list of all that can be drawn."""
        listed = self.ring.pieces() if starts is None else [starts.all()]
        keys = np.concatenate([np.empty(0, np.int64), *(piece[self.mass(piece) > 0] for piece in listed)])
        left = int(self._uses.left(keys, drawn).sum()) + len(drawn)
        if left < count:
            raise Starved(
                f"{count} rows were asked for, and those that could be drawn have {left} uses left; add rows, or ask "
                "for less"
            )
        while len(drawn) < count:
            keys = keys[self._uses.left(keys, drawn) > 0]
            drawn = self._accepted(drawn, keys[rng.integers(0, len(keys), count - len(drawn))], None)
        return drawn

    def mass(self, keys: Ints) -> Floats:
        mass = (self._uses.left(keys) > 0).astype(np.float64)
        return mass if self._window is None else mass * self._window.holds(keys)

    def state(self) -> dict[str, Any]:
        return {} if self._window is None else self._window.state()

    def arrays(self) -> dict[str, np.ndarray]:
        return {"used": self._uses.values()}

    def load(self, state: dict[str, Any], arrays: dict[str, Any]) -> None:
        """As of any drawer; how often rows were drawn may lie elsewhere, and stays there."""
        ring, used = self.ring, arrays.get("used")
        self._uses.load(used)
        if self._window is not None:
            self._window.load(state)
        if used is None or isinstance(used, np.ndarray):
            self._tree = self._new_tree(ring.capacity)
            self._tree.empty()
            self._place_all()
            return
        self._pending = ring.added
        self._tree = self._new_tree(1)  # one or the other is in memory
        self._tree = UnreadSums(ring.capacity, used, ring.oldest % ring.capacity, of=self._open, name="used")

    def _open(self, used: Floats) -> Floats:
        open_: Floats = (used < self._uses.most).astype(np.float64)
        return open_

    def rebuild(self) -> None:
        self._tree.fill(0, self._tree.capacity, 0.0)
        self._place_all()

    def _place_all(self) -> None:
        self._pending = self.ring.added
        for keys in self.ring.pieces():
            self._mark(keys)

    def clear(self) -> None:
        self._tree, self._pending = self._new_tree(self.ring.capacity), self.ring.added

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self._pending,)

    @numbers.setter
    def numbers(self, numbers: Sequence[float]) -> None:
        self._pending = int(numbers[0])


def _times_before(keys: Ints) -> Ints:
    """Return how often each key was named before, in the same array."""
    order = np.argsort(keys, kind="stable")
    named = keys[order]
    begins = np.flatnonzero(np.diff(named, prepend=named[:1] - 1))
    times = np.empty(len(keys), np.int64)
    times[order] = np.arange(len(keys)) - np.repeat(begins, np.diff(begins, append=len(keys)))
    return times

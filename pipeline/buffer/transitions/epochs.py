"""Drawing every row once in an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.drawing import Drawer, Ints, Starts
from pipeline.buffer.transitions.elsewhere import ByName, Parts, pieces
from pipeline.buffer.transitions.given import MOST, distinct, whole, wholes
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.uses import Uses
from pipeline.config import WithoutReplacement
from pipeline.errors import Starved


class EpochDrawer(Drawer):
    """Each row once in an epoch."""

    def __init__(self, ring: Ring, options: WithoutReplacement, seed: int) -> None:
        super().__init__(ring)
        self.last, self._seed = options.last, seed
        self.epoch, self.cursor, self.skipped = -1, 0, 0
        self._base = 0
        self._order: Any = np.empty(0, np.int64)  # of the rows of the epoch, whose keys begin at `_base`
        self._uses = None if options.uses is None else Uses(ring, options.uses)
        # Where processes have the rows in common, they have the list as well.
        self._common = ring.array("order", np.int64) if ring.common and self._listed else None

    @property
    def _listed(self) -> bool:
        """Whether the order is of keys that do not follow from how many rows there were."""
        return self._uses is not None or self.ring.scattered

    def added(self, first: int, count: int) -> None:
        if self._uses is not None:
            self._uses.added(first, count)

    def draw(self, rng: np.random.Generator, count: int, starts: Starts | None = None) -> Ints:
        if count > self.ring.size and self.last != "keep":
            raise self._starved(count)
        before = self.before()
        try:
            keys = self._draw(count, starts)
        except BaseException:  # a condition may raise anything
            self._go_back(before)
            raise
        self._publish()
        if self._uses is not None:
            self._uses.take(keys)
        return keys

    def before(self) -> tuple[int, int, int, int, Ints]:
        if self._uses is not None:
            self._uses.begin()
        return self.epoch, self.cursor, self.skipped, self._base, self._order

    def undo(self, before: tuple[int, int, int, int, Ints]) -> None:
        self._go_back(before)
        if self._uses is not None:
            self._uses.give_back()

    def _go_back(self, before: tuple[int, int, int, int, Ints]) -> None:
        self.epoch, self.cursor, self.skipped, self._base, self._order = before

    def _draw(self, count: int, starts: Starts | None) -> Ints:
        drawn: list[Ints] = []
        missing, begun = count, False
        while missing:
            keys = self._next(missing, starts)
            drawn.append(keys)
            missing -= len(keys)
            if not missing or (self.last == "keep" and missing < count and self.at_end):
                break
            if not self.at_end:
                continue
            if begun:  # a whole epoch is not enough
                raise self._starved(count)
            if self.last == "drop":
                drawn, missing = [], count
            self._begin(drawn)
            begun = True
        return np.concatenate(drawn)

    def _starved(self, count: int) -> Starved:
        return Starved(
            f"{count} were asked for without replacement, and of the {self.ring.size} rows that are there fewer can be "
            "drawn; add rows, or ask for less"
        )

    def looks_at(self, count: int) -> int:
        return count if count < self.left else max(count, self.ring.size)  # an epoch ends, and another one begins

    @property
    def left(self) -> int:
        """How many rows of the epoch were not drawn; some may have gone."""
        return len(self._order) - self.cursor

    @property
    def at_end(self) -> bool:
        """Whether the epoch has nothing left."""
        return self.cursor >= len(self._order)

    def _next(self, most: int, starts: Starts | None) -> Ints:
        keys = self._order[self.cursor : self.cursor + most].astype(np.int64) + self._base
        self.cursor += len(keys)
        there = self.ring.alive(keys)
        self.skipped += int((~there).sum())
        keys = keys[there]
        kept: Ints = keys if starts is None else keys[starts.mask(keys)]
        return kept

    def _begin(self, drawn: list[Ints]) -> None:
        """Begin an epoch; of ``drawn`` rows the uses are not counted yet."""
        self.epoch += 1
        self.cursor, self._base = 0, 0 if self.ring.scattered else self.ring.oldest
        if not self._listed:
            self._order = self._permutation(self.ring.size)
            return
        taken, open_ = np.concatenate(drawn) if drawn else None, np.empty(self.ring.size, self._dtype)
        count = 0
        for keys in self.ring.pieces():
            left = keys if self._uses is None else keys[self._uses.left(keys, taken) > 0]
            open_[count : count + len(left)] = left - self._base
            count += len(left)
        self._order = self._shuffled(open_[:count])

    def _publish(self) -> None:
        """Let other processes have the list of this epoch."""
        common, count = self._common, len(self._order)
        if common is not None and count and not np.may_share_memory(common, self._order):
            self.ring.changing("order", np.arange(count))
            common[:count] = self._order
            self._order = common[:count]

    @property
    def _dtype(self) -> type[np.integer[Any]]:
        """For numbers below that of the rows: half the memory, where it can be."""
        return np.int64 if not self.ring.dense or self.ring.capacity > 2**32 else np.uint32

    def _permutation(self, size: int) -> Ints:
        return self._shuffled(np.arange(size, dtype=self._dtype))

    def _shuffled(self, order: Ints) -> Ints:
        np.random.Generator(np.random.PCG64([self._seed, self.epoch])).shuffle(order)
        return order

    def state(self) -> dict[str, Any]:
        names = ("epoch", "cursor", "skipped")
        counts = {name: getattr(self, name) for name in names}
        return counts | {"base": self._base, "rows": len(self._order), "seed": self._seed}

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {} if self._uses is None else {"used": self._uses.values()}
        return arrays | {"order": self._order.astype(np.int64)} if self._listed else arrays

    def load(self, state: dict[str, Any], arrays: dict[str, Any]) -> None:
        """As of any drawer; the order, and how often rows were drawn, may lie elsewhere, and stay there."""
        if self._uses is not None:
            self._uses.load(arrays.get("used"))
        if not state:
            return
        self.epoch = whole("epoch", state["epoch"], -1, MOST)
        # The order follows from it, as all that is drawn after a resume.
        self._seed = whole("seed", state.get("seed", self._seed), 0, MOST)
        self.skipped, self._base = whole("skipped", state["skipped"], 0, MOST), whole("base", state["base"], 0, MOST)
        if "order" in arrays:
            self._take_order(arrays["order"])
            self.cursor = whole("cursor", state["cursor"], 0, len(self._order))
            if len(self._order) > self.ring.capacity:
                self._leave_out_gone()
            self._publish()
            return
        rows = whole("rows", state["rows"], 0, max(0, self.ring.added - self._base))
        self.cursor = whole("cursor", state["cursor"], 0, rows)
        self._order = self._permutation(rows) if self.epoch >= 0 else np.empty(0, np.int64)

    def _take_order(self, given: Any) -> None:
        most = self.ring.keys_end - 1 - self._base
        if isinstance(given, np.ndarray):
            self._order = distinct("order", wholes("order", given, 0, most))
            return
        if isinstance(given, ByName):
            given.check("order", most)
            self._order = given
            return
        size, count = self.ring.size, 0
        named = np.zeros(size, bool)  # of rows that are there; of others it does not matter
        for first, piece in pieces(given):
            places = wholes("order", piece, 0, most, first=first).astype(np.int64) + (self._base - self.ring.oldest)
            places = places[places >= 0]
            named[places] = True
            count += len(places)
        if count > np.count_nonzero(named):
            raise ValueError("order: a row is there more than once")
        self._order = Parts(given)

    def _leave_out_gone(self) -> None:
        """Forget rows of the epoch that did not come back to a smaller buffer."""
        there = self.ring.alive(self._order[:] + self._base)
        self.skipped += int((~there[self.cursor :]).sum())
        self.cursor = int(there[: self.cursor].sum())
        self._order = self._order[:][there]

    def clear(self) -> None:
        self.cursor, self._order = 0, np.empty(0, np.int64)

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.epoch, self.cursor, self.skipped, self._base, len(self._order)

    @numbers.setter
    def numbers(self, numbers: Sequence[float]) -> None:
        epoch, self.cursor, self.skipped, self._base, rows = map(int, numbers)
        if self._common is not None:
            self.epoch, self._order = epoch, self._common[:rows]
        elif (epoch, rows) != (self.epoch, len(self._order)):
            self.epoch = epoch
            self._order = self._permutation(rows) if rows else np.empty(0, np.int64)

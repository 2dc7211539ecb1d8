"""Which rows are drawn: one drawer for each kind of selection. They see keys, versions and priorities, never data."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from pipeline.buffer.transitions.layout import VERSION
from pipeline.buffer.transitions.ring import Ring
from pipeline.config import Ordered, Selection, Uniform, WithoutReplacement
from pipeline.errors import ConfigError, Starved

Ints = np.ndarray
Floats = np.ndarray
_ROUNDS = 4  # of drawing again what is no start, before the starts are listed


class Starts(Protocol):
    """Which rows can be drawn, where not all can: those that begin a sequence."""

    def mask(self, keys: Ints) -> Ints:
        """Whether each key is a start."""
        ...

    def all(self) -> Ints:
        """Return the keys of every start, oldest first."""
        ...


class Drawer:
    """Draws keys out of a ring. Subclasses say how; what is here serves those that draw with replacement."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def added(self, first: int, count: int) -> None:
        """Take in that ``count`` rows were added, from the key ``first`` on."""

    def draw(self, rng: np.random.Generator, count: int, starts: Starts | None = None) -> Ints:
        """Return ``count`` keys.

        Raises:
            Starved: there is nothing that could be drawn.
        """
        keys = self._any(rng, count)
        if starts is None:
            return keys
        for _ in range(_ROUNDS):
            wrong = np.flatnonzero(~starts.mask(keys))
            if not len(wrong):
                return keys
            keys[wrong] = self._any(rng, len(wrong))
        wrong = np.flatnonzero(~starts.mask(keys))
        if len(wrong):
            keys[wrong] = self._of(rng, len(wrong), starts.all())
        return keys

    def _any(self, rng: np.random.Generator, count: int) -> Ints:
        raise NotImplementedError

    def _of(self, rng: np.random.Generator, count: int, keys: Ints) -> Ints:
        """Draw out of ``keys`` alone."""
        mass = np.cumsum(self.mass(keys))
        if not len(keys) or not mass[-1] > 0:
            raise Starved("no row that could be drawn begins a sequence as long as asked; add rows, or ask for less")
        last = np.nextafter(mass[-1], 0)
        found: Ints = keys[np.searchsorted(mass, np.minimum(rng.random(count) * mass[-1], last), side="right")]
        return found

    def mass(self, keys: Ints) -> Floats:
        """Return numbers in proportion to which keys are drawn."""
        return np.ones(len(keys))

    def weights(self, keys: Ints) -> Floats | None:
        """Return the importance weight of drawn keys, float64; None where all are alike."""
        return None

    def update(self, keys: Ints, priorities: Floats) -> None:
        """Take in priorities that were checked, of keys whose rows are there.

        Raises:
            ConfigError: priorities play no part here.
        """
        raise ConfigError("priorities play no part in this buffer's selection; build it with select='prioritized'")

    def state(self) -> dict[str, Any]:
        """Return what the next draws depend on, but for the generator: plain values."""
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return that part of the state which grows with the buffer: one value for each row, oldest first."""
        return {}

    def load(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Take back what :meth:`state` and :meth:`arrays` gave, after the ring took back its rows."""

    def clear(self) -> None:
        """Take in that no row is left."""


class UniformDrawer(Drawer):
    """Each row alike."""

    def __init__(self, ring: Ring, options: Uniform) -> None:
        super().__init__(ring)
        self._window = options.window

    def _any(self, rng: np.random.Generator, count: int) -> Ints:
        ring = self.ring
        size = ring.size if self._window is None else min(ring.size, self._window)
        return rng.integers(ring.added - size, ring.added, count)

    def mass(self, keys: Ints) -> Floats:
        if self._window is None:
            return np.ones(len(keys))
        return (keys >= self.ring.added - self._window).astype(np.float64)


class OrderedDrawer(Drawer):
    """The first of an order."""

    def __init__(self, ring: Ring, options: Ordered) -> None:
        super().__init__(ring)
        self._options = options

    def draw(self, rng: np.random.Generator, count: int, starts: Starts | None = None) -> Ints:
        keys = self.ring.keys() if starts is None else starts.all()
        if count > len(keys):
            raise Starved(f"{count} rows were asked for in order, and {len(keys)} are there; add rows, or ask for less")
        by = self._options.by
        if by in ("fifo", "lifo"):
            return (keys if by == "fifo" else keys[::-1])[:count].copy()  # the starts are listed once, and kept
        values = self._values(keys)
        if by in ("freshest", "max"):
            values = -values if values.dtype.kind == "f" else ~values  # exact, where -values of whole numbers is not
        # Of equals the oldest is first, as a stable order has it; what is no number comes last.
        first: Ints = keys[np.lexsort((keys, values))[:count]]
        return first

    def _values(self, keys: Ints) -> np.ndarray:
        storage, field = self.ring.storage, self._options.field
        if not field:
            return self.ring.mark(VERSION, keys)
        assert storage.layout is not None
        column = storage.layout.column(field)
        if column.shape or column.torch_only is not None or column.bits.kind == "c":
            raise ConfigError.of("field", field, f"{column}; one real number in each row is needed")
        return self.ring.mark(field, keys)


class EpochDrawer(Drawer):
    """Each row once in an epoch."""

    def __init__(self, ring: Ring, options: WithoutReplacement, seed: int) -> None:
        super().__init__(ring)
        self.last, self._seed = options.last, seed
        self.epoch, self.cursor, self.skipped = -1, 0, 0
        self._base = 0
        self._order: Ints = np.empty(0, np.int64)

    def draw(self, rng: np.random.Generator, count: int, starts: Starts | None = None) -> Ints:
        if count > self.ring.size and self.last != "keep":
            raise self._starved(count)
        before = (self.epoch, self.cursor, self.skipped, self._base, self._order)
        try:
            return self._draw(count, starts)
        except Starved:
            self.epoch, self.cursor, self.skipped, self._base, self._order = before
            raise

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
            self._begin()
            begun = True
        return np.concatenate(drawn)

    def _starved(self, count: int) -> Starved:
        return Starved(
            f"{count} were asked for without replacement, and of the {self.ring.size} rows that are there fewer can be "
            "drawn; add rows, or ask for less"
        )

    @property
    def left(self) -> int:
        """How many rows of the epoch were not drawn; some may have gone."""
        return len(self._order) - self.cursor

    @property
    def at_end(self) -> bool:
        """Whether the epoch has nothing left."""
        return self.cursor >= len(self._order)

    def _next(self, most: int, starts: Starts | None) -> Ints:
        keys = self._order[self.cursor : self.cursor + most] + self._base
        self.cursor += len(keys)
        there = self.ring.alive(keys)
        self.skipped += int((~there).sum())
        keys = keys[there]
        kept: Ints = keys if starts is None else keys[starts.mask(keys)]
        return kept

    def _begin(self) -> None:
        self.epoch += 1
        self.cursor, self._base = 0, self.ring.oldest
        self._order = self._permutation(self.ring.size)

    def _permutation(self, size: int) -> Ints:
        order: Ints = np.random.Generator(np.random.PCG64([self._seed, self.epoch])).permutation(size)
        return order

    def state(self) -> dict[str, Any]:
        names = ("epoch", "cursor", "skipped")
        return {name: getattr(self, name) for name in names} | {"base": self._base, "rows": len(self._order)}

    def load(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        if not state:
            return
        self.epoch, self.cursor, self.skipped = state["epoch"], state["cursor"], state["skipped"]
        self._base = state["base"]
        self._order = self._permutation(state["rows"]) if self.epoch >= 0 else np.empty(0, np.int64)

    def clear(self) -> None:
        self.cursor, self._order = 0, np.empty(0, np.int64)


def make_drawer(ring: Ring, options: Selection, seed: int) -> Drawer:
    """Return the drawer for a selection."""
    from pipeline.buffer.transitions.priorities import PriorityDrawer

    if isinstance(options, Uniform):
        return UniformDrawer(ring, options)
    if isinstance(options, WithoutReplacement):
        return EpochDrawer(ring, options, seed)
    if isinstance(options, Ordered):
        return OrderedDrawer(ring, options)
    return PriorityDrawer(ring, options)

"""Which rows are drawn: one drawer for each kind of selection. They see keys, versions and priorities, never data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from pipeline.buffer.transitions.best import Best
from pipeline.buffer.transitions.elsewhere import AT_ONCE
from pipeline.buffer.transitions.layout import VERSION
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.sums import SumTree
from pipeline.buffer.transitions.uses import Uses
from pipeline.buffer.transitions.windows import Window
from pipeline.config import Ordered, Prioritized, Selection, Uniform, WithoutReplacement
from pipeline.errors import ConfigError, Starved

Ints = np.ndarray
Floats = np.ndarray
_ROUNDS, _MOST_TRIES = 4, 1 << 14


def rounds(missing: int, size: int) -> Iterator[int]:
    """Yield how many rows are tried next, where not all can be drawn: twice as many each time, until listing all
    that can be, out of ``size``, costs less."""
    tries, spent = max(1, missing), 0
    for round_ in itertools.count():
        if round_ >= _ROUNDS and spent > size // 8:
            return
        yield tries
        spent += tries
        tries = min(2 * tries, max(missing, _MOST_TRIES))


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
        wrong = np.flatnonzero(~starts.mask(keys))
        for tries in rounds(len(wrong), self.ring.size):
            if not len(wrong):
                return keys
            # Of more tries than are missing those that can be drawn are taken in their order: each is as likely.
            found = self._any(rng, tries)
            found = found[starts.mask(found)][: len(wrong)]
            keys[wrong[: len(found)]] = found
            wrong = wrong[len(found) :]
        if len(wrong):
            keys[wrong] = self._of(rng, len(wrong), starts.all())
        return keys

    def before(self) -> Any:
        """Return what :meth:`undo` takes to undo the next :meth:`draw`, but for the generator's part."""
        return None

    def undo(self, before: Any) -> None:
        """Undo the last :meth:`draw`: its rows could not be had."""

    def _any(self, rng: np.random.Generator, count: int) -> Ints:
        raise NotImplementedError

    def _of(self, rng: np.random.Generator, count: int, keys: Ints) -> Ints:
        """Draw out of ``keys`` alone."""
        mass = np.cumsum(self.mass(keys))
        if not len(keys) or not mass[-1] > 0:
            raise Starved(
                "nothing that could be drawn is as it was asked for: no row begins a sequence so long, or meets the "
                "condition; add rows, or ask for less"
            )
        last = np.nextafter(mass[-1], 0)
        found: Ints = keys[np.searchsorted(mass, np.minimum(rng.random(count) * mass[-1], last), side="right")]
        return found

    def mass(self, keys: Ints) -> Floats:
        """Return numbers in proportion to which keys are drawn."""
        return np.ones(len(keys))

    def looks_at(self, count: int) -> int:
        """Return about how many rows are looked at when so many are drawn, out of all."""
        return count

    def weights(self, keys: Ints) -> Floats | None:
        """Return the importance weight of drawn keys, float64; None where all are alike."""
        return None

    takes_priorities = False
    """Whether priorities play a part."""

    def check_priorities(self, priorities: Floats) -> None:
        """Refuse priorities that :meth:`update` would refuse.

        Raises:
            ConfigError: they are too large.
        """

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

    def rebuild(self) -> None:
        """Compute anew what follows from the rows: a process was killed while it changed that, or the rows."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """What changes with draws and updates, but for arrays that grow with the buffer: all that another process has
        to take over to draw on from here. At most five."""
        return ()

    @numbers.setter
    def numbers(self, numbers: Sequence[float]) -> None:
        """Take over what another process has."""


class UniformDrawer(Drawer):
    """Each row alike."""

    def __init__(self, ring: Ring, options: Uniform) -> None:
        super().__init__(ring)
        self._window = Window.of(ring, options)

    def _any(self, rng: np.random.Generator, count: int) -> Ints:
        ring = self.ring
        if ring.scattered:
            return ring.key_at(rng.integers(0, ring.size, count))
        return rng.integers(
            *(ring.added - ring.size, ring.added) if self._window is None else self._window.bounds(), count
        )

    def draw(self, rng: np.random.Generator, count: int, starts: Starts | None = None) -> Ints:
        if self._window is None or self._window.whole:
            return super().draw(rng, count, starts)
        return super().draw(rng, count, _Both(self._window, starts))

    def looks_at(self, count: int) -> int:
        return count if self._window is None else max(count, self._window.looks_at())

    def mass(self, keys: Ints) -> Floats:
        return np.ones(len(keys)) if self._window is None else self._window.holds(keys).astype(np.float64)

    def state(self) -> dict[str, Any]:
        return {} if self._window is None else self._window.state()

    def load(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        if self._window is not None:
            self._window.load(state)


class _Both:
    """Starts that lie in a window."""

    def __init__(self, window: Window, starts: Starts | None) -> None:
        self._window, self._starts = window, starts

    def mask(self, keys: Ints) -> Ints:
        held = self._window.holds(keys)
        return held if self._starts is None else held & self._starts.mask(keys)

    def all(self) -> Ints:
        if self._starts is None:
            return self._window.all()
        keys = self._starts.all()
        held: Ints = keys[self._window.holds(keys)]
        return held


class OrderedDrawer(Drawer):
    """The first of an order."""

    def __init__(self, ring: Ring, options: Ordered) -> None:
        super().__init__(ring)
        self._options = options
        self._uses = None if options.uses is None else Uses(ring, options.uses)
        self._used_up = 0
        self._best = Best(ring, self._ranks) if options.by not in ("fifo", "lifo") and not ring.common else None

    def added(self, first: int, count: int) -> None:
        if self._uses is not None:
            self._uses.added(first, count)

    def draw(self, rng: np.random.Generator, count: int, starts: Starts | None = None) -> Ints:
        if self._best is not None and starts is None:
            drawn = self._first(self._best.among(count, self._open), count)
            if self._uses is not None:
                self._uses.take(drawn)
            return drawn
        if self._uses is None:
            return self._first(self._listed(count) if starts is None else starts.all(), count)
        if self._options.by in ("fifo", "lifo") and starts is None and self.ring.dense:
            keys = self._ends(self._uses, count)
        else:
            keys = self.ring.keys() if starts is None else starts.all()
            keys = keys[self._uses.left(keys) > 0]
        drawn = self._first(keys, count)
        self._uses.take(drawn)
        return drawn

    def _open(self, keys: Ints) -> Ints:
        """Return those of the keys whose rows may be drawn."""
        if self._uses is None:
            return keys
        open_: Ints = keys[self._uses.left(keys) > 0]
        return open_

    def looks_at(self, count: int) -> int:
        listed = not self.ring.dense or self._options.by not in ("fifo", "lifo")
        return max(count, self.ring.size) if listed or self._uses is not None else count

    def before(self) -> Any:
        if self._uses is not None:
            self._uses.begin()

    def undo(self, before: Any) -> None:
        if self._uses is not None:
            self._uses.give_back()
            self._used_up = 0

    def arrays(self) -> dict[str, np.ndarray]:
        return {} if self._uses is None else {"used": self._uses.values()}

    def load(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        if self._uses is not None:
            self._uses.load(arrays.get("used"))
            self._used_up = 0
        if self._best is not None:
            self._best = Best(self.ring, self._ranks)

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self._used_up,)

    @numbers.setter
    def numbers(self, numbers: Sequence[float]) -> None:
        self._used_up = int(numbers[0])

    def _listed(self, count: int) -> Ints:
        """Return the keys of all rows, oldest first; where that is the order of the draws, no more than are drawn."""
        ring, by = self.ring, self._options.by
        if not ring.dense or by not in ("fifo", "lifo") or count > ring.size:
            return ring.keys()
        return np.arange(count) + (ring.oldest if by == "fifo" else ring.added - count)

    def _ends(self, uses: Uses, count: int) -> Ints:
        """Return the rows with uses left that come first, oldest first: ``count`` or more, if there are so many."""
        ring, lifo, width, missing = self.ring, self._options.by == "lifo", 4 * count, count
        # Rows before that have no use left, and get none.
        begin, end, found = max(self._used_up, ring.oldest), ring.added, [np.empty(0, np.int64)]
        while begin < end and missing > 0:
            keys = np.arange(max(begin, end - width), end) if lifo else np.arange(begin, min(end, begin + width))
            begin, end = (begin, int(keys[0])) if lifo else (int(keys[-1]) + 1, end)
            found.append(keys[uses.left(keys) > 0])
            missing -= len(found[-1])
            width = max(width, min(4 * width, AT_ONCE))
        keys = np.concatenate(found[::-1] if lifo else found)
        if not lifo:
            self._used_up = int(keys[0]) if len(keys) else begin
        return keys

    def _first(self, keys: Ints, count: int) -> Ints:
        if count > len(keys):
            raise Starved(f"{count} rows were asked for in order, and {len(keys)} are there; add rows, or ask for less")
        by = self._options.by
        if by in ("fifo", "lifo"):
            return (keys if by == "fifo" else keys[::-1])[:count].copy()  # the starts are listed once, and kept
        values = self._ranks(keys)
        border = np.partition(values, count - 1)[count - 1]
        if border == border:  # else fewer than that are numbers
            within = np.flatnonzero(values <= border)
            keys, values = keys[within], values[within]
        # Of equals the oldest is first, as a stable order has it; what is no number comes last.
        first: Ints = keys[np.argsort(values, kind="stable")[:count]]
        return first

    def _ranks(self, keys: Ints) -> np.ndarray:
        """Return numbers by which rows are ordered, the lowest first."""
        values = self._values(keys)
        if self._options.by not in ("freshest", "max"):
            return values
        return -values if values.dtype.kind == "f" else ~values  # exact, where -values of whole numbers is not

    def _values(self, keys: Ints) -> np.ndarray:
        storage, field = self.ring.storage, self._options.field
        if not field:
            return self.ring.mark(VERSION, keys)
        assert storage.layout is not None
        column = storage.layout.column(field)
        if column.shape or column.torch_only is not None or column.bits.kind == "c":
            raise ConfigError.of("field", field, f"{column}; one real number in each row is needed")
        return self.ring.mark(field, keys)


def make_drawer(ring: Ring, options: Selection, seed: int, new_tree: Callable[[int], SumTree] = SumTree) -> Drawer:
    """Return the drawer for a selection; ``new_tree`` makes the tree of what rows weigh."""
    from pipeline.buffer.transitions.ageing import AgeingDrawer
    from pipeline.buffer.transitions.consuming import ConsumingDrawer
    from pipeline.buffer.transitions.epochs import EpochDrawer
    from pipeline.buffer.transitions.priorities import PriorityDrawer

    if isinstance(options, Uniform):
        return UniformDrawer(ring, options) if options.uses is None else ConsumingDrawer(ring, options, new_tree)
    if isinstance(options, WithoutReplacement):
        return EpochDrawer(ring, options, seed)
    if isinstance(options, Ordered):
        return OrderedDrawer(ring, options)
    if isinstance(options, Prioritized):
        return PriorityDrawer(ring, options, new_tree)
    return AgeingDrawer(ring, options, new_tree)

"""The newest rows of a ring: so many of them, or those of so many episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.buffer.transitions.given import distinct, each_whole
from pipeline.buffer.transitions.ring import Ring
from pipeline.config import Uniform

Ints = np.ndarray


class Window:
    """Which rows can be drawn. Whatever the kind, all of them lie in :meth:`bounds`, and :meth:`holds` tells which."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    @classmethod
    def of(cls, ring: Ring, options: Uniform) -> Window | None:
        """Return the window of a selection; None: every row can be drawn."""
        if options.window_trajectories is not None:
            return EpisodeWindow(ring, options.window_trajectories)
        return None if options.window is None else RowWindow(ring, options.window)

    whole = True
    """Whether every row within the bounds is in it."""

    def bounds(self) -> tuple[int, int]:
        """Return the key of the first row that may be in it, and that after the last."""
        raise NotImplementedError

    def holds(self, keys: Ints) -> Ints:
        """Whether the row of each key, which is there, is in it: [n] bool."""
        raise NotImplementedError

    def all(self) -> Ints:
        """Return the keys of all rows that are in it, oldest first."""
        begin, _ = self.bounds()
        found = [np.empty(0, np.int64)]
        for piece in self._ring.pieces():
            keys = piece[piece >= begin]
            if len(keys):
                found.append(keys[self.holds(keys)])
        return np.concatenate(found)

    def looks_at(self) -> int:
        """Return about how many episodes, or rows, have to be looked at before the bounds are known."""
        return 0

    def state(self) -> dict[str, Any]:
        """Return what cannot be told from the rows: plain values."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state` gave, after the ring took back its rows."""


class RowWindow(Window):
    """The newest ``rows`` rows."""

    def __init__(self, ring: Ring, rows: int) -> None:
        super().__init__(ring)
        self._rows = rows

    def bounds(self) -> tuple[int, int]:
        return self._ring.added - min(self._ring.size, self._rows), self._ring.added

    def holds(self, keys: Ints) -> Ints:
        held: Ints = keys >= self.bounds()[0]
        return held


class EpisodeWindow(Window):
    """The rows of the newest ``episodes`` episodes, of those that have rows there, by the keys of their first rows."""

    whole = False

    def __init__(self, ring: Ring, episodes: int) -> None:
        super().__init__(ring)
        self._episodes = episodes
        self._first, self._as_of = 0, (-1, -1, -1)

    def bounds(self) -> tuple[int, int]:
        ring = self._ring
        if self._as_of != self._now:
            self._first, self._as_of = ring.begin_of_newest(self._episodes), self._now
        return max(self._first, ring.oldest), ring.added

    @property
    def _now(self) -> tuple[int, int, int]:
        return self._ring.added, self._ring.size, self._ring.cuts

    def holds(self, keys: Ints) -> Ints:
        self.bounds()
        held: Ints = self._ring.firsts(keys) >= self._first
        return held

    def looks_at(self) -> int:
        return 0 if self._as_of == self._now else self._ring.size

    def state(self) -> dict[str, Any]:
        return {"begun": self._ring.begun()}

    def load(self, state: dict[str, Any]) -> None:
        begun = state.get("begun", [])
        episodes = [episode for episode, _ in begun]
        each_whole("begun", episodes, 0, self._ring.episodes.next - 1)
        # Their first rows are gone.
        each_whole("begun", (first for _, first in begun), 0, self._ring.oldest - 1)
        distinct("begun", np.array(episodes, np.int64))
        self._as_of = (-1, -1, -1)
        self._ring.take_begun(begun)

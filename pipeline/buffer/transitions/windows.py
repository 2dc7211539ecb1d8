"""The newest rows of a ring: so many of them, or those of so many episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.buffer.transitions.layout import EPISODE
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
        self._first, self._as_of = 0, (-1, -1)

    def bounds(self) -> tuple[int, int]:
        ring = self._ring
        if self._as_of != (ring.added, ring.size):
            self._first, self._as_of = self._find(), (ring.added, ring.size)
        return max(self._first, ring.oldest), ring.added

    def holds(self, keys: Ints) -> Ints:
        self.bounds()
        ring = self._ring
        held: Ints = ring.episodes.lengths.first(ring.mark(EPISODE, keys)) >= self._first
        return held

    def looks_at(self) -> int:
        ring = self._ring
        return 0 if self._as_of == (ring.added, ring.size) else ring.size

    def _find(self) -> int:
        """Return the key of the first row of the oldest episode that is in it; it may be gone."""
        ring, lengths = self._ring, self._ring.episodes.lengths
        firsts = lengths.first(lengths.numbers())
        begun = firsts[firsts >= ring.oldest]  # the first row is there, so the episode has rows
        if len(begun) < self._episodes:  # then some that began earlier belong to it
            begun = np.unique(lengths.first(np.unique(ring.mark(EPISODE, ring.keys()))))
        at = max(0, len(begun) - self._episodes)
        return int(np.partition(begun, at)[at])

    def state(self) -> dict[str, Any]:
        ring = self._ring
        there = ring.mark(EPISODE, ring.keys()) if ring.size else np.empty(0, np.int64)
        # One that is open may go on, though none of its rows is left.
        episodes = np.union1d(there, ring.episodes.open())
        firsts = ring.episodes.lengths.first(episodes)
        gone = firsts < ring.oldest
        return {"begun": np.column_stack([episodes[gone], firsts[gone]]).tolist()}

    def load(self, state: dict[str, Any]) -> None:
        self._as_of = (-1, -1)
        lengths = self._ring.episodes.lengths
        for episode, first in state.get("begun", []):
            if lengths.knows(episode):
                lengths.set_first(episode, first)

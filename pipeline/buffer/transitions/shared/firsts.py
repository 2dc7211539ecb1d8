"""Where the episode of each row began, for windows of episodes: each process must come to the same ones, whatever rows
it has seen."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.buffer.transitions.episodes import Marks
from pipeline.buffer.transitions.layout import EPISODE, PLACE
from pipeline.buffer.transitions.shared.arrays import FIRSTS, TAIL_FIRSTS, SharedArrays

if TYPE_CHECKING:
    from pipeline.buffer.transitions.shared.ring import SharedRing

Ints = np.ndarray
_LOOKED_AT = 1024


class Firsts:
    """By slot, the key of the first row of its row's episode; and by environment, that of its newest episode. The
    caller has the lock. What lies in a slot is about its row: it goes when that does."""

    def __init__(self, ring: SharedRing, arrays: SharedArrays) -> None:
        self._ring: SharedRing = weakref.proxy(ring)  # it has us
        self._firsts, self._tails = arrays[FIRSTS], arrays[TAIL_FIRSTS]

    def note_one(self, key: int, env: int, place: int) -> None:
        """Take in a row that is about to be written."""
        if place == 0:
            self._ring.changing(TAIL_FIRSTS, np.array([env]))
            self._tails[env] = key
        self._firsts[key % self._ring.capacity] = self._tails[env]

    def note(self, key: int, marks: Marks, envs: Ints, before: Ints, numbers: Ints) -> None:
        """Take in rows that are about to be written.

        Args:
            key: of the first.
            marks: of all.
            envs: the environments that they are of, each once.
            before: [3, environments] what their open episodes were.
            numbers: the newest episode of each.
        """
        names, of = np.unique(marks.episode, return_inverse=True)
        firsts = np.zeros(len(names), np.int64)
        open_ = before[0] >= 0
        firsts[np.searchsorted(names, before[1, open_])] = self._tails[envs[open_]]
        begins = np.flatnonzero(marks.place == 0)
        firsts[of[begins]] = key + begins
        kept = np.arange(len(of))[-self._ring.capacity :]
        self._firsts[(key + kept) % self._ring.capacity] = firsts[of[kept]]
        self._ring.changing(TAIL_FIRSTS, envs)
        self._tails[envs] = firsts[np.searchsorted(names, numbers)]

    def of(self, keys: Ints) -> Ints:
        """Return the key of the first row of each row's episode."""
        firsts: Ints = self._firsts[self._ring.slots(keys)]
        return firsts

    def of_episodes(self, episodes: Ints) -> Ints:
        """Return the keys of the first rows of episodes that have rows there, or are open."""
        ring = self._ring
        open_ = np.array(ring.episodes.state(), np.int64).reshape(-1, 4)
        keys = ring.keys() if ring.size else np.empty(0, np.int64)
        there = ring.mark(EPISODE, keys) if len(keys) else keys
        names, at = np.unique(np.concatenate([there, open_[:, 2]]), return_index=True)
        firsts = np.concatenate([self.of(keys), self._tails[open_[:, 0]]])[at]
        found: Ints = firsts[np.searchsorted(names, episodes)]
        return found

    def begin_of_newest(self, episodes: int) -> int:
        """See :meth:`Ring.begin_of_newest`. Looks at as many of the newest rows as the window has, twice at the most."""
        ring = self._ring
        missing, end, width = episodes, ring.added, _LOOKED_AT
        while end > ring.oldest:
            keys = np.arange(max(ring.oldest, end - width), end)
            begins = keys[ring.mark(PLACE, keys) == 0]
            if len(begins) >= missing:
                return int(begins[len(begins) - missing])
            missing, end, width = missing - len(begins), int(keys[0]), 2 * width
        begun = np.unique(self.of(ring.keys()))  # some that began earlier belong to it
        return int(begun[max(0, len(begun) - episodes)])

    def guess(self) -> None:
        """Take in that rows are there again: those whose episode's first row is gone count from their oldest one, until
        :meth:`take_begun` knows better."""
        ring = self._ring
        keys = ring.keys()
        names, at, of = np.unique(ring.mark(EPISODE, keys), return_index=True, return_inverse=True)
        firsts = keys[at]
        self._firsts[ring.slots(keys)] = firsts[of]
        for env, _, number, _ in ring.episodes.state():
            found = int(np.searchsorted(names, number))
            self._tails[env] = firsts[found] if found < len(names) and names[found] == number else 0

    def take_begun(self, begun: Sequence[Sequence[int]]) -> None:
        """Take in [number, key of its first row] of episodes whose first row is gone."""
        ring = self._ring
        if not begun:
            return
        known = {int(number): int(first) for number, first in begun}
        names, firsts = np.array(sorted(known.items()), np.int64).T
        keys = ring.keys() if ring.size else np.empty(0, np.int64)
        numbers = ring.mark(EPISODE, keys) if len(keys) else keys
        at = np.minimum(np.searchsorted(names, numbers), len(names) - 1)
        told = names[at] == numbers
        self._firsts[ring.slots(keys[told])] = firsts[at[told]]
        for env, _, number, _ in ring.episodes.state():
            if number in known:
                self._tails[env] = known[number]

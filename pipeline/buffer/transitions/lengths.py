"""How long each episode is, as far as anybody still asks."""

from __future__ import annotations

from typing import Any

import numpy as np

Ints = np.ndarray
_NONE: Ints = np.empty(0, np.int64)


class Lengths:
    """How many rows each episode has had, and the key of its first; by the episode's number, which is never reused.

    The newest numbers lie side by side. Of those before :attr:`base` only few are remembered: episodes that go on, or
    have rows, while many others began and ended. They lie in front, in their order; so an environment that rests, or
    never ends its episode, costs one place, and not one for each episode of the others.
    """

    def __init__(self) -> None:
        self.base = 0
        """Episodes from this one on are remembered, all of them."""
        self._far = _NONE  # the numbers of those that are remembered of the episodes before it
        self._behind = 0  # how many these are
        self._shift = 0  # what an episode's number, from `base` on, is to be made smaller by
        self._length = np.zeros(64, np.int32)
        self._first = np.zeros(64, np.int64)
        self._end = 0

    def _at(self, episodes: Any) -> Any:
        """Return where episodes lie, which are remembered."""
        if not self._behind:
            return episodes - self.base
        return np.where(episodes < self.base, np.searchsorted(self._far, episodes), episodes - self._shift)

    def note(self, episodes: Ints, places: Ints, key: int) -> None:
        """Take in rows, the first of which has the key ``key``."""
        self._reach(int(episodes.max()) + 1)
        at = self._at(episodes)
        self._length[at] = places + 1  # of an episode that is named more often its newest row counts
        begins = np.flatnonzero(places == 0)
        self._first[at[begins]] = key + begins

    def note_one(self, episode: int, place: int, key: int) -> None:
        """Take in one row."""
        if place == 0:
            self._reach(episode + 1)
            self._first[episode - self._shift] = key
        at = episode - self._shift if episode >= self.base else int(np.searchsorted(self._far, episode))
        self._length[at] = place + 1

    def begin(self, episode: int, key: int) -> None:
        """Take in a new episode, and the key of its first row; :meth:`set` follows."""
        self._reach(episode + 1)
        self._first[episode - self._shift] = key

    def set(self, episodes: Ints, lengths: Ints) -> None:
        """Take in how many rows episodes have had."""
        self._length[self._at(episodes)] = lengths

    def set_one(self, episode: int, length: int) -> None:
        """Take in how many rows an episode has had."""
        at = episode - self._shift if episode >= self.base else int(np.searchsorted(self._far, episode))
        self._length[at] = length

    def of(self, episodes: Ints) -> Ints:
        """Return how many rows episodes have had."""
        lengths: Ints = self._length[self._at(episodes)]
        return lengths

    def first(self, episodes: Ints) -> Ints:
        """Return the keys of the first rows of episodes; they may be gone."""
        firsts: Ints = self._first[self._at(episodes)]
        return firsts

    def set_first(self, episode: int, key: int) -> None:
        """Tell the key of an episode's first row, which is gone."""
        self._first[self._at(episode)] = key

    # -- what is remembered ------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """How many episodes are remembered from :attr:`base` on."""
        return self._end

    def numbers(self) -> Ints:
        """Return the numbers of all episodes that are remembered."""
        newest = np.arange(self.base, self.base + self._end)
        return np.concatenate([self._far, newest]) if self._behind else newest

    def knows(self, episode: int) -> bool:
        """Whether an episode is remembered."""
        return self.base <= episode < self.base + self._end or bool((self._far == episode).any())

    def trim(self, newest: int, needed: Ints = _NONE) -> None:
        """Forget all episodes but the ``newest`` so many, and those that are ``needed``, in any order."""
        end = self.base + self._end
        base = max(self.base, end - newest)
        far = np.unique(needed[needed < base])
        at = self._at(np.concatenate([far, np.arange(base, end)]))
        self._length, self._first = self._length[at], self._first[at]
        self._place(far, base)
        self._end = end - base
        self._grow(64)

    def _place(self, far: Ints, base: int) -> None:
        self._far, self._behind, self.base, self._shift = far, len(far), base, base - len(far)

    def start(self, base: int, end: int) -> None:
        """Forget all, and make room for the episodes from ``base`` to ``end``, of which nothing is known."""
        self._place(_NONE, base)
        self._end = end - base
        self._length, self._first = np.zeros(max(64, self._end), np.int32), np.zeros(max(64, self._end), np.int64)

    def fill(self, lengths: Ints, firsts: Ints) -> None:
        """Forget all but the episodes [n] from 0 on, of which this is known."""
        self.start(0, len(lengths))
        self._length[: len(lengths)], self._first[: len(lengths)] = lengths, firsts

    def remember(self, episodes: Ints) -> None:
        """Make room for episodes, of which nothing may be known."""
        low = episodes[episodes < self.base]
        far = np.union1d(self._far, low) if len(low) else self._far
        if len(far) > self._behind:
            lengths, firsts = np.zeros(len(far), np.int32), np.zeros(len(far), np.int64)
            at = np.searchsorted(far, self._far)
            lengths[at], firsts[at] = self._length[: self._behind], self._first[: self._behind]
            self._length = np.concatenate([lengths, self._length[self._behind :]])
            self._first = np.concatenate([firsts, self._first[self._behind :]])
            self._place(far, self.base)
        self._reach(int(episodes.max(initial=-1)) + 1)

    def note_back(self, episodes: Ints, places: Ints, key: int) -> None:
        """Take in rows [n] that are there again, in their order; the first rows of an episode may be gone.

        Args:
            episodes, places: [n] their marks.
            key: of the first of them.
        """
        self.remember(episodes)
        at = self._at(episodes)
        new = np.flatnonzero(self._length[at] == 0)[::-1]
        self._first[at[new]] = key + new  # of rows of one episode, the last that is written counts: the oldest
        self._length[at] = places + 1  # and here the newest

    def note_open(self, episodes: Ints, lengths: Ints) -> None:
        """Take in how many rows open episodes have had, though none may be there."""
        self.remember(episodes)
        self.set(episodes, lengths)

    def _reach(self, top: int) -> None:
        self._end = max(self._end, top - self.base)
        self._grow(self._behind + self._end)

    def _grow(self, least: int) -> None:
        if least > len(self._length):
            more = max(least, 2 * len(self._length)) - len(self._length)
            self._length = np.concatenate([self._length, np.zeros(more, np.int32)])
            self._first = np.concatenate([self._first, np.zeros(more, np.int64)])

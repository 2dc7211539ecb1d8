"""One process's part in a shared buffer: it takes over what others committed, and commits what it did."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from pipeline.buffer.transitions.drawing import Drawer
from pipeline.buffer.transitions.limiter import Counts
from pipeline.buffer.transitions.shared.header import COMMITS, DIRTY, WAITING, Counters, Header
from pipeline.buffer.transitions.shared.repair import repair
from pipeline.buffer.transitions.shared.ring import SharedRing
from pipeline.errors import ConfigError, Starved, TimedOut, UsageError

_HARMLESS = (ConfigError, Starved, TimedOut, UsageError)  # raised before anything is changed


class Keeper(Protocol):
    """Who counts the priorities that came too late."""

    stale_updates: int


class Member:
    """What a :class:`~pipeline.buffer.transitions.shared.lock.SharedLock` guards, as this process has it."""

    def __init__(self, header: Header, number: int, wake: Callable[[], None]) -> None:
        """Args:
        header: of the memory.
        number: of this process.
        wake: wakes other processes that wait. It is called before what they wait for is committed: killed between the
            two, this process has woken them for nothing; the other way round they might sleep for ever.
        """
        self.header, self.number, self._wake = header, number, wake
        self._ring: SharedRing | None = None
        self._commits = -1  # which one the parts are as of
        self._committed = Counters()
        self.replacing = False
        """Whether other parts are being made in the place of those that are bound: then no error is harmless."""

    def bind(self, ring: SharedRing, drawer: Drawer, counts: Counts, keeper: Keeper) -> None:
        """Have these parts be the buffer from now on. The caller has the lock, or nobody else has the memory."""
        self._ring, self._drawer, self._counts, self.replacing = ring, drawer, counts, False
        self._keeper: Keeper = weakref.proxy(keeper)  # it has us: in a circle, the memory would outlive its users

    def enter(self) -> None:
        """Take over what others did; repair what one of them left unfinished."""
        if self._ring is None:
            return
        words = self.header.words
        if words[DIRTY]:
            self._take_over()
            repair(self.header, self._ring, self._drawer)
            self._commit(self._counters())
        words[DIRTY] = self.number + 1
        if words[COMMITS] != self._commits:
            self._take_over()

    def leave(self, error: BaseException | None) -> None:
        """Commit. After an error that could have come in the midst of a change, leave it to the next to repair."""
        if self._ring is None:
            return
        if error is not None and (self.replacing or not isinstance(error, _HARMLESS)):
            self.replacing = False
            self._commits = self._ring.shared.shapes = -1  # nothing of this was committed: take all of it over again
            self._ring.episodes.doubt()
            return
        self._ring.episodes.cool()
        counters = self._counters()
        if counters != self._committed or self.header.intends:
            if self.header.words[WAITING] and _concerns(counters) != _concerns(self._committed):
                self._wake()
            cleared = self._committed.size > 0 and counters.size == 0
            self._commit(counters)
            self._ring.undo.forget()
            if cleared:
                self._give_back()
        self.header.words[DIRTY] = 0

    def commit(self) -> None:
        """Commit what was done up to now, and go on with the lock."""
        self.leave(None)
        self.enter()

    def publish(self) -> None:
        """Commit for the first time, before any other process has the memory."""
        self._commit(self._counters())

    def _commit(self, counters: Counters) -> None:
        self.header.commit(counters)
        self._committed, self._commits = counters, self.header.words[COMMITS]

    def _give_back(self) -> None:
        """Nothing of the rows is needed once it is committed that there are none."""
        assert self._ring is not None
        self._drawer.rebuild()
        storage = self._ring.shared
        if storage.layout is None:
            storage.give_back()

    def _counters(self) -> Counters:
        ring, counts = self._ring, self._counts
        assert ring is not None
        storage = ring.shared
        return Counters(
            *ring.counters,
            ring.episodes.next,
            ring.episodes.envs,
            counts.added,
            counts.sampled,
            self._keeper.stale_updates,
            storage.shapes,
            storage.text,
            self._drawer.numbers,
        )

    def _take_over(self) -> None:
        ring, counts = self._ring, self._counts
        assert ring is not None
        committed = self.header.read()
        storage = ring.shared
        if committed.shapes != storage.shapes:
            storage.take_over(committed.shapes, committed.text)
            if ring.followers is not None:
                ring.followers.take_over()
            ring.episodes.doubt()  # it may be that other rows have the keys of those that were there
        ring.counters = committed[:5]
        ring.episodes.take_over(committed.next_episode, committed.envs)
        counts.added, counts.sampled = committed.counted_in, committed.counted_out
        self._keeper.stale_updates = committed.stale_updates
        numbers = committed.drawer[: len(self._drawer.numbers)]
        self._drawer.numbers = numbers
        self._committed = committed._replace(drawer=self._drawer.numbers)
        self._commits = self.header.words[COMMITS]


def _concerns(counters: Counters) -> tuple[int, ...]:
    """What a limiter looks at."""
    return counters.added, counters.size, counters.counted_in, counters.counted_out

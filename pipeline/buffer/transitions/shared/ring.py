"""A ring whose rows other processes add to as well."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.buffer.transitions.episodes import Episodes, Marks
from pipeline.buffer.transitions.layout import CUT, END, EPISODE, PLACE, TRUNCATED
from pipeline.buffer.transitions.lengths import Lengths
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.shared.arrays import SharedArrays, name_of, number_of
from pipeline.buffer.transitions.shared.firsts import Firsts
from pipeline.buffer.transitions.shared.header import MOST_ENVS, PROCESSES, Header
from pipeline.buffer.transitions.shared.memory import SharedStorage
from pipeline.buffer.transitions.shared.spill import Spill
from pipeline.buffer.transitions.shared.undo import Undo
from pipeline.buffer.transitions.steady import Steady

Ints = np.ndarray


class Common(NamedTuple):
    """What the rings of all processes are about."""

    header: Header
    spill: Spill
    undo: Undo
    arrays: SharedArrays
    ordered: bool
    """Whether it is kept where each episode began."""


class Followers(Protocol):
    """What follows the rows."""

    def take_over(self) -> None:
        """Take in that another process has set, or forgotten, the columns."""
        ...

    def repair(self) -> None:
        """Take in that rows were given up, as who was about to overwrite them was killed."""
        ...


class SharedRing(Ring):
    """Notes what is about to be lost before it is; all else is that of a ring."""

    common = True

    followers: Followers | None = None
    """What keeps something of the rows beside them, and of their columns."""

    def __init__(self, storage: SharedStorage, common: Common) -> None:
        self._of, self._header, self._spill, self.undo = common, common.header, common.spill, common.undo
        self._restored: list[int] = []
        super().__init__(storage)
        self.shared = storage
        firsts = Firsts(self, common.arrays) if common.ordered else None
        self.episodes: SharedEpisodes = SharedEpisodes(common.header, self, firsts)
        self._begins = firsts

    def like(self, schema: Schema | None) -> SharedRing:
        """Return an empty one in the place of this one, which must not have rows."""
        storage = self.shared.again()
        if schema is not None:
            storage.shape(schema)
        ring = SharedRing(storage, self._of)
        ring.cuts = self.cuts + 1  # what other processes concluded from the rows of this one is no longer so
        return ring

    def array(self, name: str, dtype: type[np.generic]) -> np.ndarray:
        array = self._of.arrays[name]
        assert array.dtype == dtype
        return array

    def changing(self, name: str, places: Ints) -> None:
        self.undo.note(number_of(name), self._of.arrays[name], places)

    def take_back(self) -> None:
        """Make columns, and arrays beside the rows, what they were at the last commit."""
        columns, nexts = self.shared.column_names, list(self.shared.nexts.values())

        def array_of(number: int) -> np.ndarray | None:
            if number < 0:
                return self._of.arrays[name_of(number)]
            if number < len(columns):
                return self.storage.view(columns[number])
            return nexts[number - len(columns)] if number < len(columns) + len(nexts) else None

        self.undo.take_back(array_of)

    def changing_nexts(self, places: Ints) -> None:
        """Take in that next observations that are kept aside are about to be changed."""
        for number, array in enumerate(self.shared.nexts.values()):
            self.undo.note(len(self.shared.column_names) + number, array, places)

    def about_to_change(self, keys: Ints) -> None:
        if len(keys):
            self._spill.set_aside(int(keys.max()) + 1, self.storage)

    def changing_columns(self, keys: Ints, names: Iterable[str]) -> None:
        """Take in that columns of rows are about to be changed."""
        columns = self.shared.column_names
        for name in names:
            self.undo.note(columns.index(name), self.storage.view(name), self.slots(keys))

    def firsts(self, keys: Ints) -> Ints:
        return self._firsts.of(keys)

    def begin_of_newest(self, episodes: int) -> int:
        return self._firsts.begin_of_newest(episodes)

    def _firsts_of(self, episodes: Ints) -> Ints:
        return self._firsts.of_episodes(episodes)

    def take_begun(self, begun: Sequence[Sequence[int]]) -> None:
        self._firsts.take_begun(begun)

    @property
    def _firsts(self) -> Firsts:
        assert self._begins is not None, "it is not kept where episodes began"
        return self._begins

    @property
    def processes(self) -> int:
        """How many processes have joined: the next one's draws are of a stream that none of them had, in this life or
        one before."""
        return self._header.words[PROCESSES]

    @processes.setter
    def processes(self, processes: int) -> None:
        self._header.words[PROCESSES] = max(self._header.words[PROCESSES], processes)

    @property
    def counters(self) -> tuple[int, int, int, int, int]:
        """What another process has to take over: rows that were added, that are there, cuts, and how rows follow."""
        return self.added, self.size, self.cuts, self._stride, self._irregular

    @counters.setter
    def counters(self, counters: tuple[int, int, int, int, int]) -> None:
        self.added, self.size, self.cuts, self._stride, self._irregular = counters

    @property
    def cut_keys(self) -> list[int]:
        """Keys of rows with which an episode was cut: the rows tell, whichever process it was."""
        keys = self.keys() if self.storage.layout is not None else np.empty(0, np.int64)
        return keys[self.mark(END, keys) == CUT].tolist() if len(keys) else []

    @cut_keys.setter
    def cut_keys(self, keys: list[int]) -> None:
        """Rows that were read tell it too; see :meth:`restore`."""
        self._restored = keys

    def extend(
        self, arrays: Arrays, count: int, envs: Ints, ends: Ints | None, version: int, *, mixed: bool = False
    ) -> int:
        self._lose(min(self.added, self.added + count - self.capacity))
        return super().extend(arrays, count, envs, ends, version, mixed=mixed)

    def append(
        self, row: Mapping[str, Any], env: int, end: int, version: int, packed: list[Any] | None = None
    ) -> int:
        self._lose(self.added + 1 - self.capacity)
        return super().append(row, env, end, version, packed)

    def clear(self) -> None:
        self._spill.set_aside(self.added, self.storage)
        super().clear()

    def _lose(self, upto: int) -> None:
        """See to it that rows of keys before ``upto`` may be overwritten."""
        self._spill.set_aside(upto, self.storage)
        self._header.overwrite(upto)

    def cut(self, env: int | None = None) -> list[int]:
        """End the open episode of an environment, or of all, where it is."""
        cut = self.episodes.cut(env)
        self.cuts += len(cut)
        keys = [key for key in cut if key >= self.oldest]
        for key in keys:
            self.storage.view(END)[key % self.capacity] = CUT
        return keys

    def begin_links(self) -> None:
        """Know nothing of what follows what: :meth:`link_back` is called for all rows."""
        self._stride, self._irregular = 1, 0

    def relink(self) -> None:
        for key in self.truncated_keys:
            self.storage.view(END)[key % self.capacity] = TRUNCATED
        for key in self._restored:
            self.storage.view(END)[key % self.capacity] = CUT
        self._restored = []
        if self._begins is not None:
            self._begins.guess()


class SharedEpisodes(Episodes):
    """Open episodes that every process goes on with. They are noted before they change."""

    def __init__(self, header: Header, ring: SharedRing, firsts: Firsts | None) -> None:
        super().__init__()
        self._header, self._firsts = header, firsts
        self._lengths: SharedLengths = SharedLengths(ring)
        self.envs = 0

    @property
    def envs(self) -> int:
        """For how many environments it is known whether they have an open episode."""
        return self._tails.shape[1]

    @envs.setter
    def envs(self, envs: int) -> None:
        self._tails = self._header.tails[:, :envs]

    def take_over(self, next_episode: int, envs: int) -> None:
        """Go on from what another process has left."""
        self.next, self._hot = next_episode, None
        if envs != self.envs:
            self.envs = envs

    def doubt(self) -> None:
        """Look at all rows again before anything is said of them."""
        self._lengths.doubt()

    def steady(self, key: int, envs: Ints, count: int) -> Steady | None:
        """Nothing is kept at hand that other processes cannot see."""
        return None

    def cool(self) -> None:
        """Leave nothing that other processes cannot see."""
        self._cool()

    def _tail(self, env: int) -> tuple[int, int, int]:
        if env >= self.envs:
            before, after = self.envs, min(MOST_ENVS, max(env + 1, 2 * self.envs, 8))
            self._header.tails[:, before:after] = -1
            self.envs = after
        return super()._tail(env)

    def append(self, key: int, env: int, end: int) -> tuple[int, int, int]:
        if env >= self._tails.shape[1]:
            self._tail(env)
        self._header.note_one(env)
        found = super().append(key, env, end)
        if self._firsts is not None:
            self._firsts.note_one(key, env, found[1])
        return found

    def extend(self, key: int, envs: Ints, ends: Ints) -> Marks:
        self._tail(int(envs.max()))
        self._header.note(envs)
        if self._firsts is None:
            return super().extend(key, envs, ends)
        self._cool()
        before = self._tails[:, envs]
        marks = super().extend(key, envs, ends)
        self._firsts.note(key, marks, envs, before, self._tails[1, envs])
        return marks

    def mixed(self, key: int, envs: Ints, ends: Ints) -> Marks:
        self._tail(int(envs.max()))
        names = np.unique(envs)
        self._header.note(names)
        if self._firsts is None:
            return super().mixed(key, envs, ends)
        self._cool()
        before = self._tails[:, names]
        marks = super().mixed(key, envs, ends)
        self._firsts.note(key, marks, names, before, self._tails[1, names])
        return marks

    def cut(self, env: int | None = None) -> list[int]:
        if env is not None:
            self._tail(env)
        self._header.note(np.arange(self.envs) if env is None else np.array([env]))
        return super().cut(env)

    def load(self, state: list[list[int]], next_episode: int) -> None:
        self._hot = self._like = None
        self._header.note(np.arange(self._header.read().envs))
        self.envs = 0
        for env, *tail in state:
            self._tail(env)
            self._tails[:, env] = tail
        self.next = next_episode


class SharedLengths(Lengths):
    """How long episodes are, as far as this process was asked: rows of others are looked at then, and not before."""

    def __init__(self, ring: SharedRing) -> None:
        super().__init__()
        self._ring: SharedRing = weakref.proxy(ring)  # it has us: in a circle, memory would outlive its users
        self._seen = -1  # rows from this key on were not looked at; -1: none was

    def note(self, episodes: Ints, places: Ints, key: int) -> None:
        """The rows will tell."""

    def note_one(self, episode: int, place: int, key: int) -> None:
        """The row will tell."""

    def note_back(self, episodes: Ints, places: Ints, key: int) -> None:
        """The rows will tell."""

    def doubt(self) -> None:
        """Look at all rows again."""
        self._seen = -1

    def of(self, episodes: Ints) -> Ints:
        self._look()
        return super().of(episodes)

    def first(self, episodes: Ints) -> Ints:
        self._look()
        return super().first(episodes)

    @property
    def held(self) -> int:
        """Nothing that the ring would have to trim: this begins anew when it knows too much."""
        return 0

    def trim(self, newest: int, needed: Ints | None = None) -> None:
        """See :attr:`held`."""

    def start(self, base: int, end: int) -> None:
        """The rows will tell."""

    def _look(self) -> None:
        ring = self._ring
        if self._seen == ring.added or not ring.size:
            return
        known = ring.oldest <= self._seen < ring.added and self._end <= 2 * ring.size + 1024
        if not known:
            self._seen = ring.oldest
            super().start(max(0, ring.episodes.next - ring.size), ring.episodes.next)
        keys = np.arange(self._seen, ring.added)
        super().note_back(ring.mark(EPISODE, keys), ring.mark(PLACE, keys), self._seen)
        self._seen = ring.added

"""A ring of rows: the newest ``capacity`` of all that were ever added, each under a key that is never used again.

The key of a row is its number among all that were added, from 0; it lies in slot ``key % capacity``. So a key tells
whether its row is still there, and nothing is kept for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.bodies import rows_between
from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.buffer.transitions.elsewhere import AT_ONCE, Numbers
from pipeline.buffer.transitions.episodes import Episodes, Marks
from pipeline.buffer.transitions.layout import AHEAD, BEHIND, CUT, END, EPISODE, PLACE, SERIAL, TRUNCATED, VERSION
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.config.replay import MOST_ROWS

Ints = np.ndarray


class Ring:
    """Rows in the order in which they were added, and which of them follow each other in an episode."""

    scattered = False
    """Whether rows lie in any order, and none knows its neighbours; see :mod:`pipeline.buffer.transitions.pool`."""
    dense = True
    """Whether the keys of the rows that are there follow each other."""
    processes = 0
    """How many processes have joined, where several add rows."""
    numbered = ""
    """What tells how rows are numbered from how they had been, if a resume has given them other keys."""
    common = False
    """Whether processes have the rows in common; see :mod:`pipeline.buffer.transitions.shared`."""

    def __init__(self, storage: TransitionStorage) -> None:
        self.storage = storage
        self.capacity = storage.capacity
        self.added = 0
        """How many rows were ever added: the key of the next one."""
        self.size = 0
        self.episodes = Episodes()
        self.cuts = 0
        """How many episodes were cut: with :attr:`added`, this tells whether anything has changed."""
        self.cut_keys: list[int] = []
        """Keys of rows with which an episode was cut; some may be gone."""
        self.truncated_keys: list[int] = []
        """Keys of rows with which a save has truncated an open episode; some may be gone."""
        self._most_cut = 64
        self.not_kept = 0
        """How many rows were added and not kept."""
        self.rewritten = 0
        """How often columns of rows were changed."""
        self.before_overwriting: Callable[[int], None] | None = None
        """Told up to which key, that one excluded, rows are about to be overwritten."""
        self._stride = 1
        self._irregular = 0  # from this key on, the next row of an episode lies `_stride` further, if there is one

    def like(self, schema: Schema | None) -> Ring:
        """Return an empty one of the same kind, for rows of a schema.

        Raises:
            ConfigError: they do not fit into memory, or cannot be ordered as they would have to be.
        """
        return type(self)(self.storage.like(schema))

    def check(self, schema: Schema) -> None:
        """Refuse columns that rows cannot be ordered by.

        Raises:
            ConfigError: there are such.
        """

    def make_room(self, count: int) -> None:
        """See to it that ``count`` more rows can be written, where that may fail.

        Raises:
            StoreError: they cannot be.
        """

    @property
    def oldest(self) -> int:
        """The key of the oldest row that is there, if there is one."""
        return self.added - self.size

    @property
    def stride(self) -> int:
        """How far every row lies before the next of its episode; 0 if it is not the same for all."""
        return self._stride if self._irregular <= self.oldest else 0

    def one(self) -> Ints:
        """Return the key of some row that is there, or none."""
        return np.arange(self.oldest, min(self.oldest + 1, self.added))

    def keys(self) -> Ints:
        """Return the keys of all rows, oldest first."""
        return np.arange(self.oldest, self.added)

    def pieces(self) -> Iterator[Ints]:
        """Yield the keys of all rows, oldest first, some hundred thousand at a time."""
        for first in range(self.oldest, self.added, AT_ONCE):
            yield np.arange(first, min(first + AT_ONCE, self.added))

    def newest(self, first: int, count: int) -> Ints:
        """Return the keys of those of the rows that were just added, ``count`` from the key ``first`` on, which are
        there."""
        return np.arange(max(first, self.oldest), first + count)

    def given(self, first: int, count: int) -> Sequence[int]:
        """Return the keys of the rows that were just added, ``count`` from number ``first`` on; -1: it was not
        kept."""
        return range(first, first + count)

    @property
    def keys_end(self) -> int:
        """No row has, or had, this key or a larger one."""
        return self.added

    def serials(self, keys: Ints) -> Ints:
        """Return the numbers of rows that are there, among all that were ever added, from 0."""
        return keys

    def slots(self, keys: Ints) -> Ints:
        """Return the slots of keys, whose rows may be gone."""
        if self.added <= self.capacity:
            return keys
        slots: Ints = keys % self.capacity
        return slots

    def key_at(self, slots: Ints) -> Ints:
        """Return the keys of the rows in filled slots."""
        turn, newest = divmod(self.added - 1, self.capacity)
        keys: Ints = slots + turn * self.capacity
        if turn:
            keys -= (slots > newest) * self.capacity  # these were filled the turn before
        return keys

    def alive(self, keys: Ints) -> Ints:
        """Whether the row of each key is there."""
        there: Ints = (keys >= self.oldest) & (keys < self.added)
        return there

    def mark(self, name: str, keys: Ints) -> Ints:
        """Return a mark, or a column, of rows that are there."""
        slots, storage = self.slots(keys), self.storage
        if storage.unread is not None:
            storage.unread.need(name, slots)
        marks: Ints = storage.view(name)[slots]
        return marks

    def elsewhere(self, name: str) -> Numbers | None:
        """Return a mark, or a column, of all rows, if these are not to be in memory; else None."""

    def know_marks(self) -> None:
        """Bring in the marks of rows that lie on the disk alone: lengths of episodes follow from them."""
        if self.storage.unread is not None:
            self.storage.unread.marks()

    def about_to_change(self, keys: Ints) -> None:
        """Take in that rows are about to be changed; a generation that is being written copies them."""
        if self.before_overwriting is not None and len(keys):
            self.before_overwriting(int(keys.max()) + 1)

    def changed(self, keys: Ints, names: Sequence[str]) -> None:
        """Take in that columns of rows were changed."""
        self.rewritten += 1

    def array(self, name: str, dtype: type[np.generic]) -> np.ndarray:
        """Return one number for each slot, 0 at first, for who keeps something of rows beside them."""
        return np.zeros(self.capacity, dtype)

    def changing(self, name: str, places: Ints) -> None:
        """Take in that such an array is about to be changed at places whose rows are there."""

    def revalued(self, slots: Ints, values: np.ndarray) -> None:
        """Take in what the rows in slots are worth: the lowest go first, if priorities decide."""

    def numbers(self) -> list[int]:
        """Return what must be known of rows in any order beside their places."""
        return []

    def places(self) -> dict[str, Ints]:
        """Return where rows in any order lie: one value for each row, oldest first."""
        return {}

    # -- adding ------------------------------------------------------------------------------------------------

    def extend(
        self, arrays: Arrays, count: int, envs: Ints, ends: Ints | None, version: int, *, mixed: bool = False
    ) -> int:
        """Add ``count`` rows that were checked; return the key of the first.

        Args:
            arrays: [count, ...] by column.
            count: how many rows.
            envs: [E] the environments, step-major; or [count] the environment of each row, if ``mixed``.
            ends: [count] how the episode ends with the row; None if none does.
            version: of the weights that made them.
            mixed: see ``envs``.
        """
        first = self.added
        if count == 0:
            return first
        if not mixed and self._extend_steadily(arrays, count, envs, ends, version):
            return first
        if ends is None:
            ends = np.zeros(count, np.uint8)
        marks = (self.episodes.mixed if mixed else self.episodes.extend)(first, envs, ends)
        self._link(marks, first)
        own: Mapping[str, Any] = {
            **arrays,
            EPISODE: marks.episode,
            PLACE: marks.place,
            AHEAD: marks.ahead,
            BEHIND: np.minimum(marks.behind, MOST_ROWS),  # what is further back is gone, wherever it lay
            VERSION: version,
            END: ends,
            SERIAL: np.arange(first, first + count).astype(np.uint32),  # last: then the row is whole
        }
        if self.before_overwriting is not None:
            self.before_overwriting(min(first, first + count - self.capacity))
        skipped = max(0, count - self.capacity)
        begin = (first + skipped) % self.capacity
        room = min(self.capacity - begin, count - skipped)
        self.storage.write(slice(begin, begin + room), rows_between(own, skipped, skipped + room))
        if skipped + room < count:
            self.storage.write(slice(0, count - skipped - room), rows_between(own, skipped + room, count))
        self.added = first + count
        self.size = min(self.capacity, self.size + count)
        self._trim()
        return first

    def _extend_steadily(self, arrays: Arrays, count: int, envs: Ints, ends: Ints | None, version: int) -> bool:
        """Add a block that is like the one before, and whose slots lie in one run, with those of the step before;
        return whether it was one."""
        first, width = self.added, len(envs)
        begin = first % self.capacity
        if begin < width or begin + count > self.capacity or self.size < width or self._stride != width:
            return False
        episodes = self.episodes
        hot = episodes.steady(first, envs, count)
        if hot is None:
            return False
        if hot.version != version:
            hot.name_version(version)
        known = episodes.next
        changed = ends is not None or bool(hot.starts)
        if changed and not episodes.begin(hot, ends):
            return False
        if self.before_overwriting is not None:
            self.before_overwriting(first + count - self.capacity)
        self.storage.write_block(begin, count, arrays, hot.plain, hot.links, width)
        episodes.went(hot, changed=changed)
        self.added = first + count
        self.size = min(self.capacity, self.size + count)
        if episodes.next != known:
            self._trim()
        return True

    def append(self, row: Mapping[str, Any], env: int, end: int, version: int, packed: list[Any] | None = None) -> int:
        """Add one row that was checked, or ``packed`` by the storage; return its key."""
        key = self.added
        if self.before_overwriting is not None:
            self.before_overwriting(key + 1 - self.capacity)
        episode, place, behind = self.episodes.append(key, env, end)
        slot = key % self.capacity
        storage = self.storage
        if behind:
            if behind < self.capacity and key - behind >= self.added - self.size:
                storage.link((key - behind) % self.capacity, behind)
            if behind != self._stride:
                self._stride, self._irregular = behind, key
        back = min(MOST_ROWS, behind)
        storage.write_row(slot, row, (episode, place, 0, back, version, key & 0xFFFFFFFF, end), packed)
        self.added = key + 1
        size = self.size
        if size < self.capacity:
            self.size = size + 1
        elif not key & 1023:
            self._trim()
        return key

    def _link(self, marks: Marks, first: int) -> None:
        """Let older rows know of the new ones that follow them; note whether rows still follow at one distance."""
        there = marks.linked >= self.oldest
        self.storage.view(AHEAD)[self.slots(marks.linked[there])] = marks.distances[there]
        stride = marks.stride
        if stride != self._stride or stride == 0:
            self._stride, self._irregular = stride or 1, first if stride else first + len(marks.place)
        odd = (marks.linked + marks.distances)[marks.distances != stride]  # seen from them, no stride leads back
        if len(odd):
            self._irregular = max(self._irregular, int(odd.max()) + 1)

    def _trim(self) -> None:
        """Forget episodes of which no row is left, once they are more than half of those remembered: as many have to
        begin before it is done again."""
        unread = self.storage.unread
        if unread is not None and not unread.marks_known:
            return  # reading may fail, and rows were added
        if self.size and self.episodes.held > 2 * self.size + 1024:
            self.episodes.trim(self.size, self.mark(EPISODE, self.keys()))

    def cut(self, env: int | None = None) -> list[int]:
        """End the open episode of an environment, or of all, where it is; return the keys of the rows that are
        there."""
        cut = self.episodes.cut(env)
        self.cuts += len(cut)
        keys = [key for key in cut if key >= self.oldest]
        self._note_cut(keys)
        for key in keys:
            self.storage.view(END)[key % self.capacity] = CUT
        return keys

    def _note_cut(self, keys: list[int]) -> None:
        """Remember rows with which an episode was cut; those that are gone are forgotten once they may be half."""
        self.cut_keys += keys
        if len(self.cut_keys) > self._most_cut:
            self.cut_keys = self.cut_keys_there()
            self._most_cut = 2 * len(self.cut_keys) + 64

    def cut_keys_there(self) -> list[int]:
        """Return the keys of rows that are there with which an episode was cut."""
        return self._there(self.cut_keys)

    def truncated_keys_there(self) -> list[int]:
        """Return the keys of rows that are there with which a save has truncated an open episode."""
        return self._there(self.truncated_keys)

    def _there(self, given: list[int]) -> list[int]:
        keys = np.array(given, np.int64)
        there: list[int] = keys[self.alive(keys)].tolist()
        return there

    def restore(self, added: int, size: int, cuts: list[int], truncated: Sequence[int] = ()) -> None:
        """Take back the counters, before the rows; :meth:`relink` follows when they are there."""
        self.added, self.size = added, min(size, self.capacity)
        self.cut_keys = [key for key in cuts if key >= self.oldest]
        self.truncated_keys = [key for key in truncated if key >= self.oldest]

    def link_back(self, first: int, behind: Ints, episodes: Ints, places: Ints) -> None:
        """Find out what follows what, from how far behind [n] the predecessors of rows lie that are there again.

        Args:
            first: the key of the first of them; what comes before it was linked already.
            behind, episodes, places: [n] their marks.
        """
        self._start_lengths()
        count = len(behind)
        begin = first % self.capacity
        led = np.flatnonzero(behind > 0)
        distances = behind[led].astype(np.int64)
        stride = int(distances[-1]) if len(led) else 0
        if stride and stride != self._stride:
            self._stride, self._irregular = stride, first
        odd = led[distances != stride]
        if len(odd):
            self._irregular = first + int(odd[-1]) + 1
        ahead = np.zeros(count, np.int32)
        inside = led >= distances
        ahead[led[inside] - distances[inside]] = distances[inside]
        self.storage.view(AHEAD)[begin : begin + count] = ahead
        before = first + led[~inside] - distances[~inside]
        there = before >= self.oldest
        self.storage.view(AHEAD)[self.slots(before[there])] = distances[~inside][there]
        self.episodes.lengths.note_back(episodes, places, first)

    def relink(self) -> None:
        """Mark again the rows with which an episode was cut: that came after they were written."""
        self._mark_ends()
        self._start_lengths()
        self.episodes.note_open()

    def _mark_ends(self) -> None:
        for keys, end in ((self.truncated_keys, TRUNCATED), (self.cut_keys, CUT)):
            for key in keys:
                self.storage.view(END)[key % self.capacity] = end

    def begin_unread(self) -> None:
        """In place of :meth:`link_back` and :meth:`relink`, where no mark is there yet."""
        self._irregular = self.added  # nothing is said of older rows
        self._start_lengths()
        self.episodes.note_open()

    def link_adjacent(self, lengths: Ints) -> None:
        """Take in that the rows, whose marks are there, are those of episodes [n] of some lengths, numbered from 0,
        one after the other; :class:`Episodes` knows which of them are open."""
        self._stride, self._irregular = 1, 0
        self.episodes.lengths.fill(lengths, self.oldest + np.cumsum(lengths) - lengths)
        self.episodes.note_open()

    def link_all(self) -> None:
        """Find out again what follows what, of all rows: their marks are there by now."""
        lengths = self.episodes.lengths  # first, as it takes in what is not settled
        lengths.start(max(0, self.episodes.next - self.size), self.episodes.next)
        self._stride, self._irregular = 1, 0
        first = self.oldest
        while first < self.added:
            begin = first % self.capacity
            count = min(self.added - first, self.capacity - begin, AT_ONCE)
            slots = slice(begin, begin + count)
            self.link_back(first, *(self.storage.view(name)[slots] for name in (BEHIND, EPISODE, PLACE)))
            first += count
        self.episodes.note_open()

    def _start_lengths(self) -> None:
        if not self.episodes.held:
            self.episodes.lengths.start(max(0, self.episodes.next - self.size), self.episodes.next)

    def clear(self) -> None:
        """Forget every row. Keys are not used again."""
        self.cuts += len(self.episodes.cut())
        self.episodes.lengths.trim(0)
        self.size = 0

    # -- which episodes are the newest -------------------------------------------------------------------------

    def firsts(self, keys: Ints) -> Ints:
        """Return the key of the first row of each row's episode; it may be gone."""
        firsts: Ints = self.episodes.lengths.first(self.mark(EPISODE, keys))
        return firsts

    def begin_of_newest(self, episodes: int) -> int:
        """Return the key of the first row, which may be gone, of the oldest of the newest so many episodes that have
        rows there; there are some."""
        self.know_marks()
        lengths = self.episodes.lengths
        firsts = lengths.first(lengths.numbers())
        begun = firsts[firsts >= self.oldest]  # the first row is there, so the episode has rows
        if len(begun) < episodes:  # then some that began earlier belong to it
            begun = np.unique(lengths.first(np.unique(self.mark(EPISODE, self.keys()))))
        at = max(0, len(begun) - episodes)
        return int(np.partition(begun, at)[at])

    def begun(self) -> list[list[int]]:
        """Return [number, key of the first row] of every episode whose first row is gone, and that may have others."""
        self.know_marks()
        there = self.mark(EPISODE, self.keys()) if self.size else np.empty(0, np.int64)
        # One that is open may go on, though none of its rows is left.
        episodes = np.union1d(there, self.episodes.open())
        firsts = self._firsts_of(episodes)
        gone = firsts < self.oldest
        found: list[list[int]] = np.column_stack([episodes[gone], firsts[gone]]).tolist()
        return found

    def _firsts_of(self, episodes: Ints) -> Ints:
        return self.episodes.lengths.first(episodes)

    def take_begun(self, begun: Sequence[Sequence[int]]) -> None:
        """Take back what :meth:`begun` gave, after the rows."""
        if begun:
            self.know_marks()  # else they would be found out again later
        lengths = self.episodes.lengths
        for episode, first in begun:
            if lengths.knows(episode):
                lengths.set_first(episode, first)

    # -- what follows ------------------------------------------------------------------------------------------

    def following(self, keys: Ints) -> Ints:
        """Return how many rows of its episode are there from each row on, itself among them."""
        counts: Ints = self.episodes.lengths.of(self.mark(EPISODE, keys)) - self.mark(PLACE, keys)
        return counts

    def chain(self, keys: Ints, length: int) -> tuple[Ints, Ints]:
        """Return the keys of up to ``length`` rows of an episode from each of ``keys`` [n] on, and how many there are.

        Returns:
            keys [n, length], where the last one is repeated once there are no more, and counts [n], at least 1.
        """
        counts = np.minimum(self.following(keys), length).astype(np.int64)
        stride = self.stride
        if stride:
            steps = np.minimum(np.arange(length), counts[:, None] - 1)
            return keys[:, None] + steps * stride, counts
        return self._hop(keys, length, AHEAD, 1), counts

    def chain_back(self, keys: Ints, length: int) -> tuple[Ints, Ints]:
        """As :meth:`chain`, but the ``length`` rows that end with each of ``keys``, newest first.

        Counts are of the rows that the episode had, though they may be gone: look with :meth:`alive`.
        """
        counts = np.minimum(self.mark(PLACE, keys) + 1, length).astype(np.int64)
        stride = self.stride
        if stride:
            steps = np.minimum(np.arange(length), counts[:, None] - 1)
            return keys[:, None] - steps * stride, counts
        return self._hop(keys, length, BEHIND, -1), counts

    def _hop(self, keys: Ints, length: int, mark: str, sign: int) -> Ints:
        chain = np.empty((len(keys), length), np.int64)
        distance = self.storage.view(mark)
        here = keys
        for at in range(length):
            chain[:, at] = here
            here = np.where(here >= self.oldest, here + sign * distance[self.slots(here)], here)
        return chain

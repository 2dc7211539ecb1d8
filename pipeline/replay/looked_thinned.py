"""Rows of a saved ring that is looked at, of which a save has left episodes out: as those of any ring
(:mod:`pipeline.replay.looked`), and with the keys that a resume gives them.

There the episodes that are left lie one after the other, oldest first; on the disk their rows lie among those of
others. In memory is what is said of each episode, not of each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.elsewhere import Numbers
from pipeline.buffer.transitions.layout import AHEAD, BEHIND, EPISODE, PLACE
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.checkpoint.generations import Stored
from pipeline.errors import Damaged
from pipeline.replay.episode_ids import Numbers as EpisodeNumbers
from pipeline.replay.looked import LookedRing
from pipeline.replay.looked_order import BySlot, Slots
from pipeline.replay.looked_pool import ApartRows
from pipeline.replay.row_set import RowSet
from pipeline.replay.selecting import extras_of, selection_of
from pipeline.replay.shards import oldest_first, read_shard
from pipeline.replay.state import BufferState
from pipeline.replay.values import ValuesFile
from pipeline.store.segments import Block, needed_blocks

Ints = np.ndarray


class KeptRows(Slots):
    """Which rows on the disk come back as which: for slots stand these, oldest first."""

    def __init__(self, stored: Stored) -> None:
        """Args:
        stored: the generation, or a shard as if it were one.

        Raises:
            Damaged: it does not fit together.
        """
        shard = read_shard(stored, 0, whole=True)
        super().__init__(shard.state.held)
        table, self._folder = shard.table, stored.folder
        self.first = shard.oldest
        """The key on the disk of the oldest row there."""
        self._all = shard.state.size
        self._numbers, self._lengths = EpisodeNumbers(table.number), table.rows
        self._skipped = table.length - table.rows
        order = oldest_first(shard, stored.folder)
        self.begins = np.append(0, np.cumsum(table.rows[order]))
        """Of each episode, in the order in which they come back, the first row; and that after the last one."""
        self._rows = np.empty(len(order), np.int64)  # the first row of each, as they are listed
        self._rows[order] = self.begins[:-1]
        self._spans = np.full((2, len(self.begins) - 1), -1, np.int64)  # the first and last place of each on the disk
        self._read: Any = None

    def look(self, rows: ThinnedRows) -> None:
        """Find out where about on the disk each episode lies.

        Raises:
            Damaged: rows are not where they are said to be.
        """
        self._read, found = rows, RowSet(self.count)
        firsts, lasts = self._spans
        for place, own in self.pieces():
            there = np.flatnonzero(own >= 0)
            found.add(own[there])
            episodes, there = self.episodes(own[there]), place + there
            new = np.flatnonzero(firsts[episodes] < 0)[::-1]
            firsts[episodes[new]] = there[new]  # of an episode that is named more often its first row counts
            lasts[episodes] = there  # and here its last
        missing = self.count - len(found)
        if missing:
            raise Damaged(
                f"{self._folder}: {missing} of {self.count} rows are in none of its blocks. resume() an older one"
            )

    def episodes(self, rows: Ints) -> Ints:
        """Return the episodes of rows, by the numbers that they come back with."""
        found: Ints = np.searchsorted(self.begins, rows, side="right") - 1
        return found

    def pieces(self) -> Iterator[tuple[int, Ints]]:
        return self._between(np.array([[0, self._all]]))

    def pieces_with(self, slots: Ints) -> Iterator[tuple[int, Ints]]:
        return self._between(self._stretches(np.unique(self.episodes(slots))))

    def pieces_between(self, low: int, high: int) -> Iterator[tuple[int, Ints]]:
        first, last = self.episodes(np.array([low, max(low, high - 1)])).tolist()
        return self._between(self._stretches(np.arange(first, last + 1)))

    def _stretches(self, episodes: Ints) -> Ints:
        """Return the stretches [k, 2] on the disk in which the rows of episodes lie."""
        firsts, lasts = self._spans[:, episodes]
        order = np.argsort(firsts)
        firsts, ends = firsts[order], np.maximum.accumulate(lasts[order]) + 1
        begins = np.flatnonzero(np.append(True, firsts[1:] > ends[:-1] + self._read.span))
        return np.stack([firsts[begins], ends[np.append(begins[1:], len(ends)) - 1]], axis=1)

    def _between(self, stretches: Ints) -> Iterator[tuple[int, Ints]]:
        for begin, end in stretches.tolist():
            for low, high in pairwise([*range(begin, end, self._read.span), end]):
                yield low, self._come_back(self.first + np.arange(low, high))

    def _come_back(self, keys: Ints) -> Ints:
        """Return which rows those on the disk come back as; -1: it does not."""
        at = self._numbers.find(self._read.peek(EPISODE, keys))
        listed = at >= 0
        if not len(self._rows):
            return at
        place = self._read.peek(PLACE, keys).astype(np.int64) - self._skipped[at]
        if ((place < 0) | (place >= self._lengths[at]))[listed].any():
            raise Damaged(
                f"{self._folder}: a row lies beyond its episode as it is listed. resume() an older generation"
            )
        return np.where(listed, self._rows[at] + place, -1)


class LookedThinned(LookedRing):
    """A ring of which rows are drawn one by one, and none is added."""

    def __init__(self, storage: TransitionStorage) -> None:
        super().__init__(storage)
        self._kept: Any = None

    def take(self, kept: KeptRows) -> None:
        """Have these rows, and no others."""
        self._kept = kept
        self.restore(self.added, kept.count, [])
        self.episodes.load([], len(kept.begins) - 1)

    def disk_places(self, keys: Ints) -> Ints:
        places: Ints = self._kept.first + self._kept.places(keys - self.oldest)
        return places

    def mark(self, name: str, keys: Ints) -> Ints:
        if name not in (EPISODE, PLACE, AHEAD, BEHIND):
            return super().mark(name, self.disk_places(keys))
        rows = keys - self.oldest
        episodes = self._kept.episodes(rows)
        places = rows - self._kept.begins[episodes]
        marks: dict[str, Ints] = {
            EPISODE: episodes,
            PLACE: places,
            AHEAD: (rows + 1 < self._kept.begins[episodes + 1]).astype(np.int64),
            BEHIND: (places > 0).astype(np.int64),
        }
        return marks[name]

    def elsewhere(self, name: str) -> Numbers | None:
        return BySlot(self._kept, _OnDisk(self, name))

    def on_disk(self, name: str, places: Ints) -> np.ndarray:
        """Return a mark, or a column, of rows by their places on the disk; the first one has 0."""
        return super().mark(name, self._kept.first + places)

    def selected(self, name: str, file: ValuesFile) -> Any:
        return BySlot(self._kept, file)

    def ready(self) -> None:
        self._kept.look(self._rows())

    def selection(self, state: BufferState, stored: Stored) -> BufferState:
        chosen = selection_of([state], [extras_of(stored)]).state(self.added)
        return msgspec.structs.replace(state, size=self.size, selector=chosen)


class _OnDisk:
    """A mark, or a column, of all rows, in the order of the disk."""

    def __init__(self, ring: LookedThinned, name: str) -> None:
        self._ring, self._name = ring, name

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, begin: int, count: int) -> np.ndarray:
        return self._ring.on_disk(self._name, np.arange(begin, begin + count))

    def at(self, places: Ints) -> np.ndarray:
        return self._ring.on_disk(self._name, places)[:, None]


class ThinnedRows(ApartRows):
    """As :class:`~pipeline.replay.looked.LookedRows`, of a :class:`LookedThinned`. Blocks are named by the keys that
    their rows had."""

    def _own(self, arrays: Arrays, keys: Ints) -> None:
        for name in (EPISODE, PLACE):
            arrays[name] = self._apart.mark(name, keys).astype(arrays[name].dtype)

    def _let_go(self) -> None:
        """A block has rows that are left, or none that is asked for."""


def keep_rows(ring: LookedThinned, state: BufferState, stored: Stored, blocks: Sequence[Block]) -> list[Block]:
    """Let a ring know which of a generation's rows come back; return the blocks in which rows lie.

    Raises:
        Damaged: it does not fit together.
    """
    ring.take(KeptRows(stored))
    return needed_blocks(blocks, state.added - state.size)

"""Where the rows of a shard go, and what there is of each beside its block; see :mod:`pipeline.replay.moving`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.buffer.transitions.bodies import some_rows
from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.layout import (
    AHEAD,
    BEHIND,
    CUT,
    END,
    EPISODE,
    PLACE,
    SERIAL,
)
from pipeline.buffer.transitions.layout import OPEN as GOES_ON
from pipeline.errors import Damaged
from pipeline.replay.episode_ids import Numbers, unlisted
from pipeline.replay.handing import Wanted
from pipeline.replay.shards import ShardOnDisk, Shares
from pipeline.replay.state import BufferState, Ends
from pipeline.replay.values import Values, WrittenBack, put_rows
from pipeline.replay.write_back import saved
from pipeline.store.segments import Block

Ints = np.ndarray
_NARROW = 1 << 16


class Found(NamedTuple):
    """Where the rows [n] of a block are to go.

    Attributes:
        at: the episode of each, as its shard lists them; -1: it is not to come along.
        place: of each in what is kept of its episode.
        rank, row: where each goes; rank -1: nowhere.
        order: which of them go, in the order of the runs.
        runs: [k, 3]: rank, row and length of each run.
    """

    at: Ints
    place: Ints
    rank: Ints
    row: Ints
    order: Ints
    runs: Ints

    @classmethod
    def each(cls, at: Ints, rank: Ints, row: Ints) -> Found:
        """Return where rows go that have no neighbours, by themselves; ``at`` is what is known of each."""
        order = np.lexsort((row, rank))
        order = order[rank[order] >= 0]
        begins = np.flatnonzero((np.diff(rank[order], prepend=-2) != 0) | (np.diff(row[order], prepend=-2) != 1))
        counts = np.diff(np.append(begins, len(order)))
        runs = np.stack([rank[order[begins]], row[order[begins]], counts], axis=1)
        return cls(at, np.zeros_like(at), rank, row, order, runs)

    def by_rank(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield each rank that gets rows, its runs, and the rows in their order."""
        edges = [0, *(np.flatnonzero(np.diff(self.runs[:, 0])) + 1).tolist(), len(self.runs)]
        ends = np.concatenate([[0], np.cumsum(self.runs[:, 2])])
        for begin, end in pairwise(edges):
            if begin < end:
                yield int(self.runs[begin, 0]), self.runs[begin:end, 1:], self.order[ends[begin] : ends[end]]


class Homes(Protocol):
    """Says where rows are to go, and what there is of each beside its block."""

    def there(self, block: Block, arrays: Arrays) -> tuple[Ints, Arrays]:
        """Return the keys of those of a block's rows that are there, and these as they are now."""
        ...

    def find(self, keys: Ints, arrays: Arrays, where: str) -> Found:
        """Return where rows are to go.

        Raises:
            Damaged: they are not those that are listed.
        """
        ...

    def mark(self, records: np.ndarray, found: Found, arrays: Arrays) -> None:
        """Write the marks that rows have where they go."""

    def extras_of(self, keys: Ints) -> list[np.ndarray]:
        """Return what the selection has of rows."""
        ...

    def aside_of(self, keys: Ints) -> tuple[Ints, list[np.ndarray]]:
        """Return which of the rows have a next observation aside, and these."""
        ...


class EpisodeHomes:
    """Where the rows of a shard are to go, which follow each other in episodes; see :class:`Homes`."""

    def __init__(self, shard: ShardOnDisk, shares: Shares, wanted: Wanted) -> None:
        table, state = shard.table, shard.state
        shard.check()
        values = Values(shard.stored)
        self._shard, self._table, self._firsts = shard, table, np.array(shares.firsts, np.int64)
        self._numbers = Numbers(table.number)
        self._skipped = table.length - table.rows
        self._ranks, self._places, self._episodes = (
            each[shard.rank] for each in (shares.ranks, shares.places, shares.episodes)
        )
        self._ends = Ends(state)
        self._begin(values, wanted)

    def _begin(self, values: Values, wanted: Wanted) -> None:
        """Look what there is of rows beside their blocks; it is read as they come."""
        state = self._shard.state
        self._written = WrittenBack(state, values)
        self._extras = [values.reader(each.name) for each in wanted.extras]
        self._aside = values.aside(wanted.nexts if state.size else [])

    def there(self, block: Block, arrays: Arrays) -> tuple[Ints, Arrays]:
        shard = self._shard
        begin = max(block.first, shard.oldest)
        end = min(block.first + block.count, shard.state.added)
        if (begin, end) != (block.first, block.first + block.count):
            part = slice(begin - block.first, end - block.first)
            arrays = some_rows(arrays, part)
        keys = np.arange(begin, end)
        self._written.into(arrays, keys)
        arrays[END] = self._ends.of(keys, arrays[END])
        return keys, arrays

    def find(self, keys: Ints, arrays: Arrays, where: str) -> Found:
        at, table = self._numbers.find(arrays[EPISODE]), self._table
        listed = at >= 0
        if not listed.all() and not self._shard.state.dropped:
            raise unlisted(where)
        if not len(table.number):
            none = np.empty(0, np.int64)
            return Found(at, at, at, at, none, np.empty((0, 3), np.int64))
        place = arrays[PLACE].astype(np.int64) - self._skipped[at]
        if ((place < 0) | (place >= table.rows[at]))[listed].any():
            raise Damaged(f"{where}: a row lies beyond its episode as it is listed. resume() an older generation")
        rank = np.where(listed, self._ranks[at], -1)
        row = self._places[at] + place
        order = grouped(at)
        begins = np.flatnonzero((np.diff(at[order], prepend=-2) != 0) | (np.diff(row[order], prepend=-2) != 1))
        counts = np.diff(np.append(begins, len(order)))
        first = order[begins]
        runs = np.stack([rank[first], row[first], counts], axis=1)
        chosen = np.lexsort((runs[:, 1], runs[:, 0]))
        chosen = chosen[runs[chosen, 0] >= 0]
        runs, begins = runs[chosen], begins[chosen]
        counts = runs[:, 2]
        spread = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return Found(at, place, rank, row, order[spread], runs)

    def mark(self, records: np.ndarray, found: Found, arrays: Arrays) -> None:
        if not len(self._table.number):
            return
        records[EPISODE], records[PLACE] = self._episodes[found.at], found.place
        records[AHEAD], records[BEHIND] = found.place + 1 < self._table.rows[found.at], found.place > 0
        records[SERIAL] = (self._firsts[found.rank] + found.row).astype(np.uint32)

    def extras_of(self, keys: Ints) -> list[np.ndarray]:
        begin = int(keys[0]) - self._shard.oldest if len(keys) else 0
        return [read(begin, len(keys)) for read in self._extras]

    def aside_of(self, keys: Ints) -> tuple[Ints, list[np.ndarray]]:
        begin, end = (int(keys[0]), int(keys[-1]) + 1) if len(keys) else (0, 0)
        own, nexts = self._aside.among(begin, end)
        return own - begin, nexts


class PoolHomes(EpisodeHomes):
    """As that, of rows that lie in any order: each goes by itself. For keys stands which of the shard's rows
    they are, oldest first."""

    def __init__(self, shard: ShardOnDisk, shares: Shares, wanted: Wanted) -> None:
        super().__init__(shard, shares, wanted)
        self._order = np.argsort(shard.pool["at"])
        self._at = shard.pool["at"][self._order]
        self._opened = np.array(sorted(key for _, key, *_ in shard.state.open_episodes), np.int64)
        self._before = shard.before

    def _begin(self, values: Values, wanted: Wanted) -> None:
        """Rows come in any order: what there is of them is in memory."""
        state = self._shard.state
        names = [each for each in values.names if each.startswith("written.")]
        self._changed = written_of(state, {name: values.all(name) for name in names})
        self._worth = [values.all(each.name) for each in wanted.extras]

    def there(self, block: Block, arrays: Arrays) -> tuple[Ints, Arrays]:
        low, high = np.searchsorted(self._at, (block.first, block.first + block.count))
        own = np.sort(self._order[low:high])
        rows = self._shard.pool["at"][own] - block.first
        arrays = some_rows(arrays, rows)
        keys = self._shard.pool["keys"][own]
        put_back_by_key(arrays, keys, self._changed)
        arrays[END] = self.ended(own, self._ends.of(keys, arrays[END]))
        return own, arrays

    def ended(self, own: Ints, ends: Ints) -> Ints:
        """Return how rows end an episode where they go, of how they end one here. Environments begin anew there: what
        had no end yet ends where it is."""
        ends[np.isin(self._table.number[own], self._opened) & (ends == GOES_ON)] = CUT
        return ends

    def find(self, keys: Ints, arrays: Arrays, where: str) -> Found:
        return Found.each(keys, self._ranks[keys], self._places[keys])

    def mark(self, records: np.ndarray, found: Found, arrays: Arrays) -> None:
        records[EPISODE], records[PLACE] = arrays[EPISODE] + self._before, arrays[PLACE]
        records[AHEAD], records[BEHIND] = 0, 0
        records[SERIAL] = found.row.astype(np.uint32)

    def extras_of(self, keys: Ints) -> list[np.ndarray]:
        return [each[keys] for each in self._worth]

    def aside_of(self, keys: Ints) -> tuple[Ints, list[np.ndarray]]:
        return np.empty(0, np.int64), []


def grouped(at: Ints) -> Ints:
    """Return the order in which equal ones follow each other, each in the order in which they are."""
    low = int(at.min()) if len(at) else 0
    narrow = len(at) > 0 and int(at.max()) - low < _NARROW  # such are sorted by counting
    order: Ints = np.argsort((at - low).astype(np.uint16) if narrow else at, kind="stable")
    return order


def written_of(state: BufferState, values: Mapping[str, np.ndarray]) -> list[tuple[str, Ints, np.ndarray]]:
    """Return what was changed in rows of a buffer after their blocks were written: column, keys in order, values."""
    plain = {name.rpartition(".")[0].removeprefix("written."): each for name, each in values.items()}
    found = saved(plain, state.written_columns, state.schema)
    return [
        (name, keys[order], each[order]) for name, keys, each in found for order in [np.argsort(keys, kind="stable")]
    ]


def put_back_by_key(arrays: Arrays, keys: Ints, written: Sequence[tuple[str, Ints, Any]]) -> None:
    """Let values count that were changed after blocks had been written, of rows whose ``keys`` are in any order, and of
    arrays that may be changed."""
    order = np.argsort(keys)
    for name, changed, values in written:
        found = np.searchsorted(keys[order], changed)
        inside = np.flatnonzero(found < len(keys))
        inside = inside[keys[order][found[inside]] == changed[inside]]
        put_rows(arrays[name], order[found[inside]], values[inside])

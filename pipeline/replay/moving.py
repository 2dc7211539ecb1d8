"""Bringing the rows of M shards to N ranks.

Each block is read by one rank, whichever rows are in it: M shards are so read once, and not once by each of N ranks.
Who has read it hands every row to the rank that is to have it, through files in the run's folder that are there for
this moment alone.

The rows of an episode follow each other where they go, and lie among those of other environments where they come from.
So the rows of a block are taken in the order of their episodes, and copied in runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.buffer.transitions.blocks import decode_block
from pipeline.buffer.transitions.bodies import beside, bodies_as, some_rows
from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.compressed import packed_row
from pipeline.buffer.transitions.layout import (
    AHEAD,
    BEHIND,
    CUT,
    END,
    EPISODE,
    MARK_BYTES,
    PLACE,
    SERIAL,
    VERSION,
    RowLayout,
)
from pipeline.buffer.transitions.layout import OPEN as GOES_ON
from pipeline.buffer.transitions.packing import as_runs
from pipeline.errors import Damaged, RankFailed
from pipeline.replay.ahead import ahead
from pipeline.replay.assembling import Assembled
from pipeline.replay.episode_ids import Numbers, unlisted
from pipeline.replay.handing import Extra, RowFormat, SomeRows
from pipeline.replay.shards import ShardOnDisk, Shares
from pipeline.replay.state import BufferState, Ends
from pipeline.replay.values import Values, WrittenBack
from pipeline.replay.write_back import saved
from pipeline.store.files import FilesLike, open_plain
from pipeline.store.layout import SCRATCH, Layout
from pipeline.store.segments import Block, PayloadReader

Ints = np.ndarray
_NARROW = 1 << 16


class Wanted(NamedTuple):
    """What there is to be moved of each row.

    Attributes:
        schema: the columns.
        extras: what the selection has of each row.
        nexts: columns of next observations that are kept aside.
    """

    schema: Schema
    extras: list[Extra]
    nexts: list[Column]


def extras_named(names: Sequence[str]) -> list[Extra]:
    """Return what lies in files of these names; their ends are dtypes."""
    return [Extra(name, np.dtype(name.rpartition(".")[2])) for name in names]


def part_to_read(blocks: Sequence[Block], rank: int, size: int) -> list[int]:
    """Return the places of those of some blocks that a rank reads for all: as many bytes as the others, next to each
    other."""
    lengths = np.array([block.length for block in blocks], np.int64)
    ends = np.cumsum(lengths)
    middle = ends - lengths // 2
    whose = np.minimum(middle * size // max(1, int(ends[-1]) if len(ends) else 1), size - 1)
    own: list[int] = np.flatnonzero(whose == rank).tolist()
    return own


class Gone(NamedTuple):
    """A block whose rows cannot be had: in which file, of which shard, and why."""

    path: str
    shard: int
    block: Block
    error: Damaged


class Mover:
    """One rank's part in it."""

    def __init__(
        self,
        layout: Layout,
        run_tag: int,
        files: FilesLike,
        *,
        life: int,
        rank: int,
        wanted: Wanted,
        partial: bool = False,
    ) -> None:
        self._layout, self._files, self._rank, self._life, self._partial = layout, files, rank, life, partial
        self._reader = PayloadReader(layout, run_tag)
        self._wanted = wanted
        self._row_layout = RowLayout(wanted.schema)
        self._format = RowFormat(self._row_layout, wanted.extras, wanted.nexts)
        self._records = np.empty(0, self._row_layout.record)  # of one block, used again
        self.bytes_read = 0
        """Bytes of payloads that were read out of shards."""
        self.gone: list[Gone] = []
        """What could not be read, where that is allowed."""

    def path(self, origin: int, rank: int) -> str:
        """Return the path of the file in which one rank hands rows to another."""
        return os.path.join(self._layout.directory, f"{SCRATCH}{self._life}-{origin}-{rank}")

    def hand_out(self, shards: Sequence[ShardOnDisk], shares: Shares, own: Assembled) -> None:
        """Read this rank's share of all blocks, and hand their rows out; those of its own go into ``own``. Blocks.

        Raises:
            Damaged: a block is not whole, or holds other rows than are listed.
            StoreError: a file cannot be read or written.
        """
        size = len(shares.rows)
        self.clean_up(size)  # what an attempt before could not remove: such names are this rank's in this life
        with contextlib.ExitStack() as stack:
            handles = {}
            for rank in range(size):
                if rank != self._rank:
                    handles[rank] = self._files.create(self.path(self._rank, rank))
                    stack.callback(self._files.close, handles[rank])
            for shard, blocks in self._own_blocks(shards, size):
                for rank, rows in self.rows(shard, shares, blocks):
                    if rank == self._rank:
                        own.put(rows)
                    else:
                        self._files.write(handles[rank], self._format.encoded(rows))

    def _own_blocks(self, shards: Sequence[ShardOnDisk], size: int) -> list[tuple[ShardOnDisk, list[Block]]]:
        """Return the blocks that this rank reads: as many bytes as the others, of as few shards as may be."""
        each = [(shard, block) for shard in shards for block in shard.needed()]
        found: dict[int, list[Block]] = {}
        for number in part_to_read([block for _, block in each], self._rank, size):
            shard, block = each[number]
            found.setdefault(shard.rank, []).append(block)
        return [(shards[rank], blocks) for rank, blocks in found.items()]

    def rows(self, shard: ShardOnDisk, shares: Shares, blocks: list[Block]) -> Iterator[tuple[int, SomeRows]]:
        """Yield ranks, and the rows of blocks that are to go to each; they are good until the next ones are asked for.
        Blocks.

        Raises:
            Damaged: a block is not whole, or holds other rows than are listed.
        """
        homes = (PoolHomes if shard.pool else EpisodeHomes)(shard, shares, self._wanted)
        yield from self.rows_by(homes, shard.rank, blocks)

    def rows_by(self, homes: Homes, shard: int, blocks: Sequence[Block]) -> Iterator[tuple[int, SomeRows]]:
        """As :meth:`rows`, of blocks of a shard, by what says where their rows go.

        Raises:
            Damaged: as :meth:`rows`.
        """
        by_first = {block.first: block for block in blocks}
        with contextlib.closing(ahead(self._reader.each(block.place for block in by_first.values()))) as places:
            for place, found in places:
                block = by_first[place[0]]
                try:
                    if isinstance(found, Damaged):
                        raise found
                    where = f"{self._layout.segment(*block.segment_key)} at byte {block.offset}"
                    arrays = decode_block(found, self._wanted.schema, block.count, where, block.sums)
                    keys, arrays = homes.there(block, arrays)
                    sorted_ = homes.find(keys, arrays, where)
                except Damaged as error:
                    if not self._partial:
                        raise
                    self.gone.append(Gone(self._layout.segment(*block.segment_key), shard, block, error))
                    continue
                self.bytes_read += len(found)
                yield from self._packed(homes, sorted_, keys, arrays)

    def _packed(self, homes: Homes, found: Found, keys: Ints, arrays: Arrays) -> Iterator[tuple[int, SomeRows]]:
        layout, count = self._row_layout, len(keys)
        if len(self._records) < count:
            self._records = np.zeros(count, layout.record)
        records = self._records[:count]
        bodies = bodies_as(arrays, layout.body)
        if bodies is not None:
            records.getfield(bodies.dtype, MARK_BYTES)[...] = bodies
        apart = arrays if bodies is None else beside(arrays)
        for column in layout.small:
            if column.name not in apart:
                continue
            to, given = records[column.name], arrays[column.name]
            if column.nbytes > 8 and given.flags.c_contiguous:
                kind = f"V{column.nbytes}"
                to, given = as_runs(to, kind), as_runs(given, kind)
            to[...] = given
        records[VERSION], records[END] = arrays[VERSION], arrays[END]
        homes.mark(records, found, arrays)
        large = [arrays[column.name] for column in layout.large]
        extras = homes.extras_of(keys)
        aside, nexts = homes.aside_of(keys)
        for rank, runs, rows in found.by_rank():
            own = np.flatnonzero(found.rank[aside] == rank)
            yield (
                rank,
                SomeRows(runs, rows, records, large, extras, found.row[aside[own]], [each[own] for each in nexts]),
            )

    def take_in(self, size: int, own: Assembled) -> None:
        """Take what the others have handed to this rank. Blocks.

        Raises:
            Damaged: a file is not whole.
            RankFailed: another rank failed in this before.
        """
        for origin in range(size):
            if origin != self._rank:
                path = self.path(origin, self._rank)
                try:
                    file = open_plain(path)
                except FileNotFoundError:  # it was there when all had handed out theirs
                    raise RankFailed(
                        f"rows: rank {origin} failed: it has removed what it had handed to rank {self._rank}, and says "
                        "why itself. Nothing was changed on this one"
                    ) from None
                with file:
                    while (rows := self._format.read(file, path)) is not None:
                        own.put(rows)

    def clean_up(self, size: int) -> None:
        """Remove what this rank handed out, as far as the disk lets it."""
        for rank in range(size):
            with contextlib.suppress(OSError):
                self._files.unlink(self.path(self._rank, rank))


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
        places = order[found[inside]]
        for at, value in zip(places.tolist(), values[inside], strict=True):
            arrays[name][at] = packed_row(value) if arrays[name].dtype == object else value

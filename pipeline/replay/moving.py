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
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.buffer.transitions.blocks import decode_block
from pipeline.buffer.transitions.bodies import beside, bodies_as
from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.layout import (
    END,
    MARK_BYTES,
    VERSION,
    RowLayout,
)
from pipeline.buffer.transitions.packing import as_runs
from pipeline.errors import Damaged, RankFailed
from pipeline.replay.ahead import ahead
from pipeline.replay.assembling import Assembled
from pipeline.replay.handing import RowFormat, SomeRows, Wanted
from pipeline.replay.homes import EpisodeHomes, Found, Homes, PoolHomes
from pipeline.replay.shards import ShardOnDisk, Shares
from pipeline.store.files import FilesLike, open_plain
from pipeline.store.layout import SCRATCH, Layout
from pipeline.store.segments import Block, PayloadReader

Ints = np.ndarray
_NARROW = 1 << 16


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

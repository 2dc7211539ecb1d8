"""Rows of pools, of which others than the oldest go first, on the disk: what merging and splitting of them read.

None of them has neighbours, so each goes by itself. It has an id: the part that it belongs to, and its number among all
rows that were added there; of a run that a tool made, part and number of each lie beside the rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.layout import EPISODE, VERSION
from pipeline.checkpoint.generations import Stored, check_generation
from pipeline.checkpoint.manifest import BLOCKS_FILE, MadeOf
from pipeline.errors import ConfigError, Damaged
from pipeline.replay.episode_ids import EpisodeTable
from pipeline.replay.pooling import block_of
from pipeline.replay.shards import ShardOnDisk, pool_on_disk
from pipeline.replay.state import read_buffer_state
from pipeline.replay.values import Values, ValuesFile, WrittenBackInAnyOrder
from pipeline.store.held import HeldSegments
from pipeline.store.segments import Block, read_blocks
from pipeline.tools.environments import ENVIRONMENTS_FILE, Home, homes_listed
from pipeline.tools.kept_rows import (
    EPISODES_FILE,
    KEY_FILE,
    PART_FILE,
    columns_of_block,
    origins_listed,
    stored_parts,
    where_of,
)
from pipeline.tools.related import Read
from pipeline.tools.sources import Source, check_columns, in_order, named

Ints = np.ndarray
Met = Callable[[Arrays, int], Ints]


def are_pools(sources: Sequence[Source]) -> bool:
    """Return whether the rows of all sources that have any are those of pools.

    Raises:
        ConfigError: some are, and others are not.
        Damaged, StoreError: a state cannot be read.
    """
    every = [
        (where_of(source, own), read_buffer_state(stored.folder)[0])
        for source in sources
        for stored, own in stored_parts(source)
    ]
    having = [each for each in every if each[1].size] or every
    ringed = [each for each in having if each[1].remove == "fifo"]
    pooled = [each for each in having if each[1].remove != "fifo"]
    if ringed and pooled:
        (one, of_one), (other, of_other) = pooled[0], ringed[0]
        raise ConfigError(
            f"remove: {one} was saved with remove={of_one.remove!r}, and {other} with remove={of_other.remove!r}: rows "
            "that have no neighbours and rows that have them cannot be put together. Merge each kind by itself",
            option="remove",
        )
    return bool(pooled)


class PoolRows:
    """The rows of one pool, oldest first."""

    def __init__(self, source: Source, stored: Stored, own: MadeOf, number: int) -> None:
        """Args:
        source: the run.
        stored: the generation, or a shard as if it were one.
        own: what names the rows, if nothing was made of the run before.
        number: of this one among all that are read.

        Raises:
            Damaged: something is missing or was changed.
        """
        check_generation(stored)
        self.source, self.where, self.options = source, where_of(source, own), dict(stored.manifest.options)
        self.stored = stored
        state, unknown = read_buffer_state(stored.folder)
        self.state, self.schema = state, state.schema
        self.shard = (
            ShardOnDisk(number, stored, state, unknown, EpisodeTable.none(), [])  # of a buffer that has no rows
            if state.remove == "fifo"
            else pool_on_disk(stored, state, unknown, number)
        )
        self.serials = self.shard.table.number
        self.made = any(info.path == PART_FILE for info in stored.manifest.files)
        own = msgspec.structs.replace(own, numbered=state.numbered)
        self.parts = list(stored.manifest.made_of) if self.made else [own]
        size = len(self.serials)
        self.part: Ints = self._file(PART_FILE, size).astype(np.int64) if self.made else np.zeros(size, np.int64)
        self.number: Ints = self._file(KEY_FILE, size) if self.made else self.serials
        self.ranks: Ints = np.zeros(len(self.parts), np.int64)
        """Where each part stands among those of all that is read."""
        self.blocks = self._needed()
        self.episode, self.version = np.zeros(size, np.int64), np.zeros(size, np.int64)
        """What the marks of each say."""
        self.met = np.zeros(size, bool)
        """Whether each meets a condition."""

    @property
    def order(self) -> str:
        """Which rows go first, for people."""
        given = self.options.get("remove")
        field = str(given.get("field", "")) if isinstance(given, dict) else ""
        return f"{self.state.remove} of {field}" if field else self.state.remove

    @property
    def bytes(self) -> int:
        """Of payloads that are read."""
        return sum(block.length for block in self.blocks)

    def _file(self, path: str, count: int) -> np.ndarray:
        return ValuesFile(os.path.join(self.stored.folder, path)).read(0, count)

    def _needed(self) -> list[Block]:
        if not len(self.serials):
            return []
        blocks = sorted(read_blocks(os.path.join(self.stored.folder, BLOCKS_FILE)), key=lambda block: block.first)
        of = block_of(self.shard.pool["at"], blocks)
        if (of < 0).any():
            raise Damaged(f"{self.where}: {int((of < 0).sum())} of its rows are in no block. Restore it from a copy")
        return [blocks[number] for number in np.unique(of).tolist()]

    def look(self, names: Sequence[str] = (), met: Met | None = None) -> None:
        """Read the marks of all rows, and no columns but those of ``names``, which ``met`` is called with: arrays by
        name, and how many rows; it returns [n] bool.

        Raises:
            Damaged: a block is not whole.
        """
        if self.schema is None:
            return
        held = HeldSegments(self.source.layout, self.source.tag, self.blocks, self.stored.manifest.segments)
        written = WrittenBackInAnyOrder(self.state, Values(self.stored), names)
        at, keys = self.shard.pool.get("at", self.serials), self.shard.pool.get("keys", self.serials)
        order = np.argsort(at)
        rising = at[order]
        for block in self.blocks:
            low, high = np.searchsorted(rising, (block.first, block.first + block.count))
            own = order[low:high]
            whole = columns_of_block(held, block, self.schema, [EPISODE, VERSION, *names], slice(0, block.count))
            arrays = {name: each[at[own] - block.first] for name, each in whole.items()}
            written.into(arrays, keys[own])
            self.episode[own], self.version[own] = arrays[EPISODE], arrays[VERSION]
            if met is not None:
                self.met[own] = met({name: arrays[name] for name in names}, len(own))
        held.close()

    def origins(self, number: Ints) -> tuple[Ints, Ints]:
        """Return the part that episodes are of, and their numbers there."""
        if not self.made:
            return np.zeros(len(number), np.int64), number
        count = next(info.bytes for info in self.stored.manifest.files if info.path == EPISODES_FILE) // 8
        return origins_listed(self._file(EPISODES_FILE, count), number, self.where)

    def homes(self, env: int) -> list[Home]:
        """Return the ids of an environment."""
        size = next((info.bytes for info in self.stored.manifest.files if info.path == ENVIRONMENTS_FILE), 0)
        table = self._file(ENVIRONMENTS_FILE, size // 8) if size else np.empty(0, np.int64)
        return homes_listed(table, self.ranks, env)


def pools_of(sources: Sequence[Source]) -> list[PoolRows]:
    """Return the pools of sources: one each, or one for each shard.

    Raises:
        Damaged: something is missing or was changed.
    """
    every = [(source, *each) for source in sources for each in stored_parts(source)]
    return [PoolRows(source, stored, own, number) for number, (source, stored, own) in enumerate(every)]


class EveryPool(NamedTuple):
    """All that is read, in its order.

    Attributes:
        sources: the runs.
        pools: their rows, of a buffer of ranks one for each.
        parts: what names rows, in the order in which those of one number come.
        run, at: [n] which of the pools each row is of, and where it stands there.
        part, number: [n] what names it.
        episode: [n] which of the episodes it is of.
        origin: [m, 2] of each episode its part and its number there.
    """

    sources: list[Source]
    pools: list[PoolRows]
    parts: list[MadeOf]
    run: Ints
    at: Ints
    part: Ints
    number: Ints
    episode: Ints
    origin: Ints

    @property
    def reads(self) -> list[Read]:
        """What names the rows of each source."""
        return [Read(each.source, each.parts) for each in self.pools]

    @property
    def telling(self) -> list[PoolRows]:
        """Those that say how rows lie: which have rows, or, if none has, all."""
        return [each for each in self.pools if len(each.serials)] or self.pools

    @property
    def schema(self) -> Schema | None:
        """The columns that all have which have any."""
        having = [each.schema for each in self.telling if each.schema is not None]
        return having[0] if having else None

    def of_rows(self, values: Sequence[Ints]) -> Ints:
        """Return values that there are by pool, oldest row first, by row."""
        begins = np.cumsum([0, *map(len, values)])
        found: Ints = np.concatenate(values)[begins[self.run] + self.at]
        return found


def every_pool(
    sources: Sequence[Source], pools: Sequence[PoolRows], names: Sequence[str] = (), met: Met | None = None
) -> EveryPool:
    """Read what there is. See :meth:`PoolRows.look`.

    Raises:
        ConfigError: two runs have a row in common, or other columns.
        Damaged: something is missing or was changed.
    """
    check_columns("column", [(each.where, _columns(each)) for each in pools if each.schema is not None])
    found = named("row", pools)
    for each in pools:
        each.look(names, met)
    _, places = in_order([each.parts for each in pools])
    origins = []
    for each, each.ranks in zip(pools, places, strict=True):
        number, of = np.unique(each.episode, return_inverse=True)
        part, origin = each.origins(number)
        origins.append(np.column_stack([origin, each.ranks[part]])[of.reshape(-1)])
    joined = np.concatenate(origins).astype(np.int64)
    known, of = np.unique(joined, axis=0, return_inverse=True)  # by number, and then by part
    begins = np.cumsum([0, *(len(each.serials) for each in pools)])
    episode = of.reshape(-1)[begins[found.run] + found.at]
    return EveryPool(list(sources), list(pools), *found, episode, known[:, ::-1])


def _columns(pool: PoolRows) -> Sequence[Column]:
    return pool.state.columns or ()

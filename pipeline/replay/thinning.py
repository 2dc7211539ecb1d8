"""Loading a generation of which not all rows come along: those that a save dropped, and those that are damaged."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import decode_block
from pipeline.buffer.transitions.layout import BEHIND, END, EPISODE, PLACE
from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.ring import Ring
from pipeline.checkpoint.generations import Stored, check_listed
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.config import ReplayOptions
from pipeline.distributed import alone
from pipeline.errors import Damaged
from pipeline.observe import events
from pipeline.replay.ahead import ahead
from pipeline.replay.episode_ids import EpisodeTable
from pipeline.replay.loading import Lost, Read, check_columns, read_values
from pipeline.replay.parts import check_kind
from pipeline.replay.pooling import fill_pool
from pipeline.replay.resharding import Moved, Moving, Reached
from pipeline.replay.shards import ShardOnDisk, read_shard
from pipeline.replay.state import STATE_FILE, BufferState, read_buffer_state
from pipeline.replay.whole_rows import read_whole, without
from pipeline.store.segments import PayloadReader, read_blocks

Ints = np.ndarray


def says_dropped(stored: Stored) -> bool:
    """Whether rows of a generation's blocks are not to come back.

    Raises:
        Damaged: what it says of itself is not whole.
    """
    return bool(_state_of(stored)[0].dropped)


def load_alone(store: Reached, options: ReplayOptions, stored: Stored, like: Ring) -> Moved:
    """Load a generation, or a rank's part of one, without what was dropped.

    Raises:
        Damaged: something is missing, or was changed.
        ConfigError, UsageError: it does not fit the options.
    """
    shard = read_shard(stored, 0, whole=True)
    return Moving(store, alone(), options, stored, like, shards=[shard]).rows(rebalance=False, evict=True)


def load_partly(store: Reached, options: ReplayOptions, stored: Stored, like: Ring, error: Damaged) -> Read:
    """Load what is whole of the rows of a generation of one process, whose own files are.

    Raises:
        Damaged: its own files are not; or, as ``error`` says, there is no damage that can be left out.
        ConfigError, UsageError: it does not fit the options.
    """
    state, unknown = _state_of(stored)
    blocks = read_blocks(os.path.join(stored.folder, BLOCKS_FILE))
    if isinstance(like, Pool):
        return _load_pool_partly(store, stored, like, error)
    if state.dropped:
        shard, found = read_shard(stored, 0, whole=True), None
    else:
        shard = ShardOnDisk(0, stored, state, unknown, EpisodeTable.none(), blocks)
        found = _looked_through(store, shard)
        cut = [*state.cut_keys, *found.left.tolist()]
        shard = shard._replace(table=found.table, state=msgspec.structs.replace(state, cut_keys=cut))
    moving = Moving(store, alone(), options, stored, like, shards=[shard], partial=True)
    read = moving.rows(rebalance=False, evict=True).read
    if found is None:
        return read
    lost = Lost(state.held - int(found.table.rows.sum()) + read.lost.rows, found.hurt, read.lost.files)
    if not lost.rows:
        raise error
    return read._replace(lost=lost)


def _load_pool_partly(store: Reached, stored: Stored, like: Pool, error: Damaged) -> Read:
    """As :func:`load_partly`, where rows lie in any order: they are read into memory twice."""
    for info in stored.manifest.files:
        check_listed(stored, info)
    state, unknown = _state_of(stored)
    check_kind(state, like, stored.folder)
    check_columns(state.schema, like, stored.folder)
    values, layout = read_values(stored), store.folder.layout
    blocks = read_blocks(os.path.join(stored.folder, BLOCKS_FILE))
    found = read_whole(layout, PayloadReader(layout, store.folder.tag, forgiving=True), state, values, blocks)
    missing = state.size - int(found.there.sum())
    if not missing:
        raise error
    state, values = without(state, values, found.there)
    ring = like.like(state.schema)
    rows = {name: each[found.there] for name, each in found.arrays.items()}
    try:
        fill_pool(ring, state, values, rows)
    except (LookupError, ValueError) as wrong:
        raise Damaged(f"{stored.folder}: the rows do not fit together ({wrong})") from None
    files = sorted({layout.segment(*block.segment_key) for block, _ in found.gone})
    return Read(stored, state, unknown, [], values, {}, ring, Lost(missing, 0, tuple(files)))


def tell_lost(log: Any, stored: Stored, lost: Lost) -> None:
    """Log what a load did without."""
    said = {"rows": lost.rows, "episodes": lost.episodes, "files": list(lost.files)}
    log.warning(events.ROWS_LOST, generation=stored.manifest.generation, **said)


def _state_of(stored: Stored) -> tuple[BufferState, dict[str, Any]]:
    for info in stored.manifest.files:
        if info.path == STATE_FILE:
            check_listed(stored, info)
    try:
        return read_buffer_state(stored.folder)
    except FileNotFoundError as error:
        raise Damaged(f"{error.filename}: missing. resume() an older generation") from None


class _Seen(NamedTuple):
    """What the blocks that are whole say of episodes.

    Attributes:
        table: the episodes of which rows are there.
        hurt: how many of them lack others.
        left: keys of the last rows that are there of those whose end is not: they were left there.
    """

    table: EpisodeTable
    hurt: int
    left: Ints


def _looked_through(store: Reached, shard: ShardOnDisk) -> _Seen:
    """Read the marks of all rows that can be read. Blocks."""
    state, folder = shard.state, store.folder
    blocks = {block.first: block for block in shard.needed()}
    parts: list[tuple[Ints, ...]] = []
    schema = state.schema
    reader = PayloadReader(folder.layout, folder.tag)
    with contextlib.closing(ahead(reader.each(block.place for block in blocks.values()))) as places:
        for place, found in places:
            block = blocks[place[0]]
            if isinstance(found, Damaged) or schema is None:
                continue
            with contextlib.suppress(Damaged):
                arrays = decode_block(found, schema, block.count, "", block.sums)
                keys = np.arange(block.first, block.first + block.count)
                there = (keys >= shard.oldest) & (keys < state.added)
                names = (EPISODE, PLACE, BEHIND, END)
                parts.append((keys[there], *(arrays[name][there].astype(np.int64) for name in names)))
    if not parts:
        return _Seen(EpisodeTable.none(), 0, np.empty(0, np.int64))
    keys, numbers, rows, behind, ends = (np.concatenate(each) for each in zip(*parts, strict=True))
    keys, at = np.unique(keys, return_index=True)  # blocks may have rows in common
    numbers, rows, behind, ends = (each[at] for each in (numbers, rows, behind, ends))
    opened = {number: key for _, key, number, _ in state.open_episodes}
    table = EpisodeTable.of_rows(numbers, rows, np.array(list(opened), np.int64))
    before = keys - behind
    cut_off = (behind > 0) & (before >= shard.oldest) & ~np.isin(before, keys)
    last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
    ended = np.array([*state.cut_keys, *state.truncated_keys, *opened.values()], np.int64)
    going_on = (ends[last] == 0) & ~np.isin(keys[last], ended)
    hurt = np.union1d(numbers[cut_off], numbers[last][going_on])
    return _Seen(table, len(hurt), keys[last][going_on])

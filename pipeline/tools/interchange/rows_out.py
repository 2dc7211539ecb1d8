"""Transitions out of a run, block by block: of a buffer, of all its shards, or of the buffer that a pipeline's rollouts
fill, as a generation holds it.

What is said of rows beside them is read as they come; where rows lie in any order, it waits for them in a file without
a name. In memory are the keys of next observations that are kept aside, and the numbers of episodes where a save has
dropped some.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import decode_block
from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.buffer.transitions.compressed import unpacked
from pipeline.buffer.transitions.layout import BEHIND
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import BLOCKS_FILE, SHARDS
from pipeline.checkpoint.parts import shard_of
from pipeline.config import Fields
from pipeline.errors import ConfigError, Damaged
from pipeline.replay.next_obs import Batch, OwnNextObs
from pipeline.replay.pool_files import ByBlock, PoolFiles
from pipeline.replay.state import LISTED, BufferState, Ends, read_buffer_state
from pipeline.replay.values import Values, WrittenBack
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, PayloadReader, needed_blocks, read_blocks
from pipeline.tools.interchange.runs import Opened
from pipeline.tools.interchange.streams import (
    END,
    EPISODE,
    KEY,
    PLACE,
    PRIORITY,
    RANK,
    VERSION,
    Rows,
    Transitions,
)

_MARKS = (EPISODE, PLACE, VERSION, END)
_PRIORITIES = "selector.priorities.float64"


class _Buffer(NamedTuple):
    """A buffer, or a shard, as a generation says it."""

    rank: int
    state: BufferState
    values: Values
    blocks: list[Block]
    fields: Fields
    pool: PoolFiles | None
    """Where rows lie, if they do in any order."""

    @property
    def prioritized(self) -> bool:
        return _PRIORITIES in self.values.names


def transitions_of(opened: Opened, folder: str = "") -> Transitions:
    """Return every row of a generation.

    Args:
        opened: the run.
        folder: where what is said of rows that lie in any order waits for them; empty: beside the run.

    Raises:
        ConfigError: nothing was ever added.
        Damaged: a file is damaged.
    """
    stored = opened.stored
    ranks = range(stored.manifest.world_size) if stored.manifest.kind == SHARDS else ()
    buffers = [_buffer(shard_of(stored, rank), rank) for rank in ranks] or [_buffer(stored, -1)]
    having = [each for each in buffers if each.state.columns is not None]
    if not having:
        raise ConfigError(f"{opened.layout.directory}: nothing was ever added to the buffer, so it has no columns")
    schemas = [_schema(each) for each in having]
    for one, other in pairwise(schemas):
        if one != other:
            raise Damaged(f"{stored.folder}: the shards have different columns: {one} and {other}")
    prioritized = all(each.prioritized for each in having if each.state.size)
    marks = (KEY, *_MARKS, *((PRIORITY,) if prioritized else ()), *((RANK,) if ranks else ()))
    first = having[0].state
    single = not ranks and having[0].pool is None and not first.dropped
    folder = folder or os.path.dirname(os.path.realpath(opened.layout.directory))
    about = msgspec.structs.replace(
        opened.about,
        capacity=sum(each.state.capacity for each in having),
        contiguous=single,
        next_key=first.added if single else 0,
        next_episode=first.next_episode if single else 0,
        open_episodes=first.open_episodes if single else [],
        priority_alpha=float(first.selector.get("alpha", 1.0)) if prioritized else None,
    )

    def batches() -> Iterator[Rows]:
        for buffer in having:
            yield from _Reading(opened.layout, opened.tag, buffer, marks, folder).batches()

    nbytes = sum(block.length for each in having for block in each.blocks)
    total = sum(each.state.held for each in having)
    scattered = any(each.pool is not None for each in having)
    return Transitions(schemas[0], marks, about, batches, nbytes, total, total, scattered)


def _buffer(stored: Stored, rank: int) -> _Buffer:
    state, _ = read_buffer_state(stored.folder)
    blocks = read_blocks(f"{stored.folder.rstrip('/')}/{BLOCKS_FILE}")
    fields = Fields.of(stored.manifest.options.get("fields"))
    blocks = needed_blocks(blocks, state.added - state.size if state.remove == "fifo" else 0)
    pool = None if state.remove == "fifo" else PoolFiles(stored, state, stored.folder)
    return _Buffer(rank, state, Values(stored), blocks, fields, pool)


def _schema(buffer: _Buffer) -> Schema:
    schema = buffer.state.schema
    assert schema is not None
    more = buffer.state.next_obs_columns or ()
    return Schema(tuple(sorted((*schema.columns, *more), key=lambda column: column.name)))


class _Reading:
    """Reads the rows of one buffer."""

    def __init__(self, layout: Layout, tag: int, buffer: _Buffer, marks: tuple[str, ...], folder: str) -> None:
        self._layout, self._reader, self._buffer, self._marks = layout, PayloadReader(layout, tag), buffer, marks
        self._ends, self._folder = Ends(buffer.state), folder
        self._priorities = buffer.values.file(_PRIORITIES) if PRIORITY in marks and buffer.state.size else None

    def batches(self) -> Iterator[Rows]:
        """Yield all rows that come back."""
        state, values = self._buffer.state, self._buffer.values
        listed = {LISTED: values.all(LISTED)} if state.dropped and LISTED in values.names else {}
        for rows in self._there():
            back = state.coming_back(listed, rows.marks[EPISODE])
            if back.all():
                yield rows
            elif back.any():
                columns, marks = ({name: each[back] for name, each in of.items()} for of in (rows.columns, rows.marks))
                yield Rows(columns, marks)

    def _there(self) -> Iterator[Rows]:
        state = self._buffer.state
        if self._buffer.pool is not None:
            yield from self._pooled(self._buffer.pool)
            return
        found = self._in_order()
        if state.next_obs_columns is None:
            yield from (rows for rows, _ in found)
            return
        columns, fields = state.next_obs_columns, self._buffer.fields
        aside = self._buffer.values.aside(columns)
        batches = (Batch(rows, rows.marks[KEY], behind, rows.columns) for rows, behind in found)
        for rows, nexts in OwnNextObs(columns, fields, aside, self._layout.directory).filled(batches):
            yield Rows({**rows.columns, **nexts}, rows.marks)

    def _in_order(self) -> Iterator[tuple[Rows, np.ndarray]]:
        state = self._buffer.state
        oldest = due = state.added - state.size
        written = WrittenBack(state, self._buffer.values)
        for block in self._buffer.blocks:
            low, high = max(block.first, due), min(block.first + block.count, state.added)
            if block.first > due:
                raise Damaged(f"{self._layout.directory}: rows from key {due} to {block.first} are in no block")
            if low >= high:
                continue
            arrays = self._arrays(block)
            keys = np.arange(low, high)
            part = {name: array[low - block.first : high - block.first] for name, array in arrays.items()}
            written.into(part, keys)
            priorities = None if self._priorities is None else self._priorities.read(low - oldest, len(keys))
            yield self._rows(part, keys, priorities), part[BEHIND]
            due = high
        if due < state.added:
            raise Damaged(f"{self._layout.directory}: rows from key {due} to {state.added} are in no block")

    def _pooled(self, pool: PoolFiles) -> Iterator[Rows]:
        """Yield rows that lie in any order, by their places on the disk."""
        own = [] if self._priorities is None else [(PRIORITY, np.float64)]
        with closing(ByBlock(pool, self._folder, own)) as rows:
            for begin, count in pool.pieces():
                told = {} if self._priorities is None else {PRIORITY: self._priorities.read(begin, count)}
                rows.add(begin, told, np.arange(count), count)
            for number in rows.needed:
                places, records = rows.of(number)
                part = {name: array[places] for name, array in self._arrays(pool.blocks[number]).items()}
                rows.into(part, records)
                priorities = None if self._priorities is None else records[PRIORITY].copy()
                yield self._rows(part, records["key"].copy(), priorities)

    def _arrays(self, block: Block) -> Arrays:
        ((_, found),) = self._reader.each([block.place])
        if isinstance(found, Damaged):
            raise found
        schema = self._buffer.state.schema
        assert schema is not None
        where = f"{self._layout.segment(*block.segment_key)} at byte {block.offset}"
        arrays = decode_block(found, schema, block.count, where, block.sums)
        for column in schema.columns:
            if arrays[column.name].dtype == object:
                arrays[column.name] = unpacked(arrays[column.name], column.shape, column.bits)
        return arrays

    def _rows(self, arrays: Arrays, keys: np.ndarray, priorities: np.ndarray | None) -> Rows:
        """Return rows of a block."""
        schema = self._buffer.state.schema
        assert schema is not None
        columns = {column.name: arrays[column.name] for column in schema.columns}
        marks: dict[str, Any] = {KEY: keys, **{name: arrays[name] for name in _MARKS}}
        marks[END] = self._ends.of(keys, marks[END])
        if priorities is not None:
            marks[PRIORITY] = priorities
        if RANK in self._marks:
            marks[RANK] = np.full(len(keys), self._buffer.rank, np.int32)
        return Rows(columns, marks)

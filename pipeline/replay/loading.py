"""Reading a generation of a buffer: everything is read and checked before anything is changed. Blocks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.blocks import decode_block, take_back
from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.ring import Ring
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.errors import Damaged, UsageError
from pipeline.replay.ahead import ahead
from pipeline.replay.parts import check_kind
from pipeline.replay.pooling import needed_by, read_rows, take_places
from pipeline.replay.state import STATE_FILE, VALUES_FOLDER, BufferState, decode_state
from pipeline.replay.unread import UnreadPool, UnreadRows
from pipeline.store.files import open_plain
from pipeline.store.held import HeldSegments
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, PayloadReader, read_blocks
from pipeline.wiring.recovery import read_generation


class Read(NamedTuple):
    """What a generation holds; nothing of it is in use yet."""

    stored: Stored
    state: BufferState
    unknown: dict[str, Any]
    blocks: list[Block]
    values: dict[str, np.ndarray]
    states: dict[str, Any]
    ring: Ring


def read(
    layout: Layout, run_tag: int, stored: Stored, attached: Sequence[str], like: Ring, *, lazily: bool = False
) -> Read:
    """Read and check a generation, its rows into a ring of its own, which is like another one. ``lazily``, of rows only
    that they are there is checked, and each block is read when it is first wanted.

    Raises:
        Damaged: something is missing or was changed; the message names file and byte.
        UsageError: what is attached, or the columns, are not what the generation holds.
        ConfigError: the rows do not fit into memory.
    """
    states = read_generation(stored, attached)
    found = read_state(layout, run_tag, stored, like, lazily=lazily)
    return Read(stored, found.state, found.unknown, found.blocks, found.values, states, found.ring)


class ReadRows(NamedTuple):
    """A buffer's part of a generation; nothing of it is in use yet."""

    state: BufferState
    unknown: dict[str, Any]
    blocks: list[Block]
    values: dict[str, np.ndarray]
    ring: Ring


def read_state(layout: Layout, run_tag: int, stored: Stored, like: Ring, *, lazily: bool = False) -> ReadRows:
    """As :func:`read`, without what was attached; the generation's files were compared with its manifest."""
    path = os.path.join(stored.folder, STATE_FILE)
    with open_plain(path) as file:
        state, unknown = decode_state(file.read(), path)
    check_kind(state, like, path)
    schema = like.storage.schema
    if schema is not None and state.schema is not None and schema != state.schema:
        raise UsageError(
            f"{path}: the rows have the columns {', '.join(map(str, state.schema.columns))}; this buffer has "
            f"{', '.join(map(str, schema.columns))}. Build it without schema=, or with that one"
        )
    values = read_values(stored)
    ring = like.like(state.schema)
    ring.restore(state.added, state.size, state.cut_keys)
    ring.episodes.load(state.open_episodes, state.next_episode)
    blocks = _read_blocks(os.path.join(stored.folder, BLOCKS_FILE), None if ring.scattered else state)
    try:
        if isinstance(ring, Pool):
            take_places(ring, state, values)
        if state.schema is not None:
            if not lazily:
                _read_rows(PayloadReader(layout, run_tag), ring, state.schema, blocks, layout)
                ring.relink()
            elif ring.size:
                _leave_rows(layout, run_tag, ring, state.schema, blocks, stored)
    except (LookupError, ValueError) as error:
        raise Damaged(f"{path}: the rows do not fit together ({error})") from None
    return ReadRows(state, unknown, blocks, values, ring)


def _leave_rows(
    layout: Layout, run_tag: int, ring: Ring, schema: Schema, blocks: Sequence[Block], stored: Stored
) -> None:
    """Have the rows read when they are wanted; check that their blocks are there."""
    needed = needed_by(ring, blocks, layout) if isinstance(ring, Pool) else _needed(ring, blocks)
    held = HeldSegments(layout, run_tag, needed, stored.manifest.segments)
    ring.begin_unread()
    if isinstance(ring, Pool):
        ring.storage.unread = UnreadPool(ring, schema, needed, held)
    else:
        ring.storage.unread = UnreadRows(ring, schema, needed, held)


def _needed(ring: Ring, blocks: Sequence[Block]) -> list[Block]:
    return list({block.first: block for block in blocks if block.first + block.count > ring.oldest}.values())


def _read_blocks(path: str, state: BufferState | None) -> list[Block]:
    """Return the places of all rows, of which, by ``state``, none may be missing."""
    blocks = read_blocks(path)
    if state is None:
        return blocks
    expected = state.added - state.size
    for block in blocks:
        if (
            block.count < 1
            or block.first > expected
            or min(block.segment_key) < 0
            or min(block.offset, block.length) < 0
        ):
            raise Damaged(f"{path}: rows from {expected} on are missing, before those from {block.first} on")
        expected = max(expected, block.first + block.count)
    if expected < state.added:
        raise Damaged(f"{path}: rows from {expected} to {state.added} are missing")
    return blocks


def _read_rows(reader: PayloadReader, ring: Ring, schema: Schema, blocks: Sequence[Block], layout: Layout) -> None:
    if isinstance(ring, Pool):
        read_rows(reader, ring, schema, blocks, layout)
        return
    wanted = {block.first: block for block in _needed(ring, blocks)}
    with contextlib.closing(ahead(reader.each(block.place for block in wanted.values()))) as places:
        for place, found in places:
            if isinstance(found, Damaged):
                raise found
            block = wanted[place[0]]
            where = f"{layout.segment(*block.segment_key)} at byte {block.offset}"
            take_back(ring, block.first, block.count, decode_block(found, schema, block.count, where))


def read_values(stored: Stored) -> dict[str, np.ndarray]:
    """Return the arrays of a generation, whose files have been compared with its manifest."""
    values = {}
    for info in stored.manifest.files:
        folder, _, name = info.path.partition("/")
        if folder == VALUES_FOLDER:
            path = os.path.join(stored.folder, info.path)
            with open_plain(path) as file:
                raw = file.read()
            try:
                values[name] = np.frombuffer(raw, _dtype_of(name))
            except ValueError as error:
                raise Damaged(f"{path}: {len(raw)} bytes are no array of {_dtype_of(name)} ({error})") from None
    return values


def _dtype_of(name: str) -> np.dtype[Any]:
    """The end of a file's name is its dtype."""
    try:
        return np.dtype(name.rpartition(".")[2])
    except TypeError:
        raise Damaged(f"{VALUES_FOLDER}/{name}: its dtype is unknown") from None

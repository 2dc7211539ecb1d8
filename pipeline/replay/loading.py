"""Reading a generation of a buffer: everything is read and checked before anything is changed. Blocks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
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
from pipeline.replay.state import STATE_FILE, VALUES_FOLDER, BufferState, read_buffer_state
from pipeline.replay.unread import UnreadPool, UnreadRows
from pipeline.replay.values import dtype_of
from pipeline.store.files import open_plain
from pipeline.store.held import HeldSegments
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, PayloadReader, needed_blocks, read_blocks
from pipeline.wiring.recovery import read_generation


class Lost(NamedTuple):
    """What a generation held and a load did without, as it was told to."""

    rows: int = 0
    episodes: int = 0
    """Of so many episodes rows are gone, at the least."""
    files: tuple[str, ...] = ()
    """The damaged files and folders."""


class Read(NamedTuple):
    """What a generation holds; nothing of it is in use yet."""

    stored: Stored
    state: BufferState
    unknown: dict[str, Any]
    blocks: list[Block]
    values: dict[str, np.ndarray]
    states: dict[str, Any]
    ring: Ring
    lost: Lost = Lost()
    own: dict[str, Any] | None = None
    """What this rank had attached for itself; None: that is not loaded."""
    left: tuple[str, ...] = ()
    """Names of what ranks had attached for themselves and is not loaded."""


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
    values: dict[str, Any]
    """Arrays, or what reads them."""
    ring: Ring


def read_state(
    layout: Layout,
    run_tag: int,
    stored: Stored,
    like: Ring,
    *,
    lazily: bool = False,
    rows: type[UnreadRows] | None = None,
    unread: tuple[str, ...] = (),
    find: Callable[[Ring, BufferState, Sequence[Block]], list[Block]] | None = None,
) -> ReadRows:
    """As :func:`read`, without what was attached; the generation's files were compared with its manifest.

    Args:
        layout, run_tag, stored, like, lazily: see :func:`read`.
        rows: what brings rows in, if ``lazily``.
        unread: values whose names begin with one of these are not read.
        find: lets a ring know which rows it has, and where these lie, if its counters and the values that are read do
            not say so; and returns the blocks in which they lie.
    """
    path = os.path.join(stored.folder, STATE_FILE)
    state, unknown = read_buffer_state(stored.folder)
    check_kind(state, like, path)
    check_columns(state.schema, like, path)
    values = read_values(stored, unread=unread)
    ring = like.like(state.schema)
    ring.restore(state.added, state.size, state.cut_keys, state.truncated_keys)
    ring.episodes.load(state.open_episodes, state.next_episode)
    listed = os.path.join(stored.folder, BLOCKS_FILE)
    blocks = read_blocks(listed) if ring.scattered else blocks_of(listed, state)
    try:
        if isinstance(ring, Pool):
            take_places(ring, state, values)
        needed = None if find is None else find(ring, state, blocks)
        if state.schema is not None:
            if not lazily:
                _read_rows(PayloadReader(layout, run_tag), ring, state.schema, blocks, layout)
                ring.relink()
            elif ring.size:
                if isinstance(ring, Pool):
                    needed = needed_by(ring, blocks, layout)
                elif needed is None:
                    needed = needed_blocks(blocks, ring.oldest)
                _leave_rows(layout, run_tag, ring, state.schema, needed, stored, rows)
    except (LookupError, ValueError) as error:
        raise Damaged(f"{path}: the rows do not fit together ({error})") from None
    return ReadRows(state, unknown, blocks, values, ring)


def check_columns(schema: Schema | None, like: Ring, where: str) -> None:
    """Compare the columns of rows with those that a ring has, if it has any.

    Raises:
        UsageError: they differ.
    """
    own = like.storage.schema
    if own is not None and schema is not None and own != schema:
        raise UsageError(
            f"{where}: the rows have the columns {', '.join(map(str, schema.columns))}; this buffer has "
            f"{', '.join(map(str, own.columns))}. Build it without schema=, or with that one"
        )


def _leave_rows(
    layout: Layout,
    run_tag: int,
    ring: Ring,
    schema: Schema,
    needed: Sequence[Block],
    stored: Stored,
    rows: type[UnreadRows] | None,
) -> None:
    """Have the rows read when they are wanted; check that their blocks are there."""
    held = HeldSegments(layout, run_tag, needed, stored.manifest.segments)
    ring.begin_unread()
    if isinstance(ring, Pool):
        ring.storage.unread = UnreadPool(ring, schema, needed, held)
    else:
        ring.storage.unread = (rows or UnreadRows)(ring, schema, needed, held)


def blocks_of(path: str, state: BufferState) -> list[Block]:
    """Return the places of all rows of a state, whose keys follow each other.

    Raises:
        Damaged: some are missing.
    """
    blocks = read_blocks(path)
    expected = state.added - state.size
    for block in needed_blocks(blocks, expected):
        if block.first > expected:
            raise Damaged(f"{path}: rows from {expected} on are missing, before those from {block.first} on")
        expected = max(expected, block.first + block.count)
    if expected < state.added:
        raise Damaged(f"{path}: rows from {expected} to {state.added} are missing")
    return blocks


def _read_rows(reader: PayloadReader, ring: Ring, schema: Schema, blocks: Sequence[Block], layout: Layout) -> None:
    if isinstance(ring, Pool):
        read_rows(reader, ring, schema, blocks, layout)
        return
    wanted = {block.first: block for block in needed_blocks(blocks, ring.oldest)}
    with contextlib.closing(ahead(reader.each(block.place for block in wanted.values()))) as places:
        for place, found in places:
            if isinstance(found, Damaged):
                raise found
            block = wanted[place[0]]
            where = f"{layout.segment(*block.segment_key)} at byte {block.offset}"
            take_back(ring, block.first, block.count, decode_block(found, schema, block.count, where, block.sums))


def read_values(stored: Stored, *, unread: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Return the arrays of a generation, whose files have been compared with its manifest; but for those whose names
    begin with one of ``unread``."""
    values = {}
    for info in stored.manifest.files:
        folder, _, name = info.path.partition("/")
        if folder == VALUES_FOLDER and not name.startswith(unread):
            path = os.path.join(stored.folder, info.path)
            with open_plain(path) as file:
                raw = file.read()
            dtype = dtype_of(path)
            if len(raw) % dtype.itemsize:
                raise Damaged(f"{path}: {len(raw)} bytes are no array of {dtype}")
            values[name] = np.frombuffer(raw, dtype)
    return values

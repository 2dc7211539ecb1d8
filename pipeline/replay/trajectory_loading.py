"""Reading a generation of a buffer of trajectories: everything is read and checked before anything is changed.
Blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Literal, NamedTuple

from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.errors import ConfigError, Damaged, StoreError
from pipeline.replay.ahead import ahead
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.loading import read_values
from pipeline.replay.shelf import Shelf
from pipeline.replay.trajectory_blobs import BlobLayout
from pipeline.replay.trajectory_state import STATE_FILE, TrajectoryState, decode_state, from_values
from pipeline.store.files import open_plain
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout, SegmentKey
from pipeline.store.segments import Block, PayloadReader, read_blocks
from pipeline.wiring.recovery import read_generation

Verify = Literal["full", "lazy"]


class Room(NamedTuple):
    """How much a buffer holds, by its options: trajectories at all, and in memory; None: no bound."""

    capacity: int | None
    cache: int | None


class ReadTrajectories(NamedTuple):
    """What a generation holds; nothing of it is in use yet."""

    stored: Stored
    state: TrajectoryState
    unknown: dict[str, Any]
    states: dict[str, Any]
    shelf: Shelf
    blocks: list[Block]
    """Empty: where trajectories lie the shelf knows."""


def read(
    layout: Layout, run_tag: int, stored: Stored, attached: Sequence[str], room: Room, verify: Verify
) -> ReadTrajectories:
    """Read and check a generation, its newest trajectories into memory, as many as ``room`` says; the others, unless
    ``verify`` is ``full``, when they are first read: of these, how long the files are is compared now.

    Raises:
        Damaged: something is missing or was changed; the message names file and byte.
        UsageError: what is attached is not what the generation holds.
        ConfigError: the rows do not fit into memory.
    """
    states = read_generation(stored, attached)
    state, unknown, infos = read_infos(stored)
    blocks = blocks_of(os.path.join(stored.folder, BLOCKS_FILE), state)
    drop = 0 if room.capacity is None else max(0, state.size - room.capacity)
    shelf = Shelf(state.trajectory_counter - state.size + drop)
    shelf.enter(infos[drop:])
    shelf.note_written(blocks[drop:], shelf.next)
    shelf.synced = shelf.next
    if state.schema is not None:
        cached = shelf.low if room.cache is None else max(shelf.low, shelf.next - room.cache)
        shelf.fill(state.schema, cached)
        reader = PayloadReader(layout, run_tag)
        others = blocks[drop : drop + cached - shelf.low]
        if verify == "full":
            reader.verify(block.place for block in others)
        else:
            _check_sizes(layout, others)
            shelf.unchecked = cached
        _read_cached(reader, shelf, blocks[drop + cached - shelf.low :], layout)
    return ReadTrajectories(stored, state, unknown, states, shelf, [])


def read_infos(stored: Stored) -> tuple[TrajectoryState, dict[str, Any], list[TrajectoryInfo]]:
    """Return the state of a generation, the fields of it that this version does not know, and what is known of each
    trajectory, oldest first.

    Raises:
        NewerFormat: it was written by a newer version.
        Damaged: something is missing, or does not fit together.
    """
    path = os.path.join(stored.folder, STATE_FILE)
    with open_plain(path) as file:
        state, unknown = decode_state(file.read(), path)
    values = read_values(stored)
    try:
        return state, unknown, from_values(state, values)
    except (LookupError, ValueError) as error:
        raise Damaged(f"{path}: what is known of trajectories does not fit together ({error})") from None
    except Damaged as error:
        raise Damaged(f"{path}: {error}") from None


def blocks_of(path: str, state: TrajectoryState) -> list[Block]:
    """Return where the trajectories of a state lie, by number.

    Raises:
        Damaged: the file lists others.
    """
    blocks = read_blocks(path)
    first = state.trajectory_counter - state.size
    if [(block.first, block.count) for block in blocks] != [(first + at, 1) for at in range(state.size)]:
        raise Damaged(f"{path}: lists other trajectories than {first} to {state.trajectory_counter - 1}")
    return blocks


def _check_sizes(layout: Layout, blocks: Sequence[Block]) -> None:
    ends: dict[SegmentKey, int] = {}
    for block in blocks:
        end = block.offset + HEADER_BYTES + block.length
        ends[block.segment_key] = max(ends.get(block.segment_key, 0), end)
    for key, end in ends.items():
        path = layout.segment(*key)
        try:
            size = os.path.getsize(path)
        except FileNotFoundError:
            size = -1
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error}") from error
        if size < end:
            how = "missing" if size < 0 else f"has {size} bytes"
            raise Damaged(f"{path}: {how}; {end} bytes of it are needed. Restore the file from a copy.")


def _read_cached(reader: PayloadReader, shelf: Shelf, blocks: Sequence[Block], layout: Layout) -> None:
    assert shelf.schema is not None
    blobs = BlobLayout(shelf.schema)
    by_number = {block.first: block for block in blocks}
    with closing(ahead(reader.each(block.place for block in blocks))) as places:
        for place, found in places:
            if isinstance(found, Damaged):
                raise found
            block = by_number[place[0]]
            where = f"{layout.segment(*block.segment_key)} at byte {block.offset}"
            shelf.put(block.first, blobs.decode(found, shelf.info(block.first), where))


def shelf_of(state: TrajectoryState, values: dict[str, Any], rows: dict[str, Any], room: Room, memory: bool) -> Shelf:
    """Return the shelf of a state in memory: its newest trajectories.

    Args:
        state, values, rows: what :meth:`~pipeline.TrajectoryBuffer.state_dict` gave.
        room: how much is held.
        memory: whether what is not in memory is nowhere.

    Raises:
        ConfigError: rows are missing, or do not fit into memory.
        Damaged, LookupError, ValueError: the state does not fit together.
    """
    infos, schema = from_values(state, values), state.schema
    bounds = [each for each in (room.capacity, room.cache if memory else None) if each is not None]
    drop = max(0, state.size - min(bounds, default=state.size))
    shelf = Shelf(state.trajectory_counter - state.size + drop)
    if schema is None:
        return shelf
    for column in schema.columns:
        array = rows.get(column.name)
        if array is None or array.dtype != column.bits or array.shape != (state.total_samples, *column.shape):
            raise ConfigError(f"field {column}: {state.total_samples} rows of it are needed", option="rows")
    shelf.enter(infos[drop:])
    shelf.fill(schema, shelf.low)
    begin = state.total_samples - shelf.end
    if shelf.end:
        shelf.storage.write(slice(0, shelf.end), {name: rows[name][begin:] for name in schema.names})
    return shelf

"""Reading a generation of a buffer of trajectories: everything is read and checked before anything is changed.
Blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Literal, NamedTuple

from pipeline.buffer.transitions.columns import Schema
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.errors import ConfigError, Damaged, StoreError
from pipeline.replay.ahead import ahead
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.loading import Lost, read_values
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
    lost: Lost = Lost()
    own: dict[str, Any] | None = None
    """What this rank had attached for itself; None: that is not loaded."""
    left: tuple[str, ...] = ()
    """Names of what ranks had attached for themselves and is not loaded."""


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
    shelf = Reading(layout, run_tag, room, verify).shelf(state.schema, infos, blocks, state.trajectory_counter)
    return ReadTrajectories(stored, state, unknown, states, shelf, [])


class Reading:
    """Reads trajectories out of segments; see :func:`read`. Blocks."""

    def __init__(self, layout: Layout, run_tag: int, room: Room, verify: Verify) -> None:
        self._layout, self._room, self._verify = layout, room, verify
        self._reader = PayloadReader(layout, run_tag)
        self.bytes_read = 0
        """Of payloads."""

    def shelf(self, schema: Schema | None, infos: Sequence[TrajectoryInfo], blocks: Sequence[Block], end: int) -> Shelf:
        """Return a shelf of trajectories, of which as many as there is room for: the newest.

        Args:
            schema: their columns; None: there are none.
            infos: what is known of each, oldest first. Of the numbers in them none counts.
            blocks: where they lie, and under which numbers.
            end: the number of the next one that comes.

        Raises:
            Damaged, StoreError: one cannot be read.
            ConfigError: they do not fit into memory.
        """
        room, count = self._room, len(infos)
        drop = 0 if room.capacity is None else max(0, count - room.capacity)
        infos, blocks = infos[drop:], blocks[drop:]
        shelf = Shelf(end - len(infos))
        shelf.enter(infos)
        shelf.note_there(blocks)
        if schema is None:
            return shelf
        cached = shelf.low if room.cache is None else max(shelf.low, shelf.next - room.cache)
        shelf.fill(schema, cached)
        others, inside = blocks[: cached - shelf.low], blocks[cached - shelf.low :]
        if self._verify == "full":
            self._reader.verify(block.place for block in others)
        else:
            _check_sizes(self._layout, others)
            shelf.unchecked = cached
        self._into_memory(shelf, inside)
        self.bytes_read += sum(each.length for each in (blocks if self._verify == "full" else inside))
        return shelf

    def _into_memory(self, shelf: Shelf, blocks: Sequence[Block]) -> None:
        assert shelf.schema is not None
        blobs = BlobLayout(shelf.schema)
        numbers = {block.place: number for number, block in enumerate(blocks, shelf.next - len(blocks))}
        with closing(ahead(self._reader.each(numbers))) as places:
            for place, found in places:
                if isinstance(found, Damaged):
                    raise found
                block, info = shelf.payload(numbers[place])
                where = f"{self._layout.segment(*block.segment_key)} at byte {block.offset}"
                shelf.put(numbers[place], blobs.decode(found, info, where))


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


def blocks_of(path: str, state: TrajectoryState, *, moved: bool = False) -> list[Block]:
    """Return where the trajectories of a state lie, by number; ``moved``: they may have been written under others.

    Raises:
        Damaged: the file lists others.
    """
    blocks = read_blocks(path)
    first = state.trajectory_counter - state.size
    if moved:
        if len(blocks) != state.size or any(block.count != 1 for block in blocks):
            raise Damaged(f"{path}: lists {len(blocks)} blocks, where {state.size} trajectories are")
        return blocks
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

"""One row of a buffer of transitions, or one trajectory, as it lies in its block."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import decode_block
from pipeline.buffer.transitions.columns import Column
from pipeline.buffer.transitions.compressed import unpacked
from pipeline.buffer.transitions.layout import BEHIND, CUT, END, EPISODE, PLACE, TERMINATED, TRUNCATED, VERSION
from pipeline.buffer.transitions.sharing import twins_of
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.checkpoint.parts import shard_of
from pipeline.config import Fields
from pipeline.errors import ConfigError, Damaged
from pipeline.replay.next_obs import KEYS_FILE, file_of
from pipeline.replay.pool_files import AT, KEYS
from pipeline.replay.state import LISTED, STATE_FILE, BufferState, Ends, read_buffer_state
from pipeline.replay.trajectory_blobs import BlobLayout
from pipeline.replay.trajectory_loading import blocks_of, read_infos
from pipeline.replay.values import Values
from pipeline.store.codec import tensor_of
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, PayloadReader, read_blocks

Found = tuple[dict[str, Any], dict[str, Any]]
_ENDS = {0: "it went on", TERMINATED: "terminated", TRUNCATED: "truncated", CUT: "left where it was"}
_SAFE = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def row_of(layout: Layout, run_tag: int, stored: Stored, key: int, rank: int | None) -> Found:
    """Return what is known of a row, and its columns.

    Raises:
        ConfigError: it is not there.
        Damaged: its block is not whole.
    """
    stored = stored if rank is None else shard_of(stored, rank)
    path = os.path.join(stored.folder, STATE_FILE)
    state, _ = read_buffer_state(stored.folder)
    values = Values(stored)
    place = _place(state, values, key)
    blocks = read_blocks(os.path.join(stored.folder, BLOCKS_FILE))
    block = _block_of(blocks, place)
    if block is None or state.schema is None:
        raise Damaged(f"{path}: no block holds row {key}")
    where = f"{layout.segment(*block.segment_key)} at byte {block.offset}"
    arrays = decode_block(_payload(layout, run_tag, block), state.schema, block.count, where, block.sums)
    at = place - block.first
    listed = {LISTED: values.all(LISTED)} if state.dropped and LISTED in values.names else {}
    if not state.coming_back(listed, arrays[EPISODE][at : at + 1]).all():
        raise ConfigError.of("--item", key, "the save dropped its episode, which was not whole: it does not come back")
    end = int(Ends(state).of(np.array([key]), arrays[END][at : at + 1])[0])
    facts = {
        "episode": int(arrays[EPISODE][at]),
        "place": int(arrays[PLACE][at]),
        "version": int(arrays[VERSION][at]),
        "end": _ENDS.get(end, str(end)),
        "block": f"rows {block.first} to {block.first + block.count - 1}, {where}",
    }
    if state.written_columns:
        facts["note"] = f"as first written: {', '.join(state.written_columns)} of some rows was changed since"
    rows = {column.name: _dense(arrays[column.name][at : at + 1], column)[0] for column in state.schema.columns}
    if state.next_obs_columns:
        rows |= _NextObs(layout, run_tag, stored, state, blocks).of(key)
    columns = sorted([*state.schema.columns, *(state.next_obs_columns or ())], key=lambda column: column.name)
    return facts, {column.name: _valued(rows[column.name], column) for column in columns}


class _NextObs:
    """Next observations that rows share (``share_next_obs``)."""

    def __init__(
        self, layout: Layout, run_tag: int, stored: Stored, state: BufferState, blocks: Sequence[Block]
    ) -> None:
        self._layout, self._run_tag, self._stored, self._state, self._blocks = layout, run_tag, stored, state, blocks
        self._columns = state.next_obs_columns or []

    def of(self, key: int) -> dict[str, np.ndarray]:
        """Return that of a row, by column: the one that is kept aside, or the observation of its successor.

        Raises:
            Damaged: there is neither.
        """
        values = Values(self._stored)
        keys = values.file(KEYS_FILE) if values.count(KEYS_FILE) else None
        at = 0 if keys is None else keys.below(key)
        if keys is None or at == len(keys) or int(keys.read(at, 1)[0]) != key:
            return self._observed(key)
        found = {}
        for number, column in enumerate(self._columns):
            items = prod(column.shape)
            raw = values.reader(file_of(number, column))(at * items, items)
            found[column.name] = raw.view(column.bits).reshape(column.shape)
        return found

    def _observed(self, key: int) -> dict[str, np.ndarray]:
        layout, schema, begin = self._layout, self._state.schema, key + 1
        assert schema is not None
        twins = twins_of(self._columns, Fields.of(self._stored.manifest.options.get("fields")))
        while begin < self._state.added and (block := _block_of(self._blocks, begin)) is not None:
            where = f"{layout.segment(*block.segment_key)} at byte {block.offset}"
            arrays = decode_block(_payload(layout, self._run_tag, block), schema, block.count, where, block.sums)
            behind = arrays[BEHIND]
            led = np.flatnonzero((np.arange(block.first, block.first + block.count) - behind == key) & (behind > 0))
            if len(led):
                row = slice(int(led[0]), int(led[0]) + 1)
                return {name: _dense(arrays[twin][row], schema.column(twin))[0] for name, twin in twins.items()}
            begin = block.first + block.count
        raise Damaged(f"{self._stored.folder}: the next observation of row {key} is nowhere. Restore it from a copy")


def _block_of(blocks: Sequence[Block], place: int) -> Block | None:
    return next((each for each in reversed(blocks) if each.first <= place < each.first + each.count), None)


def _place(state: BufferState, values: Values, key: int) -> int:
    """Return the place of a row among all that were written."""
    if state.remove == "fifo":
        if not state.added - state.size <= key < state.added:
            there = f"{state.added - state.size} to {state.added - 1} are" if state.size else "none is"
            raise ConfigError.of("--item", key, f"{there} there")
        return key
    before = 0
    for keys in values.pieces(KEYS):
        found = np.flatnonzero(keys == key)
        if len(found):
            return int(values.file(AT).read(before + int(found[0]), 1)[0])
        before += len(keys)
    first = values.file(KEYS).read(0, min(3, before)).tolist() if before else []
    raise ConfigError.of("--item", key, f"no row of this key is there, as {first} and others are")


def trajectory_of(layout: Layout, run_tag: int, stored: Stored, number: int, rank: int | None) -> Found:
    """Return what is known of a trajectory, and its fields [T, B, ...].

    Raises:
        ConfigError: it is not there.
        Damaged: it is not whole.
    """
    stored = stored if rank is None else shard_of(stored, rank)
    state, _, infos = read_infos(stored)
    first = state.trajectory_counter - state.size
    if state.schema is None or not first <= number < state.trajectory_counter:
        there = f"{first} to {state.trajectory_counter - 1} are" if infos else "none is"
        raise ConfigError.of("--item", number, f"{there} there")
    blocks = blocks_of(os.path.join(stored.folder, BLOCKS_FILE), state, moved=rank is not None)
    info, block = infos[number - first], blocks[number - first]
    where = f"{layout.segment(*block.segment_key)} at byte {block.offset}"
    written = msgspec.structs.replace(info, trajectory_id=block.first)
    arrays = BlobLayout(state.schema).decode(_payload(layout, run_tag, block), written, where)
    columns = {column.name: column for column in state.schema.columns}
    facts = {
        "steps": info.shape[0],
        "environments": info.shape[1],
        "longest episode": info.max_episode_length,
        "weights": info.model_weights_id,
        "block": where,
    }
    return facts, {
        name: _valued(array.reshape(*info.shape, *columns[name].shape), columns[name]) for name, array in arrays.items()
    }


def _payload(layout: Layout, run_tag: int, block: Block) -> bytes:
    return PayloadReader(layout, run_tag).read_many([block.place])[block.first, 0]


def _dense(rows: np.ndarray, column: Column) -> np.ndarray:
    return unpacked(rows, column.shape, column.bits) if rows.dtype == object else rows


def _valued(array: Any, column: Column) -> Any:
    """Return an array as what it is: of dtypes that numpy lacks, the tensor."""
    array = np.asarray(array)
    if column.torch_only is None:
        return array
    raw = np.frombuffer(bytearray(np.ascontiguousarray(array).tobytes()), np.uint8)
    return tensor_of(_SAFE[column.dtype], array.shape, raw)

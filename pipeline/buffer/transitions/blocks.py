"""Rows as bytes: a block of them is a ``safetensors`` blob, its large columns under their names, its small ones in
bodies, its marks beside them.

The mark that says how far ahead an episode goes on is left out: it may change after a block was written, and follows
from how far behind the next row's predecessor lies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.bodies import BODIES, RowArrays, body_of, described, some_rows, stored_name, without
from pipeline.buffer.transitions.checked import CHUNK, sums_of
from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.compressed import LENGTHS, PACKED, CompressedColumn, fitting
from pipeline.buffer.transitions.layout import BEHIND, CUT, END, EPISODE, MARKS, PLACE, SERIAL, VERSION
from pipeline.buffer.transitions.recycling import Recycler
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import Slots, TransitionStorage
from pipeline.errors import Damaged
from pipeline.store.block_sums import OTHER_BLOCK, SUMS, checksum_of
from pipeline.store.codec import METADATA, TensorBytes, bodies_of_head, item_bytes, read_bytes

KEPT_MARKS = (EPISODE, PLACE, BEHIND, VERSION, END)
BLOCK_BYTES = 4 << 20
"""About how large a block is: what one copy under the buffer's lock takes a few milliseconds for."""


def rows_of_block(ring: Ring) -> int:
    """Return how many rows a block has."""
    return max(1, BLOCK_BYTES // max(1, ring.storage.row_bytes))


def encode_block(ring: Ring, first: int, count: int, memory: Recycler | None = None) -> memoryview:
    """Return the rows of ``count`` keys from ``first`` on, which must be there, as a blob that is the caller's; in
    ``memory`` that others have given back, if there is such."""
    slots = np.arange(first, first + count) % ring.capacity
    whole = slots[0] + count <= ring.capacity
    return encode_rows(ring, slice(int(slots[0]), int(slots[0]) + count) if whole else slots, count, memory)


def encode_rows(ring: Ring, slots: Slots, count: int, memory: Recycler | None = None) -> memoryview:
    """As :func:`encode_block`, of the rows in ``count`` slots."""
    storage = ring.storage
    layout = storage.layout
    assert layout is not None
    parts: list[_Part] = []
    packed = len(layout.small) > 1 and layout.body.itemsize > 0  # one column is a tensor like any other
    packed = packed and all(column.name != METADATA for column in layout.large)  # what is said of bodies stands there
    for column in layout.large if packed else layout.schema.columns:
        view: Any = storage.view(column.name)
        if isinstance(view, CompressedColumn):
            parts += _packed(column.name, view.packed(slots))
        else:
            parts.append(_Part(column.name, stored_name(column), (count, *column.shape), view))
    marks = np.empty(count, MARKS)
    parts += [_Part(name, stored_name(Column(name, MARKS[name].name)), (count,), marks[name]) for name in KEPT_MARKS]
    parts.sort(key=lambda part: -item_bytes(part.dtype))
    said = ""
    if packed:  # in front: all of them are aligned there, and so is what follows
        parts.insert(0, _Part(BODIES, "U8", (count, layout.body.itemsize), storage.bodies))
        said = described({each.name: (stored_name(each), each.shape) for each in layout.small}, layout.body)
    data = sum(item_bytes(part.dtype) * prod(part.shape) for part in parts)
    sums = (SUMS, "U8", (4 * -(-data // CHUNK),))
    head, offsets = blob_head([*((part.name, part.dtype, part.shape) for part in parts), sums], said)
    blob = (memory or Recycler()).array("block", len(head) + offsets[-1], (), np.dtype(np.uint8))
    blob[: len(head)] = np.frombuffer(head, np.uint8)
    places = {
        part.name: blob[len(head) + begin : len(head) + end]
        for part, begin, end in zip(parts, offsets, offsets[1:], strict=False)
    }
    storage.copy_out(slots, marks, places.pop(BODIES).reshape(count, -1) if packed else None)
    for part in parts[packed:]:
        to = places[part.name].view(part.source.dtype)
        if part.name.startswith((PACKED, LENGTHS)) or part.name in KEPT_MARKS:
            to[...] = part.source
        else:
            to.reshape(count, *part.source.shape[1:])[...] = part.source[slots]
    blob[len(head) + data :] = sums_of(blob[len(head) : len(head) + data])
    return memoryview(blob.data)


def encode_arrays(schema: Schema, arrays: Arrays, count: int) -> memoryview:
    """As :func:`encode_block`, of ``count`` rows that lie in no ring: columns and marks [count, ...] by name."""
    ring = Ring(TransitionStorage(count, schema))
    ring.storage.write(slice(0, count), arrays)
    return encode_rows(ring, slice(0, count), count)


class _Part(NamedTuple):
    """A tensor of a block, and where it is copied from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: Any


def _packed(name: str, rows: np.ndarray) -> list[_Part]:
    """Return a compressed column as parts of a blob: the rows one after the other, and how long each is."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    joined = np.frombuffer(b"".join(rows.tolist()), np.uint8)
    return [_Part(LENGTHS + name, "I64", lengths.shape, lengths), _Part(PACKED + name, "U8", joined.shape, joined)]


def _unpacked(found: Mapping[str, TensorBytes], name: str, count: int, where: str) -> np.ndarray | None:
    """Return a compressed column of a blob: [count] objects, ``bytes`` each; None if there is none."""
    packed, lengths = found.get(PACKED + name), found.get(LENGTHS + name)
    if packed is None or lengths is None:
        return None
    sizes = lengths.array.view(np.int64) if lengths.dtype == "I64" else np.empty(0, np.int64)
    if sizes.shape != (count,) or sizes.min(initial=0) < 0 or int(sizes.sum()) != packed.array.nbytes:
        raise Damaged(f"{where}: the compressed rows of {name!r} are not as long as they are said to be")
    ends = np.cumsum(sizes).tolist()
    raw, rows = packed.array.tobytes(), np.empty(count, object)
    for at, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        rows[at] = raw[begin:end]
    return rows


def blob_head(parts: Sequence[tuple[str, str, tuple[int, ...]]], bodies: str = "") -> tuple[bytes, list[int]]:
    """Return the beginning of a ``safetensors`` blob up to its data, and where in these each part begins, and the last
    one ends. Parts are (name, dtype as safetensors spells it, shape), wide types first, so that each is aligned to its
    own item size without gaps. ``bodies`` is what is said of these, if it has such."""
    header: dict[str, Any] = {METADATA: {"bodies": bodies}} if bodies else {}
    offsets = [0]
    for name, dtype, shape in parts:
        offsets.append(offsets[-1] + item_bytes(dtype) * prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets[-2:]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text, offsets


def decode_block(blob: Any, schema: Schema, count: int, where: str, sums: int = -1) -> Arrays:
    """Return the columns and marks of a block, as views of ``blob``.

    Args:
        blob: its payload.
        schema, count: what is expected.
        where: it lies, for the error.
        sums: as it is listed; -1: not known.

    Raises:
        Damaged: it is no block of so many rows of these columns, or not the one that is listed.
    """
    if sums >= 0 and checksum_of(memoryview(blob)) != sums:
        raise Damaged(f"{where}: {OTHER_BLOCK}")
    columns = [*schema.columns, *(Column(name, MARKS[name].name) for name in KEPT_MARKS)]
    arrays = decode_columns(blob, columns, (count,), where)
    # An episode may have been cut between the moment that was saved and the writing; `cut_keys` are of that moment.
    arrays[END] = np.where(arrays[END] == CUT, 0, arrays[END])
    return arrays


def decode_columns(blob: Any, columns: Sequence[Column], leading: tuple[int, ...], where: str) -> Arrays:
    """Return the columns [*leading, ...] of a blob by name, as views of it.

    Raises:
        Damaged: one is missing, or of another dtype or shape.
    """
    found = read_bytes(blob, where)
    arrays = _bodies(blob, found, columns, leading[0], where) if BODIES in found else {}
    for column in columns:
        if column.name in arrays:
            continue
        tensor = found.get(column.name)
        if tensor is None and (rows := _unpacked(found, column.name, leading[0], where)) is not None:
            arrays[column.name] = rows
            continue
        if tensor is None:
            raise Damaged(f"{where}: a block of rows without {column.name!r}")
        shape, dtype = (*leading, *column.shape), stored_name(column)
        if tensor.dtype != dtype or tensor.shape != shape:
            raise Damaged(
                f"{where}: {column.name!r} is {tensor.dtype}{list(tensor.shape)} there, {dtype}{list(shape)} "
                "was expected"
            )
        arrays[column.name] = tensor.array.view(column.bits).reshape(shape)
    return arrays


def _bodies(
    blob: Any, found: Mapping[str, TensorBytes], columns: Sequence[Column], count: int, where: str
) -> RowArrays:
    """Return the columns of a block that lie in bodies."""
    bodies = found[BODIES]
    if bodies.dtype != "U8" or len(bodies.shape) != 2 or bodies.shape[0] != count:
        raise Damaged(f"{where}: bodies are {bodies.dtype}{list(bodies.shape)} there, {count} were expected")
    said = bodies_of_head(memoryview(blob)[: 8 + int.from_bytes(blob[:8], "little")])
    return RowArrays({}, bodies.array.view(body_of(said, bodies.shape[1], columns, where)))


def take_back(ring: Ring, first: int, count: int, arrays: Arrays) -> None:
    """Put the rows of a block into their slots: those that are the ring's by its counters, which are set already.

    Blocks come in the order of their keys; :meth:`Ring.relink` is to follow the last one.
    """
    low, high = max(first, ring.oldest), min(first + count, ring.added)
    if low >= high:
        return
    assert ring.storage.schema is not None
    arrays = fitting(arrays, ring.storage.views, ring.storage.schema)
    begin = low % ring.capacity
    room = min(ring.capacity - begin, high - low)
    for start, at, size in ((low - first, begin, room), (low - first + room, 0, high - low - room)):
        if size:
            part = some_rows(arrays, slice(start, start + size))
            marks = np.zeros(size, MARKS)
            for name in KEPT_MARKS:
                marks[name] = part[name]
            marks[SERIAL] = (np.arange(size) + (first + start & 0xFFFFFFFF)).astype(np.uint32)
            ring.storage.copy_in(slice(at, at + size), without(part, KEPT_MARKS), marks)
            ring.link_back(first + start, part[BEHIND], part[EPISODE], part[PLACE])

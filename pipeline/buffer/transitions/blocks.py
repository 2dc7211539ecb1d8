"""Rows as bytes: a block of them is a ``safetensors`` blob, its columns under their names, its marks beside them.

The mark that says how far ahead an episode goes on is left out: it may change after a block was written, and follows
from how far behind the next row's predecessor lies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from pipeline.buffer.transitions.checked import CHUNK, SUMS, sums_of
from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.compressed import LENGTHS, PACKED, CompressedColumn, fitting
from pipeline.buffer.transitions.layout import BEHIND, CUT, END, EPISODE, MARKS, PLACE, VERSION
from pipeline.buffer.transitions.recycling import Recycler
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import Slots
from pipeline.errors import Damaged
from pipeline.store.codec import TensorBytes, dtype_name, item_bytes, read_bytes

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
    layout = ring.storage.layout
    assert layout is not None
    parts: list[tuple[str, str, tuple[int, ...], Any]] = []
    for column in [*layout.schema.columns, *(Column(name, MARKS[name].name) for name in KEPT_MARKS)]:
        view: Any = ring.storage.view(column.name)
        if isinstance(view, CompressedColumn):
            parts += _packed(column.name, view.packed(slots))
        else:
            parts.append((column.name, stored_name(column), (count, *column.shape), view))
    parts.sort(key=lambda part: -item_bytes(part[1]))
    data = sum(item_bytes(dtype) * prod(shape) for _, dtype, shape, _ in parts)
    parts.append((SUMS, "U8", (4 * -(-data // CHUNK),), None))
    head, offsets = blob_head([part[:3] for part in parts])
    blob = (memory or Recycler()).array("block", len(head) + offsets[-1], (), np.dtype(np.uint8))
    blob[: len(head)] = np.frombuffer(head, np.uint8)
    for (name, _, shape, source), begin, end in zip(parts[:-1], offsets, offsets[1:], strict=False):
        part = blob[len(head) + begin : len(head) + end].view(source.dtype).reshape(shape)
        part[...] = source if name.startswith((PACKED, LENGTHS)) else source[slots]
    blob[len(head) + data :] = sums_of(blob[len(head) : len(head) + data])
    return memoryview(blob.data)


def _packed(name: str, rows: np.ndarray) -> list[tuple[str, str, tuple[int, ...], Any]]:
    """Return a compressed column as parts of a blob: the rows one after the other, and how long each is."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    joined = np.frombuffer(b"".join(rows.tolist()), np.uint8)
    return [(LENGTHS + name, "I64", lengths.shape, lengths), (PACKED + name, "U8", joined.shape, joined)]


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


def blob_head(parts: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int]]:
    """Return the beginning of a ``safetensors`` blob up to its data, and where in these each part begins, and the last
    one ends. Parts are (name, dtype as safetensors spells it, shape), wide types first, so that each is aligned to its
    own item size without gaps."""
    header: dict[str, Any] = {}
    offsets = [0]
    for name, dtype, shape in parts:
        offsets.append(offsets[-1] + item_bytes(dtype) * prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets[-2:]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text, offsets


def decode_block(blob: Any, schema: Schema, count: int, where: str) -> Arrays:
    """Return the columns and marks of a block, as views of ``blob``.

    Raises:
        Damaged: it is no block of so many rows of these columns.
    """
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
    arrays: Arrays = {}
    for column in columns:
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
            part = {name: array[start : start + size] for name, array in arrays.items()}
            ring.storage.write(slice(at, at + size), part)
            ring.storage.mark_serials(slice(at, at + size), first + start)
            ring.link_back(first + start, part[BEHIND], part[EPISODE], part[PLACE])


def stored_name(column: Column) -> str:
    """Return how safetensors spells the dtype in which a column is stored."""
    kind = column.torch_only
    return dtype_name(torch.from_numpy(np.empty(0, column.bits)).dtype if kind is None else kind)

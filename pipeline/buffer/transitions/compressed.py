"""Columns whose rows are held compressed, each by itself: images that are mostly alike take a fraction of their memory.

Such a column is used as an array [capacity, ...] of its rows would be: what is put in is compressed, what is taken out
is dense, and the caller's. Both release the interpreter's lock.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod
from typing import Any, cast

import numpy as np

from pipeline.buffer.transitions.bodies import RowArrays
from pipeline.buffer.transitions.columns import LARGE, Column, Schema
from pipeline.buffer.transitions.memory import ProcessMemory
from pipeline.errors import ConfigError

_LEVEL = 1  # of zlib: the higher ones take several times as long for a few percent

PACKED, LENGTHS = "#zlib.", "#lengths."
"""What stands before a column's name where its rows are compressed."""


class CompressedColumn:
    """``capacity`` rows of one shape and dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.dtype, self.shape = dtype, shape
        self._row = shape[1:]
        self._rows = np.empty(shape[0], object)  # None where nothing was put: so no memory is touched before
        self.held_bytes = 0
        """How many bytes all rows take."""

    def __setitem__(self, slots: Any, values: Any) -> None:
        """Compress rows [n, ...], or one, into slots; rows of :meth:`packed` are taken as they are."""
        if isinstance(slots, (int, np.integer)):
            one = np.empty(1, object)
            one[0] = self._pack(np.asarray(values).reshape(self._row))
            self._put(slice(slots, slots + 1), one)
            return
        array = np.asarray(values)
        if array.dtype == object:
            self._put(slots, array)
            return
        count = len(self._rows[slots])
        self._put(slots, packed_rows(np.broadcast_to(array, (count, *self._row)), self.dtype))

    def _put(self, slots: Any, packed: np.ndarray) -> None:
        touched = slots if isinstance(slots, slice) else np.unique(slots)
        before = _total(self._rows[touched])
        self._rows[slots] = packed
        self.held_bytes += _total(self._rows[touched]) - before

    def __getitem__(self, slots: Any) -> np.ndarray:
        """Return rows, dense."""
        if isinstance(slots, (int, np.integer)):
            one: np.ndarray = unpacked(self._rows[slots : slots + 1], self._row, self.dtype)[0]
            return one
        return unpacked(self._rows[slots], self._row, self.dtype)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, slots: np.ndarray, axis: int, out: np.ndarray, mode: str) -> None:
        """Fill ``out`` [n, ...] with rows, dense."""
        _unpack(self._rows[slots], out)

    def packed(self, slots: Any) -> np.ndarray:
        """Return rows as they are held: [n] objects, ``bytes`` each."""
        found: np.ndarray = self._rows[slots]
        return found

    def _pack(self, row: np.ndarray) -> bytes:
        return packed_row(np.ascontiguousarray(row, self.dtype))


def packed_row(row: np.ndarray) -> bytes:
    """Return a dense row as it is held."""
    return zlib.compress(memoryview(np.ascontiguousarray(row).reshape(-1).view(np.uint8).data), _LEVEL)


def packed_rows(rows: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return rows [n, ...], dense or as they are held, as they are held: [n] objects."""
    if rows.dtype == object:
        return rows
    packed = np.empty(len(rows), object)
    for at, row in enumerate(rows):
        packed[at] = packed_row(np.ascontiguousarray(row, dtype))
    return packed


def compressed_bytes(columns: Mapping[str, Any]) -> int:
    """Return how many bytes the compressed ones among some columns take."""
    return sum(each.held_bytes for each in columns.values() if isinstance(each, CompressedColumn))


def unpacked(packed: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return rows [n, *shape] of packed ones [n]."""
    out = np.empty((len(packed), *shape), dtype)
    _unpack(packed, out)
    return out


def dense(rows: np.ndarray, column: Column) -> np.ndarray:
    """Return rows [n, ...] of a column, dense or as they are held, dense."""
    return unpacked(rows, column.shape, column.bits) if rows.dtype == object else rows


def as_held(rows: np.ndarray, column: Column) -> np.ndarray:
    """Return rows of a column that were read as they are to be written: those that are compressed stay so, if the
    column is large enough that memory has it so."""
    return rows if column.nbytes >= LARGE else dense(rows, column)


def _total(packed: np.ndarray) -> int:
    return sum(len(row) for row in packed.tolist() if row is not None)


def _unpack(packed: np.ndarray, out: np.ndarray) -> None:
    if not len(out):
        return
    raw = out.reshape(len(out), -1).view(np.uint8)
    size = raw.shape[1]
    for at, row in enumerate(packed.tolist()):
        raw[at] = np.frombuffer(zlib.decompress(row, bufsize=size), np.uint8) if row else 0


class CompressingMemory(ProcessMemory):
    """Memory of this process, in which large columns of some names are compressed."""

    def __init__(self, compress: Mapping[str, str]) -> None:
        self._compress = compress

    def check(self, nbytes: int, what: str) -> None:
        """How much compressed rows take nobody knows beforehand; :meth:`array` looks at the others."""

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        if is_compressed(self._compress, name):
            return cast(np.ndarray, CompressedColumn(shape, dtype))  # used as such, by slots alone
        super().check(prod(shape) * dtype.itemsize, f"capacity={shape[0]}, column {name}")
        return super().array(name, shape, dtype)


def is_compressed(compress: Mapping[str, str], name: str) -> bool:
    """Whether a column, or a group that it is in, is to be compressed."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in compress for end in range(1, len(parts) + 1))


def check_compressed(compress: Mapping[str, str] | None, schema: Schema) -> None:
    """Refuse names of columns that are not there, or too small.

    Raises:
        ConfigError: the message says which there are.
    """
    for name in compress or ():
        sizes = {each.name: each.nbytes for each in schema.columns if is_compressed({name: ""}, each.name)}
        if max(sizes.values(), default=0) < LARGE:
            large = ", ".join(sorted(each.name for each in schema.columns if each.nbytes >= LARGE)) or "none"
            what = f"has {max(sizes.values())} bytes a row" if sizes else "is no column"
            raise ConfigError(
                f"compress: {name!r} {what}; columns of {LARGE} bytes a row or more are compressed: {large}",
                option="compress",
            )


def fitting(arrays: Mapping[str, np.ndarray], views: Mapping[str, Any], schema: Schema) -> dict[str, np.ndarray]:
    """Return columns that were read, those that are packed unpacked where they are not held so."""
    found: dict[str, np.ndarray] = arrays.copy() if isinstance(arrays, RowArrays) else dict(arrays)
    for name, array in arrays.items():
        if array.dtype == object and not isinstance(views[name], CompressedColumn):
            column = schema.column(name)
            found[name] = unpacked(array, column.shape, column.bits)
    return found

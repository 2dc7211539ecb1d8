"""Transitions as Arrow tables, and back: what Parquet and ``datasets`` have in common.

A column of one number is a column of that type; one of several is a list of a fixed size, in row-major order; one of
bytes of :data:`~pipeline.buffer.transitions.columns.LARGE` or more, an image mostly, is binary. Arrow knows no
bfloat16, which travels as the float32 of the same value; complex numbers as pairs of float32; 8-bit floats as their
bits in uint8. NaNs keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import LARGE, Column
from pipeline.errors import ConfigError, Damaged
from pipeline.tools.formats.extras import needed
from pipeline.tools.interchange.columns import stored_of
from pipeline.tools.interchange.streams import MARK_DTYPES, Rows, Transitions

BATCH_BYTES = 8 << 20
_LEAST = 4  # bytes of a number: Parquet has none of fewer
_ARROW = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "float32",
    "F8_E4M3": "uint8",
    "F8_E5M2": "uint8",
    "C64": "float32",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool_",
}


def table_bytes(rows: Rows) -> int:
    """Return about how many bytes rows take as a table while it is written."""
    arrays = [*rows.columns.values(), *rows.marks.values()]
    binary = [array.nbytes >= LARGE * len(rows) for array in arrays]
    return sum(
        array.nbytes if whole else array.size * max(_LEAST, array.itemsize)
        for array, whole in zip(arrays, binary, strict=True)
    )


def arrow_module(form: str) -> Any:
    """Return ``pyarrow``.

    Raises:
        ConfigError: it is not installed.
    """
    return needed("pyarrow", form, "tools")


def carried(dtype: str, bits: np.ndarray) -> np.ndarray:
    """Return numbers as Arrow takes them, flat, of numbers as they are held."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    if dtype == "BF16":  # the upper half of a float32
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return flat.view(np.float32) if dtype == "C64" else flat


def held(dtype: str, numbers: np.ndarray, bits: np.dtype[Any]) -> np.ndarray:
    """Undo :func:`carried`."""
    flat = np.ascontiguousarray(numbers)
    if dtype == "BF16":
        return (flat.view(np.uint32) >> 16).astype(np.uint16).view(bits)
    return flat.view(bits)


def value_type(pa: Any, dtype: str) -> Any:
    """Return the Arrow type of a number."""
    return getattr(pa, _ARROW[dtype])()


def schema_of(pa: Any, stream: Transitions) -> Any:
    """Return the Arrow schema of a stream."""
    fields = [pa.field(column.name, _type(pa, column), nullable=False) for column in stream.schema.columns]
    fields += [
        pa.field(name, value_type(pa, stored_of(MARK_DTYPES[name].name)), nullable=False) for name in stream.marks
    ]
    return pa.schema(fields)


def _size(column: Column) -> int:
    """Return how many numbers a row has."""
    return prod(column.shape) * (2 if stored_of(column.dtype) == "C64" else 1)


def _is_bytes(column: Column) -> bool:
    return stored_of(column.dtype) == "U8" and column.nbytes >= LARGE


def _type(pa: Any, column: Column) -> Any:
    dtype = value_type(pa, stored_of(column.dtype))
    size = _size(column)
    if _is_bytes(column):
        return pa.binary()
    if not column.shape and size == 1:
        return dtype
    return pa.list_(dtype, size) if size else pa.list_(dtype)


def table_of(pa: Any, schema: Any, stream: Transitions, rows: Rows) -> Any:
    """Return rows as a table."""
    arrays = [_array(pa, column, rows.columns[column.name]) for column in stream.schema.columns]
    arrays += [pa.array(rows.marks[name]) for name in stream.marks]
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(pa: Any, column: Column, array: np.ndarray) -> Any:
    count, kind = len(array), _type(pa, column)
    if _is_bytes(column):
        offsets = np.arange(count + 1, dtype=np.int32) * column.nbytes
        data = np.ascontiguousarray(array).reshape(-1)
        return pa.BinaryArray.from_buffers(kind, count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    flat = pa.array(carried(stored_of(column.dtype), array))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), flat, type=kind)
    return flat


def rows_of(pa: Any, table: Any, stream: Transitions, where: str) -> Rows:
    """Return a table as rows.

    Raises:
        Damaged: it has other columns.
    """
    try:
        columns = {column.name: _column(pa, column, table.column(column.name)) for column in stream.schema.columns}
        marks = {name: _flat(table.column(name)).astype(MARK_DTYPES[name], copy=False) for name in stream.marks}
    except (KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise Damaged(f"{where}: no rows of these columns ({error})") from None
    return Rows(columns, marks)


def _column(pa: Any, column: Column, given: Any) -> np.ndarray:
    array = given.combine_chunks() if hasattr(given, "combine_chunks") else given
    count = len(array)
    if array.null_count:
        raise ValueError(f"column {column.name} has values that are missing")
    if _is_bytes(column):
        joined = b"".join(array.to_pylist())
        return np.frombuffer(joined, np.uint8).reshape(count, *column.shape).copy()
    flat = array.flatten() if pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type) else array
    numbers = held(stored_of(column.dtype), _flat(flat), column.bits)
    return numbers.reshape(count, *column.shape)


def _flat(array: Any) -> np.ndarray:
    array = array.combine_chunks() if hasattr(array, "combine_chunks") else array
    numbers: np.ndarray = array.to_numpy(zero_copy_only=False)
    return numbers


def foreign_table(pa: Any, table: Any, notes: list[str]) -> dict[str, Any]:
    """Return the columns of numbers of a table that somebody else wrote, [n, ...] each; others are noted."""
    found: dict[str, Any] = {}
    for name in table.column_names:
        array = table.column(name).combine_chunks()
        value = _numbers(pa, name, array, notes)
        if value is not None:
            found[name] = value
    return found


def _numbers(pa: Any, name: str, array: Any, notes: list[str]) -> Any:
    kind = array.type
    if array.null_count:
        raise ConfigError(f"column {name}: {array.null_count} of its values are missing", option="path")
    if pa.types.is_struct(kind):
        parts = {kind.field(at).name: array.field(at) for at in range(kind.num_fields)}
        inner: Mapping[str, Any] = {key: _numbers(pa, f"{name}.{key}", part, notes) for key, part in parts.items()}
        return {key: part for key, part in inner.items() if part is not None} or None
    if hasattr(array, "storage"):
        array, kind = array.storage, array.storage.type
    shape: tuple[int, ...] = ()
    count = len(array)
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        flat = array.flatten()
        size = len(flat) // max(1, len(array))
        if not pa.types.is_fixed_size_list(kind):
            offsets = np.diff(array.offsets.to_numpy())
            if (offsets != size).any():
                raise ConfigError(f"column {name}: lists of several lengths; rows have one shape", option="path")
        shape, array, kind = (*shape, size), flat, flat.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)) or array.null_count:
        if (note := f"column {name} is {kind}, no number, and did not come along") not in notes:
            notes.append(note)
        return None
    return _flat(array).reshape(count, *shape)

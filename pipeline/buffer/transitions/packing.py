"""Packed records put together before they are written.

Records lie one after the other, and are written from the oldest slot to the newest: as whole runs they cost a fifth of
what they do column by column, each of which goes over all of the memory again.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import NUMBERS, Number
from pipeline.buffer.transitions.layout import MARK_BYTES, RowLayout

MARKS_CODE = "qiiiiIB"
"""The marks of a row, as :mod:`struct` spells them."""
MOST_BYTES = 1 << 20
"""A block up to which records are put together first: what is larger would leave the caches before it is copied."""
MANY = 96
"""Rows from which on a column of several values is copied as runs of bytes: numpy's loop over the values of each row
then costs more than making the views."""


class RowPacker:
    """Writes rows of one layout into memory in which their records lie one after the other.

    Most rows are arrays of the very dtypes of their columns, and numbers of Python; others are none of its business. A
    call of numpy for each column takes five times as long.
    """

    def __init__(self, layout: RowLayout) -> None:
        fields: Any = layout.record.fields
        codes, end = [MARKS_CODE], struct.calcsize(f"<{MARKS_CODE}")
        self._columns: list[tuple[str, np.dtype[Any] | None, tuple[int, ...], Number | None]] = []
        for column in sorted(layout.small, key=lambda each: (fields[each.name][1], each.nbytes)):
            begin = fields[column.name][1]
            number = None if column.shape else NUMBERS.get(column.dtype)
            codes.append(f"{begin - end}x{f'{column.nbytes}s' if number is None else number.code}")
            self._columns.append((column.name, column.numpy, column.shape, number))
            end = begin + column.nbytes
        self._large = [(each.name, each.numpy, each.shape) for each in layout.large]
        self._pack_into = struct.Struct("<" + "".join(codes)).pack_into

    def values(self, row: Mapping[str, Any]) -> list[Any] | None:
        """Return what :meth:`write` takes, if the row has every column in its very dtype and shape, and no other; None:
        look closer."""
        if row.__class__ is not dict or len(row) != len(self._columns) + len(self._large):
            return None
        get = row.get
        values: list[Any] = []
        add = values.append
        for name, dtype, shape, number in self._columns:
            value: Any = get(name)
            if number is None:
                if value.__class__ is not np.ndarray or value.dtype is not dtype or value.shape != shape:
                    return None
                add(value.tobytes())
                continue
            kind: Any = value.__class__
            if kind is number.kind:
                if not number.least <= value <= number.most:
                    return None
            elif kind is np.ndarray:
                if value.dtype is not dtype or value.shape:
                    return None
            elif kind is not number.numpy:
                return None
            add(value)
        for name, dtype, shape in self._large:
            value = get(name)
            if value.__class__ is not np.ndarray or value.dtype is not dtype or value.shape != shape:
                return None
        return values

    def write(self, memory: memoryview, at: int, marks: tuple[int, ...], values: list[Any]) -> None:
        """Write a record, beginning at a byte."""
        self._pack_into(memory, at, *marks, *values)


class BlockPacker:
    """Puts blocks of so many rows of one layout together."""

    def __init__(self, layout: RowLayout, count: int) -> None:
        self.count = count
        records = np.zeros(count, layout.record)  # what no column fills up goes to the disk too
        self.whole = records.view(f"V{records.itemsize}")
        """[count]: the records of the block, as runs of bytes."""
        self._marks = records.getfield(f"V{MARK_BYTES}")
        runs = {each.name: as_runs(records[each.name], f"V{each.nbytes}") for each in layout.small if each.nbytes > 8}
        many = runs if count >= MANY else {}
        self._columns = [(each.name, records[each.name], many.get(each.name)) for each in layout.small]

    def write(self, arrays: Mapping[str, Any], marks: np.ndarray) -> None:
        """Put columns [count, ...] together, and marks [count] without fields."""
        for name, column, runs in self._columns:
            array = arrays[name]
            if runs is not None and array.flags.c_contiguous:
                runs[:] = as_runs(array, runs.dtype)
            else:
                column[:] = array
        self._marks[:] = marks


def as_runs(column: np.ndarray, kind: np.dtype[Any] | str) -> np.ndarray:
    """Return a column [n, ...], each of whose rows is contiguous, as [n, 1] runs of bytes, ``V`` and how many; the same
    memory."""
    return (column if column.ndim == 2 else column.reshape(len(column), prod(column.shape[1:]))).view(kind)

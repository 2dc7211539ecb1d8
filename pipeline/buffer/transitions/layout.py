"""How rows lie in memory: one packed record for the small columns and the marks of a row, an array for each large
one."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import LARGE, Column, Schema

EPISODE, PLACE, AHEAD, BEHIND = "#episode", "#place", "#ahead", "#behind"
"""Marks of a row: its episode, and its place in that, from 0; how many keys further the episode's next row lies (0:
there is none yet), and how many keys before it the one before (0: there is none)."""
VERSION, SERIAL, END = "#version", "#serial", "#end"
"""More marks: the version of the weights that made the row; the low 32 bits of its key; how the episode ended with
it."""

MARKS = np.dtype(
    {
        "names": [EPISODE, PLACE, AHEAD, BEHIND, VERSION, SERIAL, END],
        "formats": ["<i8", "<i4", "<i4", "<i4", "<i4", "<u4", "u1"],
        "offsets": [0, 8, 12, 16, 20, 24, 28],
        "itemsize": 32,
    }
)
MARK_BYTES = MARKS.itemsize

OPEN, TERMINATED, TRUNCATED, CUT = 0, 1, 2, 3
"""Values of :data:`END`: the episode goes on, or the row is its newest; it terminated; it was truncated; it was left
where it was, by a reset in its middle or by a resume."""


class RowLayout:
    """Where each column of a schema lies.

    Attributes:
        record: dtype of the packed record: the marks, then the small columns.
        body: dtype of what of it is no mark; of no bytes where no column is small.
        small, large: the columns in the record, and those with arrays of their own.
        row_bytes: memory for one row.
        torch_only: dtypes that numpy does not know, by column.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.small = [column for column in schema.columns if column.nbytes < LARGE]
        self.large = [column for column in schema.columns if column.nbytes >= LARGE]
        self.small_names = [column.name for column in self.small]
        self.torch_only = {each.name: kind for each in schema.columns if (kind := each.torch_only) is not None}
        fields: Any = MARKS.fields
        names, end = list(fields), MARK_BYTES
        formats = [fields[name][0] for name in names]
        offsets = [fields[name][1] for name in names]
        # Wide types first: each column is aligned to its own item size without gaps.
        for column in sorted(self.small, key=lambda each: -_align(each)):
            names.append(column.name)
            formats.append(np.dtype((column.bits, column.shape)))
            offsets.append(end)
            end += column.nbytes
        # A tensor of a column needs a stride that is a multiple of its item size: 16 bytes of complex128.
        unit = max(8, *(column.bits.itemsize for column in self.small)) if self.small else 8
        itemsize = -(-end // unit) * unit
        spec: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
        self.record = np.dtype(spec)
        marks = len(fields)
        spec = {
            "names": names[marks:],
            "formats": formats[marks:],
            "offsets": [offset - MARK_BYTES for offset in offsets[marks:]],
            "itemsize": itemsize - MARK_BYTES,
        }
        self.body = np.dtype(spec)
        self.row_bytes = itemsize + sum(column.nbytes for column in self.large)

    def column(self, name: str) -> Column:
        """Return a column by its name."""
        return self.schema.column(name)


def _align(column: Column) -> int:
    return column.bits.itemsize if column.bits.kind != "c" else column.bits.itemsize // 2

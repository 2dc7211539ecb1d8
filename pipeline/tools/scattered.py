"""Rows on their way to places that are known: each is written where it belongs, in a file without a name, and all are
read from the front once they are there. So a buffer may be larger than memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.compressed import unpacked
from pipeline.buffer.transitions.layout import RowLayout
from pipeline.buffer.transitions.storage import as_runs
from pipeline.errors import Damaged, WriteFailed
from pipeline.replay.handing import Extra, SomeRows
from pipeline.store.scratch import unnamed

_READ = 4 << 20


class ScatteredRows:
    """The rows of one rank. Blocks."""

    def __init__(self, folder: str, schema: Schema, extras: Sequence[Extra], rows: int) -> None:
        """Raises:
        WriteFailed: there can be no such file.
        """
        self._layout, self._rows, self._folder = RowLayout(schema), rows, folder
        self._handle = -1
        fields: list[tuple[str, Any]] = [("record", f"V{self._layout.record.itemsize}")]
        fields += [(f"large.{at}", f"V{column.nbytes}") for at, column in enumerate(self._layout.large)]
        fields += [(f"extra.{at}", extra.dtype) for at, extra in enumerate(extras)]
        self._kind, self._extras = np.dtype(fields), extras
        self._there = np.zeros(rows, bool)
        try:
            self._handle = unnamed(folder)
        except OSError as error:
            raise WriteFailed(f"{folder}: no file for rows can be made there: {error}") from error

    def put(self, given: SomeRows) -> None:
        """Write some rows where they belong; such as were compressed, dense.

        Raises:
            WriteFailed: they cannot be.
        """
        rows = given.in_order()
        count = int(rows.runs[:, 1].sum())
        packed = np.empty(count, self._kind)
        packed["record"] = rows.records.view(self._kind["record"])
        for at, (column, each) in enumerate(zip(self._layout.large, rows.large, strict=True)):
            dense = unpacked(each, column.shape, column.bits) if each.dtype == object else each
            packed[f"large.{at}"] = as_runs(np.ascontiguousarray(dense), column.nbytes)[:, 0]
        for at, each in enumerate(rows.extras):
            packed[f"extra.{at}"] = each
        raw, size, done = memoryview(packed.view(np.uint8).data), self._kind.itemsize, 0
        for begin, length in rows.runs.tolist():
            self._there[begin : begin + length] = True
            self._write(raw[done * size : (done + length) * size], begin * size)
            done += length

    def _write(self, raw: memoryview, offset: int) -> None:
        try:
            while raw:
                written = os.pwrite(self._handle, raw, offset)
                raw, offset = raw[written:], offset + written
        except OSError as error:
            raise WriteFailed(f"{self._folder}: rows could not be written aside: {error}") from error

    def each(self, where: str) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], list[np.ndarray]]]:
        """Yield all rows, from the front: packed records, large columns and extras.

        Raises:
            Damaged: some were in no block.
        """
        missing = int((~self._there).sum())
        if missing:
            raise Damaged(f"{where}: {missing} of {self._rows} rows are in none of its blocks. Restore it from a copy")
        size = self._kind.itemsize
        most = max(1, _READ // size)
        for begin in range(0, self._rows, most):
            count = min(most, self._rows - begin)
            packed = np.frombuffer(os.pread(self._handle, count * size, begin * size), self._kind)
            records = np.ascontiguousarray(packed["record"]).view(self._layout.record)
            large = {
                column.name: np.ascontiguousarray(packed[f"large.{at}"]).view(column.bits).reshape(count, *column.shape)
                for at, column in enumerate(self._layout.large)
            }
            yield records, large, [packed[f"extra.{at}"] for at in range(len(self._extras))]

    def close(self) -> None:
        """Let the file go."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)

    __del__ = close

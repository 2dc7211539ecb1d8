"""Rows on their way to places that are known: each is written where it belongs, in a file without a name, and all are
read from the front once they are there. So a buffer may be larger than memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.compressed import unpacked
from pipeline.buffer.transitions.layout import END, RowLayout
from pipeline.buffer.transitions.storage import as_runs
from pipeline.errors import Damaged, WriteFailed
from pipeline.replay.episode_ids import EpisodeTable
from pipeline.replay.gaps import Gaps
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
        self._gaps: Gaps | None = None
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

    @property
    def missing(self) -> int:
        """How many rows have not come."""
        return self._rows - int(self._there.sum())

    def close_gaps(self, table: EpisodeTable, names: int) -> tuple[EpisodeTable, int]:
        """Go on without the rows that have not come, as
        :meth:`~pipeline.replay.assembling.Assembled.close_gaps` does; return the table of what is left, and how many
        names it took.

        Args:
            table: the episodes, whose rows lie one after the other.
            names: the first of the names that parts of episodes get.
        """
        self._gaps = Gaps.of(self._there, table.rows)
        return self._gaps.table(table, names)

    def each(self, where: str, first: int) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], list[np.ndarray]]]:
        """Yield all rows, from the front: packed records, large columns and extras.

        Args:
            where: the run, for messages.
            first: the key of the first row.

        Raises:
            Damaged: some were in no block, and the gaps were not closed.
        """
        if self._gaps is None and self.missing:
            raise Damaged(
                f"{where}: {self.missing} of {self._rows} rows are in none of its blocks. Restore it from a copy"
            )
        size, done = self._kind.itemsize, 0
        for begin, count in self._pieces(max(1, _READ // size)):
            packed = np.frombuffer(os.pread(self._handle, count * size, begin * size), self._kind)
            records = np.ascontiguousarray(packed["record"]).view(self._layout.record)
            if self._gaps is not None:
                records = records.copy()
                for name, marks in self._gaps.marks(records[END], first, slice(done, done + count)).items():
                    records[name] = marks
            large = {
                column.name: np.ascontiguousarray(packed[f"large.{at}"]).view(column.bits).reshape(count, *column.shape)
                for at, column in enumerate(self._layout.large)
            }
            done += count
            yield records, large, [packed[f"extra.{at}"] for at in range(len(self._extras))]

    def _pieces(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield where rows that follow each other begin in the file, and how many they are."""
        edges = np.flatnonzero(np.diff(self._there, prepend=False, append=False)).tolist()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            for at in range(begin, end, most):
                yield at, min(most, end - at)

    def close(self) -> None:
        """Let the file go."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)

    __del__ = close

"""Rows on their way to places that are known: each is written where it belongs, in a file without a name, and all are
read from the front once they are there. So a buffer may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Column
from pipeline.buffer.transitions.compressed import packed_row, unpacked
from pipeline.buffer.transitions.layout import BEHIND, END, EPISODE, PLACE, RowLayout
from pipeline.errors import Damaged
from pipeline.replay.episode_ids import EpisodeTable
from pipeline.replay.gaps import Gaps, Unfollowed
from pipeline.replay.handing import SomeRows, Wanted
from pipeline.replay.row_set import RowSet
from pipeline.store.nameless import Nameless

Ints = np.ndarray
_READ = 4 << 20
_FEW = 256
_RENUMBERED = (EPISODE, PLACE, BEHIND, END)
"""The marks that gaps change, of those that blocks hold."""


class Heap(Nameless):
    """Bytes in the order in which they come. Blocks."""

    def add(self, content: bytes | memoryview) -> int:
        """Append bytes; return where they begin.

        Raises:
            WriteFailed: they cannot be written.
        """
        return self.append(memoryview(content))

    def gathered(self, begins: Ints, sizes: Ints) -> bytes:
        """Return the bytes [sizes] from each of ``begins`` on, together; what lies together is read at once.

        Raises:
            StoreError: they cannot be read.
        """
        if not len(begins):
            return b""
        edges = np.flatnonzero(begins[1:] != begins[:-1] + sizes[:-1]) + 1
        firsts = begins[np.concatenate([[0], edges])]
        lengths = np.add.reduceat(sizes, [0, *edges])
        return b"".join(map(self.read, firsts.tolist(), lengths.tolist()))


class AsideRows:
    """Next observations of some rows."""

    def __init__(self, heap: Heap, columns: Sequence[Column]) -> None:
        self._heap, self._columns = heap, columns
        self._ends = np.cumsum([column.nbytes for column in columns], dtype=np.int64)
        self._size = int(self._ends[-1]) if columns else 0
        self._came: list[tuple[Ints, Ints]] = []  # rows, and where what is of them lies
        self._sorted: tuple[Ints, Ints] | None = None

    def put(self, rows: Ints, nexts: Sequence[np.ndarray]) -> None:
        """Write those [n, ...], by column, of some rows."""
        raw = [np.frombuffer(each.tobytes(), np.uint8).reshape(len(rows), -1) for each in nexts if each.nbytes]
        begin = self._heap.add(np.concatenate(raw, axis=1).tobytes() if raw else b"")
        self._came.append((rows.copy(), begin + np.arange(len(rows)) * self._size))
        self._sorted = None

    def there(self) -> Ints:
        """Return which rows have one, rising."""
        return self._all()[0]

    def among(self, first: int, end: int) -> tuple[Ints, list[np.ndarray]]:
        """Return which of the rows from ``first`` up to ``end`` have one, and these, by column."""
        rows, begins = self._all()
        low, high = np.searchsorted(rows, (first, end))
        raw = self._heap.gathered(begins[low:high], np.full(high - low, self._size))
        parts = np.split(np.frombuffer(raw, np.uint8).reshape(high - low, self._size), self._ends[:-1], axis=1)
        return rows[low:high], [
            np.frombuffer(part.tobytes(), column.bits).reshape(high - low, *column.shape)
            for part, column in zip(parts, self._columns, strict=False)
        ]

    def _all(self) -> tuple[Ints, Ints]:
        if self._sorted is None:
            none = np.empty(0, np.int64)
            rows, begins = (
                np.concatenate([none, *each]) for each in ([r for r, _ in self._came], [b for _, b in self._came])
            )
            order = np.argsort(rows)
            self._sorted = rows[order], begins[order]
        return self._sorted


class Packed(NamedTuple):
    """Rows [n] as memory has them.

    Attributes:
        records: packed records: marks and small columns.
        large: by column; of ``bytes``, if they are compressed.
        extras: what the selection has of each.
        aside: [m] which of them have a next observation that is kept aside.
        nexts: these, by column.
    """

    records: np.ndarray
    large: dict[str, np.ndarray]
    extras: list[np.ndarray]
    aside: Ints
    nexts: list[np.ndarray]


class ScatteredRows:
    """The rows of one rank. Blocks."""

    def __init__(self, folder: str, wanted: Wanted, rows: int, heap: Heap) -> None:
        """Args:
        folder: where the file is to be.
        wanted: what there is of each row.
        rows: how many there will be.
        heap: takes what only some of them have, and what takes more of some than of others.

        Raises:
            WriteFailed: there can be no such file.
        """
        extras = wanted.extras
        self._layout, self._rows = RowLayout(wanted.schema), rows
        fields: list[tuple[str, Any]] = [("record", f"V{self._layout.record.itemsize}")]
        fields += [(f"large.{at}", "(2,)i8") for at in range(len(self._layout.large))]
        fields += [(f"extra.{at}", extra.dtype) for at, extra in enumerate(extras)]
        self._kind, self._extras = np.dtype(fields), extras
        self._there = RowSet(rows)
        self._gaps: Gaps | None = None
        self._alone = False  # whether some have not come, and those that have stay what they are
        self._heap, self._aside = heap, AsideRows(heap, wanted.nexts)
        self._file = Nameless(folder)

    def put(self, given: SomeRows) -> None:
        """Write some rows where they belong; such as are compressed, as they are.

        Raises:
            WriteFailed: they cannot be.
        """
        rows = given.in_order()
        if len(rows.aside):
            self._aside.put(rows.aside, rows.nexts)
        count = int(rows.runs[:, 1].sum())
        packed = np.empty(count, self._kind)
        packed["record"] = rows.records.view(self._kind["record"])
        for at, (column, each) in enumerate(zip(self._layout.large, rows.large, strict=True)):
            packed[f"large.{at}"] = self._put_large(column, each)
        for at, each in enumerate(rows.extras):
            packed[f"extra.{at}"] = each
        raw, size, done = memoryview(packed.view(np.uint8).data), self._kind.itemsize, 0
        self._there.add_runs(rows.runs)
        for begin, length in rows.runs.tolist():
            self._file.put(raw[done * size : (done + length) * size], begin * size)
            done += length

    def _put_large(self, column: Column, rows: np.ndarray) -> Ints:
        """Write rows of a large column; return where each lies, and of one that is compressed how long it is, else
        -1."""
        found = np.full((len(rows), 2), -1)
        if rows.dtype == object:
            found[:, 1] = sizes = np.fromiter(map(len, rows), np.int64, len(rows))
            content: Any = b"".join(rows.tolist())
        else:
            sizes = np.full(len(rows), column.nbytes)
            content = memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        found[:, 0] = self._heap.add(content) + np.cumsum(sizes) - sizes
        return found

    def _large(self, column: Column, where: Ints) -> np.ndarray:
        """Return rows of a large column: dense, or all compressed if one of them is."""
        dense = where[:, 1] < 0
        sizes = np.where(dense, column.nbytes, where[:, 1])
        raw = self._heap.gathered(where[:, 0], sizes)
        if dense.all():
            return np.frombuffer(raw, column.bits).reshape(len(where), *column.shape)
        rows, ends = np.empty(len(where), object), np.cumsum(sizes).tolist()
        for at, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            row = raw[begin:end]
            rows[at] = packed_row(np.frombuffer(row, np.uint8)) if dense[at] else row
        return rows

    @property
    def missing(self) -> int:
        """How many rows have not come."""
        return self._rows - len(self._there)

    def leave_out_unfollowed(self, table: EpisodeTable, twins: Mapping[str, str]) -> int:
        """Do without rows whose next observation lies in one that has not come, as
        :meth:`~pipeline.replay.assembling.Assembled.leave_out_unfollowed` does; return how many."""
        stretches = self._there.stretches()
        found = Unfollowed.within(Gaps.of_stretches(stretches, table.rows), stretches, self._aside.there())
        for begin in range(0, len(found.before), _FEW):
            part = slice(begin, begin + _FEW)
            packed = np.concatenate([self._read(at, 1) for at in found.after[part].tolist()])
            records, large = self._columns(packed)
            observed = {name: large[name] if name in large else records[name] for name in twins.values()}
            for column in self._layout.large:
                if column.name in observed and observed[column.name].dtype == object:
                    observed[column.name] = unpacked(observed[column.name], column.shape, column.bits)
            self._aside.put(found.before[part], [observed[twin] for twin in twins.values()])
        self._there.remove(found.rows)
        return len(found.rows)

    def close_gaps(self, table: EpisodeTable, names: int) -> tuple[EpisodeTable, int]:
        """Go on without the rows that have not come, as
        :meth:`~pipeline.replay.assembling.Assembled.close_gaps` does; return the table of what is left, and how many
        names it took.

        Args:
            table: the episodes, whose rows lie one after the other.
            names: the first of the names that parts of episodes get.
        """
        self._gaps = Gaps.of_stretches(self._there.stretches(), table.rows)
        return self._gaps.table(table, names)

    def leave_out_missing(self) -> int:
        """As :meth:`close_gaps`, of rows that have no neighbours: each stays what it is. Return how many have not
        come."""
        self._alone = True
        return self.missing

    def came(self, begin: int, end: int) -> Ints:
        """Return which of the rows from ``begin`` up to ``end`` have come, counted from there."""
        return np.flatnonzero(self._there.between(begin, end))

    def each(self, where: str, first: int) -> Iterator[Packed]:
        """Yield all rows, from the front.

        Args:
            where: the run, for messages.
            first: the key of the first row.

        Raises:
            Damaged: some were in no block, and the gaps were not closed.
        """
        if self._gaps is None and not self._alone and self.missing:
            raise Damaged(
                f"{where}: {self.missing} of {self._rows} rows are in none of its blocks. Restore it from a copy"
            )
        done = 0
        for begin, count in self._pieces(max(1, _READ // self._layout.row_bytes)):
            packed = self._read(begin, count)
            records, large = self._columns(packed)
            if self._gaps is not None:
                marks = self._gaps.marks(records[END], first, slice(done, done + count))
                for name in _RENUMBERED:
                    records[name] = marks[name]
            done += count
            extras = [packed[f"extra.{at}"] for at in range(len(self._extras))]
            aside, nexts = self._aside.among(begin, begin + count)
            yield Packed(records, large, extras, aside - begin, nexts)

    def _read(self, begin: int, count: int) -> np.ndarray:
        size = self._kind.itemsize
        return np.frombuffer(self._file.read(begin * size, count * size), self._kind)

    def _columns(self, packed: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the packed records of rows, and their large columns."""
        records = np.ascontiguousarray(packed["record"]).copy().view(self._layout.record)
        return records, {
            column.name: self._large(column, packed[f"large.{at}"]) for at, column in enumerate(self._layout.large)
        }

    def _pieces(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield where rows that follow each other begin in the file, and how many they are."""
        begins, ends = self._there.stretches()
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            for at in range(begin, end, most):
                yield at, min(most, end - at)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

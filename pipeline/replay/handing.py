"""Rows on their way from the rank that read them to the rank that is to have them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.buffer.transitions.layout import RowLayout
from pipeline.errors import Damaged
from pipeline.store.frames import crc32c_more

Ints = np.ndarray


class Extra(NamedTuple):
    """What there is of each row beside its columns: the selection's."""

    name: str
    dtype: np.dtype[np.generic]


class Wanted(NamedTuple):
    """What there is to be moved of each row.

    Attributes:
        schema: the columns.
        extras: what the selection has of each row.
        nexts: columns of next observations that are kept aside.
    """

    schema: Schema
    extras: list[Extra]
    nexts: list[Column]


def extras_named(names: Sequence[str]) -> list[Extra]:
    """Return what lies in files of these names; their ends are dtypes."""
    return [Extra(name, np.dtype(name.rpartition(".")[2])) for name in names]


class SomeRows(NamedTuple):
    """Rows [n] of one rank, as runs of rows that follow each other there.

    Attributes:
        runs: [k, 2]: where the first row of each lies among the rank's, and how many there are.
        rows: [n] which of those below they are, in the order of the runs; None: all, in theirs.
        records: packed: marks and small columns.
        large: by column; of ``bytes``, if they are compressed.
        extras: what the selection has of each row.
        aside: [m] which of the rank's rows have a next observation that is kept aside.
        nexts: these, by column.
    """

    runs: Ints
    rows: Ints | None
    records: np.ndarray
    large: list[np.ndarray]
    extras: list[np.ndarray]
    aside: Ints
    nexts: list[np.ndarray]

    def in_order(self) -> SomeRows:
        """Return them in the order of the runs, as copies."""
        rows = self.rows
        if rows is None:
            return self
        large, extras = ([each.take(rows, axis=0) for each in of] for of in (self.large, self.extras))
        return self._replace(rows=None, records=self.records.take(rows), large=large, extras=extras)


class _Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What some rows begin with in a file."""

    rows: int
    runs: int
    aside: int
    sizes: list[int]
    """Bytes of each part."""
    packed: list[int]
    """Which of the large columns are compressed: each is two parts."""
    checksum: int


_HEAD_BYTES = 4  # before a head: how long it is


class RowFormat:
    """How such rows are written into a file and read back."""

    def __init__(self, layout: RowLayout, extras: Sequence[Extra], nexts: Sequence[Column]) -> None:
        self._layout, self._extras, self._nexts = layout, extras, nexts
        self._memory = np.empty(0, np.uint8)

    def encoded(self, given: SomeRows) -> list[bytes | memoryview]:
        """Return rows as bytes."""
        rows = given.in_order()
        arrays = [rows.runs, rows.records, *rows.extras, rows.aside, *rows.nexts]
        for each in rows.large:
            arrays += _joined(each) if each.dtype == object else [each]
        parts = [memoryview(np.ascontiguousarray(each).reshape(-1).view(np.uint8).data) for each in arrays]
        checksum = 0
        for part in parts:
            checksum = crc32c_more(checksum, part)
        packed = [number for number, each in enumerate(rows.large) if each.dtype == object]
        sizes = [len(part) for part in parts]
        raw = msgspec.msgpack.encode(_Head(len(rows.records), len(rows.runs), len(rows.aside), sizes, packed, checksum))
        return [len(raw).to_bytes(_HEAD_BYTES, "little"), raw, *parts]

    def read(self, file: BinaryIO, where: str) -> SomeRows | None:
        """Return the next rows of a file, valid until the next call; None at its end.

        Raises:
            Damaged: the file is not whole.
        """
        size = file.read(_HEAD_BYTES)
        if not size:
            return None
        try:
            head = msgspec.msgpack.decode(file.read(int.from_bytes(size, "little")), type=_Head)
        except (msgspec.MsgspecError, ValueError):
            raise _torn(where) from None
        total = sum(head.sizes)
        if len(self._memory) < total:
            self._memory = np.empty(total + total // 4, np.uint8)
        memory = self._memory[:total]
        if file.readinto(memory.data) != total or crc32c_more(0, memory.data) != head.checksum:  # type: ignore[attr-defined]
            raise _torn(where)
        ends = np.cumsum(head.sizes)[:-1]
        parts = iter(np.split(memory, ends))
        return self._rows(head, parts)

    def _rows(self, head: _Head, parts: Any) -> SomeRows:
        def array(dtype: np.dtype[Any], *shape: int) -> np.ndarray:
            part: np.ndarray = next(parts)
            count = prod(shape)
            return np.ndarray(shape, dtype, part.data) if count * dtype.itemsize else np.empty(shape, dtype)

        int64: np.dtype[Any] = np.dtype(np.int64)
        runs, records = array(int64, head.runs, 2), array(self._layout.record, head.rows)
        extras = [array(each.dtype, head.rows) for each in self._extras]
        aside = array(int64, head.aside)
        nexts = [array(column.bits, head.aside, *column.shape) for column in self._nexts]
        large = [
            _split(array(int64, head.rows), next(parts))
            if number in head.packed
            else array(column.bits, head.rows, *column.shape)
            for number, column in enumerate(self._layout.large)
        ]
        return SomeRows(runs, None, records, large, extras, aside, nexts)


def _joined(rows: np.ndarray) -> list[np.ndarray]:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return [lengths, np.frombuffer(b"".join(rows.tolist()), np.uint8)]


def _split(lengths: Ints, joined: np.ndarray) -> np.ndarray:
    ends = np.cumsum(lengths).tolist()
    raw, rows = joined.tobytes(), np.empty(len(lengths), object)
    for at, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        rows[at] = raw[begin:end]
    return rows


def _torn(where: str) -> Damaged:
    return Damaged(f"{where}: what another rank handed over is not whole; start again")

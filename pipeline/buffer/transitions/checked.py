"""Parts of a block that are read, and checked, without the rest.

The last tensor of a block, ``#sums``, has the crc32c of every 16 KiB of the data before it. Its own crc32c, after that
of the block's header, is in the list of blocks (:class:`~pipeline.store.segments.Block`): so a chain of checksums leads
from the manifest to any 16 KiB of rows, and a row can be had for the reading of a few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.bodies import BODIES, RowArrays, body_of
from pipeline.buffer.transitions.columns import Arrays, Column
from pipeline.buffer.transitions.compressed import PACKED
from pipeline.errors import Damaged, UsageError
from pipeline.store.block_sums import SUMS
from pipeline.store.blocks import crc32c, crc32c_more, crc32c_of_array
from pipeline.store.codec import Laid, bodies_of_head, read_layout

CHUNK = 16 << 10
_HEAD = 2048  # bytes in which the header of most blocks lies


def sums_of(data: np.ndarray) -> np.ndarray:
    """Return the crc32c of every 16 KiB of bytes: [4 n] uint8, each in little endian."""
    whole = len(data) // CHUNK
    sums = [crc32c_of_array(each) for each in data[: whole * CHUNK].reshape(whole, CHUNK)]
    if whole * CHUNK < len(data):
        sums.append(crc32c_of_array(data[whole * CHUNK :]))
    return np.array(sums, "<u4").view(np.uint8)


class Range(NamedTuple):
    """Where the values of some rows lie: of a column, or of those that are in bodies."""

    name: str
    first: int
    """The number of the first 16 KiB."""
    begin: int
    end: int
    """In the payload: whole parts of 16 KiB."""
    low: int
    """Where the values begin, seen from ``begin``."""


class CheckedBlock:
    """One block."""

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        size: int,
        checksum: int,
        columns: Sequence[Column],
        count: int,
        damaged: Callable[[int], Damaged],
    ) -> None:
        """Args:
        read: returns a part of the payload: from where on, how many bytes; fewer at the file's end.
        size: of the payload.
        checksum: what :func:`checksum_of` gave.
        columns: that may be asked for, marks among them.
        count: of rows.
        damaged: makes the error for what lies somewhere in the payload.

        Raises:
            Damaged: header or sums are not what they were.
        """
        self._read, self._damaged, self._count = read, damaged, count
        self._columns = {column.name: column for column in columns}
        self._known: dict[str, tuple[int, int]] = {}
        head = read(0, min(_HEAD, size))
        length = 8 + int.from_bytes(head[:8], "little")
        if length > size:
            raise damaged(0)
        head = head[:length] if length <= len(head) else head + read(len(head), length - len(head))
        try:
            self._laid: dict[str, Laid] = read_layout(head, size)
            sums = self._laid[SUMS]
            self._body = self._of_bodies(head, columns)
        except (Damaged, KeyError):
            raise damaged(0) from None
        raw = read(sums.begin, sums.end - sums.begin)
        if crc32c_more(crc32c_more(0, head), raw) != checksum:
            raise damaged(0)
        self._begin, self._end = len(head), sums.begin
        if len(raw) != 4 * -(-(self._end - self._begin) // CHUNK):
            raise damaged(0)
        self._sums: list[int] = np.frombuffer(raw, "<u4").tolist()

    @property
    def packed(self) -> bool:
        """Whether rows of a column are compressed, so that parts of it cannot be read."""
        return any(name.startswith(PACKED) for name in self._laid)

    def _of_bodies(self, head: bytes, columns: Sequence[Column]) -> np.dtype[Any]:
        """Return the dtype of the block's bodies: without a field, it has none."""
        laid = self._laid.get(BODIES)
        if laid is None:
            return np.dtype([])
        if laid.dtype != "U8" or len(laid.shape) != 2 or laid.end - laid.begin != self._count * laid.shape[1]:
            raise self._damaged(0)
        if laid.end > self._laid[SUMS].begin:
            raise self._damaged(laid.begin)
        return body_of(bodies_of_head(head), laid.shape[1], columns, "a block")

    def ranges(self, rows: slice, names: Iterable[str]) -> list[Range]:
        """Return where the values of rows lie, by column.

        Raises:
            Damaged: a column is not there, or not as it should be.
            UsageError: its rows are compressed.
        """
        found, fields, packed = [], self._body.names or (), False
        for name in names:
            if name not in fields:
                found.append(self._range(name, rows, *self._column(name)))
            elif not packed:  # they come together
                packed = True
                found.append(self._range(BODIES, rows, self._laid[BODIES].begin - self._begin, self._body.itemsize))
        return found

    def _range(self, name: str, rows: slice, begin: int, width: int) -> Range:
        low, high = begin + rows.start * width, begin + rows.stop * width
        first, last = low // CHUNK, -(-high // CHUNK)
        end = min(self._begin + last * CHUNK, self._end)
        return Range(name, first, self._begin + first * CHUNK, end, low - first * CHUNK)

    def _column(self, name: str) -> tuple[int, int]:
        """Return where a column begins in the data, and the bytes of a row."""
        known = self._known.get(name)
        if known is None:
            laid = self._laid.get(name)
            column = self._columns[name]
            shape, width = column.shape, column.nbytes
            if laid is None and PACKED + name in self._laid:
                raise UsageError(
                    f"column {name!r}: its rows were saved with compress=, and are read whole; resume(verify='full')"
                )
            if laid is None or laid.shape != (self._count, *shape) or laid.end - laid.begin != self._count * width:
                raise self._damaged(0)
            if laid.end > self._end:  # of what lies behind them there are no sums
                raise self._damaged(laid.begin)
            known = self._known[name] = (laid.begin - self._begin, width)
        return known

    def read(self, rows: slice, ranges: Iterable[Range]) -> Arrays:
        """Return columns of rows: [n, ...] each. Of those that are in bodies all come together.

        Args:
            rows: which.
            ranges: what :meth:`ranges` gave for them.

        Raises:
            Damaged: they are not what they were.
            StoreError: they cannot be read now.
        """
        arrays: Arrays = {}
        bodies: np.ndarray | None = None
        count = rows.stop - rows.start
        for each in ranges:
            raw = self._checked(each)
            if each.name == BODIES:
                bodies = np.frombuffer(raw, self._body, count, each.low)
                continue
            column = self._columns[each.name]
            size = count * prod(column.shape)
            values = np.frombuffer(raw, column.bits, size, each.low) if size else np.empty(0, column.bits)
            arrays[each.name] = values.reshape(count, *column.shape) if column.shape else values
        return arrays if bodies is None else RowArrays(arrays, bodies)

    def _checked(self, part: Range) -> bytes:
        begin, end, sums = part.begin, part.end, self._sums
        raw = self._read(begin, end - begin)
        if end - begin <= CHUNK:
            if end > begin and crc32c(raw) != sums[part.first]:
                raise self._damaged(begin)
        else:
            view = memoryview(raw)
            for at in range(0, end - begin, CHUNK):
                if crc32c_more(0, view[at : at + CHUNK]) != sums[part.first + at // CHUNK]:
                    raise self._damaged(begin + at)
        if len(raw) < end - begin:
            raise self._damaged(begin)
        return raw

"""Parts of a block that are read, and checked, without the rest.

The last tensor of a block, ``#sums``, has the crc32c of every 16 KiB of the data before it. Its own crc32c, after that
of the block's header, is in the list of blocks (:class:`~pipeline.store.segments.Block`): so a chain of checksums leads
from the manifest to any 16 KiB of rows, and a row can be had for the reading of a few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.compressed import PACKED
from pipeline.errors import Damaged, UsageError
from pipeline.store.blocks import crc32c, crc32c_more
from pipeline.store.codec import Laid, read_layout

SUMS = "#sums"
CHUNK = 16 << 10
_HEAD = 2048  # bytes in which the header of most blocks lies


def sums_of(data: np.ndarray) -> np.ndarray:
    """Return the crc32c of every 16 KiB of bytes: [4 n] uint8, each in little endian."""
    sums = [crc32c_more(0, data[begin : begin + CHUNK].data) for begin in range(0, len(data), CHUNK)]
    return np.array(sums, "<u4").view(np.uint8)


def checksum_of(blob: memoryview) -> int:
    """Return the crc32c of a block's header, with the length in front, and of its sums; -1 if it has none."""
    head = blob[: 8 + int.from_bytes(blob[:8], "little")]
    laid = read_layout(head, len(blob)).get(SUMS)
    if laid is None:
        return -1
    return crc32c_more(crc32c_more(0, head), blob[laid.begin : laid.end])


Columns = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""The dtype and the shape of a row's value, by column."""


class Range(NamedTuple):
    """Where the values of some rows of a column lie."""

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
        columns: Columns,
        count: int,
        damaged: Callable[[int], Damaged],
    ) -> None:
        """Args:
        read: returns a part of the payload: from where on, how many bytes; fewer at the file's end.
        size: of the payload.
        checksum: what :func:`checksum_of` gave.
        columns: that it has, marks among them.
        count: of rows.
        damaged: makes the error for what lies somewhere in the payload.

        Raises:
            Damaged: header or sums are not what they were.
        """
        self._read, self._damaged, self._columns, self._count = read, damaged, columns, count
        self._known: dict[str, tuple[int, int]] = {}
        head = read(0, min(_HEAD, size))
        length = 8 + int.from_bytes(head[:8], "little")
        if length > size:
            raise damaged(0)
        head = head[:length] if length <= len(head) else head + read(len(head), length - len(head))
        try:
            self._laid: dict[str, Laid] = read_layout(head, size)
            sums = self._laid[SUMS]
        except (Damaged, KeyError):
            raise damaged(0) from None
        raw = read(sums.begin, sums.end - sums.begin)
        if crc32c_more(crc32c_more(0, head), raw) != checksum:
            raise damaged(0)
        self._begin, self._end = len(head), sums.begin
        self._sums: list[int] = np.frombuffer(raw, "<u4").tolist()

    def ranges(self, rows: slice, names: Iterable[str]) -> list[Range]:
        """Return where the values of rows lie, by column.

        Raises:
            Damaged: a column is not there, or not as it should be.
            UsageError: its rows are compressed.
        """
        found = []
        for name in names:
            begin, width = self._column(name)
            low, high = begin + rows.start * width, begin + rows.stop * width
            first, last = low // CHUNK, -(-high // CHUNK)
            end = min(self._begin + last * CHUNK, self._end)
            found.append(Range(name, first, self._begin + first * CHUNK, end, low - first * CHUNK))
        return found

    def _column(self, name: str) -> tuple[int, int]:
        """Return where a column begins in the data, and the bytes of a row."""
        known = self._known.get(name)
        if known is None:
            laid = self._laid.get(name)
            bits, shape = self._columns[name]
            width = bits.itemsize * prod(shape)
            if laid is None and PACKED + name in self._laid:
                raise UsageError(
                    f"column {name!r}: its rows were saved with compress=, and are read whole; resume(verify='full')"
                )
            if laid is None or laid.shape != (self._count, *shape) or laid.end - laid.begin != self._count * width:
                raise self._damaged(0)
            known = self._known[name] = (laid.begin - self._begin, width)
        return known

    def read(self, rows: slice, ranges: Iterable[Range]) -> Arrays:
        """Return columns of rows: [n, ...] each.

        Args:
            rows: which.
            ranges: what :meth:`ranges` gave for them.

        Raises:
            Damaged: they are not what they were.
            StoreError: they cannot be read now.
        """
        arrays: Arrays = {}
        count, sums = rows.stop - rows.start, self._sums
        for name, first, begin, end, low in ranges:
            raw = self._read(begin, end - begin)
            if end - begin <= CHUNK:
                if end > begin and crc32c(raw) != sums[first]:
                    raise self._damaged(begin)
            else:
                view = memoryview(raw)
                for at in range(0, end - begin, CHUNK):
                    if crc32c_more(0, view[at : at + CHUNK]) != sums[first + at // CHUNK]:
                        raise self._damaged(begin + at)
            if len(raw) < end - begin:
                raise self._damaged(begin)
            bits, shape = self._columns[name]
            size = count * prod(shape)
            values = np.frombuffer(raw, bits, size, low) if size else np.empty(0, bits)
            arrays[name] = values.reshape(count, *shape) if shape else values
        return arrays

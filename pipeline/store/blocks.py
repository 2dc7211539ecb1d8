"""Reading files through one block of memory, and the crc32c of what is read.

A file that is only to be checked is read into the same block again and again: memory that is new for every piece costs
more than the reading. The interpreter's lock is free while the disk is waited for, and while a large piece is checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import Self

import google_crc32c
import numpy as np

from pipeline.errors import StoreError
from pipeline.store.files import plain_handle, size_of
from pipeline.store.memory import aligned_memory

_BLOCK = 256 << 10
LARGE_BLOCK = 4 << 20
"""For files that are read from their beginning to their end: a call for a smaller piece takes longer than it need, and
two threads that come back from smaller ones wait for each other."""
_POLYNOMIAL = 0x82F63B78  # of crc32c, its lowest bit first

crc32c = google_crc32c.value


def crc32c_of_array(array: np.ndarray) -> int:
    """Return the crc32c of a contiguous array [n] uint8, which is not copied."""
    checksum: int = google_crc32c.extend(0, array)
    return checksum


def crc32c_more(checksum: int, chunk: bytes | bytearray | memoryview) -> int:
    """Return the crc32c of what ``checksum`` (0 for nothing) is of, followed by ``chunk``, which is not copied."""
    if not len(chunk):
        return checksum
    # It takes bytes or an array, and no other view of memory.
    more: int = google_crc32c.extend(checksum, np.frombuffer(chunk, np.uint8))
    return more


def crc32c_joined(first: int, second: int, length: int) -> int:
    """Return the crc32c of two pieces, one behind the other, from those of each; the second is ``length`` long."""
    return _times(_zeros(length), first) ^ second


@lru_cache(maxsize=64)
def _zeros(length: int) -> tuple[int, ...]:
    """Return what so many zero bytes make of each bit of a checksum: a matrix over the numbers 0 and 1."""
    # One zero bit divides by x; of n bytes it is that, 8 n times, by doubling.
    power: tuple[int, ...] = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    result = tuple(1 << bit for bit in range(32))
    bits = 8 * length
    while bits:
        if bits & 1:
            result = tuple(_times(power, row) for row in result)
        power = tuple(_times(power, row) for row in power)
        bits >>= 1
    return result


def _times(matrix: tuple[int, ...], bits: int) -> int:
    found = 0
    while bits:
        lowest = bits & -bits
        found ^= matrix[lowest.bit_length() - 1]
        bits ^= lowest
    return found


class Blocks:
    """A file that is read piece by piece, forward for the most part. All methods block.

    Raises:
        Damaged: it is no plain file.
        StoreError: it cannot be opened; every method: it cannot be read.
    """

    def __init__(self, path: str, *, block: int = _BLOCK, told: Callable[[int], None] | None = None) -> None:
        """Args:
        path: the file.
        block: how many bytes are read at a time.
        told: told of bytes as they are read.
        """
        self._path, self._most, self._told = path, block, told
        self._file = plain_handle(path)
        self._block = memoryview(b"")
        self._start = self._end = 0
        self._size = 0

    def holds(self, end: int) -> bool:
        """Whether the file has ``end`` bytes; it may be growing."""
        if end > self._size:
            self._size = size_of(self._file, self._path)
        return end <= self._size

    def size(self) -> int:
        """Return how many bytes the file has now."""
        return size_of(self._file, self._path)

    def part(self, offset: int, most: int) -> memoryview:
        """Return up to ``most`` bytes at ``offset``, none at the file's end alone; valid until the next call."""
        if not self._start <= offset < self._end:
            if not self._block:
                self._block = aligned_memory(min(self._most, max(64, size_of(self._file, self._path))))
            try:
                self._start, self._end = offset, offset + os.preadv(self._file, [self._block], offset)
            except OSError as error:
                self._start = self._end = 0
                raise StoreError(f"{self._path} at byte {offset}: cannot be read: {error}") from error
            if self._told is not None:
                self._told(self._end - self._start)
        at = offset - self._start
        return self._block[at : min(at + most, self._end - self._start)]

    def take(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes, or what there is of them before the file's end."""
        part = self.part(offset, length)
        if len(part) == length:
            return bytes(part)
        parts = []
        while len(part):
            parts.append(bytes(part))
            offset, length = offset + len(part), length - len(part)
            part = self.part(offset, length) if length else part[:0]
        return b"".join(parts)

    def exactly(self, offset: int, length: int) -> bytes:
        """As :meth:`take`, but nothing around it is read: for pieces that lie here and there."""
        try:
            found = os.pread(self._file, length, offset)
        except OSError as error:
            raise StoreError(f"{self._path} at byte {offset}: cannot be read: {error}") from error
        if len(found) < length:  # at the end, or of more than 2 GB
            found += self.take(offset + len(found), length - len(found))
        return found

    def checksum(self, offset: int, length: int) -> int | None:
        """Return the crc32c of ``length`` bytes, or None if there are not so many; nothing is kept."""
        checksum = 0
        while length:
            part = self.part(offset, length)
            if not len(part):
                return None
            checksum = crc32c_more(checksum, part)
            offset, length = offset + len(part), length - len(part)
        return checksum

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def crc32c_of_file(path: str, told: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Return a file's size and its crc32c as eight hexadecimal digits; ``told`` is told of the bytes read. Blocks."""
    checksum = size = 0
    with Blocks(path, block=LARGE_BLOCK, told=told) as blocks:
        while len(part := blocks.part(size, LARGE_BLOCK)):
            checksum = crc32c_more(checksum, part)
            size += len(part)
    return size, f"{checksum:08x}"

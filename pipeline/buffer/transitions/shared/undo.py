"""What arrays held before they were changed: copied here first, and back by whoever finds that it was not committed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

from pipeline.buffer.transitions.shared.header import COMMITS, PAGE, UNDO, UNDO_END, Header

Ints = np.ndarray
_HEAD = 3 * 8
_KEPT = 1 << 20  # bytes of memory that are not given back


class Undo:
    """Old values, one entry after the other: the number of an array, how many places, how many bytes; the places; the
    values. Entries count that end before what a word of the header says, and only until the next commit.

    The caller has the lock.
    """

    def __init__(self, descriptor: int, header: Header) -> None:
        self._descriptor, self._words = descriptor, header.words
        self._map: mmap.mmap | None = None
        self._bytes = np.empty(0, np.uint8)

    def note(self, number: int, array: np.ndarray, places: Ints) -> None:
        """Keep what ``array`` [capacity, ...] holds at places, each named once or several times, before it is changed
        there; ``number`` tells every process which array it is."""
        words = self._words
        if words[UNDO] != words[COMMITS] + 1:
            words[UNDO_END] = 0
            words[UNDO] = words[COMMITS] + 1  # last: now the entries count, of which there are none yet
        values = np.ascontiguousarray(array[places])
        begin = words[UNDO_END]
        at = begin + _HEAD + 8 * len(places)
        end = at + -(-values.nbytes // 8) * 8
        self._reach(end)
        self._bytes[begin : begin + _HEAD].view(np.int64)[:] = number, len(places), values.nbytes
        self._bytes[begin + _HEAD : at].view(np.int64)[:] = places
        self._bytes[at : at + values.nbytes] = values.reshape(-1).view(np.uint8)
        words[UNDO_END] = end  # now this one counts

    def take_back(self, array_of: Callable[[int], np.ndarray | None]) -> None:
        """Copy back what was noted since the last commit, the newest entry first; None: the array is not there any
        more. Done again, it does the same."""
        words = self._words
        if words[UNDO] != words[COMMITS] + 1:
            return
        self._reach(words[UNDO_END])
        begins, begin = [], 0
        while begin < words[UNDO_END]:
            begins.append(begin)
            _, count, size = self._head(begin)
            begin += _HEAD + 8 * count + -(-size // 8) * 8
        for begin in reversed(begins):
            number, count, size = self._head(begin)
            at = begin + _HEAD + 8 * count
            array = array_of(number)
            if array is None:
                continue
            places = self._bytes[begin + _HEAD : at].view(np.int64)
            array[places] = self._bytes[at : at + size].view(array.dtype).reshape(count, *array.shape[1:])

    def _head(self, begin: int) -> tuple[int, int, int]:
        number, count, size = self._bytes[begin : begin + _HEAD].view(np.int64).tolist()
        return number, count, size

    def forget(self) -> None:
        """Give back what many old values took, once the change is committed."""
        if self._map is not None and self._words[UNDO_END] > _KEPT:
            self._map.madvise(mmap.MADV_REMOVE)
            self._words[UNDO_END] = 0

    def _reach(self, end: int) -> None:
        if end <= len(self._bytes):
            return
        size = -(-max(end, 2 * len(self._bytes)) // PAGE) * PAGE
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)
        self._map = mmap.mmap(self._descriptor, size)
        self._bytes = np.frombuffer(self._map, np.uint8)

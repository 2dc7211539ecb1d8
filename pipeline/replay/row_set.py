"""A set of rows, of which each takes a bit."""

from __future__ import annotations

import numpy as np

from pipeline.buffer.transitions.memory import SparseMemory

Ints = np.ndarray
_PIECE = 1 << 17  # bytes of bits that are looked at at a time
_LONG = 256  # rows of a run that are not taken in one by one


class RowSet:
    """Some of the rows from 0 up to ``rows``."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        # Not of the heap, which would be larger from then on, for as long as there is anything behind.
        self._bits = SparseMemory().array("rows", (-(-rows // 8),), np.dtype(np.uint8))

    def add(self, rows: Ints) -> None:
        """Take rows [n] in, of which some may be in it."""
        np.bitwise_or.at(self._bits, rows >> 3, np.left_shift(1, rows & 7).astype(np.uint8))

    def add_runs(self, runs: Ints) -> None:
        """Take in runs [k, 2] of rows: where each begins, and how long it is."""
        long = runs[:, 1] >= _LONG
        for begin, length in runs[long].tolist():
            end = begin + length
            first, last = -(-begin // 8), end // 8  # of these bytes every row is in it
            self._bits[first:last] = 255
            self.add(np.concatenate([np.arange(begin, 8 * first), np.arange(8 * last, end)]))
        begins, lengths = runs[~long, 0], runs[~long, 1]
        before = np.cumsum(lengths) - lengths
        self.add(np.repeat(begins - before, lengths) + np.arange(int(lengths.sum())))

    def remove(self, rows: Ints) -> None:
        """Let rows [n] go."""
        np.bitwise_and.at(self._bits, rows >> 3, ~np.left_shift(1, rows & 7).astype(np.uint8))

    def between(self, begin: int, end: int) -> np.ndarray:
        """Return whether each row from ``begin`` up to ``end`` is in it: bool."""
        low = begin >> 3
        bits = np.unpackbits(self._bits[low : -(-end // 8)], bitorder="little")
        return bits[begin - 8 * low : end - 8 * low].astype(bool)

    def __len__(self) -> int:
        pieces = (self._bits[at : at + _PIECE] for at in range(0, len(self._bits), _PIECE))
        return sum(int(np.count_nonzero(np.unpackbits(piece))) for piece in pieces)

    def stretches(self) -> tuple[Ints, Ints]:
        """Return where the stretches of rows that are in it begin [k], rising, and where they end, which has none."""
        begins, ends, inside = [np.empty(0, np.int64)], [np.empty(0, np.int64)], False
        for at in range(0, len(self._bits), _PIECE):
            there = np.unpackbits(self._bits[at : at + _PIECE], bitorder="little").astype(bool)
            edges = np.flatnonzero(np.diff(there, prepend=inside)) + 8 * at
            rising = edges[1::2] if inside else edges[::2]
            begins.append(rising)
            ends.append(edges[::2] if inside else edges[1::2])
            inside = bool(there[-1])
        if inside:
            ends.append(np.array([self._rows]))
        return np.concatenate(begins), np.concatenate(ends)

    def all(self) -> np.ndarray:
        """Return whether each row is in it: [rows] bool."""
        return np.unpackbits(self._bits, count=self._rows, bitorder="little").astype(bool)

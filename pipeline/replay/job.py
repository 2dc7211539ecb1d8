"""A buffer's rows on their way to the disk, while others are added."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import encode_block, rows_of_block
from pipeline.buffer.transitions.recycling import Recycler
from pipeline.buffer.transitions.ring import Ring
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.replay.gate import Gate
from pipeline.replay.state import STATE_FILE, VALUES_FOLDER, BufferState, encode_state
from pipeline.store.layout import SegmentKey
from pipeline.store.segments import Block


class Piece(NamedTuple):
    """The ``rows`` of keys from ``first`` on, as they will be written."""

    first: int
    rows: int
    blob: memoryview


class Listing(NamedTuple):
    """Where everything lies that a generation lists.

    Attributes:
        blocks: what the next job is told of; empty where it knows by itself.
        raw: the content of the generation's list.
        live: bytes of payloads that the generation needs, by segment.
        used: segments of which this process needs something beside them.
    """

    blocks: list[Block]
    raw: bytes
    live: dict[SegmentKey, int]
    used: frozenset[SegmentKey] = frozenset()


class SaveJob(Protocol):
    """Everything that one generation holds of a buffer, as of one moment. Its methods belong to one thread."""

    values: dict[str, np.ndarray]
    """Arrays by the names of their files."""

    def kept(self, blocks: list[Block]) -> list[Block]:
        """Return those of the blocks on the disk that the generation needs. Asked first, before anything is written."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """Yield what is not on the disk yet. Blocks."""
        ...

    def listing(self, kept: list[Block], new: list[Block]) -> Listing:
        """Return where everything lies, once it is there for good."""
        ...

    def described(self, unknown: dict[str, Any]) -> tuple[str, bytes]:
        """Return the name and the content of the file that says the rest; ``unknown`` is carried along in it."""
        ...

    def close(self) -> None:
        """Let everything be changed that was not written."""
        ...


def listed(blocks: list[Block]) -> Listing:
    """Return the listing of blocks."""
    blocks = sorted(blocks, key=lambda block: block.first)
    live: dict[SegmentKey, int] = {}
    for block in blocks:
        live[block.segment_key] = live.get(block.segment_key, 0) + block.length
    return Listing(blocks, msgspec.msgpack.encode(blocks), live)


class JobOfRows:
    """What the jobs of a buffer of transitions have in common."""

    state: BufferState

    def listing(self, kept: list[Block], new: list[Block]) -> Listing:
        """Return where everything lies."""
        return listed(kept + new)

    def described(self, unknown: dict[str, Any]) -> tuple[str, bytes]:
        """Return the name and the content of the file that says the rest."""
        return STATE_FILE, encode_state(self.state, unknown)


def files_of(job: SaveJob, listing: Listing, unknown: dict[str, Any]) -> Iterator[tuple[str, bytes | memoryview]]:
    """Yield what a generation holds of a buffer beside its rows: paths, and contents as they are asked for."""
    yield job.described(unknown)
    yield BLOCKS_FILE, listing.raw
    for name, values in job.values.items():
        yield f"{VALUES_FOLDER}/{name}", memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


_FEW = 16


def merged_from(blocks: Sequence[Block], whole: int) -> int:
    """Return from which of the blocks on the rows are to be written again, as one block; their number if none is.

    Where 16 blocks of about one size follow each other at the end, they become one, and so do 16 such ones. So a row is
    written again once for each factor of 16 between a save's rows and the ``whole`` of a block, and there are no more
    than 16 blocks of each of these sizes.
    """
    begin, size = len(blocks), 0
    while begin and 2 * (unit := size or blocks[-1].count) < whole:
        first = begin
        while first and blocks[first - 1].count <= 2 * unit:
            first -= 1
        if begin - first + (size > 0) < _FEW:
            break
        size += sum(block.count for block in blocks[first:begin])
        begin = first
    return begin


class Job(JobOfRows):
    """Everything that one generation holds of a buffer, as of one moment.

    Rows are copied block by block, each under the buffer's lock for a few milliseconds; one that is about to be
    overwritten before its turn is copied first, by whoever overwrites it.
    """

    def __init__(self, ring: Ring, gate: Gate, state: BufferState, values: dict[str, np.ndarray], first: int) -> None:
        """Args:
        ring: the buffer's.
        gate: its lock, which the caller holds.
        state: its state.
        values: what grows with the buffer beside the rows; copies.
        first: rows before this key are on the disk, in blocks that stay.
        """
        self.state, self.values = state, values
        self._ring, self._gate = ring, gate
        self._first = self._next = max(first, ring.oldest)
        self._end = ring.added
        self._memory = Recycler()
        self._ready: deque[Piece] = deque()
        if self._next < self._end:
            self._guard()

    def _guard(self) -> None:
        """See to it that no row is overwritten that was not copied."""
        self._ring.before_overwriting = self._hand_over

    def kept(self, blocks: list[Block]) -> list[Block]:
        """Return those of the blocks on the disk that the generation needs."""
        oldest = self.state.added - self.state.size
        return [block for block in blocks if block.first + block.count > oldest and block.first < self._first]

    def pieces(self) -> Iterator[Piece]:
        """Yield every row that is not on the disk, oldest first. Blocks, and belongs to one thread."""
        while True:
            with self._gate.lock:
                if not self._ready:
                    self._copy(self._end, at_once=False)
                if not self._ready:
                    self.close()
                    return
                piece = self._ready.popleft()
            yield piece

    def close(self) -> None:
        """Let rows be overwritten that were not copied."""
        if self._ring.before_overwriting == self._hand_over:
            self._ring.before_overwriting = None

    def _hand_over(self, upto: int) -> None:
        self._copy(min(upto, self._end), at_once=True)

    def _copy(self, upto: int, *, at_once: bool) -> None:
        while self._next < upto:
            ring, end = self._source()
            count = min(rows_of_block(ring), end - self._next)
            self._ready.append(Piece(self._next, count, encode_block(ring, self._next, count, self._memory)))
            self._next += count
            self._copied()
            if not at_once:
                return

    def _source(self) -> tuple[Ring, int]:
        """Return where the next rows lie, and up to which key."""
        return self._ring, self._end

    def _copied(self) -> None:
        """Take in that rows before the next one may be overwritten."""

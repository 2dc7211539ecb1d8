"""The rows of a pool on their way to the disk and back.

Each row that was written has a place: its number among all that ever were. A block holds the rows of places that
follow each other, from ``first`` on; a generation says, in ``values``, the place of each row that is there
(``pool.at``), its key and its number among all that were added, oldest first. So a block may hold rows that are gone.
One of which fewer than half are there is not listed any more, and they are written again: what a generation lists is at
most twice as many rows as are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.blocks import decode_block, encode_rows, rows_of_block
from pipeline.buffer.transitions.bodies import some_rows
from pipeline.buffer.transitions.columns import Schema
from pipeline.buffer.transitions.compressed import fitting
from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.recycling import Recycler
from pipeline.errors import Damaged
from pipeline.replay.gate import Gate
from pipeline.replay.job import JobOfRows, Piece
from pipeline.replay.state import BufferState
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, PayloadReader

Ints = np.ndarray


def block_of(at: Ints, blocks: Sequence[Block]) -> Ints:
    """Return for each place the number of the block that holds it among ``blocks``, which are in their order; -1: none
    does."""
    if not blocks:
        return np.full(len(at), -1)
    firsts = np.array([block.first for block in blocks])
    counts = np.array([block.count for block in blocks])
    found = np.searchsorted(firsts, at, side="right") - 1
    inside = (found >= 0) & (at >= 0) & (at < firsts[found] + counts[found])
    return np.where(inside, found, -1)


def assign_places(pool: Pool, blocks: Sequence[Block]) -> tuple[list[Block], Ints]:
    """Give every row that is to be written a place; return the blocks that stay, and the slots of those rows by
    place."""
    filled = np.arange(pool.size)
    of = block_of(pool.at[filled], blocks)
    there = np.bincount(of[of >= 0], minlength=len(blocks))
    stays = np.array([2 * there[number] >= block.count for number, block in enumerate(blocks)], bool)
    unread = pool.storage.unread
    if unread is not None:  # what was not read is not written again
        stays |= np.isin([block.first for block in blocks], list(unread.waiting()))
    stays &= there > 0
    written = np.zeros(pool.size, bool)
    written[of >= 0] = stays[of[of >= 0]]
    slots = filled[~written]
    slots = slots[np.argsort(pool.serials(pool.key_at(slots)))]
    pool.at[slots] = pool.next_at + np.arange(len(slots))
    pool.next_at += len(slots)
    return [block for number, block in enumerate(blocks) if stays[number]], slots


class PoolJob(JobOfRows):
    """Everything that one generation holds of a buffer whose rows lie in any order; see
    :class:`~pipeline.replay.job.Job`.

    A block of rows of which one is about to be changed before its turn is copied first, by whoever changes it.
    """

    def __init__(
        self, pool: Pool, gate: Gate, state: BufferState, values: dict[str, np.ndarray], kept: list[Block], slots: Ints
    ) -> None:
        """Args:
        pool, gate: the buffer's; the caller holds the lock.
        state, values: of the buffer, after :func:`assign_places`, which gave ``kept`` and ``slots``.
        """
        self.state, self.values = state, values
        self._pool, self._gate, self._kept = pool, gate, kept
        most = rows_of_block(pool)
        self._first = pool.next_at - len(slots)
        self._chunks = [slots[begin : begin + most] for begin in range(0, len(slots), most)]
        self._begins = list(range(self._first, self._first + len(slots), most))
        self._waiting = np.ones(len(self._chunks), bool)
        self._of = np.full(pool.capacity if len(slots) else 0, -1, np.int64)  # by slot: the chunk
        for number, chunk in enumerate(self._chunks):
            self._of[chunk] = number
        self._memory = Recycler()
        self._ready: deque[Piece] = deque()
        if self._chunks:
            pool.before_changing = self._hand_over

    def kept(self, blocks: list[Block]) -> list[Block]:
        """Return those of the blocks on the disk that the generation needs."""
        return self._kept

    def pieces(self) -> Iterator[Piece]:
        """Yield every row that is not on the disk. Blocks, and belongs to one thread."""
        for number in range(len(self._chunks)):
            with self._gate.lock:
                if self._waiting[number]:
                    self._copy(number)
                ready = list(self._ready)
                self._ready.clear()
            yield from ready
        with self._gate.lock:
            ready = list(self._ready)
            self._ready.clear()
            self.close()
        yield from ready

    def close(self) -> None:
        """Let rows be changed that were not copied."""
        if self._pool.before_changing == self._hand_over:
            self._pool.before_changing = None

    def _hand_over(self, slots: Ints) -> None:
        numbers = np.unique(self._of[slots])
        for number in numbers[numbers >= 0].tolist():
            if self._waiting[number]:
                self._copy(number)

    def _copy(self, number: int) -> None:
        chunk = self._chunks[number]
        self._waiting[number] = False
        blob = encode_rows(self._pool, chunk, len(chunk), self._memory)
        self._ready.append(Piece(self._begins[number], len(chunk), blob))


def needed_by(pool: Pool, blocks: Sequence[Block], layout: Layout) -> list[Block]:
    """Return the blocks in which rows lie that are there, in their order.

    Raises:
        Damaged: one is in no block.
    """
    blocks = sorted(blocks, key=lambda block: block.first)
    of = block_of(pool.at[: pool.size], blocks)
    if (of < 0).any():
        raise Damaged(f"{layout.directory}: the generation lists no block of {int((of < 0).sum())} of its rows")
    return [blocks[number] for number in np.unique(of).tolist()]


def read_rows(reader: PayloadReader, pool: Pool, schema: Schema, blocks: Sequence[Block], layout: Layout) -> None:
    """Put the rows into their slots, which :meth:`Pool.take_places` has told.

    Raises:
        Damaged: one is in no block, or a block cannot be read.
    """
    filled = np.arange(pool.size)
    blocks = needed_by(pool, blocks, layout)
    of = block_of(pool.at[filled], blocks)
    wanted = {block.first: number for number, block in enumerate(blocks)}
    for place, found in reader.each(blocks[number].place for number in wanted.values()):
        if isinstance(found, Damaged):
            raise found
        number = wanted[place[0]]
        block = blocks[number]
        where = f"{layout.segment(*block.segment_key)} at byte {block.offset}"
        arrays = fitting(decode_block(found, schema, block.count, where, block.sums), pool.storage.views, schema)
        slots = filled[of == number]
        rows = pool.at[slots] - block.first
        pool.storage.write(slots, some_rows(arrays, rows))


def take_places(pool: Pool, state: BufferState, values: Mapping[str, Any]) -> None:
    """Tell a pool where the rows of a state lie.

    Raises:
        ValueError, LookupError: the state does not fit together.
    """
    plain = {name.rpartition(".")[0]: each for name, each in values.items()}
    pool.take_places(state.pool, {name: plain[f"pool.{name}"] for name in ("keys", "serials", "at")})


def places_of(added: int, size: int) -> dict[str, Ints]:
    """Return where the rows of a new pool lie, of whose ``added`` rows the newest ``size`` are there, as what a
    generation holds of it: one after the other, in slots and on the disk."""
    rows = np.arange(size)
    return {"pool.keys.int64": rows, "pool.serials.int64": added - size + rows, "pool.at.int64": rows}


def numbers_of(size: int, not_kept: int) -> list[int]:
    """Return what a new pool's state says beside :func:`places_of`; see
    :attr:`~pipeline.replay.state.BufferState.pool`."""
    return [0, size, not_kept, size]


def fill_pool(pool: Pool, state: BufferState, values: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> None:
    """Give a pool without rows those of a state, oldest first: columns and marks [n, ...]. Nothing of it is on the disk
    then.

    Raises:
        ValueError, LookupError: the state does not fit together.
    """
    pool.restore(state.added, state.size, state.cut_keys, state.truncated_keys)
    pool.episodes.load(state.open_episodes, state.next_episode)
    take_places(pool, state, values)
    if state.schema is not None:
        pool.at[:] = -1
        pool.storage.write(pool.slots(pool.keys()), fitting(rows, pool.storage.views, state.schema))
        pool.relink()

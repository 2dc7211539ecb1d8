"""Rows that a resume has not read: they lie in blocks on the disk, and are brought in when they are first wanted.

A block is brought in by pieces, of so many rows as lie together in about 16 KiB; or as a whole, if
many of its pieces are wanted at once, or its writer left no checksums of parts. Marks of all rows are brought in when
one is first wanted, without the rows; what follows what is found out then. What belongs to rows and is not in their
blocks counts as it does otherwise: episodes that were cut, and columns that were written back. A row that has gone
meanwhile stays gone, whatever its block holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipeline.buffer.transitions.blocks import KEPT_MARKS, decode_block
from pipeline.buffer.transitions.bodies import some_rows, without
from pipeline.buffer.transitions.checked import CHUNK, CheckedBlock, Range
from pipeline.buffer.transitions.columns import LARGE, Arrays, Column, Schema
from pipeline.buffer.transitions.layout import AHEAD, CUT, END, MARKS, SERIAL, TRUNCATED
from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import Slots
from pipeline.buffer.transitions.writing import Written
from pipeline.errors import Damaged
from pipeline.store.held import HeldSegments
from pipeline.store.segments import Block

Ints = np.ndarray
_FEW = 8
"""Where more than one piece in so many is wanted of a block, it is read as a whole."""


class _Part(NamedTuple):
    """A piece that is to be read."""

    number: int
    piece: int
    rows: slice
    ranges: list[Range]


class UnreadRows:
    """Rows of a ring that lie in blocks. Implements :class:`~pipeline.buffer.transitions.unread.Unread`."""

    def __init__(self, ring: Ring, schema: Schema, blocks: Sequence[Block], held: HeldSegments) -> None:
        """Args:
        ring: with its counters and no rows.
        schema: its columns.
        blocks: together all of its rows, in their order.
        held: where they lie.
        """
        self._ring, self._schema, self._blocks, self._held = ring, schema, list(blocks), held
        self._firsts = np.array([block.first for block in blocks], np.int64)
        counts = np.array([block.count for block in blocks], np.int64)
        # Where blocks overlap, the rows are the same, and those of the first one are taken.
        self._ends = np.maximum.accumulate(self._firsts + counts)
        self._begins = np.maximum(self._firsts, np.concatenate([self._firsts[:1], self._ends[:-1]]))
        small = sum(column.nbytes for column in schema.columns if column.nbytes < LARGE)  # which lie together
        self._each = max(1, CHUNK // max(1, small, *(column.nbytes for column in schema.columns)))
        self._pieces = np.concatenate([[0], np.cumsum(-(-counts // self._each))])  # the first piece of each block
        self._there = np.zeros(int(self._pieces[-1]) + 1, bool)
        self._there[-1] = True  # of what is in no block
        self._left = np.diff(self._pieces)  # pieces of each block that are not there
        self._checked: dict[int, CheckedBlock] = {}
        self._gone = 0  # of so many blocks all rows have gone
        self._columns = [*schema.columns, *(Column(name, MARKS[name].name) for name in KEPT_MARKS)]
        self._names = [column.name for column in self._columns]
        self._cuts, self._cuts_known = np.empty(0, np.int64), (-1, -1)
        self._shortened = np.sort(np.array(ring.truncated_keys, np.int64))
        self.marks_known = False
        self.written: Written | None = None

    # -- what is asked -----------------------------------------------------------------------------------------

    def rows(self, slots: Ints) -> None:
        self._let_go()
        pieces = self._of(slots)
        self._bring(np.unique(pieces[~self._there[pieces]]))

    def need(self, name: str, slots: Ints) -> None:
        if name.startswith("#"):
            self.marks()
        else:
            self.rows(slots)

    def all(self) -> None:
        self.marks()
        self._let_go()
        self._bring(np.flatnonzero(~self._there))

    def waiting(self) -> frozenset[int]:
        self._let_go()
        return frozenset(self._firsts[self._left > 0].tolist())

    def marks(self) -> None:
        if self.marks_known:
            return
        self._let_go()
        for number in np.flatnonzero(self._left).tolist():
            block = self._blocks[number]
            if block.sums < 0:
                self._bring_whole(number, [])
            else:
                rows = slice(0, block.count)
                checked = self._check(number)
                self._place(number, rows, checked.read(rows, checked.ranges(rows, KEPT_MARKS)))
        self._ring.link_all()
        self.marks_known = True
        self._end()

    # -- reading -----------------------------------------------------------------------------------------------

    def _bring(self, pieces: Ints) -> None:
        numbers = np.searchsorted(self._pieces, pieces, side="right") - 1
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(pieces)]
        whole: list[tuple[int, list[int]]] = []
        parts: list[_Part] = []
        for begin, end in pairwise(edges):
            if begin < end:
                number, own = int(numbers[begin]), pieces[begin:end].tolist()
                if self._is_whole(number, len(own)):
                    whole.append((number, own))
                else:
                    parts += self._parts(number, own)
        if len(whole) + len(parts) > 1:  # the disk may fetch them all at once
            for number, _ in whole:
                self._held.expect(self._blocks[number])
            for part in parts:
                self._held.expect(self._blocks[part.number], [(each.begin, each.end) for each in part.ranges])
        for number, own in whole:
            self._bring_whole(number, own)
        self._bring_parts(parts)
        self._end()

    def _is_whole(self, number: int, count: int) -> bool:
        """Whether a block, of which so many pieces are wanted, is read as a whole."""
        every = int(self._pieces[number + 1] - self._pieces[number])
        return self._blocks[number].sums < 0 or _FEW * count >= every

    def _bring_whole(self, number: int, own: list[int]) -> None:
        block = self._blocks[number]
        try:
            payload = self._held.payload(block)
        except Damaged:
            if block.sums < 0:
                raise
            self._bring_parts(self._parts(number, own))  # the damage may lie elsewhere in it
            return
        arrays = decode_block(payload, self._schema, block.count, self._held.where(block), block.sums)
        begin, end = self._pieces[number : number + 2].tolist()
        there = self._there[begin:end]
        for first, last in _runs(~there):
            rows = slice(first * self._each, min(last * self._each, block.count))
            self._place(number, rows, some_rows(arrays, rows))
        self._came(number, np.flatnonzero(~there) + begin)

    def _parts(self, number: int, own: list[int]) -> list[_Part]:
        checked, names = self._check(number), self._schema.names if self.marks_known else self._names
        found = []
        for piece in own:
            rows = self._rows_of(number, piece)
            found.append(_Part(number, piece, rows, checked.ranges(rows, names)))
        return found

    def _bring_parts(self, parts: list[_Part]) -> None:
        for number, piece, rows, ranges in parts:
            self._place(number, rows, self._check(number).read(rows, ranges))
            self._came(number, piece)

    def _check(self, number: int) -> CheckedBlock:
        checked = self._checked.get(number)
        if checked is None:
            block, held = self._blocks[number], self._held
            read, count = held.reader(block), block.count
            checked = self._checked[number] = CheckedBlock(
                read, block.length, block.sums, self._columns, count, lambda at: held.damaged(block, at)
            )
        return checked

    def _rows_of(self, number: int, piece: int) -> slice:
        begin = (piece - int(self._pieces[number])) * self._each
        return slice(begin, min(begin + self._each, self._blocks[number].count))

    def _came(self, number: int, pieces: Ints | int) -> None:
        self._there[pieces] = True
        self._left[number] -= 1 if isinstance(pieces, int) else len(pieces)
        if not self._left[number]:
            self._checked.pop(number, None)
            self._held.release(self._blocks[number])

    # -- placing -----------------------------------------------------------------------------------------------

    def _place(self, number: int, rows: slice, arrays: Arrays) -> None:
        """Put rows of a block, or their marks alone, where they belong."""
        storage = self._ring.storage
        if self.marks_known:
            arrays = without(arrays, KEPT_MARKS)
        for slots, keys, which in self._homes(number, rows):
            part = some_rows(arrays, which)
            if not self.marks_known:
                part[SERIAL] = (keys & 0xFFFFFFFF).astype(np.uint32)
                part[AHEAD] = np.zeros(len(keys), np.int32)
                part[END] = np.where(part[END] == CUT, 0, part[END])  # `cut_keys` are of the moment that was saved
                for end, ended in ((TRUNCATED, self._truncated(keys)), (CUT, self._cut(keys))):
                    if len(ended):
                        part[END][np.isin(keys, ended)] = end
            if self.written is not None:
                for name, changed in self.written.among(slots, keys):
                    if name in part:
                        part[name] = part[name].copy()
                        part[name][changed] = storage.view(name)[slots][changed]
            storage.write(slots, part)

    def _cut(self, keys: Ints) -> Ints:
        """Return with which of all rows an episode was cut, as far as they may be among ``keys``."""
        known = (self._ring.cuts, len(self._ring.cut_keys))
        if known != self._cuts_known:
            self._cuts, self._cuts_known = np.sort(np.array(self._ring.cut_keys, np.int64)), known
        low, high = np.searchsorted(self._cuts, (keys.min(), keys.max() + 1))
        return self._cuts[low:high]

    def _truncated(self, keys: Ints) -> Ints:
        """As :meth:`_cut`, of episodes that a save has truncated."""
        low, high = np.searchsorted(self._shortened, (keys.min(), keys.max() + 1))
        return self._shortened[low:high]

    def _homes(self, number: int, rows: slice) -> list[tuple[Slots, Ints, slice | Ints]]:
        """Return (slots, keys, which of them) of those of ``rows`` of a block that are there, in parts whose slots
        follow each other."""
        first, capacity = int(self._firsts[number]), self._ring.capacity
        low = max(int(self._begins[number]), self._ring.oldest, first + rows.start)
        high = min(int(self._ends[number]), first + rows.stop)
        found: list[tuple[Slots, Ints, slice | Ints]] = []
        while low < high:
            begin = low % capacity
            count = min(high - low, capacity - begin)
            before = low - first - rows.start
            found.append((slice(begin, begin + count), np.arange(low, low + count), slice(before, before + count)))
            low += count
        return found

    def _of(self, slots: Ints) -> Ints:
        """Return the piece of each slot's row; that after the last: it is in none."""
        return self._piece(self._ring.key_at(slots))

    def _piece(self, places: Ints) -> Ints:
        numbers = np.maximum(np.searchsorted(self._begins, places, side="right") - 1, 0)
        pieces = self._pieces[numbers] + (places - self._firsts[numbers]) // self._each
        inside = (places >= self._begins[numbers]) & (places < self._ends[numbers])
        return np.where(inside, pieces, len(self._there) - 1)

    def _let_go(self) -> None:
        """Take in which blocks have no row left."""
        while self._gone < len(self._blocks) and self._ends[self._gone] <= self._ring.oldest:
            self._drop(self._gone)
            self._gone += 1

    def _drop(self, number: int) -> None:
        begin, end = self._pieces[number : number + 2].tolist()
        if self._left[number]:
            self._came(number, begin + np.flatnonzero(~self._there[begin:end]))

    def close(self) -> None:
        """Close the files. What is read after that opens them again."""
        self._held.close()

    def _end(self) -> None:
        """Where everything is there, this is not asked any more."""
        if self.marks_known and not self._left.any():
            self._held.close()
            self._ring.storage.unread = None


class UnreadPool(UnreadRows):
    """Rows of a pool: a block is named by the places of its rows on the disk, and its rows lie in any slots."""

    def __init__(self, pool: Pool, schema: Schema, blocks: Sequence[Block], held: HeldSegments) -> None:
        super().__init__(pool, schema, blocks, held)
        self._pool = pool
        self._order = np.argsort(pool.at[: pool.size], kind="stable")  # slots by place, as they are now
        self._sorted = pool.at[self._order]

    def _homes(self, number: int, rows: slice) -> list[tuple[Slots, Ints, slice | Ints]]:
        first = int(self._firsts[number])
        begin = max(int(self._begins[number]), first + rows.start)
        end = min(int(self._ends[number]), first + rows.stop)
        low, high = np.searchsorted(self._sorted, [begin, end])
        slots = self._order[low:high]
        places = self._pool.at[slots]
        there = (places >= begin) & (places < end)  # others have taken the slots of the rest
        slots, places = slots[there], places[there]
        return [(slots, self._pool.key_at(slots), places - first - rows.start)] if len(slots) else []

    def _of(self, slots: Ints) -> Ints:
        return self._piece(self._pool.at[slots])

    def _let_go(self) -> None:
        """A block is let go when it is asked for."""


def _runs(flags: Ints) -> list[tuple[int, int]]:
    """Return where flags that are set begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

"""Rows of a saved ring that is looked at: what is drawn is brought into memory, and nothing else.

A selection may look at a mark, or a column, of every row. Such are read piece by piece where they lie, and not kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from pipeline.buffer.transitions.blocks import decode_block
from pipeline.buffer.transitions.bodies import some_rows
from pipeline.buffer.transitions.checked import CheckedBlock
from pipeline.buffer.transitions.columns import LARGE, Arrays, Schema
from pipeline.buffer.transitions.compressed import fitting
from pipeline.buffer.transitions.elsewhere import AT_ONCE, Numbers
from pipeline.buffer.transitions.layout import AHEAD, BEHIND, END, EPISODE, OPEN, PLACE
from pipeline.buffer.transitions.memory import SparseMemory
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.checkpoint.generations import Stored
from pipeline.errors import UsageError
from pipeline.replay.state import BufferState
from pipeline.replay.unread import UnreadRows
from pipeline.replay.values import Values, ValuesFile, WrittenBack
from pipeline.store.held import HeldSegments
from pipeline.store.segments import Block

Ints = np.ndarray
_SPAN = 4 << 20
"""Bytes of rows that are read at a time, at the most."""
_HELD = 64  # blocks whose checksums are in memory


class Closed(Protocol):
    """What is open until nothing is drawn any more."""

    def close(self) -> None: ...


class Changes(Closed, Protocol):
    """What was written back into rows whose blocks hold what was there before."""

    def into(self, arrays: Arrays, keys: Ints) -> None: ...


class LookedRows(UnreadRows):
    """As :class:`~pipeline.replay.unread.UnreadRows`, of a :class:`LookedRing`."""

    changes: Changes | None = None
    """What was written back into rows, of which blocks hold what was there before."""
    told: Callable[[int], None] = staticmethod(lambda count: None)
    """Told of the bytes that are read of marks, and of columns, that are not kept."""

    def __init__(self, ring: Ring, schema: Schema, blocks: Sequence[Block], held: HeldSegments) -> None:
        super().__init__(ring, schema, blocks, held)
        small = sum(column.nbytes for column in schema.columns if column.nbytes < LARGE)
        self.span = max(1, min(AT_ONCE, _SPAN // max(1, small)))
        self._read: tuple[int, Arrays] = -1, {}  # the block that was read as a whole last

    def marks(self) -> None:
        """They come with the rows that are drawn; who asks for those of others reads them by :meth:`peek`."""

    def peek(self, name: str, keys: Ints) -> np.ndarray:
        """Return a mark, or a column, of rows that are there [n, ...]; nothing is kept of it.

        Raises:
            Damaged: one is not what it was.
            StoreError: they cannot be read now.
        """
        column = self._column(name)
        found = np.empty((len(keys), *column.shape), column.bits)
        order = np.argsort(keys, kind="stable")
        rising = keys[order]
        blocks = np.searchsorted(self._begins, rising, side="right") - 1
        near = (np.diff(rising) <= self._each) & (np.diff(blocks) == 0)
        begin, edges = 0, [*(np.flatnonzero(~near) + 1).tolist(), len(keys)]
        for edge in edges:
            while begin < edge:
                end = min(edge, int(np.searchsorted(rising, rising[begin] + self.span)))
                part = rising[begin:end]
                values = self._values(int(blocks[begin]), name, int(part[0]), int(part[-1]) + 1)
                found[order[begin:end]] = values[part - part[0]]
                begin = end
        return found

    def _column(self, name: str) -> Any:
        return next(column for column in self._columns if column.name == name)

    def _values(self, number: int, name: str, begin: int, end: int) -> np.ndarray:
        """Return a mark, or a column, of rows of one block, by their keys."""
        first = int(self._firsts[number])
        rows = slice(begin - first, end - first)
        if self._is_whole(number, 0):
            arrays = some_rows(self._whole(number), rows)
        else:
            checked = self._check(number)
            ranges = checked.ranges(rows, [name])
            arrays = checked.read(rows, ranges)
            self.told(sum(each.end - each.begin for each in ranges))
        values = {name: arrays[name]}
        self._change(values, begin, end)
        return values[name]

    def _change(self, arrays: Arrays, begin: int, end: int) -> None:
        """Let count what was written back into rows, of keys that follow each other."""
        if self.changes is not None:
            self.changes.into(arrays, np.arange(begin, end))

    def _is_whole(self, number: int, count: int) -> bool:
        return super()._is_whole(number, count) or self._check(number).packed

    def _whole(self, number: int) -> Arrays:
        if self._read[0] != number:
            block, held = self._blocks[number], self._held
            self._read = -1, {}
            payload = held.payload(block)  # in memory that the next one takes as well
            arrays = decode_block(payload, self._schema, block.count, held.where(block), block.sums)
            self._read = number, arrays
        return self._read[1]

    def _bring_whole(self, number: int, own: list[int]) -> None:
        arrays = self._whole(number)
        for piece in own:
            rows = self._rows_of(number, piece)
            self._place(number, rows, some_rows(arrays, rows))
            self._came(number, piece)

    def _place(self, number: int, rows: slice, arrays: Arrays) -> None:
        arrays, first = self._fit(number, arrays), int(self._firsts[number])
        self._change(arrays, first + rows.start, first + rows.stop)
        self._put(number, rows, arrays)

    def _put(self, number: int, rows: slice, arrays: Arrays) -> None:
        """Put rows of a block, which are as they are now, where they belong."""
        super()._place(number, rows, arrays)

    def _fit(self, number: int, arrays: Arrays) -> Arrays:
        """Return rows of a block as they are held."""
        try:
            return fitting(arrays, self._ring.storage.views, self._schema)
        except (ValueError, zlib.error):  # rows that are compressed are of another length than the columns say
            raise self._held.damaged(self._blocks[number]) from None

    def _check(self, number: int) -> CheckedBlock:
        while len(self._checked) > _HELD:
            self._checked.pop(next(iter(self._checked)))
        return super()._check(number)

    def _came(self, number: int, pieces: Ints | int) -> None:
        """The block's marks may be asked for again: it is not let go."""
        self._there[pieces] = True
        self._left[number] = np.count_nonzero(~self._there[slice(*self._pieces[number : number + 2].tolist())])

    def _end(self) -> None:
        """There is none."""


class LookedRing(Ring):
    """A ring of which rows are drawn one by one, and none is added."""

    def __init__(self, storage: TransitionStorage) -> None:
        super().__init__(storage)
        self.files: list[Closed] = []
        """What else is read for a draw."""

    def names(self, keys: Ints) -> Ints:
        """Return the keys that rows have for others."""
        return keys

    def close(self) -> None:
        """Close the files beside the rows."""
        while self.files:
            self.files.pop().close()

    def array(self, name: str, dtype: type[np.generic]) -> np.ndarray:
        return SparseMemory().array(name, (self.capacity,), np.dtype(dtype))

    def disk_places(self, keys: Ints) -> Ints:
        """Return where on the disk rows lie: by the numbers after which blocks are named."""
        return keys

    def ready(self) -> None:
        """Take in that rows can be read.

        Raises:
            Damaged: they are not those that are listed.
        """

    def selected(self, name: str, file: ValuesFile) -> Any:
        """Return what a selection has of the rows, oldest first, as it takes that."""
        return file

    def selection(self, state: BufferState, stored: Stored) -> BufferState:
        """Return a buffer's state, of which the selection goes on from what there is of these rows."""
        return state

    def changes(self, state: BufferState, values: Values) -> Changes:
        """Return what was written back into rows."""
        return WrittenBack(state, values)

    def _rows(self) -> LookedRows:
        unread = self.storage.unread
        assert isinstance(unread, LookedRows)
        return unread

    def pieces(self) -> Iterator[Ints]:
        for first in range(self.oldest, self.added, step := self._rows().span if self.size else 1):
            yield np.arange(first, min(first + step, self.added))

    def mark(self, name: str, keys: Ints) -> Ints:
        if name == AHEAD:
            return self._ahead(keys)
        return self._rows().peek(name, keys) if len(keys) else np.empty(0, self.storage.view(name).dtype)

    def elsewhere(self, name: str) -> Numbers | None:
        return _Column(self, name)

    def know_marks(self) -> None:
        """They are read when they are asked for."""

    def _ahead(self, keys: Ints) -> Ints:
        """Find out how far ahead the next row of each row's episode lies, from how far behind it says that this is."""
        ahead = np.zeros(len(keys), np.int64)
        newest = np.array([key for _, key, *_ in self.episodes.state()], np.int64)  # of episodes that are open
        left = np.flatnonzero((self.mark(END, keys) == OPEN) & ~np.isin(keys, newest) & ~np.isin(keys, self.cut_keys))
        begin, width = 1, 16
        while len(left) and begin < self.size:
            steps = np.arange(begin, begin + width)
            after = keys[left][:, None] + steps
            there = after < self.added
            behind = np.zeros(after.shape, np.int64)
            behind[there] = self.mark(BEHIND, after[there])
            is_next = behind == steps
            known = is_next.any(axis=1)
            ahead[left[known]] = steps[is_next[known].argmax(axis=1)]
            left = left[~known & there[:, -1]]
            begin, width = begin + width, min(8 * width, max(16, AT_ONCE // max(1, len(left))))
        return ahead

    # -- which episodes are the newest -------------------------------------------------------------------------

    _begun: tuple[Ints, Ints] = np.empty(0, np.int64), np.empty(0, np.int64)
    """Numbers and first keys of episodes whose first row is gone, by their numbers."""
    _newest: tuple[Ints, Ints] = _begun
    """As that, of the newest episodes: those that were asked for at the least."""

    def take_begun(self, begun: Sequence[Sequence[int]]) -> None:
        numbers, firsts = np.array(begun, np.int64).reshape(-1, 2).T
        order = np.argsort(numbers)
        self._begun = numbers[order], firsts[order]

    def begin_of_newest(self, episodes: int) -> int:
        numbers, firsts, whole = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool)
        end = self.added
        while end > self.oldest and int(whole.sum()) < episodes:
            keys = np.arange(max(self.oldest, end - self._rows().span), end)
            own, at = np.unique(self.mark(EPISODE, keys), return_index=True)
            firsts = np.concatenate([keys[at], firsts])
            whole = np.concatenate([self.mark(PLACE, keys[at]) == 0, whole])
            numbers, at = np.unique(np.concatenate([own, numbers]), return_index=True)
            firsts, whole, end = firsts[at], whole[at], int(keys[0])
        if int(whole.sum()) >= episodes:
            firsts = np.where(whole, firsts, -1)  # the others began before all that was looked at
        else:
            firsts = _looked_up(numbers, *self._begun, firsts)
        self._newest = numbers, firsts
        begun = firsts[firsts != -1]
        which = max(0, len(begun) - episodes)
        return int(np.partition(begun, which)[which])

    def firsts(self, keys: Ints) -> Ints:
        return _looked_up(self.mark(EPISODE, keys), *self._newest, np.full(len(keys), -1, np.int64))

    # -- what follows ------------------------------------------------------------------------------------------

    def following(self, keys: Ints) -> Ints:
        raise _alone()

    def chain(self, keys: Ints, length: int) -> tuple[Ints, Ints]:
        raise _alone()

    def chain_back(self, keys: Ints, length: int) -> tuple[Ints, Ints]:
        raise _alone()


class _Column:
    """A mark, or a column, of all rows of a ring, oldest first."""

    def __init__(self, ring: LookedRing, name: str) -> None:
        self._ring, self._name = ring, name

    def __len__(self) -> int:
        return self._ring.size

    def read(self, begin: int, count: int) -> np.ndarray:
        first = self._ring.oldest + begin
        return self._ring.mark(self._name, np.arange(first, first + count))

    def at(self, places: Ints) -> np.ndarray:
        return self._ring.mark(self._name, self._ring.oldest + places)[:, None]


def _looked_up(names: Ints, rising: Ints, values: Ints, otherwise: Ints) -> Ints:
    """Return the values of names, of which those that are there rise; of others what ``otherwise`` [n] says."""
    if not len(rising):
        return otherwise
    at = np.minimum(np.searchsorted(rising, names), len(rising) - 1)
    return np.where(rising[at] == names, values[at], otherwise)


def _alone() -> UsageError:
    return UsageError("a saved buffer that is looked at gives rows one by one; resume it for sequences")

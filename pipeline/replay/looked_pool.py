"""Rows of a saved pool that is looked at: as those of a ring (:mod:`pipeline.replay.looked`), of which the disk has
another order than the slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from pipeline.buffer.transitions.bodies import some_rows
from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.elsewhere import Numbers, OldestFirst, pieces
from pipeline.buffer.transitions.given import wholes
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.checkpoint.generations import Stored
from pipeline.replay.looked import Changes, LookedRing, LookedRows
from pipeline.replay.looked_order import BySlot, Named, Slots
from pipeline.replay.pool_files import AT, KEYS, PoolFiles
from pipeline.replay.state import BufferState
from pipeline.replay.values import Values, ValuesFile, WrittenBackInAnyOrder, put_rows, written_files
from pipeline.store.held import HeldSegments
from pipeline.store.segments import Block

Ints = np.ndarray
_POOL = "pool."
_EACH = 1 << 14
"""Of so many rows together it is known where what was written back of them begins."""


class PoolSlots(Slots):
    """The slots of a pool's rows, as the keys say that these have."""

    def __init__(self, keys: Numbers, capacity: int) -> None:
        super().__init__(len(keys))
        self._keys, self._capacity = keys, capacity

    def pieces(self) -> Iterator[tuple[int, Ints]]:
        for first, keys in pieces(self._keys):
            yield first, keys - keys // self._capacity * self._capacity  # in a third of the time of %


class LookedPool(LookedRing):
    """A pool of which rows are drawn one by one, and none is added.

    Rows are known by their places, which count from the oldest on: what is a key of other rings. :meth:`names` tells
    the key that a row has in the pool.
    """

    scattered = True

    def __init__(self, storage: TransitionStorage) -> None:
        super().__init__(storage)
        self._end = 0
        self._keys: Any = None
        self._at: Any = None
        self.by_place: Slots = Slots(0)

    @property
    def keys_end(self) -> int:
        return self._end

    def restore(self, added: int, size: int, cuts: list[int], truncated: Sequence[int] = ()) -> None:
        super().restore(size, size, cuts, truncated)

    def begin_unread(self) -> None:
        self.episodes.lengths.start(self.episodes.next, self.episodes.next)
        self.episodes.note_open()

    def take(self, keys: ValuesFile, at: ValuesFile, end: int, told: Callable[[int], None]) -> None:
        """Have what says of rows, oldest first, which keys they have, less than ``end``, and where on the disk they
        lie; ``told`` is told of the bytes that are read where all keys are gone through."""
        self._keys, self._at, self._end = keys, at, end
        self.files += [keys, at]
        self.by_place = PoolSlots(keys, self.capacity)
        self.by_place.told = told

    def names(self, keys: Ints) -> Ints:
        found: Ints = self._keys.at(keys)[:, 0].astype(np.int64)
        return found

    def disk_places(self, keys: Ints) -> Ints:
        places: Ints = self._at.at(keys)[:, 0].astype(np.int64)
        return places

    def slots(self, keys: Ints) -> Ints:
        slots = self.names(keys) % self.capacity
        self.by_place.note(slots, keys)
        return slots

    def key_at(self, slots: Ints) -> Ints:
        return self.by_place.places(slots)

    def elsewhere(self, name: str) -> Numbers | None:
        column = super().elsewhere(name)
        assert column is not None
        return OldestFirst(column, BySlot(self.by_place, column))

    def selected(self, name: str, file: ValuesFile) -> Any:
        if name == "order":
            return Named(self.by_place, file, self._keys, self.capacity)
        return OldestFirst(file, BySlot(self.by_place, file))

    def changes(self, state: BufferState, values: Values) -> Changes:
        return WrittenInPool(state, values, self._keys)


class ApartRows(LookedRows):
    """As :class:`~pipeline.replay.looked.LookedRows`, of a ring whose rows lie in another order. Blocks are named by
    the places of their rows on the disk."""

    def __init__(self, ring: LookedRing, schema: Schema, blocks: Sequence[Block], held: HeldSegments) -> None:
        super().__init__(ring, schema, blocks, held)
        self._apart = ring
        none = np.empty(0, np.int64)
        self._wanted = none, none, none  # disk places, which rise, keys and slots of the rows that are brought in
        self._part = slice(0, 0)  # those of them that are placed now

    def rows(self, slots: Ints) -> None:
        keys = self._apart.key_at(slots)
        at = self._apart.disk_places(keys)
        order = np.argsort(at, kind="stable")
        self._wanted = at[order], keys[order], slots[order]
        self._bring(np.unique(self._piece(at)))

    def _place(self, number: int, rows: slice, arrays: Arrays) -> None:
        begin = int(self._firsts[number]) + rows.start
        low, high = np.searchsorted(self._wanted[0], (begin, begin + rows.stop - rows.start)).tolist()
        arrays = self._fit(number, arrays)
        self._change(arrays, begin, begin + rows.stop - rows.start)
        self._part = slice(low, high)
        arrays = some_rows(arrays, self._wanted[0][self._part] - begin)
        self._own(arrays, self._wanted[1][self._part])
        self._put(number, rows, arrays)

    def _own(self, arrays: Arrays, keys: Ints) -> None:
        """Let count what is known of rows by their keys."""

    def _homes(self, number: int, rows: slice) -> list[tuple[Any, Ints, slice | Ints]]:
        keys, slots = (each[self._part] for each in self._wanted[1:])
        return [(slots, self._apart.names(keys), slice(None))] if len(slots) else []


class LookedPoolRows(ApartRows):
    """As :class:`~pipeline.replay.looked.LookedRows`, of a :class:`LookedPool`."""

    def peek(self, name: str, keys: Ints) -> np.ndarray:
        arrays = {name: super().peek(name, self._apart.disk_places(keys))}
        self._own(arrays, keys)
        return arrays[name]

    def _change(self, arrays: Arrays, begin: int, end: int) -> None:
        """It is known of rows by their keys."""

    def _own(self, arrays: Arrays, keys: Ints) -> None:
        if self.changes is not None:
            self.changes.into(arrays, keys)


class WrittenInPool:
    """What was changed in rows of a pool after their blocks had been written: as of
    :class:`~pipeline.replay.values.WrittenBack`, and rows are known by their places, oldest first."""

    def __init__(self, state: BufferState, values: Values, keys: ValuesFile) -> None:
        """Args:
        state, values: of the generation.
        keys: of the rows, oldest first.

        Raises:
            ValueError: rows are named that never were.
            Damaged: a column is none.
        """
        self._keys = keys
        self._columns: list[tuple[Column, ValuesFile, ValuesFile, Ints]] = []
        others = []
        for column, name, changed in written_files(state, values, None):
            of = values.file(name)
            for first, piece in pieces(of):
                wholes(f"written keys of {column.name}", piece, 0, state.pool[1] - 1, first=first)
            begins = self._begins(of)
            if begins is None:
                others.append(column.name)
                of.close()
                changed.close()
            else:
                self._columns.append((column, of, changed, begins))
        self._others = WrittenBackInAnyOrder(state, values, others)

    def _begins(self, of: ValuesFile) -> Ints | None:
        """Return how many rows were changed that are older than every so many; None: they are not named oldest first,
        as they usually are."""
        begins = np.zeros(-(-len(self._keys) // _EACH) + 1, np.int64)
        for part in range(len(begins) - 1):
            first, begin = part * _EACH, int(begins[part])
            count = min(_EACH, len(self._keys) - first)
            next_, keys = of.read(begin, min(count, len(of) - begin)), self._keys.read(first, count)
            order = np.argsort(keys)
            rows = order[np.minimum(np.searchsorted(keys, next_, sorter=order), count - 1)]
            there = keys[rows] == next_
            own = int(there.sum())
            begins[part + 1] = begin + own
            if not there[:own].all() or (np.diff(rows[:own]) <= 0).any():
                return None
        return begins if begins[-1] == len(of) else None

    def close(self) -> None:
        """Close the files."""
        for _, of, changed, _ in self._columns:
            of.close()
            changed.close()

    def into(self, arrays: Arrays, keys: Ints) -> None:
        """Let it count in rows [n], of some columns; ``keys`` are their places, in any order."""
        self._others.into(arrays, self._keys.at(keys)[:, 0])
        for column, of, changed, begins in self._columns:
            if column.name not in arrays:
                continue
            parts = keys // _EACH
            for part in np.unique(parts[begins[parts] < begins[parts + 1]]).tolist():
                begin, end = begins[part : part + 2].tolist()
                rows = np.flatnonzero(parts == part)
                names = of.read(begin, end - begin)
                order = np.argsort(names)
                own = self._keys.at(keys[rows])[:, 0]
                at = np.minimum(np.searchsorted(names, own, sorter=order), len(order) - 1)
                named = names[order[at]] == own
                values = changed.at(begin + order[at[named]], prod(column.shape))
                array = arrays[column.name] = arrays[column.name].copy()
                put_rows(array, rows[named], values.reshape(-1, *column.shape))


def find_rows(ring: LookedPool, state: BufferState, stored: Stored, told: Callable[[int], None]) -> list[Block]:
    """Let a pool know where its rows lie, whose counters are there; return the blocks in which they do. What is read is
    checked.

    Raises:
        Damaged: it does not fit together.
    """
    files = PoolFiles(stored, state, stored.folder, told)
    ring.take(files.file(KEYS), files.file(AT), state.pool[1], told)
    return [files.blocks[number] for number in files.needed]

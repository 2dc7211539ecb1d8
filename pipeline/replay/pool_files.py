"""A pool as a generation holds it, whose rows may be more than memory: what is said of each row lies in files, oldest
row first, and the rows lie in blocks, in another order.

What goes through all rows reads the files piece by piece (:class:`PoolFiles`), and hands on what there is of each to
where its block is read (:class:`ByBlock`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from math import prod
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column
from pipeline.buffer.transitions.elsewhere import AT_ONCE
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.errors import Damaged
from pipeline.replay.pooling import block_of
from pipeline.replay.row_set import RowSet
from pipeline.replay.state import BufferState
from pipeline.replay.values import Values, ValuesFile, put_rows, written_files
from pipeline.store.rearranged import Rearranged
from pipeline.store.segments import read_blocks

Ints = np.ndarray
KEYS, SERIALS, AT = _PLACES = tuple(f"pool.{name}.int64" for name in ("keys", "serials", "at"))


class PoolFiles:
    """Where the rows of one pool lie. Blocks."""

    def __init__(
        self, stored: Stored, state: BufferState, where: str, told: Callable[[int], None] | None = None
    ) -> None:
        """Args:
        stored: the generation, or a shard as if it were one, whose files were compared with its manifest.
        state: of the buffer.
        where: for messages.
        told: told of the bytes that are read to check them.

        Raises:
            Damaged: it does not fit together.
        """
        self.state, self.where, self.values = state, where, Values(stored)
        self.size = state.size if state.remove != "fifo" else 0
        counts = {self.values.count(name) for name in (KEYS, SERIALS, AT)}
        if self.size and counts != {self.size}:
            raise Damaged(f"{where}: does not say where each of its {self.size} rows lies. Restore it from a copy")
        listed = read_blocks(os.path.join(stored.folder, BLOCKS_FILE)) if self.size else []
        by_first = {block.first: block for block in listed}
        self.blocks = [by_first[first] for first in sorted(by_first)]
        """All that are listed, in their order."""
        firsts, lengths = ([getattr(each, name) for each in self.blocks] for name in ("first", "count"))
        self._firsts, self.offsets = np.array(firsts, np.int64), np.concatenate([[0], np.cumsum(lengths)]).astype(int)
        self._there = RowSet(int(self.offsets[-1]))
        self.rows: Ints = np.zeros(len(self.blocks), np.int64)
        """How many rows that are there lie in each block."""
        if self.size:
            with ExitStack() as stack:
                self._look(*(stack.enter_context(closing(self.values.file(name, told))) for name in _PLACES))

    def file(self, name: str) -> ValuesFile:
        """Return what there is of each row under a name."""
        return self.values.file(name)

    def rows_of(self, serials: Sequence[int]) -> list[int]:
        """Return which rows, oldest first, have some numbers among all that were ever added; -1: it is not there."""
        if not self.size:
            return [-1 for _ in serials]
        with closing(self.file(SERIALS)) as file:
            rows = [file.below(serial) for serial in serials]
            return [
                row if row < self.size and int(file.read(row, 1)[0]) == serial else -1
                for row, serial in zip(rows, serials, strict=True)
            ]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield where rows begin that are looked at together, and how many they are."""
        for begin in range(0, self.size, AT_ONCE):
            yield begin, min(AT_ONCE, self.size - begin)

    def places_of(self, keys: Sequence[int]) -> Ints:
        """Return the places, among all rows that were ever written, of those rows whose keys are given; rising. As many
        are in memory as there are keys."""
        found = [np.empty(0, np.int64)]
        if keys and self.size:
            named, at, wanted = self.file(KEYS), self.file(AT), np.array(keys, np.int64)
            for begin, count in self.pieces():
                own = np.flatnonzero(np.isin(named.read(begin, count), wanted))
                if len(own):
                    found.append(at.read(begin, count)[own])
        return np.sort(np.concatenate(found))

    def _look(self, keys: ValuesFile, serials: ValuesFile, at: ValuesFile) -> None:
        slots, last = RowSet(self.size), -1
        if self.state.pool[0] % self.state.capacity:
            raise Damaged(f"{self.where}: keys are said to begin with {self.state.pool[0]}. Restore it from a copy")
        for begin, count in self.pieces():
            slots.add(self._slots(keys.read(begin, count)))
            own = serials.read(begin, count)
            if int(own[0]) <= last or (own[1:] <= own[:-1]).any() or int(own[-1]) >= self.state.added:
                raise Damaged(f"{self.where}: the numbers of its rows do not fit together. Restore it from a copy")
            last = int(own[-1])
            of, place = self.lying(at.read(begin, count))
            self.rows += np.bincount(of, minlength=len(self.rows))
            self._there.add(place)
        if min(len(self._there), len(slots)) != self.size:
            raise Damaged(f"{self.where}: two of its rows are said to be one. Restore it from a copy")

    def _slots(self, keys: Ints) -> Ints:
        (floor, end, *_), slots = self.state.pool, keys % self.state.capacity
        if int(keys.min()) < floor or int(keys.max()) >= end or int(slots.max()) >= self.size:
            raise Damaged(f"{self.where}: rows have keys that cannot be theirs. Restore it from a copy")
        return slots

    def lying(self, at: Ints) -> tuple[Ints, Ints]:
        """Return in which of :attr:`blocks` rows lie, and which rows these are among all that are listed.

        Raises:
            Damaged: one is in no block.
        """
        of = block_of(at, self.blocks)
        if len(of) and of.min() < 0:
            raise Damaged(f"{self.where}: {int((of < 0).sum())} of its rows are in no block. Restore it from a copy")
        return of, self.offsets[of] + at - self._firsts[of]

    def there(self, block: int) -> Ints:
        """Return which rows of a block are there, rising."""
        low, high = self.offsets[block : block + 2].tolist()
        return np.flatnonzero(self._there.between(low, high))

    @property
    def needed(self) -> list[int]:
        """The numbers of the blocks in which rows lie that are there."""
        found: list[int] = np.flatnonzero(self.rows).tolist()
        return found

    @property
    def bytes(self) -> int:
        """Of the payloads of these blocks."""
        return sum(self.blocks[number].length for number in self.needed)


class Changes:
    """What was written back into rows of a pool after their blocks had been written: of each row, which of the values
    are its own."""

    def __init__(self, files: PoolFiles) -> None:
        """Raises:
        Damaged: a column is none, or its values are not there.
        """
        found = list(written_files(files.state, files.values, None)) if files.size else []
        self._columns: list[tuple[Column, ValuesFile]] = [(column, values) for column, _, values in found]
        self._finders = [_Finder(files, name) for _, name, _ in found]

    @property
    def fields(self) -> list[tuple[str, Any]]:
        """What :meth:`of` returns: names and dtypes."""
        return [(f"changed.{number}", np.int64) for number in range(len(self._columns))]

    def of(self, keys: Ints) -> dict[str, Ints]:
        """Return by column where the values of rows lie, -1: they were not changed. Rows come once, oldest first; all
        of them."""
        return {name: finder.of(keys) for (name, _), finder in zip(self.fields, self._finders, strict=True)}

    def into(self, arrays: Arrays, records: np.ndarray) -> None:
        """Let them count in some columns of rows [n]; ``records`` has what :meth:`of` gave for each."""
        for (name, _), (column, values) in zip(self.fields, self._columns, strict=True):
            rows = np.flatnonzero(records[name] >= 0)
            if len(rows) and column.name in arrays:
                found = values.at(records[name][rows], prod(column.shape)).reshape(len(rows), *column.shape)
                arrays[column.name] = arrays[column.name].copy()
                put_rows(arrays[column.name], rows, found)


class _Finder:
    """Finds the rows that were changed, by their keys."""

    def __init__(self, files: PoolFiles, name: str) -> None:
        self._file, self._done, self._end = files.file(name), 0, files.values.count(name)
        self._sorted: tuple[Ints, Ints] | None = None
        keys = files.file(KEYS)
        for begin, count in files.pieces():
            self._following(keys.read(begin, count))
        if self._done < self._end:  # not oldest first, as they usually are
            every = self._file.read(0, self._end)
            order = np.argsort(every, kind="stable")
            self._sorted = every[order], order
        self._done = 0

    def of(self, keys: Ints) -> Ints:
        if self._sorted is None:
            return self._following(keys)
        changed, order = self._sorted
        at = np.minimum(np.searchsorted(changed, keys), len(changed) - 1)
        return np.where(changed[at] == keys, order[at], -1)

    def _following(self, keys: Ints) -> Ints:
        """Return where those of the keys stand that come next."""
        found = np.full(len(keys), -1, np.int64)
        new = self._file.read(self._done, min(len(keys), self._end - self._done))
        order = np.argsort(keys, kind="stable")
        rising = keys[order]
        at = np.minimum(np.searchsorted(rising, new), len(rising) - 1)
        matched = (rising[at] == new) & (np.diff(order[at], prepend=-1) > 0)
        count = len(new) if matched.all() else int(matched.argmin())
        found[order[at[:count]]] = self._done + np.arange(count)
        self._done += count
        return found


class ByBlock:
    """What there is of some rows of a pool, by the blocks in which they lie. Blocks."""

    def __init__(self, files: PoolFiles, folder: str, fields: Sequence[tuple[str, Any]]) -> None:
        """Args:
        files: of the pool.
        folder: where what is on its way lies meanwhile.
        fields: what is said of each row by whoever adds it: names and dtypes. Beside it comes its ``key``, and its
            ``row``: where it stands among all, oldest first.

        Raises:
            WriteFailed: there can be no file.
            Damaged: what was written back is not there.
        """
        self.files, self._changes = files, Changes(files)
        self._keys, self._at = (files.file(name) if files.size else None for name in (KEYS, AT))
        own = [("key", np.int64), ("row", np.int64), *self._changes.fields, *fields]
        self._records = Rearranged(folder, int(files.offsets[-1]), own)
        self.rows: Ints = np.zeros(len(files.blocks), np.int64)
        """How many of those that were added lie in each block."""

    def add(self, begin: int, values: Mapping[str, Any], chosen: Ints, count: int) -> None:
        """Add rows, of the ``count`` from ``begin`` on; all rows are gone through, oldest first.

        Args:
            begin, count: which rows.
            values: by field, [count]; or one for all.
            chosen: [m] which of them are added, rising.

        Raises:
            WriteFailed: it cannot be written.
        """
        if not count:
            return
        assert self._keys is not None
        assert self._at is not None
        keys = self._keys.read(begin, count)
        every: dict[str, Any] = {"key": keys, "row": begin + np.arange(count), **self._changes.of(keys), **values}
        of, place = self.files.lying(self._at.read(begin, count))
        self.rows += np.bincount(of[chosen], minlength=len(self.rows))
        own = {name: each[chosen] if np.ndim(each) else each for name, each in every.items()}
        self._records.put(place[chosen], own)

    @property
    def needed(self) -> list[int]:
        """The numbers of the blocks in which such rows lie."""
        found: list[int] = np.flatnonzero(self.rows).tolist()
        return found

    def of(self, block: int) -> tuple[Ints, np.ndarray]:
        """Return which rows of a block were added [n], rising, and what there is of each [n]."""
        low, high = self.files.offsets[block : block + 2].tolist()
        records = self._records.read(low, high - low)
        return records["place"] - low, records

    def into(self, arrays: Arrays, records: np.ndarray) -> None:
        """Let what was written back into rows [n] count, which :meth:`of` gave."""
        self._changes.into(arrays, records)

    def close(self) -> None:
        """Let the file go."""
        self._records.close()

"""Rows in a file: more of them than there is memory, of which the kernel keeps in memory what is used.

The file has no name, and is no part of what is saved: a save writes blocks, as it does of rows in memory. The marks of
the rows, 32 bytes each, stay in memory: they are asked for without the rows, and where the file is not written yet.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.buffer.transitions.layout import MARK_BYTES, MARKS, RowLayout
from pipeline.buffer.transitions.memory import ProcessMemory
from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import Gathered, Slots, TransitionStorage
from pipeline.buffer.transitions.unread import Unread
from pipeline.errors import ConfigError
from pipeline.store.scratch import PAGE, Scratch, free_bytes

Ints = np.ndarray
_MARK_NAMES = frozenset(MARKS.names or ())
STEP_BYTES = 32 << 20
"""About how much of the disk is taken at a time."""


class _Region(NamedTuple):
    """Where one array lies in the file."""

    begin: int
    row_bytes: int


class MappedRows:
    """Arrays [capacity, ...] in one file, which is taken from the disk in steps of so many slots."""

    def __init__(self, directory: str, capacity: int, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        """Raises:
        ConfigError: the disk has not enough space left.
        WriteFailed: the file cannot be made.
        """
        self._regions: list[_Region] = []
        end = 0
        for dtype in dtypes.values():
            self._regions.append(_Region(end, dtype.itemsize))
            end += -(-capacity * dtype.itemsize // PAGE) * PAGE
        row_bytes = sum(each.row_bytes for each in self._regions)
        free = free_bytes(directory)
        if end > free:
            raise ConfigError(
                f"capacity={capacity}: {end:,} bytes of disk are needed and {free:,} are left in {directory}; choose a "
                "smaller capacity, smaller dtypes, or another disk",
                option="capacity",
            )
        self._capacity = capacity
        self._step = max(1, STEP_BYTES // max(1, row_bytes))
        self._taken = np.zeros(-(-capacity // self._step), bool)
        self._left = len(self._taken)
        self._scratch = Scratch(directory, end)
        self._large: list[mmap.mmap] = []
        self.arrays = {
            name: self._array(region, capacity, dtype)
            for region, (name, dtype) in zip(self._regions, dtypes.items(), strict=True)
        }

    def _array(self, region: _Region, capacity: int, dtype: np.dtype[Any]) -> np.ndarray:
        size = capacity * dtype.itemsize
        if not size:
            return np.zeros(capacity, dtype)
        mapped = self._scratch.map(region.begin, -(-size // PAGE) * PAGE)
        if dtype.itemsize < PAGE:  # a row's neighbours are rarely drawn with it
            mapped.madvise(mmap.MADV_RANDOM)
        else:
            self._large.append(mapped)
        return np.frombuffer(mapped, np.uint8, size).view(dtype)

    def come_here_and_there(self, they_do: bool) -> None:
        """Whether large rows are first written here and there: then the kernel had better not fill in 128 KB around
        each, which costs 14 times as much as the row."""
        for mapped in self._large:
            mapped.madvise(mmap.MADV_RANDOM if they_do else mmap.MADV_NORMAL)

    def take(self, slots: Slots) -> None:
        """See to it that slots can be written to.

        Raises:
            WriteFailed: the disk is full.
        """
        if not self._left:
            return
        if isinstance(slots, slice):
            steps: Iterable[int] = range(slots.start // self._step, (slots.stop - 1) // self._step + 1)
        else:
            steps = np.unique(slots // self._step).tolist()
        for step in steps:
            if not self._taken[step]:
                begin = step * self._step
                count = min(self._step, self._capacity - begin)
                for region in self._regions:
                    if region.row_bytes:
                        self._scratch.take(region.begin + begin * region.row_bytes, count * region.row_bytes)
                self._taken[step] = True
                self._left -= 1


class MappedStorage(TransitionStorage):
    """Rows of which the columns lie in a file of a folder."""

    def __init__(self, capacity: int, directory: str, schema: Schema | None = None) -> None:
        self._directory = directory
        self._file: MappedRows | None = None
        self._marks = np.empty(0, MARKS)
        super().__init__(capacity, schema)

    @property
    def unread(self) -> Unread | None:
        """What brings in rows that lie on the disk alone, if there are such."""
        return self._unread

    @unread.setter
    def unread(self, unread: Unread | None) -> None:
        self._unread = unread
        if self._file is not None:
            self._file.come_here_and_there(unread is not None)

    def like(self, schema: Schema | None) -> MappedStorage:
        return MappedStorage(self.capacity, self._directory, schema)

    def shape(self, schema: Schema) -> None:
        layout = RowLayout(schema)
        ProcessMemory().check(MARK_BYTES * self.capacity, f"capacity={self.capacity}: marks of rows")
        dtypes = {"#small": layout.body} if layout.small else {}
        dtypes |= {each.name: np.dtype((np.void, each.nbytes)) for each in layout.large}
        file = MappedRows(self._directory, self.capacity, dtypes)
        arrays = file.arrays
        self.records = arrays.pop("#small", np.empty(0, np.uint8))
        self.bodies = self.records.view(f"V{layout.body.itemsize}") if layout.small else np.empty(0, "V0")
        self.large = {
            each.name: arrays[each.name].view(each.bits).reshape(self.capacity, *each.shape) for each in layout.large
        }
        self._file, self._marks = file, np.empty(self.capacity, MARKS)
        views = {name: self._marks[name] for name in MARKS.names or ()}
        self._use(layout, self._marks, views | {name: self.records[name] for name in layout.small_names})

    def forget(self) -> None:
        super().forget()
        self._file, self._marks = None, np.empty(0, MARKS)

    def take(self, slots: Slots) -> None:
        """See to it that slots can be written to.

        Raises:
            WriteFailed: the disk is full.
        """
        if self._file is not None:
            self._file.take(slots)

    def write(self, slots: Slots, arrays: Mapping[str, Any]) -> None:
        if not arrays.keys() <= _MARK_NAMES:
            self.take(slots)
        super().write(slots, arrays)

    def copy_in(self, slots: slice, arrays: Arrays, marks: np.ndarray) -> None:
        self.take(slots)
        super().copy_in(slots, arrays, marks)

    def place(self, begin: int, rows: np.ndarray, records: np.ndarray, large: Mapping[str, np.ndarray]) -> None:
        slots = slice(begin, begin + len(rows))
        self.write_records(slots, records.take(rows))
        self.write(slots, {name: array.take(rows, axis=0) for name, array in large.items()})

    def write_records(self, slots: Slots, records: np.ndarray) -> None:
        assert self.layout is not None
        self.write(slots, {name: records[name] for name in self.layout.record.names or ()})

    def gather(self, slots: np.ndarray, names: Iterable[str] | None = None) -> Gathered:
        layout = self.layout
        assert layout is not None
        flat = slots.reshape(-1)
        if self.unread is not None:
            self.unread.rows(flat)
        marks = self._recycler.array("marks", flat.size, (), MARKS)
        self._marks.take(flat, out=marks, mode="clip")
        wanted = layout.schema.names if names is None else set(names)
        arrays: Arrays = {}
        if any(name in wanted for name in layout.small_names):
            records = self._recycler.array("records", flat.size, (), self.records.dtype)
            self.records.take(flat, out=records, mode="clip")
            arrays = {name: records[name] for name in layout.small_names if name in wanted}
        for column in layout.large:
            if column.name in wanted:
                arrays[column.name] = self._take_large(column, flat)
        return Gathered(layout, marks, arrays, slots.shape)


class MappedRing(Ring):
    """A ring of rows in a file: the disk is asked before anything of the new rows is taken in."""

    storage: MappedStorage

    def make_room(self, count: int) -> None:
        begin, count = self.added % self.capacity, min(count, self.capacity)
        room = min(count, self.capacity - begin)
        if room:
            self.storage.take(slice(begin, begin + room))
        if room < count:
            self.storage.take(slice(0, count - room))

    def extend(
        self, arrays: Arrays, count: int, envs: Ints, ends: Ints | None, version: int, *, mixed: bool = False
    ) -> int:
        self.make_room(count)
        return super().extend(arrays, count, envs, ends, version, mixed=mixed)

    def append(self, row: Mapping[str, Any], env: int, end: int, version: int, packed: list[Any] | None = None) -> int:
        self.make_room(1)
        return super().append(row, env, end, version, packed)


class MappedPool(Pool):
    """A pool of rows in a file."""

    storage: MappedStorage

    def make_room(self, count: int) -> None:
        if end := min(self.capacity, self.size + count):  # any row that is there may be the one that goes
            self.storage.take(slice(0, end))

    def extend(
        self, arrays: Arrays, count: int, envs: Ints, ends: Ints | None, version: int, *, mixed: bool = False
    ) -> int:
        self.make_room(count)
        return super().extend(arrays, count, envs, ends, version, mixed=mixed)

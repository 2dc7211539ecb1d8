"""The arrays that a generation of a buffer holds beside its rows, of which parts are read: they grow with the rows, and
need not fit into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column
from pipeline.buffer.transitions.compressed import packed_row
from pipeline.buffer.transitions.elsewhere import AT_ONCE
from pipeline.checkpoint.generations import Stored
from pipeline.errors import Damaged
from pipeline.replay.next_obs import KEYS_FILE, Aside, file_of
from pipeline.replay.state import VALUES_FOLDER, BufferState
from pipeline.store.files import plain_handle, size_of

Ints = np.ndarray
_SPAN = 64 << 10  # bytes that are read at a time, where some of what lies there is wanted


_DTYPES = {each.name: each for each in map(np.dtype, "?bhilBHILefdFD")}
"""By name: plain numbers, and nothing else that numpy takes for a dtype."""


def dtype_of(path: str) -> np.dtype[Any]:
    """Return the dtype that the name of a file ends with.

    Raises:
        Damaged: it is none of numbers.
    """
    try:
        return _DTYPES[path.rpartition(".")[2]]
    except KeyError:
        raise Damaged(f"{path}: its dtype is unknown") from None


class ValuesFile:
    """An array on the disk, of which parts are read."""

    _handle = -1  # while it is not open

    def __init__(self, path: str, told: Callable[[int], None] | None = None) -> None:
        """Open it; ``told`` is told of the bytes that are read.

        Raises:
            Damaged: it is not there, or no array of what its name ends with.
            StoreError: it cannot be opened now.
        """
        self._path, self._dtype, self._told = path, dtype_of(path), told
        try:
            self._handle = plain_handle(path)
        except FileNotFoundError:
            raise Damaged(f"{path}: missing, though the generation's manifest lists it") from None
        self.nbytes = size_of(self._handle, path)
        """How long it is."""
        if self.nbytes % self._dtype.itemsize:
            raise Damaged(f"{path}: {self.nbytes} bytes are no array of {self._dtype}")

    def __len__(self) -> int:
        return self.nbytes // self._dtype.itemsize

    def as_of(self, dtype: np.dtype[Any]) -> ValuesFile:
        """Return this, its bytes taken for numbers of another dtype."""
        self._dtype = dtype
        return self

    def read(self, begin: int, count: int) -> np.ndarray:
        """Return ``count`` values from ``begin`` on.

        Raises:
            Damaged: there are fewer.
        """
        size = self._dtype.itemsize
        raw = b""
        while (left := count * size - len(raw)) and (more := os.pread(self._handle, left, begin * size + len(raw))):
            raw += more
        if len(raw) < count * size:
            raise Damaged(f"{self._path}: ends at value {begin + len(raw) // size}. Restore the file from a copy")
        if self._told is not None:
            self._told(len(raw))
        return np.frombuffer(raw, self._dtype)

    def at(self, places: Ints, width: int = 1) -> np.ndarray:
        """Return values [n, width] at places in any order; what lies between them is not kept.

        Raises:
            Damaged: one is not there.
        """
        found = np.empty((len(places), width), self._dtype)
        if not width:
            return found
        order = np.argsort(places, kind="stable")
        rising = places[order]
        most, begin = max(1, _SPAN // max(1, width * self._dtype.itemsize)), 0
        while begin < len(rising):
            first = int(rising[begin])
            end = int(np.searchsorted(rising, first + most))
            span = self.read(first * width, (int(rising[end - 1]) + 1 - first) * width).reshape(-1, width)
            found[order[begin:end]] = span[rising[begin:end] - first]
            begin = end
        return found

    def below(self, value: int) -> int:
        """Return how many of the values, which rise, are below one. Few are read."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if int(self.read(middle, 1)[0]) < value:
                low = middle + 1
            else:
                high = middle
        return low

    def close(self) -> None:
        """Nothing is read any more."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        self.close()


class ValuesRows:
    """An array of rows [n, ...] on the disk, of which some are read."""

    def __init__(self, file: ValuesFile, shape: tuple[int, ...] = ()) -> None:
        self.file, self._shape = file, shape or (len(file),)

    def __len__(self) -> int:
        return self._shape[0]

    def reshape(self, *shape: int) -> ValuesRows:
        """Return the same values as rows of another shape.

        Raises:
            ValueError: they are not so many.
        """
        if prod(shape) != len(self.file):
            raise ValueError(f"{len(self.file)} values are none of the shape {list(shape)}")
        return ValuesRows(self.file, shape)

    def __getitem__(self, places: Ints) -> np.ndarray:
        return self.file.at(places, prod(self._shape[1:])).reshape(len(places), *self._shape[1:])


class Values:
    """The arrays of one generation by the names of their files, which end with a dtype."""

    def __init__(self, stored: Stored) -> None:
        self._folder = os.path.join(stored.folder, VALUES_FOLDER)
        prefix = f"{VALUES_FOLDER}/"
        infos = [info for info in stored.manifest.files if info.path.startswith(prefix)]
        self._bytes = {info.path.removeprefix(prefix): info.bytes for info in infos}

    @property
    def names(self) -> list[str]:
        """What there is."""
        return list(self._bytes)

    def count(self, name: str) -> int:
        """Return how many values there are; 0: there is no such array.

        Raises:
            Damaged: its dtype is none.
        """
        return self._bytes.get(name, 0) // dtype_of(os.path.join(self._folder, name)).itemsize

    def file(self, name: str, told: Callable[[int], None] | None = None) -> ValuesFile:
        """Return an array that is there; ``told`` is told of the bytes that are read of it."""
        return ValuesFile(os.path.join(self._folder, name), told)

    def all(self, name: str) -> np.ndarray:
        """Return the whole of an array; nothing, where there is none."""
        count = self.count(name)
        return self.file(name).read(0, count) if count else np.empty(0, name.rpartition(".")[2])

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield an array piece by piece."""
        count = self.count(name)
        file = self.file(name) if count else None
        for begin in range(0, count, AT_ONCE):
            assert file is not None
            yield file.read(begin, min(AT_ONCE, count - begin))

    def rising(self, name: str) -> str:
        """Return the name of an array whose values have to rise.

        Raises:
            Damaged: they do not.
        """
        last = np.empty(0, np.int64)
        for piece in self.pieces(name):
            joined = np.concatenate([last, piece])
            if (joined[1:] <= joined[:-1]).any():
                raise Damaged(f"{os.path.join(self._folder, name)}: the keys in it are in no order")
            last = piece[-1:]
        return name

    def aside(self, columns: Sequence[Column]) -> Aside:
        """Return the next observations that are kept aside, of columns of these; none, if rows do not share them.

        Raises:
            Damaged: their keys are in no order.
        """
        if not columns:
            return Aside(np.empty(0, np.int64), (), ())
        keys = self.all(self.rising(KEYS_FILE))
        names = [file_of(number, column) for number, column in enumerate(columns)]
        return Aside(keys, columns, [self.reader(name) for name in names])

    def reader(self, name: str) -> Callable[[int, int], np.ndarray]:
        """Return what reads values of an array from some place on, so many; of one that is not there, or has none,
        none."""
        return self.file(name).read if self.count(name) else lambda begin, count: np.empty(0, name.rpartition(".")[2])


def written_files(
    state: BufferState, values: Values, names: Collection[str] | None
) -> Iterator[tuple[Column, str, ValuesFile]]:
    """Yield each column that was changed, of ``names`` alone if these are given, with the name of the keys of its rows,
    and its values.

    Raises:
        Damaged: a column is none, or its values are not there.
    """
    for number, name in enumerate(state.written_columns):
        keys = f"written.{number}.keys.int64"
        named = [each for each in values.names if each.startswith(f"written.{number}.values.")]
        known = state.schema is not None and name in state.schema.names
        if state.schema is None or not known or len(named) != 1 or keys not in values.names:
            raise Damaged(f"what was written back into column {name} is not there as it is said to be")
        if names is None or name in names:
            column, changed = state.schema.column(name), values.file(named[0])
            if changed.nbytes != values.count(keys) * column.nbytes:
                raise Damaged(
                    f"what was written back into column {name} has {changed.nbytes} bytes, where {values.count(keys)} "
                    f"rows of {column.nbytes} are needed"
                )
            yield column, keys, changed.as_of(column.bits)


class WrittenBack:
    """What was changed in rows of a buffer, the oldest of which go first, after their blocks had been written."""

    def __init__(self, state: BufferState, values: Values, names: Collection[str] | None = None) -> None:
        """Args:
        state, values: of the generation.
        names: the columns that are looked at; None: all.

        Raises:
            Damaged: the keys of the rows are in no order, or a column is none.
        """
        self._columns = [
            (column, values.file(values.rising(keys)), changed)
            for column, keys, changed in written_files(state, values, names)
        ]

    def close(self) -> None:
        """Close the files."""
        for _, of, values in self._columns:
            of.close()
            values.close()

    def into(self, arrays: Arrays, keys: Ints) -> None:
        """Let it count in rows [n], whose ``keys`` follow each other; some of their columns."""
        for column, of, values in self._columns:
            if column.name not in arrays:
                continue
            low, high = (of.below(int(key)) for key in (keys[0], keys[-1] + 1)) if len(keys) else (0, 0)
            if low < high:
                items = prod(column.shape)
                changed = values.read(low * items, (high - low) * items).reshape(high - low, *column.shape)
                write_back_into(arrays, keys, [(column.name, of.read(low, high - low), changed)])


class WrittenBackInAnyOrder:
    """As :class:`WrittenBack`, of a buffer whose rows lie in any order. The keys of the rows that were changed are in
    memory."""

    def __init__(self, state: BufferState, values: Values, names: Collection[str] | None = None) -> None:
        """As :class:`WrittenBack`."""
        self._columns: list[tuple[Column, Ints, Ints, ValuesFile]] = []
        for column, name, changed in written_files(state, values, names):
            keys = values.all(name)
            order = np.argsort(keys, kind="stable")
            self._columns.append((column, keys[order], order, changed))

    def into(self, arrays: Arrays, keys: Ints) -> None:
        """Let it count in rows [n] of these keys, in any order."""
        for column, changed, places, values in self._columns:
            at = np.minimum(np.searchsorted(changed, keys), max(0, len(changed) - 1))
            rows = np.flatnonzero(changed[at] == keys) if len(changed) else at[:0]
            if not len(rows):
                continue
            items = prod(column.shape)
            found = values.at(places[at[rows]], items).reshape(len(rows), *column.shape)
            array = arrays[column.name] = arrays[column.name].copy()
            put_rows(array, rows, found)


def put_rows(array: Any, places: Ints, values: np.ndarray) -> None:
    """Set rows of a column, which may be compressed."""
    if array.dtype != object:
        array[places] = values
    else:
        for at, value in zip(places.tolist(), values, strict=True):
            array[at] = packed_row(value)


def write_back_into(arrays: Arrays, keys: Ints, written: Sequence[tuple[str, Ints, Any]]) -> None:
    """Let values count that were changed after a block had been written; ``keys`` follow each other."""
    for name, changed, values in written:
        low, high = np.searchsorted(changed, (keys[0], keys[-1] + 1)) if len(keys) else (0, 0)
        if low < high:
            array = arrays[name] = arrays[name].copy()
            put_rows(array, changed[low:high] - keys[0], values[low:high])

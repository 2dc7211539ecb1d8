"""Rows in the memory that processes have in common."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.buffer.transitions.memory import ProcessMemory
from pipeline.buffer.transitions.shared.header import PAGE, TEXT_BYTES, VALUES_AT, Header
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.buffer.transitions.sums import SumTree
from pipeline.errors import ConfigError


class SharedMemory(ProcessMemory):
    """Arrays behind the header, one after the other; asked for in the same order, every process gets the same ones.

    A page is taken when it is first written, by whichever process.
    """

    def __init__(self, descriptor: int, begin: int) -> None:
        """Args:
        descriptor: of the memory.
        begin: where the first array lies.
        """
        self._descriptor = descriptor
        self._begin = self._next = begin
        self._maps: list[mmap.mmap] = []
        self.joining = False
        """Whether what is asked for lies there already."""

    def check(self, nbytes: int, what: str) -> None:
        if not self.joining:
            super().check(nbytes, what)
        self._next, self._maps = self._begin, []  # a new schema's arrays begin where the last one's did

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        begin, self._next = self._next, self._next + -(-size // PAGE) * PAGE
        if os.fstat(self._descriptor).st_size < self._next:
            os.ftruncate(self._descriptor, self._next)
        mapped = mmap.mmap(self._descriptor, self._next - begin, offset=begin)
        self._maps.append(mapped)
        return np.frombuffer(mapped, dtype, int(np.prod(shape, dtype=np.int64))).reshape(shape)

    def again(self) -> SharedMemory:
        """Return one that begins where this one does."""
        return SharedMemory(self._descriptor, self._begin)

    def give_back(self, newest: int | None = None) -> None:
        """Give back the pages of all arrays, or of the newest so many; what they held is gone, for every process."""
        for mapped in self._maps if newest is None else self._maps[len(self._maps) - newest :]:
            mapped.madvise(mmap.MADV_REMOVE)


class _Columns(msgspec.Struct):
    """What processes tell each other of columns."""

    schema: Schema
    nexts: tuple[Column, ...] = ()


class SharedStorage(TransitionStorage):
    """Rows that every process sees. The columns are committed with the counters, by their number."""

    def __init__(self, capacity: int, memory: SharedMemory, header: Header) -> None:
        super().__init__(capacity, None, memory)
        self._shared, self._header = memory, header
        self.shapes = 0
        """How often columns were set, or forgotten."""
        self.text = 0
        """Bytes of the columns as text."""
        self.column_names: list[str] = []
        """In the order in which :attr:`changed` has them."""
        self.changed = np.empty((0, 0), np.int64)
        """[columns, capacity]: where a column of a row was changed after the row had been written to the disk, 1 + its
        key."""
        self.any_changed = np.empty(0, np.uint8)
        """[columns]: whether that is so of any row; to look at all of them would take their memory."""
        self.nexts: dict[str, np.ndarray] = {}
        """[capacity, ...] each: columns of next observations that are kept aside, by place; see ``next_obs``."""

    def _take(self, schema: Schema) -> None:
        super().shape(schema)
        self.column_names = [each.name for each in schema.columns]
        count = len(self.column_names)
        self.changed = self._shared.array("changed", (count, self.capacity), np.dtype(np.int64))
        self.any_changed = self._shared.array("any changed", (count,), np.dtype(np.uint8))

    def _drop(self) -> None:
        super().forget()
        self.column_names, self.nexts = [], {}

    def shape(self, schema: Schema) -> None:
        text = self._checked(_Columns(schema))
        self._take(schema)
        self._shared.give_back()  # what another process may have begun there, and was killed
        self._tell(text)
        self.shapes += 1

    def keep_aside(self, columns: Sequence[Column]) -> None:
        """Make room for columns of next observations, after :meth:`shape`."""
        assert self.schema is not None
        text = self._checked(_Columns(self.schema, tuple(columns)))
        self._take_aside(columns)
        self._shared.give_back(len(columns))
        self._tell(text)

    def _take_aside(self, columns: Sequence[Column]) -> None:
        arrays = [self._shared.array(each.name, (self.capacity, *each.shape), each.bits) for each in columns]
        self.nexts = {each.name: array for each, array in zip(columns, arrays, strict=True)}

    def _tell(self, text: bytes) -> None:
        self._header.text[: len(text)] = text
        self.text = len(text)

    @staticmethod
    def _checked(columns: _Columns) -> bytes:
        text = msgspec.json.encode(columns)
        if len(text) > TEXT_BYTES:
            raise ConfigError(
                f"storage='shared': the names and shapes of all columns take {len(text):,} bytes, and {TEXT_BYTES:,} can "
                "be held; join columns",
                option="storage",
            )
        return text

    def forget(self) -> None:
        self._drop()
        self.text = 0
        self.shapes += 1

    def again(self) -> SharedStorage:
        """Return one without columns in the place of this one."""
        storage = SharedStorage(self.capacity, self._shared.again(), self._header)
        storage.shapes = self.shapes
        return storage

    def take_over(self, shapes: int, text: int) -> None:
        """Have the columns that another process has set, or forgotten."""
        self.shapes, self.text = shapes, text
        if not text:
            self._drop()
            return
        columns = msgspec.json.decode(bytes(self._header.text[:text]), type=_Columns)
        self._shared.joining = True
        try:
            self._take(columns.schema)
            self._take_aside(columns.nexts)
        finally:
            self._shared.joining = False

    def give_back(self) -> None:
        """Give the memory of forgotten rows back."""
        self._shared.give_back()


def shared_tree(header: Header, capacity: int, *, new: bool) -> SumTree:
    """Return a tree of what rows weigh that every process sees; ``new``: nobody has used the memory yet."""
    begin = VALUES_AT

    def take(count: int) -> np.ndarray:
        nonlocal begin
        array = np.frombuffer(header.map, np.float64, count, begin)
        begin += array.nbytes
        assert begin <= header.end
        return array

    return SumTree(capacity, memory=take, fresh=new)


def tree_bytes(capacity: int) -> int:
    """Return how much a tree takes, at the most."""
    return 16 * capacity + (64 << 10)

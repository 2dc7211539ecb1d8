"""Fixed-shape rows in memory, by slot."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pipeline.buffer.transitions.bodies import beside, bodies_as
from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.layout import AHEAD, MARK_BYTES, MARKS, RowLayout
from pipeline.buffer.transitions.memory import Memory, ProcessMemory
from pipeline.buffer.transitions.packing import MANY, MARKS_CODE, MOST_BYTES, BlockPacker, RowPacker, as_runs
from pipeline.buffer.transitions.recycling import Recycler
from pipeline.buffer.transitions.unread import Unread

Slots = slice | np.ndarray
_MARKS = struct.Struct(f"<{MARKS_CODE}")
_LINK = struct.Struct("<i")
_AT_ONCE = 1024
_AHEAD_AT = np.dtype(MARKS).fields[AHEAD][1]  # type: ignore[index]


class TransitionStorage:
    """``capacity`` rows of one schema, addressed by slot; knows nothing of their order.

    The schema is that of the first rows, or given. Memory is taken as it is written. Methods do not lock, and none of
    them checks what it is handed: :class:`~pipeline.replay.ReplayBuffer` does.
    """

    def __init__(self, capacity: int, schema: Schema | None = None, memory: Memory | None = None) -> None:
        """Raises:
        ConfigError: the rows of ``schema`` would not fit into memory.
        """
        self.capacity = capacity
        self.layout: RowLayout | None = None
        self.schema: Schema | None = None
        """The columns of every row; None before there is one."""
        self.records = np.empty(0, MARKS)
        """[capacity]: the packed record of each slot: marks and small columns."""
        self.large: dict[str, np.ndarray] = {}
        """[capacity, ...] each: the large columns."""
        self.unread: Unread | None = None
        """What brings in rows that lie on the disk alone, if there are such."""
        self._memory: Memory = memory or ProcessMemory()
        self._step = MARK_BYTES  # from one slot's marks to the next one's
        self._views: dict[str, np.ndarray] = {}
        self._runs: dict[str, np.ndarray] = {}  # [capacity, 1]: small columns of several values, as runs of bytes
        self._bytes = memoryview(b"")
        self._plain = np.empty(0, f"V{MARK_BYTES}")  # the marks of each slot, without fields
        self.bodies = np.empty(0, "V0")
        """[capacity]: the small columns of each slot, as runs of bytes."""
        self._whole = np.empty(0, f"V{MARK_BYTES}")  # the record of each slot, without fields
        # Where it need not be seen from the marks that a row is whole, and records lie one after the other:
        self._packer: RowPacker | None = None
        self._blocks: BlockPacker | None = None  # of the newest size
        self._recycler = Recycler()
        if schema is not None:
            self.shape(schema)

    def shape(self, schema: Schema) -> None:
        """Take memory for rows of ``schema``.

        Raises:
            ConfigError: they would not fit; nothing was taken.
        """
        layout = RowLayout(schema)
        self._memory.check(self.capacity * layout.row_bytes, f"capacity={self.capacity}")
        self.records = self._memory.array("records", (self.capacity,), layout.record)
        self.large = {
            each.name: self._memory.array(each.name, (self.capacity, *each.shape), each.bits) for each in layout.large
        }
        if layout.small:
            self.bodies = self.records.getfield(f"V{layout.body.itemsize}", MARK_BYTES)
        self._use(layout, self.records, {name: self.records[name] for name in layout.record.names or ()})
        if self._memory.__class__ is ProcessMemory:
            self._packer, self._blocks = RowPacker(layout), None
            self._whole = self.records.view(f"V{self._step}")

    def _use(self, layout: RowLayout, marks: np.ndarray, small: Arrays) -> None:
        """Begin with memory that was taken: ``marks`` [capacity] begin with those of each slot."""
        self.layout, self.schema = layout, layout.schema
        self._views = small | self.large
        self._runs = {
            each.name: as_runs(small[each.name], f"V{each.nbytes}") for each in layout.small if each.nbytes > 8
        }
        self._bytes, self._step = memoryview(marks.view(np.uint8).data), marks.itemsize
        self._plain = marks.getfield(self._plain.dtype)

    def forget(self) -> None:
        """Give the memory back, and forget the schema."""
        self.layout = self.schema = self.unread = self._packer = self._blocks = None
        self.records, self.large, self._views, self._runs = np.empty(0, MARKS), {}, {}, {}
        self._bytes, self._plain, self._whole = memoryview(b""), self._plain[:0].copy(), self._whole[:0].copy()
        self.bodies = self.bodies[:0].copy()

    def lay(self, name: str, memory: np.ndarray) -> np.ndarray:
        """Have a large column lie in other memory [capacity, ...] from now on, and return where it lay; rows that are
        there do not move."""
        before, self.large[name] = self.large[name], memory
        self._views[name] = memory
        return before

    def view(self, name: str) -> np.ndarray:
        """Return a column, or a mark, of every slot: [capacity, ...]; writing to it changes the rows."""
        return self._views[name]

    @property
    def views(self) -> Mapping[str, np.ndarray]:
        """Columns and marks of every slot by name; see :meth:`view`."""
        return self._views

    def like(self, schema: Schema | None) -> TransitionStorage:
        """Return one without rows, in the same kind of memory of this process.

        Raises:
            ConfigError: the rows of ``schema`` would not fit into memory.
        """
        return TransitionStorage(self.capacity, schema, self._memory)

    def write(self, slots: Slots, arrays: Mapping[str, Any]) -> None:
        """Copy columns or marks, [n, ...] or one value for all, into n slots."""
        bodies = None if self.layout is None else bodies_as(arrays, self.layout.body)
        if bodies is not None:
            self.bodies[slots] = bodies
            arrays = beside(arrays)
        for name, array in arrays.items():
            self._views[name][slots] = array

    def copy_out(self, slots: Slots, marks: np.ndarray, bodies: np.ndarray | None) -> None:
        """Copy marks [n], with their fields, and small columns [n, bytes] of rows out."""
        count, plain = len(marks), marks.view(self._plain.dtype)
        whole = None if bodies is None else bodies.view(self.bodies.dtype)[:, 0]
        for begin in range(0, count, _AT_ONCE):  # the second copy finds the records in the caches
            end = min(begin + _AT_ONCE, count)
            some = slice(slots.start + begin, slots.start + end) if isinstance(slots, slice) else slots[begin:end]
            plain[begin:end] = self._plain[some]
            if whole is not None:
                whole[begin:end] = self.bodies[some]

    def copy_in(self, slots: slice, arrays: Arrays, marks: np.ndarray) -> None:
        """Copy columns [n, ...] and marks [n], with their fields, into n slots."""
        assert self.layout is not None
        plain, begin = marks.view(self._plain.dtype), slots.start
        bodies = bodies_as(arrays, self.layout.body)
        if bodies is None:
            self.write(slots, arrays)
            self._plain[slots] = plain
            return
        for at in range(0, len(plain), _AT_ONCE):
            end = min(at + _AT_ONCE, len(plain))
            self.bodies[begin + at : begin + end] = bodies[at:end]
            self._plain[begin + at : begin + end] = plain[at:end]
        self.write(slots, beside(arrays))

    def place(self, begin: int, rows: np.ndarray, records: np.ndarray, large: Mapping[str, np.ndarray]) -> None:
        """Copy some of the packed records [n], and of large columns [n, ...], into the slots from ``begin`` on."""
        slots = slice(begin, begin + len(rows))
        records.take(rows, out=self.records[slots], mode="clip")
        for name, array in large.items():
            held = self.large[name]
            if array.dtype != object and isinstance(held, np.ndarray):
                array.take(rows, axis=0, out=held[slots], mode="clip")
            else:
                self.write(slots, {name: array[rows]})

    def write_records(self, slots: Slots, records: np.ndarray) -> None:
        """Copy packed records [n], with their marks, into n slots."""
        kind = f"V{records.itemsize}"  # without fields a record is one run of bytes
        self.records.view(kind)[slots] = records.view(kind)

    def packed(self, row: Mapping[str, Any]) -> list[Any] | None:
        """Return a row as :meth:`write_row` takes it soonest, if it has every column in its very dtype and shape, and
        the storage is one that can; None says nothing of the row."""
        return None if self._packer is None else self._packer.values(row)

    def write_row(
        self, slot: int, row: Mapping[str, Any], marks: tuple[int, ...], packed: list[Any] | None = None
    ) -> None:
        """Copy the columns of one row into a slot; then its marks, in the order of :data:`MARKS`."""
        at, views = slot * self._step, self._views
        if packed is not None:
            assert self._packer is not None
            self._packer.write(self._bytes, at, marks, packed)
            for name in self.large:
                views[name][slot] = row[name]
            return
        for name, value in row.items():
            views[name][slot] = value
        _MARKS.pack_into(self._bytes, at, *marks)

    def _block_packer(self, count: int) -> BlockPacker | None:
        if self._packer is None or count * self._step > MOST_BYTES:
            return None
        assert self.layout is not None
        self._blocks = BlockPacker(self.layout, count)
        return self._blocks

    def link(self, slot: int, ahead: int) -> None:
        """Let a slot know how far ahead its next row lies."""
        _LINK.pack_into(self._bytes, slot * self._step + _AHEAD_AT, ahead)

    def write_block(
        self, begin: int, count: int, arrays: Mapping[str, Any], marks: np.ndarray, links: Any, linked: int
    ) -> None:
        """Copy columns [count, ...], and marks [count] without fields, into the slots from ``begin`` on; let the
        ``linked`` slots before them know how far ahead their next row lies."""
        slots, views = slice(begin, begin + count), self._views
        packer = self._blocks
        if packer is None or packer.count != count:
            packer = self._block_packer(count)
        if packer is not None:
            packer.write(arrays, marks)
            self._whole[slots] = packer.whole
            for name in self.large:
                views[name][slots] = arrays[name]
        else:
            many = self._runs if count >= MANY else {}
            for name, array in arrays.items():
                if name in many and array.flags.c_contiguous:
                    many[name][slots] = as_runs(array, many[name].dtype)
                else:
                    views[name][slots] = array
            self._plain[slots] = marks
        views[AHEAD][begin - linked : begin] = links

    def gather(self, slots: np.ndarray, names: Iterable[str] | None = None) -> Gathered:
        """Copy rows out: of ``slots`` [...] all columns, or those of ``names``, and the marks.

        Raises:
            StoreError: some lie on the disk alone, and cannot be read.
        """
        assert self.layout is not None
        if self.unread is not None:
            self.unread.rows(slots.reshape(-1))
        layout = self.layout
        flat = slots if slots.ndim == 1 else slots.reshape(-1)
        records = self._recycler.array("records", flat.size, (), layout.record)
        self.records.take(flat, out=records, mode="clip")  # "raise" would copy once more; the slots are ours
        if names is None:
            arrays = {name: records[name] for name in layout.small_names}
            wanted = None
        else:
            wanted = set(names)
            arrays = {name: records[name] for name in layout.small_names if name in wanted}
        for column in layout.large:
            if wanted is None or column.name in wanted:
                arrays[column.name] = self._take_large(column, flat)
        return Gathered(layout, records, arrays, slots.shape)

    def _take_large(self, column: Column, flat: np.ndarray) -> np.ndarray:
        out = self._recycler.array(column.name, flat.size, column.shape, column.bits)
        source = self.large[column.name]
        # One thread: torch's two take 20 times as long as soon as another process keeps one of the cores busy.
        source.take(flat, axis=0, out=out, mode="clip")
        return out

    @property
    def row_bytes(self) -> int:
        """Memory of one row, marks included; 0 before there is a schema."""
        return 0 if self.layout is None else self.layout.row_bytes


class Gathered:
    """Rows that were copied out of a storage; they are the caller's.

    Attributes:
        records: [n] packed records, with the marks.
        arrays: [n, ...] by column.
        shape: of the slots that were asked for; its product is n.
    """

    __slots__ = ("arrays", "layout", "records", "shape")

    def __init__(self, layout: RowLayout, records: np.ndarray, arrays: Arrays, shape: Sequence[int]) -> None:
        self.layout, self.records, self.arrays, self.shape = layout, records, arrays, tuple(shape)

    def mark(self, name: str) -> np.ndarray:
        """Return a mark of the rows, in the shape of the slots."""
        return self.records[name].reshape(self.shape)

    def columns(self) -> Arrays:
        """Return the columns, in the shape of the slots: [*shape, ...]."""
        if len(self.shape) == 1:
            return self.arrays
        return {name: array.reshape(*self.shape, *array.shape[1:]) for name, array in self.arrays.items()}


def to_torch(layout: RowLayout, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return columns as tensors that share their memory."""
    special = layout.torch_only
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: tensor.view(special[name]) if name in special else tensor for name, tensor in tensors.items()}

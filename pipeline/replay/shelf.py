"""Trajectories of one schema: an index of all of them, and the rows of the newest in memory.

The rows of all trajectories are numbered one after the other, so that those of the newest ones are one range. Those in
memory lie in a ring. Numbers of trajectories follow each other without a gap; what is known of one, and where it lies
on the disk, is a row of a table, to which one is added in constant time, however many there are. Nothing here locks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.buffer.transitions.storage import Gathered, TransitionStorage
from pipeline.errors import ConfigError
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.store.layout import SegmentKey
from pipeline.store.segments import Block

Ints = np.ndarray

STEPS, ENVS, LENGTH, WEIGHTS, KEY, INCARNATION, RANK, SEGMENT, OFFSET, BYTES, DATA = range(11)
"""Columns of the table: T, B, ``max_episode_length``, and which of :attr:`Shelf.weights` made it; the number that the
payload has it under, where that lies (incarnation -1: not on the disk), and where in the file its data begin (0: nobody
has looked yet)."""
_LEAST_SHRUNK = 4 << 20  # bytes
_NOWHERE = (0, -1, 0, 0, 0, 0, 0)


class Rows(NamedTuple):
    """Where the rows of a trajectory lie in memory: ``count`` slots from ``slot`` on, around the ring's end."""

    storage: TransitionStorage
    slot: int
    info: TrajectoryInfo

    def copy_to(self, name: str, out: np.ndarray) -> None:
        """Copy a column to ``out`` [num_samples, ...]."""
        source, count = self.storage.view(name), len(out)
        room = min(count, self.storage.capacity - self.slot)
        out[:room] = source[self.slot : self.slot + room]
        if room < count:
            out[room:] = source[: count - room]


class Shelf:
    """See the module.

    Attributes:
        low, next: numbers of the first trajectory that is there, and of the next one that comes.
        cached: the number of the first whose rows are in memory; may be less than ``low``, while these are written.
        begin, end: numbers of the first row in memory, and of the next one.
        written, synced: trajectories before these were written, and are there for good; but for those that had gone
            before their turn came.
        incarnation: of the writer that wrote those between the two.
        unchecked: payloads of those before this are to be checked when they are first read.
        held: a save needs those from here on; None: there is none.
        storage: rows by their numbers, modulo its capacity.
    """

    def __init__(self, first: int) -> None:
        self.low = self.next = self.cached = first
        self.begin = self.end = 0
        self.written = self.synced = first
        self.incarnation = -1
        self.unchecked = first
        self.held: int | None = None
        self.storage = TransitionStorage(0)
        self._origin = self._base = first  # numbers of the table's first entry, and of the first that is in use
        self._table = np.empty((0, DATA + 1), np.int64)
        self._start = np.empty(0, np.int64)  # apart from the table: it is searched
        self.weights: list[str] = []
        """The names of weights that trajectories were made with."""
        self._number_of: dict[str, int] = {}  # weights

    @property
    def schema(self) -> Schema | None:
        """The columns of every row."""
        return self.storage.schema

    def __len__(self) -> int:
        return self.next - self.low

    # -- the index ---------------------------------------------------------------------------------------------

    def start(self, number: int) -> int:
        """Return the number of a trajectory's first row; of the next trajectory, :attr:`end`."""
        return self.end if number >= self.next else int(self._start[number - self._origin])

    def info(self, number: int) -> TrajectoryInfo:
        """Return what is known of a trajectory."""
        at = number - self._origin
        steps, envs, length, weights = self._table[at, : WEIGHTS + 1].tolist()
        return TrajectoryInfo(number, steps * envs, (steps, envs), length, self.weights[weights])

    def table(self, first: int, end: int) -> Ints:
        """Return the entries of trajectories ``first`` to ``end``, a view: [n, columns]."""
        return self._table[first - self._origin : end - self._origin]

    def of_rows(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the number of each row's trajectory, and its place in that."""
        starts = self._start[self._base - self._origin : self.next - self._origin]
        at = np.searchsorted(starts, rows, side="right") - 1
        return at + self._base, rows - starts[at]

    def placed(self, number: int, block: Block) -> None:
        """Note where a trajectory lies on the disk, if it is there still. Its payload may have been written under
        another number: ``block.first``."""
        if number < self._base:
            return
        place = (block.first, block.incarnation, block.rank, block.segment, block.offset, block.length, 0)
        self._table[number - self._origin, KEY:] = place

    def note_data(self, number: int, begin: int) -> None:
        """Note where in its file the data of a trajectory begin."""
        if self._base <= number < self.next:
            self._table[number - self._origin, DATA] = begin

    def entry(self, number: int) -> list[int]:
        """Return a trajectory's entry in the table."""
        found: list[int] = self._table[number - self._origin].tolist()
        return found

    def payload(self, number: int) -> tuple[Block, TrajectoryInfo]:
        """Return where a trajectory lies on the disk, and what is said of it there."""
        steps, envs, length, weights, key, *place = self.entry(number)[:DATA]
        info = TrajectoryInfo(key, steps * envs, (steps, envs), length, self.weights[weights])
        return Block(key, 1, *place), info

    def segments(self) -> frozenset[SegmentKey]:
        """Return the segments in which something lies that is there."""
        return frozenset(live_bytes(self.table(self.low, self.next)))

    def enter(self, infos: Sequence[TrajectoryInfo]) -> None:
        """Append trajectories to the index alone; their numbers follow each other from :attr:`next` on."""
        self._grow(len(infos))
        for info in infos:
            at = self.next - self._origin
            weights = self._number_of.setdefault(info.model_weights_id, len(self.weights))
            if weights == len(self.weights):
                self.weights.append(info.model_weights_id)
            self._table[at] = (*info.shape, info.max_episode_length, weights, *_NOWHERE)
            self._start[at] = self.end
            self.end += info.num_samples
            self.next += 1

    def _grow(self, more: int) -> None:
        if self.next - self._origin + more <= len(self._start):
            return
        there = slice(self._base - self._origin, self.next - self._origin)
        room = max(64, 2 * (self.next - self._base + more))
        table, start = np.empty((room, DATA + 1), np.int64), np.empty(room, np.int64)
        table[: self.next - self._base], start[: self.next - self._base] = self._table[there], self._start[there]
        used, table[: self.next - self._base, WEIGHTS] = np.unique(self._table[there, WEIGHTS], return_inverse=True)
        self._table, self._start, self._origin = table, start, self._base
        self.weights = [self.weights[number] for number in used.tolist()]
        self._number_of = {name: number for number, name in enumerate(self.weights)}

    # -- rows in memory ----------------------------------------------------------------------------------------

    def add(
        self, schema: Schema, infos: Sequence[TrajectoryInfo], rows: Sequence[Arrays], *, low: int, cached: int
    ) -> None:
        """Add trajectories; those before ``low`` go, and the rows of those before ``cached`` are let go in memory.

        Raises:
            ConfigError: they do not fit into memory; nothing was changed.
        """
        begins = np.cumsum([self.end, *(info.num_samples for info in infos)]).tolist()
        begin = self.start(cached) if cached < self.next else begins[cached - self.next]
        self._fit(schema, begin, begins[-1])
        for row, info, arrays in zip(begins, infos, rows, strict=False):
            if row >= begin:
                self._write(row, info.num_samples, arrays)
        self.enter(infos)
        self.let_go(low, cached)

    def fill(self, schema: Schema, cached: int) -> None:
        """Make room in memory for the rows of the trajectories from ``cached`` on, which were entered.

        Raises:
            ConfigError: they do not fit.
        """
        self.storage = TransitionStorage(self.end - self.start(cached), schema)
        self.cached, self.begin = cached, self.start(cached)

    def put(self, number: int, arrays: Arrays) -> None:
        """Put the rows of a trajectory into memory."""
        self._write(self.start(number), len(next(iter(arrays.values()))), arrays)

    def may_let_go(self, low: int) -> int:
        """Return the number of the first trajectory whose rows must stay in memory, where those before ``low`` go."""
        return max(self.synced, low if self.held is None else min(low, self.held))

    def let_go(self, low: int, cached: int) -> None:
        """Let trajectories before ``low`` go, and the rows before ``cached`` in memory."""
        self.low, self.cached, self.begin = low, cached, self.start(cached)
        base = min(low, cached) if self.held is None else min(low, cached, self.held)
        self._base = max(self._base, base)
        capacity = self.storage.capacity
        if capacity * self.storage.row_bytes > _LEAST_SHRUNK and 4 * (self.end - self.begin) < capacity:
            self.shrink()  # the disk was behind, or a save was

    def due(self, upto: int) -> int:
        """Return the first trajectory before ``upto`` that is to be written; ``upto`` if there is none."""
        low = self.low if self.held is None else min(self.low, self.held)
        return min(max(self.written, low), upto)

    def believe(self, incarnation: int) -> None:
        """Take in who writes now: what another one wrote and did not sync is to be written again."""
        if self.incarnation != incarnation:
            self.incarnation, self.written = incarnation, self.synced

    def note_written(self, blocks: Iterable[Block], upto: int) -> None:
        """Note what was written, in the order of the numbers, before ``upto``."""
        for block in blocks:
            self.placed(block.first, block)
        self.written = max(self.written, upto)

    def note_there(self, blocks: Iterable[Block]) -> None:
        """Note that all trajectories are on the disk for good, and where, oldest first."""
        for number, block in enumerate(blocks, self.low):
            self.placed(number, block)
        self.written = self.synced = self.next

    def source(self, number: int) -> Rows:
        """Return where the rows of a trajectory lie that is in memory."""
        capacity = self.storage.capacity
        return Rows(self.storage, self.start(number) % capacity if capacity else 0, self.info(number))

    def gather(self, rows: Ints) -> Gathered:
        """Copy rows out that are in memory."""
        return self.storage.gather(rows % self.storage.capacity)

    def shrink(self) -> None:
        """Give back the memory that no row needs."""
        if self.schema is not None and self.end - self.begin < self.storage.capacity:
            storage = TransitionStorage(self.end - self.begin, self.schema)
            self._copy(storage, self.begin)
            self.storage = storage

    def _fit(self, schema: Schema, begin: int, end: int) -> None:
        """See to it that the rows ``begin`` to ``end`` have room; those that are there keep their numbers."""
        old, least = self.storage, end - begin
        if least <= old.capacity and old.schema is not None:
            return
        try:
            storage = TransitionStorage(max(least, 2 * old.capacity), schema)
        except ConfigError:
            storage = TransitionStorage(least, schema)
        self._copy(storage, begin)
        self.storage = storage

    def _copy(self, storage: TransitionStorage, begin: int) -> None:
        old, row = self.storage, begin
        while row < self.end:
            source, target = row % old.capacity, row % storage.capacity
            count = min(old.capacity - source, storage.capacity - target, self.end - row)
            storage.records[target : target + count] = old.records[source : source + count]
            for name, array in old.large.items():
                storage.large[name][target : target + count] = array[source : source + count]
            row += count

    def _write(self, row: int, count: int, arrays: Arrays) -> None:
        slot = row % self.storage.capacity
        room = min(count, self.storage.capacity - slot)
        self.storage.write(slice(slot, slot + room), {name: array[:room] for name, array in arrays.items()})
        if room < count:
            self.storage.write(slice(0, count - room), {name: array[room:] for name, array in arrays.items()})


def live_bytes(table: Ints) -> dict[SegmentKey, int]:
    """Return the bytes of payloads by segment, of entries of the table; those that are not on the disk count none."""
    table = table[table[:, INCARNATION] >= 0]
    if not len(table):
        return {}
    keys = table[:, INCARNATION : SEGMENT + 1]
    begins = np.flatnonzero(np.any(keys[1:] != keys[:-1], axis=1)) + 1
    begins = np.concatenate([[0], begins])
    live: dict[SegmentKey, int] = {}
    sums = np.add.reduceat(table[:, BYTES], begins).tolist()
    for (incarnation, rank, segment), size in zip(keys[begins].tolist(), sums, strict=True):
        key = (incarnation, rank, segment)
        live[key] = live.get(key, 0) + size
    return live

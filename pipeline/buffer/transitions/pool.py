"""A pool of rows: ``capacity`` of them, of which others than the oldest go first.

A row lies in any slot. Its key is a number that leaves the slot when it is divided by the capacity, and is larger than
those of all rows that lay there before: so a key tells its slot and, compared with the one that the slot has now,
whether its row is still there.

Rows follow no order in which neighbours could be found, so no row knows what comes before or after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.buffer.transitions.elsewhere import AT_ONCE
from pipeline.buffer.transitions.given import distinct, wholes
from pipeline.buffer.transitions.layout import AHEAD, BEHIND, CUT, END, EPISODE, PLACE, SERIAL, VERSION
from pipeline.buffer.transitions.lowest import Lowest, lowest_of
from pipeline.buffer.transitions.recent import Recent
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.config import Remove
from pipeline.errors import ConfigError

Ints = np.ndarray
_ONE_BY_ONE = 2500
"""Where so many times the new rows are fewer than those that are there, each is compared with the lowest alone."""


class Pool(Ring):
    """Rows in slots 0 to ``size``, and which of them goes next."""

    scattered = True
    dense = False

    def __init__(self, storage: TransitionStorage, remove: Remove) -> None:
        super().__init__(storage)
        self.remove = remove
        self.at = np.full(self.capacity, -1, np.int64)
        """By slot: the place of the row on the disk; see :mod:`pipeline.replay.pooling`."""
        self.next_at = 0
        self.before_changing: Callable[[Ints], None] | None = None
        """Told in which slots rows are about to be changed or overwritten."""
        self.new_value: Callable[[], float] | None = None
        """The value of a new row, where priorities decide."""
        self._floor = self._end = 0
        self._keys = np.arange(self.capacity) - self.capacity  # by slot, also of a row that is gone
        self._serials = np.zeros(self.capacity, np.int64)
        self._lowest: Lowest | None = None
        self._last = np.empty(0, np.int64)  # keys of the rows that were just added, -1: not kept
        self._recent = Recent()
        self._sorted: tuple[int, Ints] = -1, self._last

    def like(self, schema: Schema | None) -> Pool:
        if schema is not None:
            self.check(schema)
        return type(self)(self.storage.like(schema), self.remove)

    @property
    def oldest(self) -> int:
        return 0

    @property
    def keys_end(self) -> int:
        return self._end

    def one(self) -> Ints:
        return self._keys[: min(1, self.size)].copy()

    def keys(self) -> Ints:
        if self._sorted[0] != self.added:
            self._sorted = self.added, self._keys[np.argsort(self._serials[: self.size])]
        return self._sorted[1].copy()

    def pieces(self) -> Iterator[Ints]:
        keys = self.keys()
        for begin in range(0, len(keys), AT_ONCE):
            yield keys[begin : begin + AT_ONCE]

    def newest(self, first: int, count: int) -> Ints:
        if first + count == self.added and count == len(self._last):
            return self._last[self._last >= 0]
        recent = self._recent.since(first)
        if recent is not None:
            there: Ints = recent[self.alive(recent)]
            return there
        newer: Ints = self._keys[: self.size][self._serials[: self.size] >= first]
        return newer

    def given(self, first: int, count: int) -> Sequence[int]:
        keys: list[int] = self._last.tolist()
        return keys

    def serials(self, keys: Ints) -> Ints:
        serials: Ints = self._serials[self.slots(keys)]
        return serials

    def slots(self, keys: Ints) -> Ints:
        slots: Ints = keys % self.capacity
        return slots

    def key_at(self, slots: Ints) -> Ints:
        keys: Ints = self._keys[slots]
        return keys

    def alive(self, keys: Ints) -> Ints:
        slots = keys % self.capacity
        there: Ints = (self._keys[slots] == keys) & (slots < self.size) & (keys >= 0)
        return there

    # -- adding ------------------------------------------------------------------------------------------------

    def check(self, schema: Schema) -> None:
        if self.remove.field:
            column = schema.column(self.remove.field)
            if column.shape or column.torch_only is not None or column.bits.kind == "c":
                raise ConfigError.of("remove", self.remove.field, f"{column}; one real number in each row is needed")

    def extend(
        self, arrays: Arrays, count: int, envs: Ints, ends: Ints | None, version: int, *, mixed: bool = False
    ) -> int:
        first = self.added
        ends = np.zeros(count, np.uint8) if ends is None else ends
        values = self._new_values(arrays, count, version) if count else None  # may ask which rows were the last ones
        self._last = np.full(count, -1, np.int64)
        if count == 0:
            return first
        rows, slots = self._placed(values, first, count)
        if self.before_changing is not None:
            self.before_changing(slots)
        marks = (self.episodes.mixed if mixed else self.episodes.extend)(first, envs, ends)
        keys = self._keys[slots] + self.capacity
        own: Mapping[str, Any] = {
            **{name: array[rows] for name, array in arrays.items()},
            EPISODE: marks.episode[rows],
            PLACE: marks.place[rows],
            AHEAD: 0,
            BEHIND: 0,
            VERSION: version,
            SERIAL: (keys & 0xFFFFFFFF).astype(np.uint32),
            END: ends[rows],
        }
        self.storage.write(slots, own)
        self._keys[slots], self._serials[slots], self.at[slots] = keys, first + rows, -1
        if self._lowest is not None and values is not None:
            self._lowest.set(slots, values[rows], first + rows)
        self._last[rows] = keys
        self._recent.add(first, self._last)
        self.added = first + count
        self.size = max(self.size, int(slots.max(initial=-1)) + 1)
        self._end = max(self._end, int(keys.max(initial=-1)) + 1)
        self.not_kept += count - len(rows)
        self._forget_episodes()
        return first

    def append(self, row: Mapping[str, Any], env: int, end: int, version: int, packed: list[Any] | None = None) -> int:
        arrays = {name: np.asarray(value)[None] for name, value in row.items()}
        return self.extend(arrays, 1, np.array([env]), np.array([end], np.uint8), version)

    def _placed(self, values: np.ndarray | None, first: int, count: int) -> tuple[Ints, Ints]:
        """Return which of the new rows are kept, in their order, and the slot of each."""
        room = min(count, self.capacity - self.size)
        free = np.arange(self.size, self.size + room)
        if values is None or room == count:  # what comes later goes first
            return np.arange(room), free
        if self.size == self.capacity and count * _ONE_BY_ONE < self.size:
            return self._one_by_one(values)
        excess = count - room
        assert self._lowest is not None
        every = np.concatenate([self._lowest.values(self.size), values])
        ages = np.concatenate([self._serials[: self.size], np.arange(first, first + count)])
        gone = lowest_of(every, ages, excess)
        kept = np.ones(count, bool)
        kept[gone[gone >= self.size] - self.size] = False
        return np.flatnonzero(kept), np.concatenate([np.sort(gone[gone < self.size]), free])

    def _one_by_one(self, values: np.ndarray) -> tuple[Ints, Ints]:
        lowest = self._lowest
        assert lowest is not None
        placed: dict[int, int] = {}
        for row in range(len(values)):
            slot = lowest.first()
            if not values[row] < lowest.value(slot):
                placed[slot] = row
                lowest.set(np.array([slot]), values[row : row + 1], np.array([self.added + row]))
        slots, rows = np.array(list(placed), np.int64), np.array(list(placed.values()), np.int64)
        order = np.argsort(rows)
        return rows[order], slots[order]

    def _new_values(self, arrays: Arrays, count: int, version: int) -> np.ndarray | None:
        """Return what new rows are ordered by; None: the newest goes first."""
        by = self.remove.by
        if by == "lifo":
            return None
        if self._lowest is None:
            self._rank()
        if by == "stalest":
            return np.full(count, version, np.int64)
        if by == "lowest_priority":
            assert self.new_value is not None
            return np.full(count, self.new_value())
        return self._ordered(arrays[self.remove.field])

    def _ordered(self, column: np.ndarray) -> np.ndarray:
        """Return numbers of which the lowest goes first."""
        assert self.storage.schema is not None
        held = column.astype(self.storage.schema.column(self.remove.field).bits)
        values: np.ndarray = held.astype({"f": np.float64, "i": np.int64}.get(held.dtype.kind, np.uint64))
        if self.remove.by == "max":
            values = -values if values.dtype.kind == "f" else ~values  # exact, where -values of whole numbers is not
        return np.where(np.isnan(values), -np.inf, values) if values.dtype.kind == "f" else values

    def _rank(self) -> None:
        """Order all rows that are there. Priorities are told by whoever has them."""
        by = self.remove.by
        if by == "lifo" or self.storage.schema is None:
            return
        held, unread = np.empty(0), self.storage.unread
        if unread is not None and by in ("min", "max", "stalest"):
            unread.need(self.remove.field or VERSION, np.arange(self.size))
        if by in ("min", "max"):
            held = self._ordered(self.storage.view(self.remove.field)[: self.size])
        elif by == "stalest":
            held = self.storage.view(VERSION)[: self.size].astype(np.int64)
        self._lowest = Lowest(self.capacity, held.dtype)
        slots = np.arange(self.size)
        self._lowest.set(slots, held if len(held) else np.zeros(self.size), self._serials[: self.size])

    def revalued(self, slots: Ints, values: np.ndarray) -> None:
        if self.remove.by == "lowest_priority":
            if self._lowest is None:
                self._rank()
            if self._lowest is not None:
                self._lowest.set(slots, values)

    def about_to_change(self, keys: Ints) -> None:
        if self.before_changing is not None:
            self.before_changing(self.slots(keys))

    def changed(self, keys: Ints, names: Sequence[str]) -> None:
        super().changed(keys, names)
        if self.remove.field in names and self._lowest is not None:
            slots = np.unique(self.slots(keys))
            self._lowest.set(slots, self._ordered(self.storage.view(self.remove.field)[slots]))

    def _forget_episodes(self) -> None:
        """Nothing is asked of episodes that are over."""
        if self.episodes.held > 1024:
            self.episodes.trim(0, np.empty(0, np.int64))

    def cut(self, env: int | None = None) -> list[int]:
        numbers = self.episodes.cut(env)
        self.cuts += len(numbers)
        found = self._of_serials(np.array(numbers, np.int64))
        slots = self.slots(found)
        keys: list[int] = found.tolist()
        if len(slots):
            self.about_to_change(found)
            self.storage.view(END)[slots] = CUT
        self._note_cut(keys)
        return keys

    def _of_serials(self, numbers: Ints) -> Ints:
        """Return the keys of those of the rows, by their numbers among all that were added, which are there."""
        keys = self._recent.of(numbers)
        if keys is None:
            keys = self._keys[np.flatnonzero(np.isin(self._serials[: self.size], numbers))]
        there: Ints = keys[self.alive(keys)]
        return there

    def clear(self) -> None:
        self.cuts += len(self.episodes.cut())
        self.episodes.lengths.trim(0)
        self.size, self._lowest, self.cut_keys = 0, None, []
        self._floor = -(-self._end // self.capacity) * self.capacity
        self._keys = np.arange(self.capacity) + self._floor - self.capacity
        self._sorted = -1, self._last

    # -- state -------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        return [self._floor, self._end, self.not_kept, self.next_at]

    def places(self) -> dict[str, Ints]:
        keys = self.keys()
        slots = self.slots(keys)
        return {"keys": keys, "serials": self._serials[slots], "at": self.at[slots]}

    def take_places(self, numbers: Sequence[int], places: Mapping[str, Ints]) -> None:
        """Take back what :meth:`numbers` and :meth:`places` gave, after :meth:`restore`; the rows may follow.

        Raises:
            ValueError, LookupError: it does not fit together.
        """
        floor, end, _, next_at = numbers
        if floor % self.capacity:
            raise ValueError(f"keys are said to begin with {floor}, of slots {self.capacity}")
        keys = wholes("pool.keys", places["keys"], floor, end - 1)
        distinct("pool.serials", wholes("pool.serials", places["serials"], 0, self.added - 1, count=len(keys)))
        at = wholes("pool.at", places["at"], -1, next_at - 1, count=len(keys))
        distinct("pool.at", at[at >= 0])
        self._floor, self._end, self.not_kept, self.next_at = numbers
        slots = self.slots(keys)
        if not np.array_equal(np.sort(slots), np.arange(self.size)):
            raise ValueError(f"{self.size} rows do not lie in {len(keys)} slots")
        self._keys = np.arange(self.capacity) + self._floor - self.capacity
        self._keys[slots], self._serials[slots], self.at[slots] = keys, places["serials"], places["at"]

    def restore(self, added: int, size: int, cuts: list[int], truncated: Sequence[int] = ()) -> None:
        self._recent = Recent()
        self.added, self.size, self.cut_keys = added, size, list(cuts)

    def begin_unread(self) -> None:
        self.episodes.lengths.start(self.episodes.next, self.episodes.next)
        self.episodes.note_open()

    def link_all(self) -> None:
        """No row knows what follows it."""

    def relink(self) -> None:
        slots = np.arange(self.size)
        self.storage.write(slots, {AHEAD: 0, SERIAL: (self._keys[slots] & 0xFFFFFFFF).astype(np.uint32)})
        self.episodes.lengths.start(self.episodes.next, self.episodes.next)
        self.episodes.note_open()
        cut = np.array(self.cut_keys, np.int64)
        self.storage.view(END)[self.slots(cut[self.alive(cut)])] = CUT
        self._rank()

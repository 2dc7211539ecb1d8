"""Next observations that are not stored twice: rows share them, which has nothing to do with processes that share a
buffer (:mod:`pipeline.buffer.transitions.shared`; there, :mod:`~pipeline.buffer.transitions.shared.next_obs` is this).

The next observation of a row is the observation of its successor in the episode. Where there is none, at the end of an
episode and at the newest row of an open one, it is kept aside, and so it is where it differs from the successor's by
as much as a bit: what is given out is what was given. So each row has either a successor with the same bytes, or a
place in the table of those kept aside; a place is freed when its row gets such a successor, or goes.

:class:`~pipeline.replay.ReplayBuffer` calls this with its lock, after the ring took the rows in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.given import distinct, wholes
from pipeline.buffer.transitions.layout import AHEAD, BEHIND, RowLayout
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.storage import Slots
from pipeline.config import Fields
from pipeline.errors import ConfigError

Ints = np.ndarray


class SharedNextObs:
    """The columns of next observations of a ring that does not hold them."""

    def __init__(self, ring: Ring, fields: Fields) -> None:
        self._ring, self._obs, self._next = ring, fields.obs, fields.next_obs
        self.schema: Schema | None = None
        """Every column of a row, the next observation's among them; None before there is one."""
        self.layout: RowLayout | None = None
        self._of: dict[str, str] = {}  # columns of the observation, by those of the next one
        self._bits: dict[str, np.dtype[Any]] = {}
        self._place = ring.array("places", np.int32)  # by slot: 0, or 1 + the row's place in the table
        self._table: Arrays = {}
        self._keys = np.empty(0, np.int64)  # by place: the key of its row, or -1
        self._free: list[int] = []

    def reduced(self, schema: Schema) -> Schema:
        """Return what is stored of rows of a schema.

        Raises:
            ConfigError: a column of the next observation is not like that of the observation, or there is none.
        """
        of = self._pairs(schema)
        return Schema(tuple(column for column in schema.columns if column.name not in of))

    def _pairs(self, schema: Schema) -> dict[str, str]:
        names = [each.name for each in schema.columns if _in_group(each.name, self._next)]
        of = {name: self._obs + name[len(self._next) :] for name in names}
        if not of:
            raise ConfigError(
                f"share_next_obs: there is no column {self._next}; each row is given with its next observation",
                option="share_next_obs",
            )
        columns = {each.name: each for each in schema.columns}
        for name, twin in of.items():
            own, other = columns[name], columns.get(twin)
            if other is None or (own.dtype, own.shape) != (other.dtype, other.shape):
                raise ConfigError(
                    f"share_next_obs: column {own} is to be like {other or twin + ', which is not there'}",
                    option="share_next_obs",
                )
        return of

    def shape(self, schema: Schema) -> None:
        """Begin with rows of a schema that :meth:`reduced` has accepted."""
        self._of, self.schema, self.layout = self._pairs(schema), schema, RowLayout(schema)
        columns = [schema.column(name) for name in self._of]
        self._bits = {each.name: each.bits for each in columns}
        self._table = {each.name: np.empty((0, *each.shape), each.bits) for each in columns}

    def forget(self) -> None:
        """Take in that no row and no column is left."""
        self.schema, self.layout, self._of, self._bits, self._table = None, None, {}, {}, {}
        if len(self._keys):  # else there is none, and no page of a large one need be touched
            self._place[:] = 0
        self._keys, self._free = np.empty(0, np.int64), []

    def split(self, rows: Mapping[str, Any]) -> tuple[dict[str, Any], Arrays, Arrays]:
        """Return what of checked rows, or of one, is stored; their observations; and their next ones."""
        stored = dict(rows)
        nexts, obs = {}, {}
        for name, bits in self._bits.items():
            twin = self._of[name]
            nexts[name], obs[twin] = np.asarray(stored.pop(name), bits), np.asarray(stored[twin], bits)
        return stored, obs, nexts

    # -- adding ------------------------------------------------------------------------------------------------

    def added(self, first: int, count: int, obs: Arrays, nexts: Arrays) -> None:
        """Take in that ``count`` rows were added, from the key ``first`` on.

        Args:
            first: the key of the first row.
            count: how many rows.
            obs, nexts: [count, ...] what :meth:`split` gave.
        """
        ring = self._ring
        skipped = max(0, count - ring.capacity)
        if skipped:
            obs = {name: array[skipped:] for name, array in obs.items()}
            nexts = {name: array[skipped:] for name, array in nexts.items()}
        first, count = first + skipped, count - skipped
        slots = ring.slots(np.arange(first, first + count))
        gone = self._place[slots]
        if gone.any():
            self._release(gone[gone > 0] - 1)
        ahead = ring.storage.view(AHEAD)[slots].astype(np.int64)
        self._relink(first, ring.storage.view(BEHIND)[slots], obs)
        aside = np.flatnonzero(~self._follows(ahead, obs, nexts))
        places = self._reserve(len(aside))
        self._keep(places, first + aside, {name: array[aside] for name, array in nexts.items()})
        own = np.zeros(count, np.int32)
        own[aside] = places + 1
        self._set_places(slots, own)

    def added_one(self, key: int, obs: Arrays, nexts: Arrays) -> None:
        """As :meth:`added`, of one row, whose columns have no leading axis."""
        ring, places = self._ring, self._place
        slot = key % ring.capacity
        if places[slot]:
            self._release(places[slot : slot + 1] - 1)
        place = -1
        before = key - int(ring.storage.view(BEHIND)[slot])
        if ring.oldest <= before < key:
            last = before % ring.capacity
            held = int(places[last]) - 1
            if all(array[held].tobytes() == obs[self._of[name]].tobytes() for name, array in self._table.items()):
                place, places[last] = held, 0
        if place < 0:
            place = self._free.pop() if self._free else int(self._reserve(1)[0])
        self._keys[place], places[slot] = key, place + 1
        for name, array in nexts.items():
            self._table[name][place] = array

    def _follows(self, ahead: Ints, obs: Arrays, nexts: Arrays) -> Ints:
        """Whether each row of a block has a successor in it, whose observation is the row's next one."""
        linked = ahead > 0
        if not linked.any():
            return linked
        width = int(ahead.max())
        if (ahead[linked] == width).all():  # a successor lies equally far: nothing need be gathered
            same = np.zeros(len(ahead), bool)
            same[:-width] = self._same(nexts, slice(-width), obs, slice(width, None))
            return same & linked
        here = np.flatnonzero(linked)
        there = here + ahead[here]
        linked[here] = self._same(nexts, here, obs, there)
        return linked

    def _relink(self, first: int, behind: Ints, obs: Arrays) -> None:
        """Free the places of older rows whose successors have come in a block."""
        ring = self._ring
        before = first + np.arange(len(behind)) - behind
        older = np.flatnonzero((behind > 0) & (before < first) & (before >= ring.oldest))
        if not len(older):
            return
        slots = ring.slots(before[older])
        places = self._place[slots] - 1
        same = self._same(self._table, places, obs, older)
        self._set_places(slots[same], 0)
        self._release(places[same])

    def _same(self, nexts: Arrays, left: Slots, obs: Arrays, right: Slots) -> Ints:
        """Whether next observations and observations [n, ...] have the same bytes, row by row."""
        found = np.ones(0, bool)
        for name, twin in self._of.items():
            equal = same_bytes(nexts[name][left], obs[twin][right])
            found = found & equal if len(found) else equal
        return found

    def _set_places(self, slots: Ints, places: Ints | int) -> None:
        """Note where the next observation of the row in each slot lies."""
        self._place[slots] = places

    def _keep(self, places: Ints, keys: Ints, arrays: Arrays) -> None:
        """Put next observations [n, ...] into places, those of the rows of ``keys``."""
        self._keys[places] = keys
        for name, array in arrays.items():
            self._table[name][places] = array

    def _release(self, places: Ints) -> None:
        self._keys[places] = -1
        self._free += places.tolist()

    def _reserve(self, count: int) -> Ints:
        """Return ``count`` places that are free."""
        short = count - len(self._free)
        if short > 0:
            held = len(self._keys)
            room = max(8, 2 * held, held + short)
            for name, array in self._table.items():
                grown = np.empty((room, *array.shape[1:]), array.dtype)
                grown[:held] = array
                self._table[name] = grown
            self._keys = np.concatenate([self._keys, np.full(room - held, -1, np.int64)])
            self._free = [*range(room - 1, held - 1, -1), *self._free]
        cut = len(self._free) - count
        places = np.array(self._free[cut:], np.int64)
        del self._free[cut:]
        return places

    # -- giving out --------------------------------------------------------------------------------------------

    def names(self, wanted: Collection[str] | None = None) -> list[str]:
        """Return the columns of the next observation, or those of them that are ``wanted``."""
        return [name for name in self._of if wanted is None or name in wanted]

    def gather(self, keys: Ints, names: Collection[str]) -> Arrays:
        """Copy out the next observations of rows that are there: of ``keys`` [n], the columns ``names`` [n, ...]."""
        if not names:
            return {}
        ring, places = self._ring, self._places_of(keys)
        own = np.flatnonzero(places)
        after = keys + ring.mark(AHEAD, keys)
        rows = ring.storage.gather(ring.slots(after), {self._of[name] for name in names})
        found: Arrays = {}
        for name in names:
            found[name] = rows.arrays[self._of[name]]
            if len(own):
                found[name][own] = self._table[name][places[own] - 1]
        return found

    def _places_of(self, keys: Ints) -> Ints:
        """Return for each row that is there 0, or 1 + its place in the table."""
        places: Ints = self._place[self._ring.slots(keys)]
        return places

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        """How many next observations are kept aside."""
        return len(self._keys) - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return sum(array.nbytes for array in self._table.values()) + self._keys.nbytes

    def state(self) -> tuple[Ints, Arrays]:
        """Return the keys [m] of the rows whose next observation is kept aside, and these [m, ...] by column."""
        places = np.flatnonzero(self._keys >= 0)
        places = places[np.argsort(self._keys[places])]
        return self._keys[places], {name: array[places] for name, array in self._table.items()}

    def columns(self) -> list[Column]:
        """Return the columns that are kept aside, in the order of :meth:`state`."""
        return [] if self.schema is None else [self.schema.column(name) for name in self._table]

    def load(self, keys: Ints, arrays: Arrays) -> None:
        """Take back what :meth:`state` gave, after the ring took back its rows; of these some may not have come back.

        Raises:
            ValueError, LookupError: it is no such state.
        """
        distinct("next_obs.keys", wholes("next_obs.keys", keys, 0, self._ring.keys_end - 1))
        self.forget()
        if not self._shape_with(arrays):
            return
        there = self._ring.alive(keys)  # others lay where rows are now that have none aside
        keys, arrays = keys[there], {name: array[there] for name, array in arrays.items()}
        places = self._reserve(len(keys))
        self._keep(places, keys, arrays)
        self._set_places(self._ring.slots(keys), places + 1)

    def _shape_with(self, names: Iterable[str]) -> bool:
        """Begin with the rows that are stored, and these columns of next observations; return whether there are rows
        of any kind."""
        stored = self._ring.storage.schema
        if stored is None:
            return False
        twins = {name: stored.column(self._obs + name[len(self._next) :]) for name in names}
        own = [Column(name, twin.dtype, twin.shape) for name, twin in twins.items()]
        self.shape(Schema(tuple(sorted((*stored.columns, *own), key=lambda each: each.name))))
        return True


def _in_group(name: str, group: str) -> bool:
    return name == group or name.startswith(f"{group}.")


def twins_of(columns: Iterable[Column], fields: Fields) -> dict[str, str]:
    """Return by the column of a next observation that of the observation."""
    return {each.name: fields.obs + each.name[len(fields.next_obs) :] for each in columns}


def same_bytes(one: np.ndarray, other: np.ndarray) -> Ints:
    """Whether the rows [n, ...] of two arrays of one dtype and shape have the same bytes: [n] bool."""
    width = one.itemsize * int(np.prod(one.shape[1:], dtype=np.int64))
    if not width or not len(one):
        return np.ones(len(one), bool)
    word = np.dtype(f"u{next(size for size in (8, 4, 2, 1) if width % size == 0)}")
    left, right = (np.ascontiguousarray(each).reshape(-1).view(word) for each in (one, other))
    found: Ints = (left == right).reshape(len(one), -1).all(axis=1)
    return found

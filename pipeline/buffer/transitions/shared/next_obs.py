"""Next observations that are kept aside where any process can reach them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.shared.arrays import COUNTS, FREE, PLACE_KEYS, PLACES, SharedArrays
from pipeline.buffer.transitions.sharing import SharedNextObs
from pipeline.config import Fields

if TYPE_CHECKING:
    from pipeline.buffer.transitions.shared.ring import SharedRing

Ints = np.ndarray
_BOTH = np.arange(2)


class CommonNextObs(SharedNextObs):
    """As :class:`~pipeline.buffer.transitions.sharing.SharedNextObs`; every array is noted before it is changed.

    Places from 0 to a top were used up to now; those of them that are free lie on a stack.
    """

    def __init__(self, ring: SharedRing, fields: Fields, arrays: SharedArrays) -> None:
        super().__init__(ring, fields)
        self._common = ring
        self._place, self._keys = arrays[PLACES], arrays[PLACE_KEYS]
        self._stack, self._counts = arrays[FREE], arrays[COUNTS]
        ring.followers = weakref.proxy(self)  # in a circle, memory would outlive its users

    def shape(self, schema: Schema) -> None:
        super().shape(schema)
        self._common.shared.keep_aside([schema.column(name) for name in self._of])
        self._table = self._common.shared.nexts

    def take_over(self) -> None:
        stored, nexts = self._common.shared.schema, self._common.shared.nexts
        if stored is None or not nexts:
            self._know_nothing()
            return
        twins = {name: stored.column(self._obs + name[len(self._next) :]) for name in nexts}
        own = [Column(name, twin.dtype, twin.shape) for name, twin in twins.items()]
        super().shape(Schema(tuple(sorted((*stored.columns, *own), key=lambda each: each.name))))
        self._table = nexts

    def _know_nothing(self) -> None:
        self.schema, self.layout, self._of, self._bits, self._table = None, None, {}, {}, {}

    def forget(self) -> None:
        self._know_nothing()
        slots = np.flatnonzero(self._place)
        self._set_places(slots, 0)
        self._common.changing(COUNTS, _BOTH)
        self._counts[:] = 0

    def repair(self) -> None:
        """Free the places of rows that were given up."""
        keys = self._keys[: self._counts[0]]
        gone = np.flatnonzero((keys >= 0) & ~self._common.alive(keys))
        if len(gone):
            self._set_places(self._common.slots(keys[gone]), 0)
            self._release(gone)

    def added_one(self, key: int, obs: Arrays, nexts: Arrays) -> None:
        self.added(key, 1, *({name: array[None] for name, array in each.items()} for each in (obs, nexts)))

    def _set_places(self, slots: Ints, places: Ints | int) -> None:
        self._common.changing(PLACES, slots)
        super()._set_places(slots, places)

    def _keep(self, places: Ints, keys: Ints, arrays: Arrays) -> None:
        self._common.changing(PLACE_KEYS, places)
        self._common.changing_nexts(places)
        super()._keep(places, keys, arrays)

    def _release(self, places: Ints) -> None:
        free = int(self._counts[1])
        at = np.arange(free, free + len(places))
        self._common.changing(PLACE_KEYS, places)
        self._common.changing(FREE, at)
        self._common.changing(COUNTS, _BOTH)
        self._keys[places] = -1
        self._stack[at] = places
        self._counts[1] = free + len(places)

    def _reserve(self, count: int) -> Ints:
        top, free = self._counts.tolist()
        taken = min(count, free)
        self._common.changing(COUNTS, _BOTH)
        self._counts[:] = top + count - taken, free - taken
        places = np.concatenate([self._stack[free - taken : free], np.arange(top, top + count - taken)])
        return places.astype(np.int64)

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        return int(self._counts[0] - self._counts[1])

    @property
    def nbytes(self) -> int:
        top = int(self._counts[0])
        return sum(array[:top].nbytes for array in self._table.values()) + self._keys[:top].nbytes

    def state(self) -> tuple[Ints, Arrays]:
        keys = self._keys[: self._counts[0]]
        places = np.flatnonzero(keys >= 0)
        places = places[np.argsort(keys[places])]
        return keys[places], {name: array[places] for name, array in self._table.items()}

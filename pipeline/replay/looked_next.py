"""Next observations that rows of a saved ring share, where that is looked at: those that are kept aside, which may be
as many as there are rows, stay where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.buffer.transitions.sharing import SharedNextObs
from pipeline.replay.looked import LookedRing
from pipeline.replay.values import ValuesFile

Ints = np.ndarray


class LookedNextObs(SharedNextObs):
    """As :class:`~pipeline.buffer.transitions.sharing.SharedNextObs`, of a ring to which no row is added."""

    _aside: ValuesFile | None = None

    def load(self, keys: Any, arrays: Any) -> None:
        """As that, of what reads the keys, which rise, and by column the next observations."""
        if not self._shape_with(arrays):
            return
        count = len(keys)
        if count and not 0 <= int(keys.read(0, 1)[0]) <= int(keys.read(count - 1, 1)[0]) < self._ring.keys_end:
            raise ValueError("next_obs.keys: rows are named that never were")
        self._aside, self._table = keys, arrays

    def _places_of(self, keys: Ints) -> Ints:
        places = np.zeros(len(keys), np.int64)
        aside = self._aside
        if aside is not None:
            assert isinstance(self._ring, LookedRing)
            for at, key in enumerate(self._ring.disk_places(keys).tolist()):
                place = aside.below(key)
                if place < len(aside) and int(aside.read(place, 1)[0]) == key:
                    places[at] = place + 1
        return places

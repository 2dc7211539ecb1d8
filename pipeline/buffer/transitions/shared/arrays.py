"""What processes have in common of rows beside the rows themselves: one value for each slot, or environment."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.buffer.transitions.shared.header import MOST_ENVS, PAGE, Header

USES, ORDER, FIRSTS, TAIL_FIRSTS = "uses", "order", "firsts", "tail firsts"
PLACES, PLACE_KEYS, FREE, COUNTS = "places", "keys of places", "free places", "counts of places"
_DTYPES: dict[str, np.dtype[Any]] = {
    USES: np.dtype(np.uint32),
    ORDER: np.dtype(np.int64),
    FIRSTS: np.dtype(np.int64),
    TAIL_FIRSTS: np.dtype(np.int64),
    PLACES: np.dtype(np.int32),
    PLACE_KEYS: np.dtype(np.int64),
    FREE: np.dtype(np.int32),
    COUNTS: np.dtype(np.int64),
}


class SharedArrays:
    """Arrays by name. Pages are taken when they are first written, so one that nobody uses costs nothing."""

    def __init__(self, header: Header, begin: int, capacity: int) -> None:
        """Args:
        header: of the memory.
        begin: where the first array lies.
        capacity: how many slots there are.
        """
        self._arrays: dict[str, np.ndarray] = {}
        for name, dtype in _DTYPES.items():
            count = _count(name, capacity)
            self._arrays[name] = np.frombuffer(header.map, dtype, count, begin)
            begin += _size(name, capacity)
        assert begin <= header.end

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]


def arrays_bytes(capacity: int) -> int:
    """Return how much all of them would take."""
    return sum(_size(name, capacity) for name in _DTYPES)


def _count(name: str, capacity: int) -> int:
    return {TAIL_FIRSTS: MOST_ENVS, COUNTS: 2}.get(name, capacity)


def _size(name: str, capacity: int) -> int:
    return -(-_count(name, capacity) * _DTYPES[name].itemsize // PAGE) * PAGE


def number_of(name: str) -> int:
    """Return the number under which old values of an array are kept; columns have those from 0 on."""
    return -1 - list(_DTYPES).index(name)


def name_of(number: int) -> str:
    """Return the name of an array by such a number."""
    return list(_DTYPES)[-1 - number]

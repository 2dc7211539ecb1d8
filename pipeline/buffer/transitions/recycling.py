"""Output memory that is used again once nobody holds it: a fresh large array costs more than the copy into it."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

_SMALL = 32 << 10  # bytes below which malloc recycles by itself
_MOST = 4  # arrays of a kind that are kept


class Recycler:
    """Hands out arrays with any content; one whose last view is gone is handed out again.

    What refers to an array, a view of it or a tensor of a view, holds a reference to it: so its count tells whether
    somebody can still see it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], list[np.ndarray]] = {}

    def array(self, name: str, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array [count, *shape] that nobody else holds."""
        fresh_shape = (count, *shape)
        if prod(fresh_shape) * dtype.itemsize < _SMALL:
            return np.empty(fresh_shape, dtype)
        kept = self._kept.setdefault((name, fresh_shape, dtype), [])
        for index in range(len(kept)):
            if sys.getrefcount(kept[index]) == 2:  # the list's, and that of the call
                return kept[index].view()
        array = np.empty(fresh_shape, dtype)
        if len(kept) >= _MOST:
            kept.pop(0)
        kept.append(array)
        if len(self._kept) > 64:  # sizes that were asked for once
            self._kept.pop(next(iter(self._kept)))
        return array.view()

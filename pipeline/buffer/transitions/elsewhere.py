"""What belongs to the rows of a ring one by one, and need not be in memory: numbers that are read where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

Ints = np.ndarray
AT_ONCE = 1 << 18
"""Numbers that are read at a time, where all are gone through."""


class Numbers(Protocol):
    """An array [n] of which parts are read."""

    def __len__(self) -> int: ...

    def read(self, begin: int, count: int) -> np.ndarray:
        """Return so many values from ``begin`` on."""

    def at(self, places: Ints) -> np.ndarray:
        """Return the values [n, 1] at places in any order."""


class OldestFirst:
    """Numbers of rows, oldest first, where the slots of these follow another order."""

    def __init__(self, numbers: Numbers, by_slot: Numbers) -> None:
        """Args:
        numbers: oldest row first.
        by_slot: the same, of the row in the first slot first.
        """
        self._numbers, self.by_slot = numbers, by_slot

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, begin: int, count: int) -> np.ndarray:
        """As of any numbers."""
        return self._numbers.read(begin, count)

    def at(self, places: Ints) -> np.ndarray:
        """As of any numbers."""
        return self._numbers.at(places)


class ByName:
    """An order of rows of which some may be gone, and whose keys are looked up when they are wanted."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, part: slice) -> Ints:
        """Return the keys of a slice of it; -1: the row is gone."""
        raise NotImplementedError

    def check(self, name: str, most: int) -> None:
        """Refuse an order that is none; ``name`` is what it is called, and ``most`` the largest number that may be in
        it.

        Raises:
            ValueError: a row is named twice, or one that never was.
        """
        raise NotImplementedError


class Parts:
    """Numbers as an array of which slices are taken."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(len(self))
        return self._numbers.read(begin, max(0, end - begin))


def pieces(numbers: Numbers) -> Iterator[tuple[int, np.ndarray]]:
    """Yield numbers piece by piece, each with how many came before."""
    count = len(numbers)
    for begin in range(0, count, AT_ONCE):
        yield begin, numbers.read(begin, min(AT_ONCE, count - begin))

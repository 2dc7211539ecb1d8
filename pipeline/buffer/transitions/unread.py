"""Rows of which the place in memory is known, and which lie on the disk alone so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from pipeline.buffer.transitions.writing import Written

Ints = np.ndarray


class Unread(Protocol):
    """Brings rows in, block by block, when they are first wanted. The caller has the buffer's lock; every method that
    reads raises a :class:`~pipeline.errors.StoreError` if it cannot, and then nothing can be seen of it."""

    marks_known: bool
    """Whether all marks are there, and what follows from them."""
    written: Written | None
    """Columns that were written back: what is there of them counts, and not what blocks hold."""

    def rows(self, slots: Ints) -> None:
        """Bring in the rows in ``slots`` [n], with all of their blocks."""
        ...

    def marks(self) -> None:
        """Bring in the marks of all rows, and find out what follows what."""
        ...

    def need(self, name: str, slots: Ints) -> None:
        """Bring in a column, or a mark, of the rows in ``slots``."""
        ...

    def all(self) -> None:
        """Bring in everything."""
        ...

    def waiting(self) -> frozenset[int]:
        """Return which blocks lie on the disk alone, by their ``first``."""
        ...

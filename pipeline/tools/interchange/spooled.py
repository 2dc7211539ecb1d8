"""Numbers that grow with the rows, on the disk until they are written where they belong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

_PIECE = 4 << 20


class Spooled:
    """A file of numbers that grows."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "w+b")  # noqa: SIM115  it is closed by remove()

    def add(self, values: np.ndarray) -> None:
        """Append numbers."""
        self._file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes, piece by piece."""
        self._file.seek(0)
        while piece := self._file.read(_PIECE):
            yield piece

    def remove(self) -> None:
        """Remove the file."""
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

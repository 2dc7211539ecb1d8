"""Numbers that grow with the rows, on the disk until they are written where they belong."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import numpy as np


class Spooled:
    """A file of numbers that grows."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "w+b")  # noqa: SIM115  it is closed by remove()
        self._map: mmap.mmap | None = None

    def add(self, values: np.ndarray) -> None:
        """Append numbers."""
        self._file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def content(self) -> memoryview:
        """Return all bytes, which the kernel reads as they are used."""
        self._file.flush()
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._map)

    def remove(self) -> None:
        """Remove the file."""
        with suppress(BufferError):  # a traceback may hold a view: the memory goes with it
            if self._map is not None:
                self._map.close()
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

"""Records that come in one order and are wanted in another, by way of a file without a name: as many as there are, few
of them are in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.store.nameless import Nameless

Ints = np.ndarray
_WINDOW = 1 << 18
"""Places whose records are brought into memory together, at the most."""
_WINDOW_BYTES = 16 << 20
"""How long these are together, if each place has one; wide records are fewer."""


class Rearranged:
    """Records by places, which are whole numbers from 0 on. Blocks."""

    def __init__(self, folder: str, count: int, fields: Sequence[tuple[str, Any]]) -> None:
        """Args:
        folder: where the file is to be.
        count: places are below this.
        fields: of each record: names and dtypes.

        Raises:
            WriteFailed: there can be no such file.
        """
        self.kind = np.dtype([("place", np.int64), *fields])
        """Of what is read: the fields, and the place."""
        self._wide = max(1, min(_WINDOW, _WINDOW_BYTES // self.kind.itemsize))
        self._windows = -(-count // self._wide)
        self._came: list[tuple[int, int, Ints]] = []  # where records lie, the first window, where each of these begins
        self._read: tuple[int, np.ndarray] = -1, np.empty(0, self.kind)  # the window that was read last
        self._file = Nameless(folder)

    def put(self, places: Ints, values: Mapping[str, Any]) -> None:
        """Add records [n], by field, at places [n]; of one place several may come.

        Raises:
            WriteFailed: they cannot be written.
        """
        if not len(places):
            return
        windows = places // self._wide
        first = int(windows.min())
        if (windows[1:] < windows[:-1]).any():
            narrow = windows - first
            narrow = narrow.astype(np.uint16) if int(narrow.max()) < 1 << 16 else narrow  # such are sorted by counting
            order = np.argsort(narrow, kind="stable")
        else:
            order = np.arange(len(places))
        records = np.empty(len(places), self.kind)
        records["place"] = places[order]
        for name, each in values.items():
            records[name] = each[order] if np.ndim(each) else each
        begins = np.searchsorted(windows[order], np.arange(first, int(windows.max()) + 2)).astype(np.uint32)
        self._came.append((self._file.append(memoryview(records.view(np.uint8).data)), first, begins))
        self._read = -1, self._read[1]

    def read(self, begin: int, count: int) -> np.ndarray:
        """Return the records of places from ``begin`` on, below ``begin + count``: in their order, and of one place in
        that in which they came.

        Raises:
            StoreError: they cannot be read.
        """
        found = []
        for window in range(begin // self._wide, -(-(begin + count) // self._wide)):
            records = self._window(window)
            low, high = np.searchsorted(records["place"], (begin, begin + count))
            found.append(records[low:high])
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self.kind), *found])

    def _window(self, window: int) -> np.ndarray:
        if self._read[0] != window:
            self._read = -1, self._read[1][:0]
            size, raw = self.kind.itemsize, []
            for offset, first, begins in self._came:
                at = window - first
                if 0 <= at < len(begins) - 1 and begins[at] < begins[at + 1]:
                    count = int(begins[at + 1] - begins[at])
                    raw.append(self._file.read(offset + int(begins[at]) * size, count * size))
            records = np.frombuffer(b"".join(raw), self.kind)
            places = records["place"]
            if (places[1:] < places[:-1]).any():
                records = records[np.argsort(places, kind="stable")]
            self._read = window, records
        return self._read[1]

    def windows(self) -> list[tuple[int, int]]:
        """Return where the places begin that are read together, and how many they are: who goes through all reads these
        one after the other."""
        return [(window * self._wide, self._wide) for window in range(self._windows)]

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

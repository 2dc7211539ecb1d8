"""Columns of rows that any process has changed after the rows had been written to the disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from pipeline.buffer.transitions.shared.header import CAPTURED, Header
from pipeline.buffer.transitions.shared.ring import SharedRing
from pipeline.buffer.transitions.writing import Written

Ints = np.ndarray


class SharedWritten(Written):
    """What is changed is first noted as it was. A row that is marked as changed and was not, as who was about to change
    it was killed, is saved once more than it need be."""

    def __init__(self, ring: SharedRing, header: Header) -> None:
        self._shared, self._words = ring, header.words
        super().__init__(ring, self.captured)

    @property
    def captured(self) -> int:
        return self._words[CAPTURED]

    @captured.setter
    def captured(self, captured: int) -> None:
        self._words[CAPTURED] = captured

    def write(self, keys: Ints, arrays: Mapping[str, np.ndarray]) -> None:
        self._shared.changing_columns(keys, arrays)
        super().write(keys, arrays)

    def _note(self, keys: Ints, names: Iterable[str]) -> None:
        if not len(keys):
            return
        storage = self._shared.shared
        for name in names:
            number = storage.column_names.index(name)
            storage.any_changed[number] = 1
            storage.changed[number][self._shared.slots(keys)] = keys + 1

    def _names(self) -> list[str]:
        storage = self._shared.shared
        return [name for number, name in enumerate(storage.column_names) if storage.any_changed[number]]

    def _marks(self, name: str) -> Ints:
        storage = self._shared.shared
        marks: Ints = storage.changed[storage.column_names.index(name)]
        return marks

    def clear(self) -> None:
        """The marks go with the rows."""

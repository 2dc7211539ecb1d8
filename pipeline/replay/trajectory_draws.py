"""Rows that were drawn, some of which lie in memory and others on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Arrays
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.segment_rows import MOST_OPEN, Chosen, SegmentFile, SegmentRows, read_rows
from pipeline.replay.shelf import DATA, Ints, Shelf
from pipeline.replay.trajectory_blobs import BlobLayout
from pipeline.store.layout import SegmentKey
from pipeline.store.segments import Block


class _Group(NamedTuple):
    """The rows of one trajectory that were drawn.

    Attributes:
        number: of the trajectory.
        block, info: where it lies, and what is said of it there.
        data: where in the file its data begin; 0: nobody has looked yet.
        rows, targets: which rows, and where they are to go.
    """

    number: int
    block: Block
    data: int
    info: TrajectoryInfo
    rows: Ints
    targets: Ints


class Draw:
    """Rows of a shelf by their numbers; made with the buffer's lock held, and :meth:`read` without it."""

    def __init__(self, shelf: Shelf, rows: Ints, files: SegmentRows) -> None:
        """Copy out what is in memory, and open the files of the rest: so whatever is removed afterwards can be read.

        Raises:
            Damaged, StoreError: what is not in memory cannot be read.
        """
        assert shelf.storage.layout is not None
        assert shelf.schema is not None
        self.shelf, self.layout = shelf, shelf.storage.layout
        self.found_data: dict[int, int] = {}
        """Where the data of trajectories begin that nobody had looked at."""
        self._files, self._blobs = files, BlobLayout(shelf.schema)
        self._into: Arrays = {each.name: np.empty((len(rows), *each.shape), each.bits) for each in shelf.schema.columns}
        inside = rows >= shelf.begin
        if inside.any():
            for name, array in shelf.gather(rows[inside]).arrays.items():
                self._into[name][inside] = array
        groups = _groups(shelf, rows, np.flatnonzero(~inside))
        keys = sorted({group.block.segment_key for group in groups})
        self._groups: list[_Group] = []
        self._open: dict[SegmentKey, SegmentFile] = {}
        if len(keys) <= MOST_OPEN:
            self._groups, self._open = groups, files.open(keys)
        else:  # more than may be open at once: read here and now, while nothing is removed
            for begin in range(0, len(keys), MOST_OPEN):
                part = files.open(keys[begin : begin + MOST_OPEN])
                self._read([group for group in groups if group.block.segment_key in part], part)

    def read(self) -> Arrays:
        """Return the rows [n, ...] by column.

        Raises:
            Damaged, StoreError: some cannot be read.
        """
        self._read(self._groups, self._open)
        return self._into

    def _read(self, groups: Sequence[_Group], files: dict[SegmentKey, SegmentFile]) -> None:
        chosen = []
        for number, block, data, info, rows, targets in groups:
            file = files[block.segment_key]
            if not data:
                checked = number >= self.shelf.unchecked
                data = self._files.find_data(file, block, info, self._blobs, checked=checked)
                self.found_data[number] = data
            chosen.append(Chosen(file, data, info.num_samples, rows, targets))
        if chosen:
            read_rows(self._blobs, chosen, self._into)


def _groups(shelf: Shelf, rows: Ints, targets: Ints) -> list[_Group]:
    """Return the rows that go to ``targets``, by trajectory."""
    if not len(targets):
        return []
    of, places = shelf.of_rows(rows[targets])
    order = np.argsort(of, kind="stable")
    of, places, targets = of[order], places[order], targets[order]
    numbers, begins = np.unique(of, return_index=True)
    ends = [*begins[1:].tolist(), len(of)]
    groups = []
    for number, begin, end in zip(numbers.tolist(), begins.tolist(), ends, strict=True):
        block, info = shelf.payload(number)
        data = shelf.entry(number)[DATA]
        groups.append(_Group(number, block, data, info, places[begin:end], targets[begin:end]))
    return groups

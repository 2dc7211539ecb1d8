"""The ways of the rows of a pool to where they belong: of each it is found out where it goes, oldest first, and that is
looked up where its block is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.buffer.transitions.bodies import some_rows
from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.layout import BEHIND, END, EPISODE, PLACE
from pipeline.replay.handing import Extra
from pipeline.replay.homes import Found
from pipeline.replay.pool_files import ByBlock, PoolFiles
from pipeline.replay.state import Ends
from pipeline.replay.values import ValuesFile
from pipeline.store.segments import Block

Ints = np.ndarray


class Routes:
    """Where the rows of one pool go. Blocks."""

    def __init__(self, files: PoolFiles, folder: str, extras: Sequence[Extra]) -> None:
        """Args:
        files: of the pool.
        folder: where what is on its way lies meanwhile.
        extras: what the selection has of each row, and comes along.

        Raises:
            WriteFailed: there can be no file.
            Damaged: what is said of rows is not there.
        """
        self.files = files
        self._extras: list[ValuesFile] = [files.file(each.name) for each in extras] if files.size else []
        self.names = [f"extra.{number}" for number in range(len(extras))]
        fields = [("target", np.int64), ("to", np.int64)]
        kinds = [(name, each.dtype) for name, each in zip(self.names, extras, strict=True)]
        self.rows = ByBlock(files, folder, [*fields, *kinds])

    def add(self, begin: int, target: Ints, place: Ints) -> None:
        """Say where the rows from ``begin`` on go, oldest first: to which target [n], -1 to none, and there to which
        place [n].

        Raises:
            WriteFailed: it cannot be written.
            Damaged: what the selection has of them is not there.
        """
        count = len(target)
        if count:
            extras = {name: file.read(begin, count) for name, file in zip(self.names, self._extras, strict=True)}
            self.rows.add(begin, {"target": target, "to": place, **extras}, np.flatnonzero(target >= 0), count)

    @property
    def needed(self) -> list[int]:
        """The numbers of the blocks in which rows lie that go somewhere."""
        return self.rows.needed

    def close(self) -> None:
        """Let the files go."""
        self.rows.close()


class RoutedHomes:
    """See :class:`~pipeline.replay.moving.Homes`. For keys stands where the rows of a block stand in what was last
    read."""

    def __init__(self, routes: Routes) -> None:
        self._routes, self._ends = routes, Ends(routes.files.state)
        self._at = {block.first: number for number, block in enumerate(routes.files.blocks)}
        self.records = np.empty(0, [])
        """What there is of each row of the block that was last read."""

    def there(self, block: Block, arrays: Arrays) -> tuple[Ints, Arrays]:
        rows, self.records = self._routes.rows.of(self._at[block.first])
        arrays = some_rows(arrays, rows)
        self._routes.rows.into(arrays, self.records)
        arrays[END] = self._ends.of(self.records["key"], arrays[END])
        return np.arange(len(rows)), arrays

    def find(self, keys: Ints, arrays: Arrays, where: str) -> Found:
        return Found.each(keys, self.records["target"][keys], self.records["to"][keys])

    def mark(self, records: np.ndarray, found: Found, arrays: Arrays) -> None:
        records[EPISODE], records[PLACE] = arrays[EPISODE], arrays[PLACE]
        records[BEHIND] = 0  # of the others blocks hold none

    def extras_of(self, keys: Ints) -> list[np.ndarray]:
        return [self.records[name][keys] for name in self._routes.names]

    def aside_of(self, keys: Ints) -> tuple[Ints, list[np.ndarray]]:
        return np.empty(0, np.int64), []

"""Next observations of rows that share them (``share_next_obs``): that of a row is the observation of its successor,
unless it is kept aside. A batch is held until the successors of its rows have come, which is soon."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column
from pipeline.config import Fields
from pipeline.errors import Damaged
from pipeline.tools.interchange.streams import KEY, Rows


class _Held:
    """A batch, and which of its rows have no next observation yet."""

    def __init__(self, rows: Rows, columns: Sequence[Column]) -> None:
        self.rows = rows
        self.keys = rows.marks[KEY]
        self.order = np.argsort(self.keys)
        self.nexts: Arrays = {each.name: np.zeros((len(rows), *each.shape), each.bits) for each in columns}
        self.waiting = np.ones(len(rows), bool)

    def fill(self, keys: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Set the next observations of those of the rows with ``keys`` that are here and have none."""
        ordered = self.keys[self.order]
        at = np.minimum(np.searchsorted(ordered, keys), len(ordered) - 1)
        here = ordered[at] == keys
        rows = self.order[at[here]]
        fresh = self.waiting[rows]
        for name, array in values.items():
            self.nexts[name][rows[fresh]] = array[here][fresh]
        self.waiting[rows] = False

    def whole(self) -> Rows:
        """Return the rows with them."""
        return Rows({**self.rows.columns, **self.nexts}, self.rows.marks)


class NextObsOut:
    """Gives rows their next observations."""

    def __init__(self, columns: Sequence[Column], fields: Fields, table: Mapping[str, np.ndarray], where: str) -> None:
        """Args:
        columns: of the next observation.
        fields: what they are called.
        table: those kept aside: ``keys``, and by the number of a column its values.
        where: the run, for errors.
        """
        self._columns, self._where = columns, where
        self._of = {each.name: fields.obs + each.name[len(fields.next_obs) :] for each in columns}
        self._aside_keys = table["keys"]
        self._aside = {
            each.name: table[str(number)].view(each.bits).reshape(len(self._aside_keys), *each.shape)
            for number, each in enumerate(columns)
        }

    def filled(self, found: Iterator[tuple[Rows, np.ndarray]]) -> Iterator[Rows]:
        """Yield the batches of ``found``, which come with how many keys before each row its predecessor lies.

        Raises:
            Damaged: a row has neither a successor nor a next observation aside.
        """
        held: deque[_Held] = deque()
        for rows, behind in found:
            new = _Held(rows, self._columns)
            new.fill(self._aside_keys, self._aside)
            held.append(new)
            led = np.flatnonzero(behind > 0)
            before = rows.marks[KEY][led] - behind[led]
            observed = {name: rows.columns[twin][led] for name, twin in self._of.items()}
            for each in held:
                if each.waiting.any() and len(before):
                    each.fill(before, observed)
            while held and not held[0].waiting.any():
                yield held.popleft().whole()
        if held:
            raise Damaged(
                f"{self._where}: of {sum(int(each.waiting.sum()) for each in held)} rows no next observation is there"
            )

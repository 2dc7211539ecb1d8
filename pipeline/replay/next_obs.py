"""Next observations of rows that share them (``share_next_obs``), where tools read them: that of a row is the
observation of its successor, unless it is kept aside."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column
from pipeline.buffer.transitions.sharing import twins_of
from pipeline.config import Fields
from pipeline.errors import Damaged

Ints = np.ndarray
T = TypeVar("T")
KEYS_FILE = "next_obs.keys.int64"


def file_of(number: int, column: Column) -> str:
    """Return the name of the file of those that are kept aside, of the column of a number."""
    return f"next_obs.{number}.{column.bits.name}"


class Aside:
    """Those that are kept aside, by the keys of their rows."""

    def __init__(
        self, keys: Ints, columns: Sequence[Column], values: Sequence[Callable[[int, int], np.ndarray]]
    ) -> None:
        """Args:
        keys: [m] rising.
        columns: of the next observation.
        values: by column, what returns its values from some place on, so many: flat, of as wide items.
        """
        self._keys, self._columns, self._values = keys, columns, values

    def keys(self, first: int, end: int) -> Ints:
        """Return the keys from ``first`` up to ``end`` whose rows have one."""
        low, high = np.searchsorted(self._keys, (first, end)).tolist()
        return self._keys[low:high]

    def among(self, first: int, end: int) -> tuple[Ints, list[np.ndarray]]:
        """As :meth:`keys`, with these [n, ...] by column."""
        low, high = np.searchsorted(self._keys, (first, end)).tolist()
        count = high - low
        nexts = []
        for column, values in zip(self._columns, self._values, strict=True):
            items = int(np.prod(column.shape, dtype=np.int64))
            nexts.append(values(low * items, count * items).view(column.bits).reshape(count, *column.shape))
        return self._keys[low:high], nexts


class Batch(NamedTuple, Generic[T]):
    """Rows [n] whose next observations are wanted.

    Attributes:
        rows: whatever they are.
        keys: of each, rising.
        behind: how many keys before each its predecessor lies; 0: it has none.
        observed: their observations, by column.
    """

    rows: T
    keys: Ints
    behind: Ints
    observed: Mapping[str, np.ndarray]


class _Held(Generic[T]):
    """A batch, and which of its rows have no next observation yet."""

    def __init__(self, rows: T, keys: Ints, columns: Sequence[Column]) -> None:
        self.rows, self._keys = rows, keys
        self.nexts: Arrays = {each.name: np.zeros((len(keys), *each.shape), each.bits) for each in columns}
        self.waiting = np.ones(len(keys), bool)

    def fill(self, keys: Ints, values: Mapping[str, np.ndarray]) -> None:
        """Set the next observations of those of the rows with ``keys`` that are here and have none."""
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        here = self._keys[at] == keys
        rows = at[here]
        fresh = self.waiting[rows]
        for name, array in values.items():
            self.nexts[name][rows[fresh]] = array[here][fresh]
        self.waiting[rows] = False


class OwnNextObs:
    """Gives rows next observations of their own."""

    def __init__(self, columns: Sequence[Column], fields: Fields, aside: Aside, where: str) -> None:
        """Args:
        columns: of the next observation.
        fields: what they are called.
        aside: those that are kept aside.
        where: the run, for errors.
        """
        self._columns, self._where, self._aside = columns, where, aside
        self._twins = twins_of(columns, fields)

    def filled(self, found: Iterator[Batch[T]]) -> Iterator[tuple[T, Arrays]]:
        """Yield the rows of batches, and their next observations by column. A batch is held until the successors of
        its rows have come, which is soon.

        Raises:
            Damaged: a row has neither a successor nor a next observation aside.
        """
        held: deque[_Held[T]] = deque()
        for batch in found:
            if not len(batch.keys):
                continue
            new = _Held(batch.rows, batch.keys, self._columns)
            keys, nexts = self._aside.among(int(batch.keys[0]), int(batch.keys[-1]) + 1)
            new.fill(keys, {column.name: each for column, each in zip(self._columns, nexts, strict=True)})
            held.append(new)
            led = np.flatnonzero(batch.behind > 0)
            before = batch.keys[led] - batch.behind[led]
            observed = {name: batch.observed[twin][led] for name, twin in self._twins.items()}
            for each in held:
                if each.waiting.any() and len(before):
                    each.fill(before, observed)
            while held and not held[0].waiting.any():
                first = held.popleft()
                yield first.rows, first.nexts
        if held:
            raise Damaged(
                f"{self._where}: of {sum(int(each.waiting.sum()) for each in held)} rows no next observation is there"
            )

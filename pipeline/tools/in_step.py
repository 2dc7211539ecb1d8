"""Several streams of ids, each of which rise, as one: they are read piece by piece, and may be as many as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.buffer.transitions.elsewhere import AT_ONCE

Ints = np.ndarray


class Ids(Protocol):
    """What each of some rows is ordered by."""

    def __len__(self) -> int: ...

    def ids(self, begin: int, count: int) -> tuple[Ints, ...]:
        """Return so many of them from ``begin`` on, by column: what they are ordered by first, then second, and so on.
        The first column never falls."""


class Step(NamedTuple):
    """Some rows of all streams, in their order.

    Attributes:
        begin: how many came before.
        run, at: [n] which of the streams each is of, and where it stands there. Of each stream these rows follow each
            other there.
        ids: [n] by column, what they are ordered by.
    """

    begin: int
    run: Ints
    at: Ints
    ids: tuple[Ints, ...]

    def of_run(self, run: int) -> tuple[int, Ints]:
        """Return where those of one stream begin there, and which rows of the step they are, in the stream's order."""
        own = np.flatnonzero(self.run == run)
        own = own[np.argsort(self.at[own], kind="stable")]
        return int(self.at[own[0]]) if len(own) else 0, own


class _Head:
    """What was read of a stream, and not taken."""

    def __init__(self, stream: Ids, at_once: int) -> None:
        self._stream, self._at_once = stream, at_once
        self.begin = self._end = 0  # of what is held
        self.columns: tuple[Ints, ...] = ()
        self.more()

    @property
    def whole(self) -> bool:
        """Whether all that is left is held."""
        return self._end == len(self._stream)

    def more(self) -> None:
        """Read some more."""
        count = min(self._at_once, len(self._stream) - self._end)
        if count or not self.columns:
            new = self._stream.ids(self._end, count)
            old = self.columns or tuple(each[:0] for each in new)
            self.columns = tuple(np.concatenate(each) for each in zip(old, new, strict=True))
        self._end += count

    def take(self, below: int | None) -> tuple[Ints, ...]:
        """Take what lies below a bound in the first column; None: all that is held."""
        count = len(self.columns[0]) if below is None else int(np.searchsorted(self.columns[0], below))
        taken = tuple(each[:count] for each in self.columns)
        self.columns = tuple(each[count:] for each in self.columns)
        self.begin += count
        return taken


def in_step(streams: Sequence[Ids]) -> Iterator[Step]:
    """Yield the rows of all streams in the order of their ids; those that are equal in the first column come
    together."""
    at_once, begin = max(1, AT_ONCE // max(1, len(streams))), 0
    heads = [_Head(stream, at_once) for stream in streams]
    while any(len(head.columns[0]) or not head.whole for head in heads):
        for head in heads:
            if not len(head.columns[0]) and not head.whole:
                head.more()
        open_ = [head for head in heads if not head.whole]
        below = min((int(head.columns[0][-1]) for head in open_), default=None)
        begins = [head.begin for head in heads]
        taken = [head.take(below) for head in heads]
        counts = [len(each[0]) for each in taken]
        if not sum(counts):  # all that is held of one has the same id: what follows may have it too
            for head in open_:
                if int(head.columns[0][-1]) == below:
                    head.more()
            continue
        run = np.repeat(np.arange(len(heads)), counts)
        at = np.concatenate([first + np.arange(count) for first, count in zip(begins, counts, strict=True)])
        ids = tuple(np.concatenate(each) for each in zip(*taken, strict=True))
        order = np.lexsort(ids[::-1])
        yield Step(begin, run[order], at[order], tuple(each[order] for each in ids))
        begin += len(run)

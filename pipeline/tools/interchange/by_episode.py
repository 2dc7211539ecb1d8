"""Rows by episode, for formats that keep episodes: those of several environments are mixed in a buffer. The rows of
episodes that have not ended yet are held; where these become many, as of a pool in which the ends of episodes are gone,
they wait in a file without a name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.layout import OPEN
from pipeline.store.nameless import Nameless
from pipeline.store.rearranged import Rearranged
from pipeline.tools.interchange.streams import END, EPISODE, PLACE, RANK, Rows, Transitions, joined

Ints = np.ndarray
_MOST_HELD = 64 << 20  # bytes of rows that are in memory
_ARRAY = 256  # bytes that an array takes beside what is in it
_ROW, _ENDS = "row", "ends"


class _Part(NamedTuple):
    """The rows of one episode that came together, and their numbers among all."""

    rows: Rows
    numbers: Ints

    @property
    def ends(self) -> bool:
        """Whether it is over with them."""
        return bool(self.rows.marks[END][-1] != OPEN)

    @property
    def size(self) -> int:
        """Bytes that they take."""
        arrays = 1 + len(self.rows.columns) + len(self.rows.marks)
        return self.rows.held_bytes + self.numbers.nbytes + arrays * _ARRAY


def episodes(stream: Transitions, folder: str) -> Iterator[Rows]:
    """Yield the rows of each episode, in the order in which they end; those that have no end come last, oldest first.
    Rows that come in any order are put into that of their places in it.

    Args:
        stream: it has the marks of a buffer's run.
        folder: where rows wait.

    Raises:
        WriteFailed, StoreError: they cannot be written or read there.
    """
    held: dict[tuple[int, int], list[_Part]] = {}
    begun = size = 0
    batches = stream.batches()
    for rows in batches:
        ended = []
        for name, part in _parts(rows, begun):
            held.setdefault(name, []).append(part)
            size += part.size
            if part.ends and not stream.scattered:
                ended.append((int(part.numbers[-1]), name))
        begun += len(rows)
        for _, name in sorted(ended):
            parts = held.pop(name)
            size -= sum(part.size for part in parts)
            yield joined([part.rows for part in parts])
        if size > _MOST_HELD:
            with ExitStack() as stack:
                spill = _Spill(folder, rows, max(begun, stream.most or 0), stack, scattered=stream.scattered)
                yield from spill.episodes(held, batches, begun)
            return
    for parts in held.values() if not stream.scattered else ():
        yield joined([part.rows for part in parts])
    if stream.scattered:
        yield from (rows for _, rows in sorted(map(_put_in_order, held.values()), key=lambda each: each[0]))


def _put_in_order(parts: list[_Part]) -> tuple[tuple[bool, int], Rows]:
    """Return the rows of an episode in their order, and where it comes among others: by its end, or else by its oldest
    row."""
    rows, numbers = joined([part.rows for part in parts]), np.concatenate([part.numbers for part in parts])
    order = np.argsort(rows.marks[PLACE], kind="stable")
    rows, goes_on = rows.part(order), bool(rows.marks[END][order[-1]] == OPEN)
    return (goes_on, int(numbers.min() if goes_on else numbers[order[-1]])), rows


def _parts(rows: Rows, begun: int) -> Iterator[tuple[tuple[int, int], _Part]]:
    """Yield the rows of each episode among some, ``begun`` of which came before, by the first of them."""
    ranks, numbers = _ids(rows)
    order, begins, counts = _grouped(ranks, numbers)
    for group in np.argsort(order[begins]).tolist():
        own = order[begins[group] : begins[group] + counts[group]]
        yield (int(ranks[own[0]]), int(numbers[own[0]])), _Part(rows.part(own), begun + own)


def _ids(rows: Rows) -> tuple[Ints, Ints]:
    return rows.marks.get(RANK, np.zeros(len(rows), np.int32)), rows.marks[EPISODE]


def _grouped(ranks: Ints, numbers: Ints, places: Ints | None = None) -> tuple[Ints, Ints, Ints]:
    """Return rows by their episodes, and in each by their places, or as they came; where each episode begins there, and
    how many it has."""
    order = np.lexsort((numbers, ranks) if places is None else (places, numbers, ranks))
    ranks, numbers, new = ranks[order], numbers[order], np.ones(len(order), bool)
    new[1:] = (ranks[1:] != ranks[:-1]) | (numbers[1:] != numbers[:-1])
    begins = np.flatnonzero(new)
    return order, begins, np.diff(begins, append=len(order))


class _Spill:
    """Rows that wait on the disk until all have come. They are brought together by their episodes: these lie anywhere,
    as many in each window as in others. Then the episodes lie one after the other, and are read in their order."""

    def __init__(self, folder: str, like: Rows, most: int, stack: ExitStack, *, scattered: bool) -> None:
        """Args:
        folder: where the files are to be.
        like: some rows.
        most: at the most so many rows will come.
        stack: closes the files.
        scattered: whether rows of an episode come in any order.
        """
        self._scattered = scattered
        self._folder, self._stack, self._places = folder, stack, most
        self._columns, self._marks = list(like.columns), list(like.marks)
        arrays = [*like.columns.values(), *like.marks.values()]
        fields: list[Any] = [(str(number), array.dtype, array.shape[1:]) for number, array in enumerate(arrays)]
        self._kind = np.dtype(fields)
        self._mixed = Rearranged(folder, most, [*fields, (_ROW, np.int64), (_ENDS, np.bool_)])
        stack.callback(self._mixed.close)

    def episodes(self, held: dict[tuple[int, int], list[_Part]], batches: Iterable[Rows], begun: int) -> Iterator[Rows]:
        """Yield the episodes of which rows are held or follow, of which ``begun`` came before."""
        for part in [part for parts in held.values() for part in parts]:
            self._put(part.rows, part.numbers)
        held.clear()
        for rows in batches:
            self._put(rows, begun + np.arange(len(rows)))
            begun += len(rows)
        whole, order = Nameless(self._folder), Rearranged(self._folder, 2 * begun, [("at", np.int64), ("n", np.int64)])
        self._stack.callback(whole.close)
        self._stack.callback(order.close)
        for window in self._mixed.windows():
            self._bring_together(self._mixed.read(*window), begun, whole, order)
        self._mixed.close()
        size = self._kind.itemsize
        for window in order.windows():
            for _, at, count in order.read(*window).tolist():
                yield self._rows(np.frombuffer(whole.read(at, count * size), self._kind))

    def _put(self, rows: Rows, numbers: Ints) -> None:
        ranks, of = _ids(rows)
        ends = rows.marks[END] != OPEN
        if not self._scattered:  # such end with the rows that came together
            order, begins, counts = _grouped(ranks, of)
            last = np.zeros(len(rows), bool)
            last[order[begins + counts - 1]] = True
            ends &= last
        mixed = of.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ ranks.astype(np.uint64) * np.uint64(0xC2B2AE3D)
        places = ((mixed ^ mixed >> np.uint64(29)) % np.uint64(self._places)).astype(np.int64)
        arrays = [rows.columns[name] for name in self._columns] + [rows.marks[name] for name in self._marks]
        named: dict[str, Any] = {str(number): array for number, array in enumerate(arrays)}
        self._mixed.put(places, {**named, _ROW: numbers, _ENDS: ends})

    def _bring_together(self, found: np.ndarray, count: int, whole: Nameless, order: Rearranged) -> None:
        """Take in the rows of some episodes, of which none lies elsewhere."""
        if not len(found):
            return
        marks = self._rows(found, whole=False)
        by_episode, begins, _ = _grouped(*_ids(marks), marks.marks[PLACE] if self._scattered else None)
        ends, numbers = found[_ENDS][by_episode], found[_ROW][by_episode]
        if not self._scattered:
            begins = np.union1d(begins, np.flatnonzero(ends[:-1]) + 1)
        counts = np.diff(begins, append=len(found))
        records = np.empty(len(found), self._kind)
        for name in self._kind.names or ():
            records[name] = found[name][by_episode]
        at = whole.append(memoryview(records.view(np.uint8).data))
        last = begins + counts - 1
        places = np.where(ends[last], numbers[last], count + np.minimum.reduceat(numbers, begins))
        order.put(places, {"at": at + begins * self._kind.itemsize, "n": counts})

    def _rows(self, records: np.ndarray, *, whole: bool = True) -> Rows:
        """Return rows, or their marks alone."""
        names = [*self._columns, *self._marks]
        first = 0 if whole else len(self._columns)
        arrays = {names[at]: records[str(at)].copy() for at in range(first, len(names))}
        return Rows(
            {name: arrays[name] for name in self._columns if whole}, {name: arrays[name] for name in self._marks}
        )

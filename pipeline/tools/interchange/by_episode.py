"""Rows by episode, for formats that keep episodes: those of several environments are mixed in a buffer. The rows of
episodes that have not ended yet are held, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.buffer.transitions.layout import OPEN
from pipeline.tools.interchange.streams import END, EPISODE, RANK, Rows, Transitions, joined


def episodes(stream: Transitions) -> Iterator[Rows]:
    """Yield the rows of each episode, in the order in which they end; those that have no end come last, oldest first.

    The stream has the marks of a buffer's run.
    """
    held: dict[tuple[int, int], list[Rows]] = {}
    for rows in stream.batches():
        ranks = rows.marks.get(RANK, np.zeros(len(rows), np.int32))
        numbers = rows.marks[EPISODE]
        order = np.lexsort((np.arange(len(rows)), numbers, ranks))
        ids = np.stack([ranks[order], numbers[order]], axis=1)
        begins = np.flatnonzero(np.r_[True, (ids[1:] != ids[:-1]).any(axis=1)])
        groups = list(zip(begins, np.r_[begins[1:], len(order)], strict=True))
        ended = []
        for begin, stop in sorted(groups, key=lambda group: order[group[0]]):
            name = (int(ids[begin, 0]), int(ids[begin, 1]))
            part = rows.part(order[begin:stop])
            held.setdefault(name, []).append(part)
            if part.marks[END][-1] != OPEN:
                ended.append((int(order[stop - 1]), name))
        for _, name in sorted(ended):
            yield joined(held.pop(name))
    for parts in held.values():
        yield joined(parts)

"""Rows in the order in which they were, after a format that keeps episodes one after the other: each is numbered on its
way out, and on its way in it waits for those before it. The rows of episodes that were mixed with one that comes later
are held, and nothing else but a byte for each row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.errors import Damaged
from pipeline.tools.interchange.streams import Rows, Transitions, joined

ROW = "#row"
"""A mark that is beside those of a stream, int64: the row's number in it, from 0."""


def numbered(stream: Transitions) -> Transitions:
    """Return a stream whose batches have the mark :data:`ROW` too."""

    def batches() -> Iterator[Rows]:
        begun = 0
        for rows in stream.batches():
            yield Rows(rows.columns, {**rows.marks, ROW: np.arange(begun, begun + len(rows))})
            begun += len(rows)

    return stream._replace(batches=batches)


def in_order(batches: Iterator[Rows], count: int, where: str) -> Iterator[Rows]:
    """Yield ``count`` rows that have the mark :data:`ROW` by it, and without it.

    Raises:
        Damaged: a number is missing, or there twice.
    """
    seen = np.zeros(count + 1, bool)  # the last stays False, so that there is always one to be found
    held: list[Rows] = []
    given = due = have = 0
    for rows in batches:
        numbers = rows.marks[ROW]
        if len(rows) and (numbers.min() < 0 or numbers.max() >= count or seen[numbers].any()):
            raise Damaged(
                f"{where}: rows are numbered from 0 to {count - 1}, and a number is out of that or there twice"
            )
        seen[numbers] = True
        held.append(rows)
        have += len(rows)
        due += int(np.argmin(seen[due:]))
        if due > given and 2 * (due - given) >= have:  # what is sorted again is no more than what goes
            ready, rest = _split(held, due - given)
            yield ready
            held, have, given = [rest] if len(rest) else [], len(rest), due
    if have or due != count:
        raise Damaged(f"{where}: of {count} rows the one with number {due} is missing")


def _split(held: list[Rows], ready: int) -> tuple[Rows, Rows]:
    """Return the first rows by their numbers, without these, and the others."""
    whole = joined(held)
    numbers = whole.marks[ROW]
    if (np.diff(numbers) < 0).any():
        whole = whole.part(np.argsort(numbers))
    first = whole.part(slice(0, ready))
    marks = {name: array for name, array in first.marks.items() if name != ROW}
    return Rows(first.columns, marks), whole.part(slice(ready, None))

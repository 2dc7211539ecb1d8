"""What is left of episodes of which rows have not come. The rows on each side of a gap are an episode of their own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeline.buffer.transitions.layout import AHEAD, BEHIND, CUT, END, EPISODE, OPEN, PLACE, SERIAL
from pipeline.replay.episode_ids import EpisodeTable

Ints = np.ndarray


class Unfollowed(NamedTuple):
    """Rows that share next observations, and have come without what says theirs.

    Attributes:
        rows: [n] which they are: the next observation of each lies in a row that has not come.
        before: [m] rows whose next observation is that of one of these, which is known.
        after: [m] which one.
    """

    rows: Ints
    before: Ints
    after: Ints

    @classmethod
    def of(cls, there: np.ndarray, aside: np.ndarray, rows: Ints) -> Unfollowed:
        """Args:
        there: [m] whether each row has come.
        aside: [m] whether its next observation is kept aside, and has come with it.
        rows: of each episode; they lie one after the other.
        """
        ends = np.cumsum(rows)
        followed, led = np.append(there[1:], False), np.append(False, there[:-1])
        followed[ends[rows > 0] - 1] = False
        led[(ends - rows)[rows > 0]] = False
        found = np.flatnonzero(there & ~followed & ~aside)
        after = found[led[found]]
        after = after[~aside[after - 1]]
        return cls(found, after - 1, after)

    @classmethod
    def within(cls, parts: Gaps, stretches: tuple[Ints, Ints], aside: Ints) -> Unfollowed:
        """As :meth:`of`, with what does not grow with the rows.

        Args:
            parts: of episodes.
            stretches: that they are of.
            aside: rows whose next observation is kept aside, and has come with them, rising.
        """
        begins = parts.among(stretches)
        lasts = begins + parts.lengths - 1
        unknown = ~_in(aside, lasts)
        found, led = lasts[unknown], parts.lengths[unknown] > 1
        after = found[led]
        after = after[~_in(aside, after - 1)]
        return cls(found, after - 1, after)


class Gaps(NamedTuple):
    """The parts of episodes that rows form which have come, one after the other.

    Attributes:
        begins, lengths: [k] of each part among these rows.
        whose: [k] the episode of each, as the table lists them.
    """

    begins: Ints
    lengths: Ints
    whose: Ints

    @classmethod
    def of(cls, there: np.ndarray, rows: Ints) -> Gaps:
        """Args:
        there: [m] whether each row has come.
        rows: of each episode; they lie one after the other.
        """
        ends = np.cumsum(rows)
        begins, stops = there.copy(), there.copy()
        begins[1:] &= ~there[:-1]
        stops[:-1] &= ~there[1:]
        edges = (ends - rows)[rows > 0], ends[rows > 0] - 1
        begins[edges[0]], stops[edges[1]] = there[edges[0]], there[edges[1]]
        first = np.flatnonzero(begins)
        lengths = np.flatnonzero(stops) - first + 1
        return cls(np.cumsum(lengths) - lengths, lengths, np.searchsorted(ends, first, side="right"))

    @classmethod
    def of_stretches(cls, stretches: tuple[Ints, Ints], rows: Ints) -> Gaps:
        """As :meth:`of`, with what does not grow with the rows.

        Args:
            stretches: where those of rows that have come begin and end.
            rows: of each episode; they lie one after the other.
        """
        firsts, stops = stretches
        ends = np.cumsum(rows)
        begin, end = (ends - rows)[rows > 0], ends[rows > 0]
        first = np.union1d(firsts, begin[_covered(firsts, stops, begin)])
        last = np.union1d(stops - 1, end[_covered(firsts, stops, end - 1)] - 1)
        lengths = last + 1 - first
        return cls(np.cumsum(lengths) - lengths, lengths, np.searchsorted(ends, first, side="right"))

    def among(self, stretches: tuple[Ints, Ints]) -> Ints:
        """Return where each part begins among all rows, those that have not come included."""
        firsts, stops = stretches
        counts = stops - firsts
        came = np.cumsum(counts) - counts
        of = np.searchsorted(came, self.begins, side="right") - 1
        found: Ints = firsts[of] + self.begins - came[of] if len(came) else self.begins
        return found

    @property
    def rows(self) -> int:
        """How many have come."""
        return int(self.lengths.sum())

    def marks(self, ends: np.ndarray, first: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """Return the marks of rows that have come, of which the first of all has the key ``first``: each part ends
        where it is, those that were open among them.

        Args:
            ends: the marks ``END`` of these rows as they were.
            first: a key.
            rows: which of them.
        """
        begin, end, _ = rows.indices(self.rows)
        low = max(0, int(np.searchsorted(self.begins, begin, side="right")) - 1)
        high = int(np.searchsorted(self.begins, end))
        begins, lengths = self.begins[low:high], self.lengths[low:high]
        counts = np.minimum(begins + lengths, end) - np.maximum(begins, begin)
        numbers = np.arange(begin, end)
        place = numbers - np.repeat(begins, counts)
        last = place + 1 == np.repeat(lengths, counts)
        return {
            EPISODE: np.repeat(np.arange(low, high), counts),
            PLACE: place,
            BEHIND: place > 0,
            AHEAD: ~last,
            SERIAL: (first + numbers).astype(np.uint32),
            END: np.where(last & (ends == OPEN), CUT, ends),
        }

    def table(self, table: EpisodeTable, names: int) -> tuple[EpisodeTable, int]:
        """Return the table of the parts, and how many names it took.

        Args:
            table: of the episodes.
            names: the first of the names that parts of episodes get beside the one that these have.
        """
        uid, more = table.uid[self.whose].copy(), np.flatnonzero(np.diff(self.whose, prepend=-1) == 0)
        uid[more] = names + np.arange(len(more))
        count, none = len(self.begins), np.zeros(len(self.begins), np.int64)
        return EpisodeTable(np.arange(count), uid, table.age[self.whose], self.lengths, self.lengths, none), len(more)


def _covered(firsts: Ints, stops: Ints, rows: Ints) -> np.ndarray:
    """Return which rows lie in a stretch."""
    if not len(firsts):
        return np.zeros(len(rows), bool)
    of = np.searchsorted(firsts, rows, side="right") - 1
    inside: np.ndarray = (of >= 0) & (rows < stops[of])
    return inside


def _in(rising: Ints, rows: Ints) -> np.ndarray:
    """Return which rows are among some that rise."""
    if not len(rising):
        return np.zeros(len(rows), bool)
    found: np.ndarray = rising[np.minimum(np.searchsorted(rising, rows), len(rising) - 1)] == rows
    return found

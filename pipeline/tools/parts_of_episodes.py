"""The parts of episodes that rows form of which others are gone, found out as the rows come in the order of their keys.

What is remembered is the newest row of each episode that has no end yet, and nothing of any other row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeline.replay.homes import grouped

Ints = np.ndarray

TAIL = np.dtype(
    [
        ("episode", np.int64),
        ("key", np.int64),
        ("now", np.int64),
        ("part", np.int64),
        ("base", np.int64),
        ("before", np.int64),
        ("ended", bool),
        ("aside", bool),
        ("before_aside", bool),
        ("stays", bool),
    ]
)
"""The newest row of a part: its episode and its key, as they were, and its key in the new run; the number of the part,
and the place that its first row had; the key of the row before it, or -1; whether the episode ends with it; whether its
next observation, and that of the row before, are kept aside; and whether an earlier part of the episode stays."""


class Marks(NamedTuple):
    """Of rows [n], in the order of their keys.

    Attributes:
        key: of each.
        episode, behind, place: its marks.
        ended: whether an episode ends with it.
        aside: whether its next observation is kept aside.
        now: its key in the new run.
    """

    key: Ints
    episode: Ints
    behind: Ints
    place: Ints
    ended: Ints
    aside: Ints
    now: Ints


class Followed(NamedTuple):
    """What is known of rows [n] once they have come.

    Attributes:
        part: the number of the part that each is in.
        place: of each in that.
        behind: how many keys before it, in the new run, the part's row before lies; 0: it begins there.
        closed: the newest rows of parts that end, as :data:`TAIL`.
    """

    part: Ints
    place: Ints
    behind: Ints
    closed: np.ndarray


class _Sorted(NamedTuple):
    """Rows in the order of their episodes, and among those of one in that of their keys.

    Attributes:
        rows: their marks.
        order: where each was.
        fresh: whether it is the first of its episode among these.
        firsts: [m] which are.
        at: [m] where the newest row of the episode stands among those that are remembered.
        known: [m] whether there is such a one.
        led: whether the row before it came.
    """

    rows: Marks
    order: Ints
    fresh: Ints
    firsts: Ints
    at: Ints
    known: Ints
    led: Ints


class PartsOfEpisodes:
    """See the module. A row whose predecessor has not come begins a part."""

    def __init__(self, *, sharing: bool = False) -> None:
        """Args:
        sharing: whether rows share next observations: then the newest row of a part, if its own is not kept aside,
            does not stay.
        """
        self._sharing = sharing
        self._open = np.empty(0, TAIL)  # by rising episode
        self._begun = 0
        self._vanished = 0
        self.episodes = 0
        """How many episodes have a part that stays, of those that have ended."""

    @property
    def parts(self) -> int:
        """How many parts there are that stay."""
        return self._begun - self._vanished

    def follow(self, marks: Marks) -> Followed:
        """Take in rows that come after all that came before."""
        if not len(marks.key):
            none = np.empty(0, np.int64)
            return Followed(none, none, none, np.empty(0, TAIL))
        given = self._sorted(marks)
        tails = self._tails(given)
        closed = self._close(given, tails)
        rows, back = given.rows, np.empty(len(given.order), np.int64)
        back[given.order] = np.arange(len(given.order))
        before = np.where(given.led, rows.now - self._before(given, "now"), 0)
        self._remember(given, tails)
        place = rows.place.astype(np.int64) - tails["base"]
        return Followed(tails["part"][back], place[back], before[back], closed)

    def _sorted(self, marks: Marks) -> _Sorted:
        order = grouped(marks.episode)
        rows = Marks(*(each[order] for each in marks))
        fresh = np.ones(len(order), bool)
        fresh[1:] = rows.episode[1:] != rows.episode[:-1]
        firsts = np.flatnonzero(fresh)
        at = np.searchsorted(self._open["episode"], rows.episode[firsts])
        known = np.zeros(len(firsts), bool)
        inside = at < len(self._open)
        known[inside] = self._open["episode"][at[inside]] == rows.episode[firsts[inside]]
        found = _Sorted(rows, order, fresh, firsts, at, known, fresh)
        before, ended = self._before(found, "key"), np.zeros(len(order), bool)
        ended[1:] = rows.ended[:-1]
        ended[firsts] = False  # of what is remembered none has ended
        led = (rows.behind > 0) & (before >= 0) & (rows.key - rows.behind == before) & ~ended
        return found._replace(led=led)

    def _before(self, given: _Sorted, name: str) -> Any:
        """Return a mark of the row of the same episode that came before each; -1, or False, if there is none."""
        own = getattr(given.rows, name)
        found = np.full(len(own), -1 if own.dtype != bool else 0, own.dtype)
        found[1:] = own[:-1]
        found[given.firsts] = found.dtype.type(-1 if own.dtype != bool else 0)
        found[given.firsts[given.known]] = self._open[name][given.at[given.known]]
        return found

    def _tails(self, given: _Sorted) -> np.ndarray:
        """Return of every row what is remembered if it is the newest of its part."""
        rows, led, count = given.rows, given.led, len(given.order)
        tails = np.zeros(count, TAIL)
        begins = np.empty(count, bool)
        begins[given.order] = ~led
        numbers = self._begun + np.cumsum(begins) - 1  # in the order of their keys
        self._begun += int(begins.sum())
        part, base = numbers[given.order], rows.place.astype(np.int64)
        going = given.known & led[given.firsts]
        for name, each in (("part", part), ("base", base)):
            each[given.firsts[going]] = self._open[name][given.at[going]]
        start = np.maximum.accumulate(np.where(~led | given.fresh, np.arange(count), 0))
        tails["part"], tails["base"] = part[start], base[start]
        tails["before"] = np.where(led, self._before(given, "key"), -1)
        tails["before_aside"] = led & self._before(given, "aside")
        for name in ("episode", "key", "now", "ended", "aside"):
            tails[name] = getattr(rows, name)
        return tails

    def _close(self, given: _Sorted, tails: np.ndarray) -> np.ndarray:
        """Return the newest rows of the parts that end here; note which parts of each episode stay."""
        begins = ~given.led
        stale = given.known & begins[given.firsts]
        inner = np.flatnonzero(begins & ~given.fresh) - 1
        lasts = np.append(given.firsts[1:], len(begins)) - 1
        stays = np.zeros(len(lasts), bool)
        stays[given.known] = self._open["stays"][given.at[given.known]]
        before = self._open[given.at[stale]]
        stays[stale] |= self._stay(before)
        np.logical_or.at(stays, (np.cumsum(given.fresh) - 1)[inner], self._stay(tails[inner]))
        tails["stays"][lasts] = stays
        ended = tails[lasts[given.rows.ended[lasts]]]
        self._done(ended)
        return np.concatenate([self._counted(before), self._counted(tails[inner]), self._counted(ended)])

    def _counted(self, closed: np.ndarray) -> np.ndarray:
        self._vanished += int((~self._stay(closed)).sum())
        return closed

    def _done(self, lasts: np.ndarray) -> None:
        """Count episodes that end with some rows."""
        self.episodes += int((lasts["stays"] | self._stay(lasts)).sum())

    def _stay(self, tails: np.ndarray) -> Any:
        """Whether anything is left of parts that end with some rows."""
        return tails["aside"] | (tails["before"] >= 0) if self._sharing else np.ones(len(tails), bool)

    def _remember(self, given: _Sorted, tails: np.ndarray) -> None:
        lasts = np.append(given.firsts[1:], len(tails)) - 1
        going = ~given.rows.ended[lasts]
        if given.known.all() and going.all():
            self._open[given.at] = tails[lasts]
            return
        stays = np.ones(len(self._open), bool)
        stays[given.at[given.known]] = False
        found = np.concatenate([self._open[stays], tails[lasts[going]]])
        self._open = found[np.argsort(found["episode"], kind="stable")]

    def finish(self) -> np.ndarray:
        """Return the newest rows of the parts that have no end; no row comes any more."""
        closed, self._open = self._counted(self._open), np.empty(0, TAIL)
        self._done(closed)
        return closed

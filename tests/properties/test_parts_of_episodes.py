"""Which parts of episodes are left, found out as rows come, against what can be said when all are there."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.tools.parts_of_episodes import Followed, Marks, PartsOfEpisodes
from tests.properties.conftest import SOAK


class Row(NamedTuple):
    """A row that is there."""

    key: int
    episode: int
    before: int
    """The key of the row before it; -1: there is none."""
    place: int
    ended: bool
    aside: bool


@st.composite
def rows_left(draw: st.DrawFn) -> list[Row]:
    """Rows of some environments by turns, in any order, of which any are gone."""
    newest: dict[int, Row] = {}
    episodes, found = draw(st.integers(0, 100)), list[Row]()
    steps = st.tuples(st.integers(0, 3), st.sampled_from([False] * 5 + [True]), st.booleans(), st.booleans())
    for key, (env, ended, aside, there) in enumerate(draw(st.lists(steps, max_size=40)), draw(st.integers(0, 1000))):
        last = newest.get(env)
        if last is None or last.ended:
            row = Row(key, episodes, -1, draw(st.integers(0, 3)) if last is None else 0, ended, aside)
            episodes += 1
        else:
            row = Row(key, last.episode, last.key, last.place + 1, ended, aside)
        newest[env] = row
        if there:
            found.append(row)
    return found


def followed(parts: PartsOfEpisodes, rows: list[Row], now: list[int], cuts: list[int]) -> list[Followed]:
    """Let rows come in pieces."""
    edges = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    found = []
    for begin, end in pairwise(edges):
        part = rows[begin:end]
        behind = [row.key - row.before if row.before >= 0 else 0 for row in part]
        columns = [np.array([getattr(row, name) for row in part]) for name in ("episode", "place", "ended", "aside")]
        episode, place, ended, aside = columns
        marks = Marks(
            np.array([row.key for row in part]),
            episode,
            np.array(behind, np.int32),
            place.astype(np.int32),
            ended,
            aside,
            np.array(now[begin:end]),
        )
        found.append(parts.follow(marks))
    return found


class Said(NamedTuple):
    """What is left of rows.

    Attributes:
        parts: the rows of each part, in the order in which they begin.
    """

    parts: list[list[Row]]

    @classmethod
    def of(cls, rows: list[Row]) -> Said:
        parts: dict[int, list[Row]] = {}  # by the key of the newest row
        begun = []
        for row in rows:
            part = parts.pop(row.before, None)
            if part is None:
                part = []
                begun.append(part)
            part.append(row)
            parts[row.key] = part
        return cls(begun)

    @property
    def episodes(self) -> int:
        return len({part[0].episode for part in self.parts})


CUTS = st.lists(st.integers(1, 40), max_size=6)

APART = [Row(2 * at, 5, 2 * at - 1 if at else -1, 2 * at, ended=False, aside=at == 0) for at in range(3)]
"""Rows of an episode none of which has the one before it; of the first one the next observation is known."""


@settings(max_examples=150 * SOAK)
@given(rows_left(), CUTS)
def test_parts_are_numbered_and_their_rows_are_too(rows: list[Row], cuts: list[int]) -> None:
    said, parts = Said.of(rows), PartsOfEpisodes()
    now = [7000 + at for at in range(len(rows))]
    found = followed(parts, rows, now, cuts)
    at = {row.key: now[number] for number, row in enumerate(rows)}
    expected = {}
    for number, part in enumerate(said.parts):
        for place, row in enumerate(part):
            base = part[0].place
            behind = at[row.key] - at[part[place - 1].key] if place else 0
            assert row.place - base == place
            expected[row.key] = (number, place, behind)
    told = [each for piece in found for each in zip(piece.part, piece.place, piece.behind, strict=True)]
    assert [tuple(map(int, each)) for each in told] == [expected[row.key] for row in rows]
    closed = np.concatenate([*(piece.closed for piece in found), parts.finish()])
    lasts = {part[-1].key: part[-1] for part in said.parts}
    assert sorted(closed["key"].tolist()) == sorted(lasts)
    for each in closed:
        row = lasts[int(each["key"])]
        assert (each["now"], each["ended"], each["episode"]) == (at[row.key], row.ended, row.episode)
    assert (parts.parts, parts.episodes) == (len(said.parts), said.episodes)
    assert not len(parts.finish())


@settings(max_examples=300 * SOAK)
@given(rows_left(), CUTS)
@example(APART[:2], [1])
@example(APART, [1, 2])
def test_where_next_observations_are_shared_some_of_the_newest_rows_do_not_stay(
    rows: list[Row], cuts: list[int]
) -> None:
    said, parts = Said.of(rows), PartsOfEpisodes(sharing=True)
    found = followed(parts, rows, [row.key for row in rows], cuts)
    closed = np.concatenate([*(piece.closed for piece in found), parts.finish()])
    gone = {part[-1].key: part[-2:-1] for part in said.parts if not part[-1].aside}
    tails = closed[~closed["aside"]]
    assert sorted(tails["key"].tolist()) == sorted(gone)
    for each in tails:
        before = gone[int(each["key"])]
        assert int(each["before"]) == (before[0].key if before else -1)
        assert bool(each["before_aside"]) == (bool(before) and before[0].aside)
    left = Said.of([row for row in rows if row.key not in gone])
    assert (parts.parts, parts.episodes) == (len(left.parts), left.episodes)

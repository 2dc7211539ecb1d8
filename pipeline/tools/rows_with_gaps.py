"""Writing rows of a buffer of which others are gone: a part of an episode becomes one, and keys follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.bodies import changed, some_rows
from pipeline.buffer.transitions.columns import Arrays, Column
from pipeline.buffer.transitions.layout import BEHIND, EPISODE, PLACE
from pipeline.replay.next_obs import Aside
from pipeline.replay.state import BufferState
from pipeline.replay.values import Values
from pipeline.replay.whole_rows import keeps_selection
from pipeline.store.segments import Block
from pipeline.tools.later_rows import Reads
from pipeline.tools.parts_of_episodes import Marks, PartsOfEpisodes
from pipeline.tools.salvaged_run import SalvagedRun
from pipeline.tools.scattered import AsideRows
from pipeline.tools.writing import AsideWriter, BlockWriter

Ints = np.ndarray


class RowsOfBlock(NamedTuple):
    """Rows [n] of a block that no block before it has, in the order of their keys.

    Attributes:
        keys: of each.
        arrays: columns and marks.
        marks: what tells which of them follow each other.
    """

    keys: Ints
    arrays: Arrays
    marks: Marks

    def at(self, chosen: np.ndarray) -> RowsOfBlock:
        """Return some of them."""
        if chosen.all():
            return self
        return RowsOfBlock(
            self.keys[chosen], some_rows(self.arrays, chosen), Marks(*(each[chosen] for each in self.marks))
        )


class Kept(NamedTuple):
    """Rows that follow each other in both runs: keys in the damaged one, and of the first in the new one."""

    begin: int
    end: int
    now: int


class _Noted:
    """Rows of which the state says something by their keys: what these are now, of those that come along."""

    def __init__(self, state: BufferState) -> None:
        self.going = {key: env for env, key, _, _ in state.open_episodes}
        self._keys = np.unique(np.array([*self.going, *state.cut_keys, *state.truncated_keys], np.int64))
        self._now: dict[int, tuple[int, int, int]] = {}

    def note(self, keys: Ints, now: Ints, episode: Ints, place: Ints) -> None:
        """Take in what rows have now: keys, and the number and place in their episodes."""
        low, high = np.searchsorted(self._keys, (keys[0], keys[-1] + 1))
        wanted = self._keys[low:high]
        at = np.searchsorted(keys, wanted)
        there = keys[at] == wanted
        for key, row in zip(wanted[there].tolist(), at[there].tolist(), strict=True):
            self._now[key] = (int(now[row]), int(episode[row]), int(place[row]))

    def keys_now(self, keys: Sequence[int]) -> list[int]:
        """Return what some keys are now, of those that come along."""
        return [self._now[key][0] for key in keys if key in self._now]

    def open_now(self) -> list[list[int]]:
        """Return the open episodes whose newest rows come along."""
        return [[env, *self._now[key]] for key, env in self.going.items() if key in self._now]


class GapsWriter:
    """Writes rows of which others are gone."""

    def __init__(
        self,
        run: SalvagedRun,
        state: BufferState,
        extras: Sequence[tuple[str, Reads]],
        values: Values,
        kept: int,
        episodes: int,
    ) -> None:
        """Args:
        run: where they go.
        state, values: of the damaged buffer.
        extras: what its selection has of each row, by the names of the files; what it has beside them is kept too.
        kept: how many rows will come.
        episodes: how many episodes these are of.
        """
        self._state, self._kept = state, kept
        self._next = self._first = state.added - kept
        self._base = max(0, state.next_episode - episodes)
        self._begun = 0
        self._parts, self._noted = PartsOfEpisodes(), _Noted(state)
        self._going = np.array(sorted(self._noted.going), np.int64)
        self.kept: list[Kept] = []
        """Where rows are that came along."""
        self._left: list[Ints] = []  # keys of rows with which an episode was left where it is
        schema = state.schema
        self._blocks = None if schema is None else BlockWriter(run.segments, schema, self._first)
        nexts: Sequence[Column] = state.next_obs_columns or ()
        self._keeps = keeps_selection(state) and bool(extras or not any(map(of_each, values.names)))
        self._extras = [(reads, run.values(name)) for name, reads in extras]
        self._aside = AsideWriter(run.files, run.generation, "values/", nexts)

    @property
    def blocks(self) -> list[Block]:
        """Where rows lie, once all were written."""
        return [] if self._blocks is None else self._blocks.blocks

    def add(self, rows: RowsOfBlock, aside: Sequence[Aside | AsideRows]) -> None:
        """Write rows; ``aside``: where next observations are kept aside, by the keys that rows had."""
        assert self._blocks is not None
        self._note_kept(rows.keys)
        now = np.arange(self._next, self._next + len(rows.keys))
        self._next += len(rows.keys)
        found = self._parts.follow(rows.marks._replace(now=now))
        self._leave(found.closed)
        episode = self._base + found.part
        self._noted.note(rows.keys, now, episode, found.place)
        self._blocks.add(changed(rows.arrays, {EPISODE: episode, PLACE: found.place, BEHIND: found.behind}))
        begin, end = int(rows.keys[0]), int(rows.keys[-1]) + 1
        oldest = self._state.added - self._state.size
        for values, file in self._extras:
            file.write(values.read(begin - oldest, end - begin)[rows.keys - begin].tobytes())
        if self._state.next_obs_columns:
            self._add_aside(rows.keys, now, [each.among(begin, end) for each in aside])

    def _note_kept(self, keys: Ints) -> None:
        edges = [0, *(np.flatnonzero(np.diff(keys) != 1) + 1).tolist(), len(keys)]
        for begin, end in pairwise(edges):
            first, last, now = int(keys[begin]), int(keys[end - 1]) + 1, self._next + begin
            if self.kept and (before := self.kept[-1]).end == first:  # of the new keys none is left out
                self.kept[-1] = before._replace(end=last)
            else:
                self.kept.append(Kept(first, last, now))

    def _add_aside(self, keys: Ints, now: Ints, found: Sequence[tuple[Ints, list[np.ndarray]]]) -> None:
        having = [each for each in found if len(each[0])]
        if not having:
            return
        own = np.concatenate([each for each, _ in having])
        nexts = [np.concatenate(each) for each in zip(*(each for _, each in having), strict=True)]
        at = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
        order = np.argsort(own)
        order = order[keys[at[order]] == own[order]]  # others do not come along
        self._aside.add(now[at[order]], [each[order] for each in nexts])

    def _leave(self, closed: np.ndarray) -> None:
        left = closed[~closed["ended"] & ~np.isin(closed["key"], self._going)]
        self._left.append(left["now"])

    def finish(self) -> BufferState:
        """Write the rest, and return the state that goes with the rows."""
        self._leave(self._parts.finish())
        if self._blocks is not None:
            self._blocks.flush()
        self._aside.finish()
        state, noted = self._state, self._noted
        keeps = self._keeps
        left = np.concatenate(self._left).tolist()
        return msgspec.structs.replace(
            state,
            size=self._kept,
            dropped={},
            next_episode=max(state.next_episode, self._base + self._parts.parts),
            open_episodes=noted.open_now(),
            cut_keys=sorted({*left, *noted.keys_now(state.cut_keys)}),
            truncated_keys=noted.keys_now(state.truncated_keys),
            written_columns=[],
            selection=state.selection if keeps else "",
            # Which rows an episode had that are gone is not said: its parts are episodes now, of other numbers.
            selector={name: each for name, each in state.selector.items() if name != "begun"} if keeps else {},
        )

    def close(self) -> None:
        """Give files back, if it was not finished."""
        self._aside.close()


def of_each(name: str) -> bool:
    """Whether a file of this name has a number for each row that the selection goes by."""
    return name.startswith("selector.") and not name.startswith("selector.order.")

"""Rows of one rank as they come in: episode by episode, the oldest first."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.buffer.transitions.columns import Column
from pipeline.buffer.transitions.compressed import fitting
from pipeline.buffer.transitions.layout import CUT, END
from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.ring import Ring
from pipeline.errors import Damaged
from pipeline.replay.episode_ids import EpisodeTable
from pipeline.replay.gaps import Gaps, Unfollowed
from pipeline.replay.handing import Extra, SomeRows

Ints = np.ndarray
_LONG = 8
"""Rows of a run, on average, from which on runs are copied one by one."""
_AT_ONCE = 1 << 14


class Assembled:
    """The rows of one rank, in any order until all are there."""

    def __init__(
        self, ring: Ring, rows: int, added: int, extras: Sequence[Extra] = (), nexts: Sequence[Column] = ()
    ) -> None:
        """Args:
        ring: without rows, with columns.
        rows: how many there will be.
        added: what the ring is to say of how many were ever added.
        extras: what there is of each row beside its columns.
        nexts: columns of next observations that are kept aside.
        """
        # Where rows lie in any order, they lie in their own here, from the first slot on.
        self._ring, self._first, self._nexts = ring, 0 if ring.scattered else added - rows, nexts
        ring.restore(added, rows, [])
        self._there = np.zeros(rows, bool)
        self.extras: dict[str, np.ndarray] = {each.name: np.zeros(rows, each.dtype) for each in extras}
        """What the selection has of each row, by name."""
        self._aside: list[tuple[Ints, list[np.ndarray]]] = []

    def put(self, given: SomeRows) -> None:
        """Put some rows where they belong; they are copied."""
        runs, rows = given.runs, given.rows
        if not len(runs):
            return
        storage = self._ring.storage
        assert storage.schema is not None
        assert storage.layout is not None
        names = [column.name for column in storage.layout.large]
        large = fitting(dict(zip(names, given.large, strict=True)), storage.views, storage.schema)
        if len(given.records) >= _LONG * len(runs):
            self._put_runs(runs, rows, given.records, large)
            for begin, count in runs.tolist():
                self._there[begin : begin + count] = True
        else:
            self._there[_places(runs)] = True
            ordered = given.in_order()
            slots = self._slots(_places(runs))
            storage.write_records(slots, ordered.records)
            for name, array in large.items():
                storage.write(slots, {name: array if rows is None else array[rows]})
        if self.extras:
            at = _places(runs)
            for extra, each in zip(self.extras.values(), given.extras, strict=True):
                extra[at] = each if rows is None else each[rows]
        if len(given.aside):
            self._aside.append((given.aside.copy(), [each.copy() for each in given.nexts]))

    def _put_runs(self, runs: Ints, rows: Ints | None, records: np.ndarray, large: dict[str, np.ndarray]) -> None:
        storage, capacity, at = self._ring.storage, self._ring.capacity, 0
        for begin, count in runs.tolist():
            slot, left = (self._first + begin) % capacity, count
            while left:
                some = min(left, capacity - slot)
                if rows is not None:
                    storage.place(slot, rows[at : at + some], records, large)
                else:
                    part, slots = slice(at, at + some), slice(slot, slot + some)
                    storage.write_records(slots, records[part])
                    if large:
                        storage.write(slots, {name: array[part] for name, array in large.items()})
                at, left, slot = at + some, left - some, 0

    def _slots(self, rows: Ints) -> Ints:
        slots: Ints = (self._first + rows) % self._ring.capacity
        return slots

    @property
    def missing(self) -> int:
        """How many rows have not come."""
        return len(self._there) - int(self._there.sum())

    def came(self) -> int:
        """Return a number of which rows have come."""
        return zlib.crc32(np.packbits(self._there).tobytes(), len(self._there))

    def hurt(self, table: EpisodeTable) -> int:
        """Return how many of the episodes lack rows that have not come."""
        return len(np.unique(np.repeat(np.arange(len(table.rows)), table.rows)[~self._there]))

    def finish(self, table: EpisodeTable, open_episodes: list[list[int]], episodes: int = 0) -> None:
        """Link the rows, all of which are there.

        Args:
            table: the episodes, whose rows lie one after the other.
            open_episodes: those that have no end yet, as :class:`~pipeline.buffer.transitions.episodes.Episodes` knows
                them.
            episodes: where rows are of no episode that could be kept together, the number of the next one.
        """
        ring = self._ring
        if ring.storage.schema is None:
            return
        if isinstance(ring, Pool):
            self._finish_pool(ring, episodes)
            return
        ring.episodes.load(open_episodes, len(table.rows))
        ring.link_adjacent(table.rows)
        ends = ring.oldest + np.cumsum(table.rows) - 1
        ring.restore(ring.added, ring.size, ends[ring.mark(END, ends) == CUT].tolist() if ring.size else [])

    @staticmethod
    def _finish_pool(pool: Pool, episodes: int) -> None:
        pool.episodes.load([], episodes)
        rows, first = np.arange(pool.size), pool.added - pool.size
        nowhere = np.full(pool.size, -1, np.int64)  # on the disk they lie among those of others
        pool.take_places([0, pool.size, 0, 0], {"keys": rows, "serials": first + rows, "at": nowhere})
        pool.cut_keys = np.flatnonzero(pool.storage.view(END)[rows] == CUT).tolist()
        pool.relink()

    def leave_out_unfollowed(self, table: EpisodeTable, twins: Mapping[str, str]) -> None:
        """Do without rows whose next observation lies in one that has not come; the row before keeps theirs aside.

        Args:
            table: the episodes, whose rows lie one after the other.
            twins: by the column of a next observation, that of the observation.
        """
        aside = np.zeros(len(self._there), bool)
        for rows, _ in self._aside:
            aside[rows] = True
        found = Unfollowed.of(self._there, aside, table.rows)
        if len(found.before):
            gathered = self._ring.storage.gather(self._slots(found.after), set(twins.values())).arrays
            self._aside.append((found.before, [gathered[twins[column.name]].copy() for column in self._nexts]))
        self._there[found.rows] = False

    def close_gaps(self, table: EpisodeTable, names: int) -> tuple[EpisodeTable, int]:
        """Go on without the rows that have not come. What is left of an episode on each side of a gap is an episode of
        its own, and ends where it is; so do those that were open.

        Args:
            table: the episodes, whose rows lie one after the other.
            names: the first of the names that parts of episodes get beside the one that these have.

        Returns:
            The table of what is left, and how many names it took.
        """
        gaps = Gaps.of(self._there, table.rows)
        now = np.cumsum(self._there) - 1
        self._aside = [(now[rows], nexts) for rows, nexts in self._aside]
        self._move(np.flatnonzero(self._there))
        if gaps.rows:
            storage, slots = self._ring.storage, self._slots(np.arange(gaps.rows))
            storage.write(slots, gaps.marks(storage.view(END)[slots], self._first))
        return gaps.table(table, names)

    def _move(self, kept: Ints) -> None:
        """Have the rows at some places follow each other, up to the newest key."""
        ring, before, count = self._ring, self._first, len(kept)
        self._first = before + len(self._there) - count
        for end in range(count, 0, -_AT_ONCE):  # from behind: rows go to larger keys
            begin = max(0, end - _AT_ONCE)
            old = (before + kept[begin:end]) % ring.capacity
            new = self._slots(np.arange(begin, end))
            ring.storage.write(new, {name: view[old] for name, view in ring.storage.views.items()})
        ring.restore(ring.added, count, [])
        self.extras = {name: each[kept] for name, each in self.extras.items()}
        self._there = np.ones(count, bool)

    def values(self) -> dict[str, np.ndarray]:
        """Return what there is of the rows beside their columns, as a generation would hold it."""
        if not self._nexts:
            return dict(self.extras)
        rows = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in self._aside)])
        order = np.argsort(rows)
        found = dict(self.extras) | {"next_obs.keys.int64": self._first + rows[order]}
        for number, column in enumerate(self._nexts):
            parts = [np.empty((0, *column.shape), column.bits), *(nexts[number] for _, nexts in self._aside)]
            found[f"next_obs.{number}.{column.bits.name}"] = np.concatenate(parts)[order]
        return found

    def check_whole(self, where: str) -> None:
        """Raises:
        Damaged: rows have not come.
        """
        if self.missing:
            raise Damaged(
                f"{where}: {self.missing} of {len(self._there)} rows are in none of its blocks. resume() an older one"
            )


def _places(runs: Ints) -> Ints:
    """Return the rows of runs."""
    counts = runs[:, 1]
    places: Ints = np.repeat(runs[:, 0] - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    return places

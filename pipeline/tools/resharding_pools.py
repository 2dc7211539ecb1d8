"""Resharding of pools, of which others than the oldest rows go first: each row goes by itself.

As of episodes (:mod:`pipeline.checkpoint.reshard`), the oldest goes to the rank that has the least: so row after row to
one rank after the other. No more than some of them are in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Arrays
from pipeline.buffer.transitions.elsewhere import AT_ONCE
from pipeline.buffer.transitions.layout import CUT, END, EPISODE
from pipeline.buffer.transitions.layout import OPEN as GOES_ON
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import SHARDS
from pipeline.checkpoint.parts import shard_of
from pipeline.checkpoint.shares import Room
from pipeline.config.replay import MOST_ROWS
from pipeline.errors import Damaged
from pipeline.replay.episode_ids import check_named, maker, prefix_of
from pipeline.replay.handing import SomeRows
from pipeline.replay.homes import Found
from pipeline.replay.moving import Mover
from pipeline.replay.pool_files import SERIALS, PoolFiles
from pipeline.replay.pooling import numbers_of
from pipeline.replay.shards import part_of
from pipeline.replay.state import BufferState, read_buffer_state
from pipeline.store.files import FilesLike
from pipeline.store.rearranged import Rearranged
from pipeline.store.segments import Block
from pipeline.tools.in_step import Step, in_step
from pipeline.tools.output import Told
from pipeline.tools.packing import places_of
from pipeline.tools.reshard_job import Job, Settled
from pipeline.tools.routes import RoutedHomes, Routes
from pipeline.tools.scattered import ScatteredRows
from pipeline.tools.sources import Source

Ints = np.ndarray
_UID, _AGE = "pool.uid.int64", "pool.age.int64"


class PoolShard:
    """A rank's pool in a generation, or that of one process."""

    def __init__(self, stored: Stored, rank: int, state: BufferState, unknown: dict[str, Any], *, named: bool) -> None:
        """Args:
        stored: the generation, or the shard as if it were one, whose files were compared with its manifest.
        rank: whose.
        state, unknown: of the buffer.
        named: whether rows must have been named when they were saved; else they get names here.

        Raises:
            ConfigError: they were not.
            Damaged: it does not fit together.
        """
        self.stored, self.rank, self.state, self.unknown = stored, rank, state, unknown
        self.files = PoolFiles(stored, state, stored.folder)
        names = [name for name in (_UID, _AGE) if name in self.files.values.names] if len(self) else []
        if named and len(self):
            check_named(stored.folder, named=len(names) == 2)
        counts = {self.files.values.count(name) for name in names}
        if names and counts != {len(self)}:
            raise Damaged(f"{stored.folder}: the names of its rows do not fit together. resume() an older generation")
        self._names = [self.files.file(name) for name in names] if len(names) == 2 else []
        self._serials = self.files.file(SERIALS) if len(self) else None

    def __len__(self) -> int:
        return self.files.size

    def ids(self, begin: int, count: int) -> tuple[Ints, ...]:
        """Return ages, who made rows, how many they had made before, and names.

        Raises:
            Damaged: they are in no order.
        """
        if self._serials is None:
            none = np.empty(0, np.int64)
            return none, none, none, none
        if self._names:
            uid, age = (file.read(begin, count) for file in self._names)
            before = self._names[1].read(begin - 1, 1) if begin and count else age[:0]
            if (np.diff(age, prepend=before) < 0).any() or (count and min(uid.min(), age.min()) < 0):
                raise Damaged(f"{self.stored.folder}: its rows are said to be older than others that came before them")
        else:
            serials = self._serials.read(begin, count)
            uid, age = prefix_of(0, self.rank) | serials, serials  # no life has this number
        return age, *maker(uid), uid

    def opened(self) -> Ints:
        """Return which of the rows, oldest first, are the newest of episodes that have no end yet."""
        return np.array(self.files.rows_of([serial for _, serial, *_ in self.state.open_episodes]), np.int64)


def shards_of(source: Source) -> list[PoolShard]:
    """Read what a generation, whose files were compared with its manifest, says of pools.

    Raises:
        ConfigError: rows have no names.
        Damaged: something is missing, or does not fit together.
    """
    stored = source.stored
    if source.kind != SHARDS:
        return [PoolShard(stored, 0, *read_buffer_state(stored.folder), named=False)]
    parts = [(each.rank, shard_of(stored, each.rank)) for each in stored.manifest.shards]
    return [PoolShard(part, rank, *read_buffer_state(part.folder), named=True) for rank, part in parts]


class PoolsJob(Job):
    """As that, of pools."""

    units, scattered = "rows", True

    def __init__(
        self,
        source: Source,
        shards: Sequence[PoolShard],
        to: int | None,
        capacity: int | None = None,
        *,
        evict: bool = False,
    ) -> None:
        """Args:
        source: the run.
        shards: all of them.
        to: how many ranks there will be; None: as many as there are shards, and each row stays with its rank.
        capacity: how many rows each has room for; None: for all that come to it.
        evict: whether the oldest go if that is not enough.

        Raises:
            ConfigError: it is not, and they may not.
        """
        super().__init__(source, shards)
        self.shards, self._anew, self._capacity = list(shards), to is not None, capacity
        to = len(shards) if to is None else to
        room = Room(MOST_ROWS if capacity is None else capacity, "steps", evict)
        self._evicted = room.too_many_rows(self.there, to) if self._anew else 0
        held = self.there - self._evicted
        self._rows = [part_of(held, to, rank) for rank in range(to)] if self._anew else list(map(len, shards))
        gone = sum(state.added for state in self.states) - held
        self._firsts = [part_of(gone, to, rank) for rank in range(to)]
        self._named: list[Rearranged] = []

    @property
    def rows(self) -> list[int]:
        return self._rows

    @property
    def firsts(self) -> list[int]:
        return self._firsts

    @property
    def evicted(self) -> tuple[int, int]:
        return self._evicted, self._evicted

    @property
    def there(self) -> int:
        return sum(map(len, self.shards))

    @property
    def bytes(self) -> int:
        return sum(each.files.bytes for each in self.shards)

    @property
    def capacity(self) -> int:
        """One number for all."""
        return self._capacity or max([*self.rows, *(state.capacity for state in self.states)])

    def handed(self, files: FilesLike, folder: str, told: Told | None) -> Iterator[tuple[int, SomeRows]]:
        source, wanted = self.source, self.wanted()
        if wanted is None:
            return
        with contextlib.ExitStack() as stack:
            routes = [Routes(each.files, folder, wanted.extras) for each in self.shards]
            for each in routes:
                stack.callback(each.close)
            self._find_out(routes, folder)
            mover = Mover(source.layout, source.tag, files, life=0, rank=0, wanted=wanted, partial=self.partial)
            total, before = self.bytes, 0
            for shard, each in zip(self.shards, routes, strict=True):
                homes = _Homes(each, shard, before)
                blocks = [shard.files.blocks[number] for number in each.needed]
                for found in mover.rows_by(homes, shard.rank, blocks):
                    yield found
                    if told is not None:
                        told(mover.bytes_read, total)
                before += shard.state.next_episode
                each.close()
        self.gone = mover.gone

    def _find_out(self, routes: Sequence[Routes], folder: str) -> None:
        """Say of each row where it goes, and keep what names it."""
        self._named = [Rearranged(folder, rows, [("uid", np.int64), ("age", np.int64)]) for rows in self.rows]
        for step, target, place in self._each():
            age, *_, uid = step.ids
            twice = np.flatnonzero(np.diff(uid) == 0)
            if len(twice):
                raise Damaged(
                    f"{self.source.stored.folder}: row {uid[twice[0]]} is listed twice. Restore it from a copy"
                )
            for rank, named in enumerate(self._named):
                own = np.flatnonzero(target == rank)
                named.put(place[own], {"uid": uid[own], "age": age[own]})
            for run, each in enumerate(routes):
                begin, own = step.of_run(run)
                each.add(begin, target[own], place[own])

    def _each(self) -> Iterator[tuple[Step, Ints, Ints]]:
        """Yield all rows, oldest first, and of each its rank, -1: it has no room, and its place there."""
        if self._anew:
            for step in in_step(self.shards):
                number = step.begin + np.arange(len(step.run)) - self._evicted
                yield step, np.where(number >= 0, number % self.ranks, -1), number // self.ranks
            return
        for rank, shard in enumerate(self.shards):
            for step in in_step([shard]):
                number = step.begin + np.arange(len(step.run))
                yield step._replace(run=np.full(len(number), rank)), np.full(len(number), rank), number

    def settled(self, rank: int, life: int, aside: ScatteredRows | None) -> Settled:
        rows, named = self.rows[rank], self._named[rank] if self._named else None
        if aside is not None and aside.missing and self.partial:
            rows -= aside.leave_out_missing()

        def names(field: str) -> Iterable[np.ndarray]:
            for begin in range(0, self.rows[rank], AT_ONCE):
                if named is not None and aside is not None:
                    found = named.read(begin, min(AT_ONCE, self.rows[rank] - begin))
                    yield found[field][aside.came(begin, begin + len(found))]

        not_kept = part_of(sum(state.pool[2] for state in self.states if state.pool), self.ranks, rank)
        state = {
            "next_episode": sum(state.next_episode for state in self.states),
            "remove": self.states[0].remove,
            "pool": numbers_of(rows, not_kept),
        }
        values = {_UID: names("uid"), _AGE: names("age"), **places_of(self.firsts[rank] + self.rows[rank], rows)}
        return Settled(rows, 0, state, values)

    def lost_in(self, shard: int, block: Block) -> int:
        """Return how many rows lie in a block that cannot be read."""
        files = self.shards[shard].files
        return int(files.rows[files.blocks.index(block)])


class _Homes(RoutedHomes):
    """Where the rows of a shard go. Environments begin anew there: what had no end yet ends where it is."""

    def __init__(self, routes: Routes, shard: PoolShard, before: int) -> None:
        """Args:
        before: what is added to the numbers of episodes, so that those of several shards differ.
        """
        super().__init__(routes)
        self._opened, self._before = shard.opened(), before

    def there(self, block: Block, arrays: Arrays) -> tuple[Ints, Arrays]:
        keys, arrays = super().there(block, arrays)
        ends = arrays[END]
        ends[np.isin(self.records["row"], self._opened) & (ends == GOES_ON)] = CUT
        return keys, arrays

    def mark(self, records: np.ndarray, found: Found, arrays: Arrays) -> None:
        super().mark(records, found, arrays)
        records[EPISODE] += self._before

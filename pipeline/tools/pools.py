"""Rows of pools, of which others than the oldest go first, on the disk: what merging and splitting of them read.

None of them has neighbours, so each goes by itself. It has an id: the part that it belongs to, and its number among all
rows that were added there; of a run that a tool made, part and number of each lie beside the rows. What there is of
each row is read piece by piece; in memory is what there is of episodes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.layout import EPISODE, VERSION
from pipeline.checkpoint.generations import Stored, check_generation
from pipeline.checkpoint.manifest import MadeOf
from pipeline.errors import ConfigError, Damaged
from pipeline.replay.pool_files import SERIALS, ByBlock, PoolFiles
from pipeline.replay.state import read_buffer_state
from pipeline.replay.values import ValuesFile
from pipeline.store.held import HeldSegments
from pipeline.store.rearranged import Rearranged
from pipeline.tools.environments import ENVIRONMENTS_FILE, Home, homes_listed
from pipeline.tools.in_step import Step, in_step
from pipeline.tools.kept_rows import (
    EPISODES_FILE,
    KEY_FILE,
    PART_FILE,
    columns_of_block,
    origins_listed,
    stored_parts,
    where_of,
)
from pipeline.tools.related import Read
from pipeline.tools.sources import Source, check_columns, in_both, in_order

Ints = np.ndarray
_MOST_NEW = 1 << 20  # numbers of episodes that are gathered, before what comes twice is left out


class Sorting(NamedTuple):
    """What rows are told apart by.

    Attributes:
        names: the columns that are looked at.
        of: called with these, and the versions, by name, and how many rows; it returns [n] whole numbers.
    """

    names: Sequence[str]
    of: Callable[[Arrays, int], Ints]


def are_pools(sources: Sequence[Source]) -> bool:
    """Return whether the rows of all sources that have any are those of pools.

    Raises:
        ConfigError: some are, and others are not.
        Damaged, StoreError: a state cannot be read.
    """
    every = [
        (where_of(source, own), read_buffer_state(stored.folder)[0])
        for source in sources
        for stored, own in stored_parts(source)
    ]
    having = [each for each in every if each[1].size] or every
    ringed = [each for each in having if each[1].remove == "fifo"]
    pooled = [each for each in having if each[1].remove != "fifo"]
    if ringed and pooled:
        (one, of_one), (other, of_other) = pooled[0], ringed[0]
        raise ConfigError(
            f"remove: {one} was saved with remove={of_one.remove!r}, and {other} with remove={of_other.remove!r}: rows "
            "that have no neighbours and rows that have them cannot be put together. Merge each kind by itself",
            option="remove",
        )
    return bool(pooled)


class Tail(NamedTuple):
    """The newest row of an open episode that is there.

    Attributes:
        at: which of the rows it is, oldest first.
        env: its environment.
        episode: the number of the episode.
        place: of the row in it.
    """

    at: int
    env: int
    episode: int
    place: int


class PoolRows:
    """The rows of one pool, oldest first."""

    def __init__(self, source: Source, stored: Stored, own: MadeOf) -> None:
        """Args:
        source: the run.
        stored: the generation, or a shard as if it were one.
        own: what names the rows, if nothing was made of the run before.

        Raises:
            Damaged: something is missing or was changed.
        """
        check_generation(stored)
        self.source, self.where, self.options = source, where_of(source, own), dict(stored.manifest.options)
        self.stored = stored
        self.state, self.unknown = read_buffer_state(stored.folder)
        self.schema = self.state.schema
        self.files = PoolFiles(stored, self.state, self.where)
        self.made = any(info.path == PART_FILE for info in stored.manifest.files)
        own = msgspec.structs.replace(own, numbered=self.state.numbered)
        self.parts = list(stored.manifest.made_of) if self.made else [own]
        self.ranks: Ints = np.zeros(len(self.parts), np.int64)
        """Where each part stands among those of all that is read."""
        self._part = self._file(PART_FILE) if self.made else None
        self._number = self._file(KEY_FILE) if self.made else self.files.file(SERIALS) if len(self) else None
        self.episodes: Ints = np.empty(0, np.int64)
        """The numbers of those of which rows are there, rising."""
        self.sorts = Counter[int]()
        """How many rows there are of each sort."""
        self._sorts: Rearranged | None = None

    def __len__(self) -> int:
        return self.files.size

    @property
    def order(self) -> str:
        """Which rows go first, for people."""
        given = self.options.get("remove")
        field = str(given.get("field", "")) if isinstance(given, dict) else ""
        return f"{self.state.remove} of {field}" if field else self.state.remove

    @property
    def bytes(self) -> int:
        """Of payloads that are read."""
        return self.files.bytes

    def _file(self, path: str) -> ValuesFile:
        return ValuesFile(os.path.join(self.stored.folder, path))

    def ids(self, begin: int, count: int) -> tuple[Ints, ...]:
        """Return numbers and parts of rows.

        Raises:
            Damaged: they are in no order.
        """
        if self._number is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        number = self._number.read(begin, count)
        before = self._number.read(begin - 1, 1) if begin and count else number[:0]
        if (np.diff(number, prepend=before) < 0).any():
            raise Damaged(f"{self.where}: what names its rows is in no order. Restore it from a copy")
        part = np.zeros(count, np.int64) if self._part is None else self._part.read(begin, count)
        if count and not 0 <= int(part.min()) <= int(part.max()) < len(self.ranks):
            raise Damaged(f"{self.where}: rows are said to be of parts that are none. Restore it from a copy")
        return number, self.ranks[part]

    def look(self, sorting: Sorting | None, folder: str) -> None:
        """Read the marks of all rows, and no columns but those by which they are told apart; ``folder`` is where what
        is on its way lies meanwhile.

        Raises:
            Damaged: a block is not whole.
        """
        found, new = self.episodes, [self.episodes]
        for arrays in self._each(sorting, folder):
            new.append(np.unique(arrays[EPISODE]).astype(np.int64))
            if sum(map(len, new)) > max(_MOST_NEW, len(found)):
                found = np.unique(np.concatenate([found, *new]))
                new.clear()
        self.episodes = np.unique(np.concatenate([found, *new]))

    def _each(self, sorting: Sorting | None, folder: str) -> Iterator[Arrays]:
        """Yield the marks of the rows of each block; of what sort these are is noted."""
        if self.schema is None or not len(self):
            return
        blocks = [self.files.blocks[number] for number in self.files.needed]
        held = HeldSegments(self.source.layout, self.source.tag, blocks, self.stored.manifest.segments)
        names = [EPISODE, VERSION, *(() if sorting is None else sorting.names)]
        rows = None if sorting is None else self._by_block(folder)
        for number, block in zip(self.files.needed, blocks, strict=True):
            whole = columns_of_block(held, block, self.schema, names, slice(0, block.count))
            arrays = {name: each[self.files.there(number)] for name, each in whole.items()}
            if sorting is not None and rows is not None:
                _, records = rows.of(number)
                rows.into(arrays, records)
                self._note(sorting.of(arrays, len(records)).astype(np.int64), records["row"], folder)
            yield arrays
        held.close()

    def _by_block(self, folder: str) -> ByBlock:
        rows = ByBlock(self.files, folder, [])
        for begin, count in self.files.pieces():
            rows.add(begin, {}, np.arange(count), count)
        return rows

    def _note(self, sorts: Ints, rows: Ints, folder: str) -> None:
        if self._sorts is None:
            self._sorts = Rearranged(folder, len(self), [("sort", np.int64)])
        self._sorts.put(rows, {"sort": sorts})
        own, counts = np.unique(sorts, return_counts=True)
        self.sorts.update(dict(zip(own.tolist(), counts.tolist(), strict=True)))

    def sorts_of(self, begin: int, count: int) -> Ints:
        """Return of what sort rows are."""
        assert self._sorts is not None
        found: Ints = self._sorts.read(begin, count)["sort"]
        return found

    def of_episodes(self, numbers: Ints) -> Ints:
        """Return where some of the episodes stand among :attr:`episodes`.

        Raises:
            Damaged: one has no row there.
        """
        at = np.minimum(np.searchsorted(self.episodes, numbers), len(self.episodes) - 1)
        if len(numbers) and (self.episodes[at] != numbers).any():
            raise Damaged(f"{self.where}: a row is of an episode that has none. Restore it from a copy")
        return at

    def tails(self) -> list[Tail]:
        """Return the open episodes whose newest row is there, by that row. Where it was not kept, the environment
        begins anew."""
        opened = self.state.open_episodes
        rows = self.files.rows_of([serial for _, serial, *_ in opened])
        every = [Tail(at, env, *rest) for at, (env, _, *rest) in zip(rows, opened, strict=True)]
        return sorted(tail for tail in every if tail.at >= 0)

    def origins(self, number: Ints) -> tuple[Ints, Ints]:
        """Return the part that episodes are of, and their numbers there."""
        if not self.made:
            return np.zeros(len(number), np.int64), number
        count = next(info.bytes for info in self.stored.manifest.files if info.path == EPISODES_FILE) // 8
        return origins_listed(self._file(EPISODES_FILE).read(0, count), number, self.where)

    def homes(self, env: int) -> list[Home]:
        """Return the ids of an environment."""
        size = next((info.bytes for info in self.stored.manifest.files if info.path == ENVIRONMENTS_FILE), 0)
        table = self._file(ENVIRONMENTS_FILE).read(0, size // 8) if size else np.empty(0, np.int64)
        return homes_listed(table, self.ranks, env)


def pools_of(sources: Sequence[Source]) -> list[PoolRows]:
    """Return the pools of sources: one each, or one for each shard.

    Raises:
        Damaged: something is missing or was changed.
    """
    return [PoolRows(source, *each) for source in sources for each in stored_parts(source)]


class EveryPool(NamedTuple):
    """All that is read.

    Attributes:
        sources: the runs.
        pools: their rows, of a buffer of ranks one for each.
        parts: what names rows, in the order in which those of one number come.
        origin: [m, 2] of each episode its part and its number there.
        episodes: by pool, which of these its :attr:`PoolRows.episodes` are.
    """

    sources: list[Source]
    pools: list[PoolRows]
    parts: list[MadeOf]
    origin: Ints
    episodes: list[Ints]

    @property
    def size(self) -> int:
        """How many rows there are."""
        return sum(map(len, self.pools))

    @property
    def reads(self) -> list[Read]:
        """What names the rows of each source."""
        return [Read(each.source, each.parts) for each in self.pools]

    @property
    def telling(self) -> list[PoolRows]:
        """Those that say how rows lie: which have rows, or, if none has, all."""
        return [each for each in self.pools if len(each)] or self.pools

    @property
    def schema(self) -> Schema | None:
        """The columns that all have which have any."""
        having = [each.schema for each in self.telling if each.schema is not None]
        return having[0] if having else None

    def in_order(self) -> Iterator[Step]:
        """Yield all rows in the order of their ids: of each its number, and its part.

        Raises:
            ConfigError: two runs have a row in common.
            Damaged: what names rows is in no order.
        """
        for step in in_step(self.pools):
            number, part = step.ids
            twice = np.flatnonzero((np.diff(number) == 0) & (np.diff(part) == 0))
            if len(twice):
                first = int(twice[0])
                having = [self.pools[int(step.run[first + more])].source.directory for more in (0, 1)]
                raise in_both("row", self.parts[int(part[first])], int(number[first]), having)
            yield step


class Division:
    """To which part of all each row goes."""

    def __init__(self, every: EveryPool, *, first: int | None = None, sorts: Sequence[int] = ()) -> None:
        """Args:
        every: all there is.
        first: so many rows are the first part, and the others the second; None: rows go by their sorts.
        sorts: those of the first part, the second, and so on, rising.
        """
        self._every, self._first, self._sorts = every, first, np.array(sorts, np.int64)
        self.counts: list[list[int]]
        """By part, how many rows it has of each pool."""
        if first is None:
            self.counts = [[pool.sorts[sort] for pool in every.pools] for sort in sorts]
        else:
            own = self._first_of(every, first)
            self.counts = [own, [len(pool) - count for pool, count in zip(every.pools, own, strict=True)]]

    @staticmethod
    def _first_of(every: EveryPool, first: int) -> list[int]:
        if first >= every.size:
            return [len(pool) for pool in every.pools]
        counts = np.zeros(len(every.pools), np.int64)
        for step in every.in_order() if first else ():
            counts += np.bincount(step.run[: max(0, first - step.begin)], minlength=len(counts))
        return [int(count) for count in counts]

    def of(self, step: Step) -> Ints:
        """Return the number of the part that rows go to."""
        if self._first is not None:
            return (step.begin + np.arange(len(step.run)) >= self._first).astype(np.int64)
        found = np.empty(len(step.run), np.int64)
        for run, pool in enumerate(self._every.pools):
            begin, own = step.of_run(run)
            if len(own):
                found[own] = np.searchsorted(self._sorts, pool.sorts_of(begin, len(own)))
        return found


def every_pool(
    sources: Sequence[Source], pools: Sequence[PoolRows], folder: str, sorting: Sorting | None = None
) -> EveryPool:
    """Look at all there is. See :meth:`PoolRows.look`.

    Raises:
        ConfigError: two runs have a row in common, or other columns.
        Damaged: something is missing or was changed.
    """
    check_columns("column", [(each.where, _columns(each)) for each in pools if each.schema is not None])
    parts, places = in_order([each.parts for each in pools])
    for each, ranks in zip(pools, places, strict=True):
        each.ranks = ranks
    every = EveryPool(list(sources), list(pools), parts, np.empty((0, 2), np.int64), [])
    for _ in every.in_order():  # each row is there once
        pass
    origins = []
    for each in pools:
        each.look(sorting, folder)
        part, origin = each.origins(each.episodes)
        origins.append(np.column_stack([origin, each.ranks[part]]))
    joined = np.concatenate(origins).astype(np.int64)
    known, of = np.unique(joined, axis=0, return_inverse=True)  # by number, and then by part
    ends = np.cumsum([len(each.episodes) for each in pools])[:-1]
    return every._replace(origin=known[:, ::-1], episodes=np.split(of.reshape(-1), ends))


def _columns(pool: PoolRows) -> Sequence[Column]:
    return pool.state.columns or ()

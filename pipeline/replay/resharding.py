"""Loading the shards of M ranks on N others: what each rank does, and what they agree on.

One process goes the same way by itself where not all rows of a generation come along: as a shard of which it is the
only rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from pipeline.buffer.transitions.compressed import check_compressed
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.sharing import twins_of
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.listed import OPEN
from pipeline.checkpoint.manifest import ShardInfo
from pipeline.config import ReplayOptions
from pipeline.distributed import Ranks
from pipeline.observe import events
from pipeline.replay.assembling import Assembled
from pipeline.replay.episode_ids import EpisodeTable, prefix_of
from pipeline.replay.handing import Wanted, extras_named
from pipeline.replay.loading import Lost, Read, check_columns
from pipeline.replay.moving import Mover
from pipeline.replay.numbering import name_of
from pipeline.replay.parts import check_order, check_sharing, tag_of
from pipeline.replay.selecting import Selected, extras_of, selection_of
from pipeline.replay.shards import HasState, Listed, ShardOnDisk, Shares, common_schema, part_of, read_shards, share_out
from pipeline.replay.state import BufferState, generator_state
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout

Ints = np.ndarray


class FolderOf(Protocol):
    """What is needed of a run's folder."""

    @property
    def layout(self) -> Layout: ...
    @property
    def tag(self) -> int: ...
    @property
    def incarnation(self) -> int: ...


class Reached(Protocol):
    """How a run is reached: by its store, or by somebody who only looks."""

    @property
    def folder(self) -> FolderOf: ...
    @property
    def files(self) -> FilesLike: ...
    @property
    def log(self) -> Any: ...


class Moved(NamedTuple):
    """What one rank has after it.

    Attributes:
        read: its rows, and the rest of its state.
        table: the episodes that they are of.
        named: how many names of this life some of these have got.
    """

    read: Read
    table: EpisodeTable | None
    named: int = 0


class _Prepared(NamedTuple):
    wanted: Wanted | None
    ring: Ring
    own: Assembled


class Moving:
    """One rank's part in it. Every rank reads what the generation lists of all shards, and plans from that alone."""

    def __init__(
        self,
        store: Reached,
        ranks: Ranks,
        options: ReplayOptions,
        stored: Stored,
        like: Ring,
        *,
        shards: list[ShardOnDisk] | None = None,
        partial: bool = False,
    ) -> None:
        """Args:
        store: the run's folder.
        ranks: who takes part.
        options: of the buffer.
        stored: the generation.
        like: a ring without rows.
        shards: what it lists; None: to be read.
        partial: whether to go on with what is whole of it.
        """
        self._store, self._ranks, self._options, self._stored, self._like = store, ranks, options, stored, like
        self._shards, self._partial = shards, partial
        self._gone: list[ShardInfo] = []
        self._came: list[Any] = []  # what tells, on all ranks alike, which rows came of those that were planned

    def rows(self, *, rebalance: bool, evict: bool) -> Moved:
        """Return this rank's rows, and the list of the episodes that they are of.

        Raises:
            ConfigError: there is no room, or the rows are such that only as many ranks as saved them can load them.
            Damaged, StoreError: something is missing, or cannot be read.
            RankFailed: the ranks have planned differently, or one of them failed.
        """
        begun, ranks = time.monotonic(), self._ranks
        shards, shares = self._planned(rebalance=rebalance, evict=evict)
        wanted, ring, own = self._prepared(shards, shares)
        table = table_of(shards, shares, ranks.rank)
        read, lost = self._bring(shards, shares, own, table, wanted)
        named = 0
        if own.missing and self._partial:
            table, named = own.close_gaps(table, prefix_of(self._store.folder.incarnation, ranks.rank))
        own.check_whole(self._stored.folder)
        own.finish(table, open_in(table, ring.oldest), sum(each.state.next_episode for each in shards))
        if ring.scattered:
            ring.not_kept = part_of(sum(each.state.pool[2] for each in shards), ranks.size, ranks.rank)
            # They are known by how many were added before.
            table = table._replace(number=ring.added - ring.size + table.number)
        if len(shards) > 1 or ranks.size > 1:
            self._store.log.info(
                events.RUN_RESHARDED,
                generation=self._stored.manifest.generation,
                shards=len(shards),
                ranks=ranks.size,
                rows=ring.size,
                evicted=shares.plan.evicted_steps,
                bytes_read=read,
                seconds=time.monotonic() - begun,
            )
        ring.numbered = self._numbered(shares)
        return Moved(self._read(shards, ring, own, wanted)._replace(lost=lost), table, named)

    def _numbered(self, shares: Shares) -> str:
        """Return what names the keys that rows have now: another generation, another plan or other rows give another
        name, and the same ones the same."""
        gone = [each.rank for each in self._gone]
        return name_of([self._stored.manifest.checksum, shares.plan.digest(), gone, self._came])

    def _planned(self, *, rebalance: bool, evict: bool) -> tuple[list[ShardOnDisk], Shares]:
        planned: list[tuple[list[ShardOnDisk], Shares]] = []

        def plan() -> str:
            gone = self._gone if self._partial else None
            shards = self._shards or read_shards(self._stored, gone, pools=True)
            for each in shards:
                check_order(each.state, self._like, self._stored.folder)
            capacity, where = self._options.capacity, self._stored.folder
            shares = share_out(shards, self._ranks.size, capacity, rebalance=rebalance, evict=evict, where=where)
            planned.append((shards, shares))
            return shares.plan.digest()

        self._ranks.alike("plan", plan)
        return planned[0]

    def _prepared(self, shards: Sequence[ShardOnDisk], shares: Shares) -> _Prepared:
        """Make room for this rank's rows. What fails in that, memory say, others hear before they wait for rows."""
        prepared: list[_Prepared] = []
        rank = self._ranks.rank

        def prepare() -> None:
            wanted, rows = self._wanted(shards), shares.rows[rank]
            ring = self._like.like(None if wanted is None else wanted.schema)
            extras, nexts = (wanted.extras, wanted.nexts) if wanted is not None else ([], [])
            own = Assembled(ring, rows, shares.firsts[rank] + rows, extras, nexts)
            prepared.append(_Prepared(wanted, ring, own))

        self._ranks.together("room", prepare)
        return prepared[0]

    def _wanted(self, shards: Sequence[ShardOnDisk]) -> Wanted | None:
        """Return what there is to be moved of each row; None: there are no rows.

        Raises:
            UsageError: next observations are to be stored in another way than they are.
            ConfigError: the options do not fit the columns.
        """
        schema, options = common_schema(shards), self._options
        if schema is None:
            return None
        first = next(each for each in shards if each.state.columns is not None)
        check_columns(schema, self._like, self._stored.folder)
        check_sharing(first.state, options, self._stored.folder)
        check_compressed(options.compress, schema)
        nexts = first.state.next_obs_columns or []
        # What rows are worth to the selection travels with them, if it is the same selection.
        return Wanted(schema, extras_named(self._selected(shards).extras), nexts)

    def _same(self, shards: Sequence[ShardOnDisk]) -> bool:
        return all(each.state.selection == tag_of(self._options) for each in shards if each.state.size)

    def _selected(self, shards: Sequence[ShardOnDisk]) -> Selected:
        """Return what the selection goes on from.

        Raises:
            UsageError: priorities were raised to different powers.
        """
        if not self._same(shards):
            return Selected("", [], [], {})
        return selection_of([each.state for each in shards], [extras_of(each.stored) for each in shards])

    def _bring(
        self, shards: list[ShardOnDisk], shares: Shares, own: Assembled, table: EpisodeTable, wanted: Wanted | None
    ) -> tuple[int, Lost]:
        """Bring this rank's rows into ``own``; return how many bytes all ranks have read for that, and what they could
        not."""
        ranks, folder = self._ranks, self._store.folder
        lost = Lost(
            sum(each.held for each in self._gone),
            sum(each.episodes for each in self._gone),
            tuple(f"{self._stored.folder}/shards/{each.rank:04d}" for each in self._gone),
        )
        if wanted is None:
            return 0, lost
        mover = Mover(
            folder.layout,
            folder.tag,
            self._store.files,
            life=folder.incarnation,
            rank=ranks.rank,
            wanted=wanted,
            partial=self._partial,
        )

        def hand_out() -> list[Any]:
            mover.hand_out(shards, shares, own)
            gone = sorted([each.shard, each.block.first] for each in mover.gone)
            return [mover.bytes_read, sorted({each.path for each in mover.gone}), gone]

        def take_in() -> list[int]:
            mover.take_in(ranks.size, own)
            if self._partial and wanted.nexts:
                own.leave_out_unfollowed(table, twins_of(wanted.nexts, self._options.fields))
            return [own.missing, own.hurt(table) if own.missing else 0, own.came()]

        try:
            read = ranks.together("rows", hand_out)
            missing = ranks.together("rows taken", take_in)
        finally:
            mover.clean_up(ranks.size)
        files = sorted({path for _, paths, _ in read for path in paths})
        self._came = [[gone for _, _, gone in read], [came for _, _, came in missing]]
        rows, episodes = (sum(each) for each in zip(*(each[:2] for each in missing), strict=True))
        more = Lost(lost.rows + rows, lost.episodes + episodes, (*lost.files, *files))
        return sum(each for each, _, _ in read), more

    def _read(self, shards: Sequence[ShardOnDisk], ring: Ring, own: Assembled, wanted: Wanted | None) -> Read:
        ranks, options = self._ranks, self._options
        schema = ring.storage.schema
        changed: dict[str, Any] = {
            "columns": None if schema is None else list(schema.columns),
            "capacity": ring.capacity,
            "added": ring.added,
            "size": ring.size,
            "next_episode": ring.episodes.next,
            "open_episodes": ring.episodes.state(),
            "cut_keys": ring.cut_keys_there(),
            "selection": tag_of(options) if self._same(shards) else "",
            "selector": self._selected(shards).state(ring.added),
            "remove": options.remove.by,
            "pool": ring.numbers(),
            "numbered": ring.numbered,
            "next_obs_columns": wanted.nexts if wanted is not None and wanted.nexts else None,
        }
        if self._shards is not None:  # it is its own, and goes on as it was
            gone: dict[str, Any] = {"truncated_keys": [], "dropped": {}, "written_columns": []}
            state = msgspec.structs.replace(self._shards[0].state, **changed, **gone)
        else:
            rank = Rank(ranks.rank, ranks.size, options.seed, self._store.folder.incarnation)
            state = state_of_rank(shards, rank, BufferState(**changed))
        return Read(self._stored, state, shards[0].unknown, [], own.values(), {}, ring)


class Rank(NamedTuple):
    """A rank that is to have a part of what M ranks had.

    Attributes:
        rank, size: its number, and how many there are.
        seed: of the buffer's choices.
        life: the incarnation in which it begins.
    """

    rank: int
    size: int
    seed: int
    life: int


def state_of_rank(shards: Sequence[HasState], rank: Rank, own: BufferState) -> BufferState:
    """Return the state of a rank's buffer: ``own`` says what follows from its rows, and the rest is its part of all
    shards."""
    limiter = {name: sum(each.state.limiter.get(name, 0) for each in shards) for name in ("added", "sampled")}
    return msgspec.structs.replace(
        own,
        stale_updates=sum(each.state.stale_updates for each in shards) if rank.rank == 0 else 0,
        limiter={name: part_of(total, rank.size, rank.rank) for name, total in limiter.items()},
        # The streams of the shards are none of these ranks': each begins one of its own.
        generator=generator_state(np.random.Generator(np.random.PCG64([rank.seed, rank.life, rank.rank]))),
    )


def table_of(shards: Sequence[Listed], shares: Shares, rank: int) -> EpisodeTable:
    """Return the list of a rank's episodes, in their order."""
    parts = []
    for at, shard in enumerate(shards):
        own, numbers = shares.taken(at, rank)
        parts.append(np.stack([numbers, *(each[own] for each in shard.table[1:])]))
    joined = np.concatenate(parts, axis=1)
    number, uid, age, _, rows, flags = joined[:, np.argsort(joined[0])]
    return EpisodeTable(number, uid, age, rows, rows, flags)  # a start that is gone is not there for anybody any more


def open_in(table: EpisodeTable, first: int) -> list[list[int]]:
    """Return (environment, key of the newest row, number, its place) of the episodes that have no end yet."""
    ends = first + np.cumsum(table.rows) - 1
    going = np.flatnonzero(table.flags & OPEN)
    found = np.stack([np.arange(len(going)), ends[going], table.number[going], table.rows[going] - 1], axis=1)
    listed: list[list[int]] = found.tolist()
    return listed

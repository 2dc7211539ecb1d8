"""What a generation holds of each rank's shard, and which of it each of other ranks is to have."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.checkpoint.generations import Stored, check_listed
from pipeline.checkpoint.listed import Listing, Shard
from pipeline.checkpoint.manifest import BLOCKS_FILE, TRAINER_FOLDER, FileInfo, ShardInfo, shard_prefix
from pipeline.checkpoint.parts import shard_of
from pipeline.checkpoint.planned import Plan
from pipeline.checkpoint.reshard import plan
from pipeline.checkpoint.shares import Counted
from pipeline.errors import ConfigError, Damaged
from pipeline.replay.episode_ids import EpisodeTable, maker, table_of_rows
from pipeline.replay.loading import read_values
from pipeline.replay.state import STATE_FILE, BufferState, read_buffer_state
from pipeline.store.segments import Block, needed_blocks, read_blocks

Ints = np.ndarray


class Listed(Protocol):
    """What is listed of a shard, so that what is in it can be shared out."""

    @property
    def rank(self) -> int: ...
    @property
    def table(self) -> EpisodeTable: ...
    @property
    def added(self) -> int:
        """How many had ever been added of what counts."""
        ...


S = TypeVar("S", bound=Listed)


class ShardOnDisk(NamedTuple):
    """A rank's part of a generation, without its rows."""

    rank: int
    stored: Stored
    state: BufferState
    unknown: dict[str, Any]
    table: EpisodeTable
    blocks: list[Block]
    pool: Mapping[str, np.ndarray] = {}
    """Where rows lie in any order: their ``keys`` and their places (``at``), oldest first."""
    before: int = 0
    """What is to be added to the numbers of its episodes, so that those of several shards differ."""

    @property
    def added(self) -> int:
        """How many rows were ever added."""
        return self.state.added

    @property
    def oldest(self) -> int:
        """The key of its oldest row."""
        return self.state.added - self.state.size

    def needed(self) -> list[Block]:
        """Return the blocks in which rows lie that are there, in their order."""
        if self.pool:
            return sorted(self.blocks, key=lambda block: block.first)
        return needed_blocks(self.blocks, self.oldest) if self.state.size else []

    def check(self) -> None:
        """Compare its files with the manifest. Blocks.

        Raises:
            Damaged: one is missing, or was changed.
        """
        for info in self.stored.manifest.files:
            check_listed(self.stored, info)

    def values(self) -> dict[str, np.ndarray]:
        """Read what it has for each row, compared with the manifest. Blocks."""
        self.check()
        return read_values(self.stored)


def trainer_of(stored: Stored) -> Stored:
    """Return the trainer's part of a generation."""
    files = [info for info in stored.manifest.files if info.path.startswith(TRAINER_FOLDER + "/")]
    return Stored(stored.folder, msgspec.structs.replace(stored.manifest, files=files))


def read_shards(stored: Stored, gone: list[ShardInfo] | None = None, *, pools: bool = False) -> list[ShardOnDisk]:
    """Read what a generation says of all its shards, but for payloads and what is of each row. Blocks.

    Args:
        stored: the generation.
        gone: takes what the manifest says of shards that cannot be read, where that is allowed: they have no rows then.
        pools: whether rows may lie in any order.

    Raises:
        ConfigError: the rows are such that only as many ranks as wrote them can load them.
        Damaged: something is missing, or does not fit together.
    """
    whole = gone is not None
    shards = each_shard(
        stored,
        gone,
        lambda part, rank: read_shard(part, rank, whole=whole, pools=pools),
        lambda part, rank: ShardOnDisk(rank, part, BufferState(), {}, EpisodeTable.none(), []),
    )
    before = np.cumsum([0, *(each.state.next_episode for each in shards)]).tolist()
    return [each._replace(before=number) for each, number in zip(shards, before, strict=False)]


def each_shard(
    stored: Stored, gone: list[ShardInfo] | None, read: Callable[[Stored, int], S], none: Callable[[Stored, int], S]
) -> list[S]:
    """Read each shard that a generation lists; of one that cannot be read, where that is allowed, ``none``.

    Raises:
        Damaged: ranks are missing; or as ``read`` does, where ``gone`` is None.
    """
    manifest = stored.manifest
    if [each.rank for each in manifest.shards] != list(range(manifest.world_size)):
        raise Damaged(f"{stored.folder}: {manifest.world_size} ranks wrote it, and shards are listed of others")
    shards = []
    for info in manifest.shards:
        part = shard_of(stored, info.rank)
        try:
            shards.append(read(part, info.rank))
        except Damaged:
            if gone is None:
                raise
            gone.append(info)
            shards.append(none(part, info.rank))
    return shards


def read_shard(stored: Stored, rank: int, *, whole: bool = False, pools: bool = False) -> ShardOnDisk:
    """Read what a generation says of a shard; ``whole``: what is of each row is compared with the manifest too;
    ``pools``: rows may lie in any order. Blocks.

    Raises:
        ConfigError, Damaged: as :func:`read_shards`.
    """
    needed = [
        each for each in stored.manifest.files if each.path in (STATE_FILE, BLOCKS_FILE) or _of_episodes(each.path)
    ]
    check_files(stored, rank, needed, whole=whole)
    state, unknown = read_buffer_state(stored.folder)
    blocks = read_blocks(os.path.join(stored.folder, BLOCKS_FILE))
    _check_movable(state, stored.folder, pools=pools)
    part = Stored(stored.folder, msgspec.structs.replace(stored.manifest, files=needed))
    values, pool = read_values(part), {}
    if state.remove == "fifo":
        table = EpisodeTable.of(values, stored.folder)
    else:
        table = table_of_rows(values, rank, stored.folder, named=True)
        pool = {name: values[f"pool.{name}.int64"] for name in ("keys", "at")}
    if int(table.rows.sum()) != state.held:
        raise Damaged(
            f"{stored.folder}: {state.held} rows, and {table.rows.sum()} in the list of episodes. resume() an older "
            "generation"
        )
    return ShardOnDisk(rank, stored, state, unknown, table, blocks, pool)


def check_files(stored: Stored, rank: int, needed: Sequence[FileInfo], *, whole: bool = False) -> None:
    """Compare files of a shard with the manifest: those that are needed; ``whole``: all of them.

    Raises:
        Damaged: there are none, or one is not whole.
    """
    if not needed:
        raise Damaged(f"{stored.folder}: the shard of rank {rank} is missing. resume() an older generation")
    for info in stored.manifest.files if whole else needed:
        check_listed(stored, info)


def _of_episodes(path: str) -> bool:
    return path.startswith(("values/episodes.", "values/pool."))


class HasState(Protocol):
    """A shard, whose state is known."""

    @property
    def rank(self) -> int: ...
    @property
    def state(self) -> BufferState: ...


def common_schema(shards: Sequence[HasState]) -> Schema | None:
    """Return the columns that all shards with rows have.

    Raises:
        Damaged: they differ; the column is named.
    """
    having = [each for each in shards if each.state.columns is not None]
    for each in having[1:]:
        own, other = ((of.state.columns, of.state.next_obs_columns) for of in (each, having[0]))
        if own != other:
            raise unlike(each.rank, each.state.columns, having[0].rank, having[0].state.columns)
    return having[0].state.schema if having else None


def unlike(rank: int, columns: Sequence[Column] | None, first: int, others: Sequence[Column] | None) -> Damaged:
    """Return the error about a shard that has other columns than the first one; it names what differs."""
    for one, other in zip(columns or (), others or (), strict=False):
        if one != other:
            return Damaged(f"shard {rank} has the column {one}, and shard {first} has {other}")
    return Damaged(f"shard {rank} has other columns than shard {first}")


class Shares(NamedTuple):
    """Which rank is to have which rows.

    Attributes:
        plan: which episodes each has.
        ranks: by shard, the rank of each episode in its table; -1: it was evicted.
        places: by shard, where its first row lies among those of its rank, which are in the episodes' order.
        episodes: by shard, its number among the episodes of its rank.
        rows: how many rows each rank has.
        firsts: the key of the first of them: what was counted of rows in the shards is divided among the ranks.
    """

    plan: Plan
    ranks: list[Ints]
    places: list[Ints]
    episodes: list[Ints]
    rows: list[int]
    firsts: list[int]

    def taken(self, shard: int, rank: int) -> tuple[Ints, Ints]:
        """Return which episodes of a shard a rank is to have: their places in its table, and their numbers there."""
        own = np.flatnonzero(self.ranks[shard] == rank)
        return own, self.episodes[shard][own]


def part_of(total: int, size: int, rank: int) -> int:
    """Return a rank's part of what was counted on all: together they are the same."""
    return total // size + (rank < total % size)


def share_out(
    shards: Sequence[Listed],
    size: int,
    capacity: int | None,
    *,
    rebalance: bool,
    evict: bool,
    where: str,
    counted: Counted = "steps",
) -> Shares:
    """Plan which of ``size`` ranks is to have which episodes, oldest first in each; ``counted``: what of ``capacity``
    is, and what was added.

    Raises:
        ConfigError: there is no room.
        Damaged: the shards do not fit together.
    """
    listing = _listing(shards)
    found = plan(
        listing,
        size,
        1,
        shards=_said(shards),
        rebalance=rebalance,
        capacity=capacity,
        counted=counted,
        evict_oldest=evict,
        where=where,
    )
    held = sum(each.steps if counted == "steps" else len(each.uids) for each in found.targets)
    return _shares(found, listing, shards, sum(each.added for each in shards) - held)


def oldest_first(shard: Listed, where: str) -> Ints:
    """Return the places in its table of the episodes of a shard, as :func:`share_out` has them follow each other in a
    single rank that has room for all.

    Raises:
        Damaged: they do not fit together.
    """
    listing = _listing([shard])
    listing.check(_said([shard]), where)
    return listing.age_order()


def _said(shards: Sequence[Listed]) -> list[Shard]:
    return [
        Shard(
            rank=each.rank,
            name=shard_prefix(each.rank),
            steps=int(each.table.rows.sum()),
            episodes=len(each.table.uid),
        )
        for each in shards
    ]


def _shares(found: Plan, listing: Listing, shards: Sequence[Listed], gone: int) -> Shares:
    """Return what a plan says by shard; ``gone``: how much was added, and is not there."""
    size = len(found.targets)
    order = np.argsort(listing.uid)
    uids = listing.uid[order]
    ranks, places, episodes = (np.full(listing.number, -1, np.int64) for _ in range(3))
    rows = []
    for target in found.targets:
        at = order[np.searchsorted(uids, np.array(target.uids, np.int64))]
        lengths = listing.steps[at]
        ranks[at], episodes[at] = target.rank, np.arange(len(at))
        places[at] = np.cumsum(lengths) - lengths
        rows.append(int(lengths.sum()))
    ends = np.cumsum([len(each.table.uid) for each in shards])[:-1]
    firsts = [part_of(gone, size, rank) for rank in range(size)]
    return Shares(found, np.split(ranks, ends), np.split(places, ends), np.split(episodes, ends), rows, firsts)


def _listing(shards: Sequence[Listed]) -> Listing:
    def joined(of: Callable[[EpisodeTable], Ints]) -> Ints:
        return np.concatenate([of(each.table) for each in shards]).astype(np.int64)

    uid = joined(lambda table: table.uid)
    rank, number = maker(uid)
    zeros = np.zeros_like(uid)
    shard = np.repeat([each.rank for each in shards], [len(each.table.uid) for each in shards]).astype(np.int64)
    return Listing(
        uid=uid,
        step=joined(lambda table: table.age),
        rank=rank,
        sequence=number,
        length=joined(lambda table: table.length),
        steps=joined(lambda table: table.rows),
        shard=shard,
        row=zeros,
        flags=joined(lambda table: table.flags),
        bytes=zeros,
    )


def _check_movable(state: BufferState, where: str, *, pools: bool) -> None:
    """Refuse what can be loaded by as many ranks as wrote it alone.

    Raises:
        ConfigError: the rows are such.
    """
    alone = f"{where}: such rows are loaded by as many ranks as saved them"
    if state.remove != "fifo" and not pools:
        raise ConfigError.of("remove", state.remove, alone)

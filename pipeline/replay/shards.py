"""What a generation holds of each rank's shard, and which of it each of other ranks is to have."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Schema
from pipeline.checkpoint.generations import Stored, check_listed
from pipeline.checkpoint.listed import Listing, Shard
from pipeline.checkpoint.manifest import BLOCKS_FILE, TRAINER_FOLDER, ShardInfo, shard_prefix
from pipeline.checkpoint.parts import shard_of
from pipeline.checkpoint.planned import Plan
from pipeline.checkpoint.reshard import plan
from pipeline.errors import ConfigError, Damaged
from pipeline.replay.episode_ids import EpisodeTable, maker
from pipeline.replay.loading import read_values
from pipeline.replay.state import STATE_FILE, BufferState, read_buffer_state
from pipeline.store.segments import Block, needed_blocks, read_blocks

Ints = np.ndarray


class ShardOnDisk(NamedTuple):
    """A rank's part of a generation, without its rows."""

    rank: int
    stored: Stored
    state: BufferState
    unknown: dict[str, Any]
    table: EpisodeTable
    blocks: list[Block]

    @property
    def oldest(self) -> int:
        """The key of its oldest row."""
        return self.state.added - self.state.size

    def needed(self) -> list[Block]:
        """Return the blocks in which rows lie that are there, in their order."""
        return needed_blocks(self.blocks, self.oldest) if self.state.size else []

    def values(self) -> dict[str, np.ndarray]:
        """Read what it has for each row, compared with the manifest. Blocks."""
        for info in self.stored.manifest.files:
            check_listed(self.stored, info)
        return read_values(self.stored)


def trainer_of(stored: Stored) -> Stored:
    """Return the trainer's part of a generation."""
    files = [info for info in stored.manifest.files if info.path.startswith(TRAINER_FOLDER + "/")]
    return Stored(stored.folder, msgspec.structs.replace(stored.manifest, files=files))


def read_shards(stored: Stored, gone: list[ShardInfo] | None = None) -> list[ShardOnDisk]:
    """Read what a generation says of all its shards, but for payloads and what is of each row. Blocks.

    Args:
        stored: the generation.
        gone: takes what the manifest says of shards that cannot be read, where that is allowed: they have no rows then.

    Raises:
        ConfigError: the rows are such that only as many ranks as wrote them can load them.
        Damaged: something is missing, or does not fit together.
    """
    manifest = stored.manifest
    if [each.rank for each in manifest.shards] != list(range(manifest.world_size)):
        raise Damaged(f"{stored.folder}: {manifest.world_size} ranks wrote it, and shards are listed of others")
    shards = []
    for info in manifest.shards:
        part = shard_of(stored, info.rank)
        try:
            shards.append(read_shard(part, info.rank, whole=gone is not None))
        except Damaged:
            if gone is None:
                raise
            gone.append(info)
            shards.append(ShardOnDisk(info.rank, part, BufferState(), {}, EpisodeTable.none(), []))
    return shards


def read_shard(stored: Stored, rank: int, *, whole: bool = False) -> ShardOnDisk:
    """Read what a generation says of a shard; ``whole``: what is of each row is compared with the manifest too. Blocks.

    Raises:
        ConfigError, Damaged: as :func:`read_shards`.
    """
    needed = [
        each for each in stored.manifest.files if each.path in (STATE_FILE, BLOCKS_FILE) or _of_episodes(each.path)
    ]
    if not needed:
        raise Damaged(f"{stored.folder}: the shard of rank {rank} is missing. resume() an older generation")
    for info in stored.manifest.files if whole else needed:
        check_listed(stored, info)
    state, unknown = read_buffer_state(stored.folder)
    blocks = read_blocks(os.path.join(stored.folder, BLOCKS_FILE))
    _check_movable(state)
    part = Stored(stored.folder, msgspec.structs.replace(stored.manifest, files=needed))
    table = EpisodeTable.of(read_values(part), stored.folder)
    if int(table.rows.sum()) != state.held:
        raise Damaged(
            f"{stored.folder}: {state.held} rows, and {table.rows.sum()} in the list of episodes. resume() an older "
            "generation"
        )
    return ShardOnDisk(rank, stored, state, unknown, table, blocks)


def _of_episodes(path: str) -> bool:
    return path.startswith("values/episodes.")


def common_schema(shards: Sequence[ShardOnDisk]) -> Schema | None:
    """Return the columns that all shards with rows have.

    Raises:
        Damaged: they differ; the column is named.
    """
    having = [each for each in shards if each.state.columns is not None]
    for each in having[1:]:
        for one, other in zip(each.state.columns or (), having[0].state.columns or (), strict=False):
            if one != other:
                raise Damaged(f"shard {each.rank} has the column {one}, and shard {having[0].rank} has {other}")
        own, other_ = ((of.state.columns, of.state.next_obs_columns) for of in (each, having[0]))
        if own != other_:
            raise Damaged(f"shard {each.rank} has other columns than shard {having[0].rank}")
    return having[0].state.schema if having else None


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


def part_of(total: int, size: int, rank: int) -> int:
    """Return a rank's part of what was counted on all: together they are the same."""
    return total // size + (rank < total % size)


def share_out(
    shards: Sequence[ShardOnDisk], size: int, capacity: int, *, rebalance: bool, evict: bool, where: str
) -> Shares:
    """Plan which of ``size`` ranks is to have which episodes, oldest first in each.

    Raises:
        ConfigError: there is no room.
        Damaged: the shards do not fit together.
    """
    listing = _listing(shards)
    listed = [
        Shard(
            rank=each.rank,
            name=shard_prefix(each.rank),
            steps=int(each.table.rows.sum()),
            episodes=len(each.table.uid),
        )
        for each in shards
    ]
    found = plan(
        listing, size, 1, shards=listed, rebalance=rebalance, capacity=capacity, evict_oldest=evict, where=where
    )
    order = np.argsort(listing.uid)
    uids, steps = listing.uid[order], listing.steps[order]
    ranks, places, episodes = (np.full(listing.number, -1, np.int64) for _ in range(3))
    rows = []
    for target in found.targets:
        at = order[np.searchsorted(uids, np.array(target.uids, np.int64))]
        lengths = listing.steps[at]
        ranks[at], episodes[at] = target.rank, np.arange(len(at))
        places[at] = np.cumsum(lengths) - lengths
        rows.append(int(lengths.sum()))
    assert len(steps) == listing.number
    ends = np.cumsum([len(each.table.uid) for each in shards])[:-1]
    gone = sum(each.state.added for each in shards) - sum(rows)
    firsts = [part_of(gone, size, rank) for rank in range(size)]
    return Shares(found, np.split(ranks, ends), np.split(places, ends), np.split(episodes, ends), rows, firsts)


def _listing(shards: Sequence[ShardOnDisk]) -> Listing:
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


def _check_movable(state: BufferState) -> None:
    """Refuse what can be loaded by as many ranks as wrote it alone.

    Raises:
        ConfigError: the rows are such.
    """
    alone = "such rows are loaded by as many ranks as saved them"
    if state.remove != "fifo":
        raise ConfigError.of("remove", state.remove, alone)

"""What a generation holds of each rank's trajectories, and which of them each of other ranks is to have."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Schema
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import BLOCKS_FILE, OWN_FOLDER, ShardInfo
from pipeline.errors import Damaged
from pipeline.replay.episode_ids import EpisodeTable
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.loading import read_values
from pipeline.replay.shards import Shares, check_files, each_shard, unlike
from pipeline.replay.trajectory_loading import Reading, ReadTrajectories, blocks_of, read_infos
from pipeline.replay.trajectory_state import TrajectoryState
from pipeline.store.segments import Block

Ints = np.ndarray


class TrajectoriesOnDisk(NamedTuple):
    """A rank's part of a generation, without payloads. Of what is of each trajectory the oldest comes first."""

    rank: int
    stored: Stored
    state: TrajectoryState
    unknown: dict[str, Any]
    infos: list[TrajectoryInfo]
    blocks: list[Block]
    table: EpisodeTable

    @property
    def added(self) -> int:
        """How many trajectories were ever added."""
        return self.state.trajectory_counter

    def without(self, places: Collection[int]) -> TrajectoriesOnDisk:
        """Return it without some of its trajectories, by their places."""
        if not places:
            return self
        kept = [at for at in range(len(self.infos)) if at not in places]
        infos, blocks = [self.infos[at] for at in kept], [self.blocks[at] for at in kept]
        return self._replace(infos=infos, blocks=blocks, table=EpisodeTable(*(each[kept] for each in self.table)))

    def read(self, reading: Reading) -> ReadTrajectories:
        """Read its trajectories, as many as there is room for.

        Raises:
            Damaged, StoreError: one cannot be read.
            ConfigError: they do not fit into memory.
        """
        shelf = reading.shelf(self.state.schema, self.infos, self.blocks, self.added)
        return ReadTrajectories(self.stored, self.state, self.unknown, {}, shelf, [])


def read_trajectory_shards(stored: Stored, gone: list[ShardInfo] | None = None) -> list[TrajectoriesOnDisk]:
    """Read what a generation says of all its shards, but for payloads. Blocks.

    Args:
        stored: the generation.
        gone: takes what the manifest says of shards that cannot be read, where that is allowed: they have none then.

    Raises:
        Damaged, NewerFormat: as :func:`read_trajectory_shard`; or a rank is missing.
    """
    return each_shard(
        stored,
        gone,
        read_trajectory_shard,
        lambda part, rank: TrajectoriesOnDisk(rank, part, TrajectoryState(), {}, [], [], EpisodeTable.none()),
    )


def read_trajectory_shard(stored: Stored, rank: int) -> TrajectoriesOnDisk:
    """Read what a generation says of a shard, compared with its manifest. Blocks.

    Raises:
        Damaged: something is missing, or does not fit together.
        NewerFormat: it was written by a newer version.
    """
    needed = [each for each in stored.manifest.files if not each.path.startswith(OWN_FOLDER + "/")]
    check_files(stored, rank, needed)
    state, unknown, infos = read_infos(stored)
    blocks = blocks_of(os.path.join(stored.folder, BLOCKS_FILE), state, moved=True)
    values = read_values(stored)
    uid, age = (values.get(f"{name}.int64", np.empty(0, np.int64)) for name in ("uid", "age"))
    if not len(uid) == len(age) == len(infos):
        raise Damaged(
            f"{stored.folder}: of {len(infos)} trajectories, {len(uid)} are named, and {len(age)} have an age. "
            "resume() an older generation"
        )
    number = np.array([each.trajectory_id for each in infos], np.int64)
    rows = np.array([each.num_samples for each in infos], np.int64)
    table = EpisodeTable(number, uid, age, rows, rows, np.zeros_like(rows))
    return TrajectoriesOnDisk(rank, stored, state, unknown, infos, blocks, table)


def schema_of(shards: Sequence[TrajectoriesOnDisk]) -> Schema | None:
    """Return the columns that all shards with trajectories have.

    Raises:
        Damaged: they differ; the column is named.
    """
    having = [each for each in shards if each.state.columns is not None]
    for each in having[1:]:
        if each.state.columns != having[0].state.columns:
            raise unlike(each.rank, each.state.columns, having[0].rank, having[0].state.columns)
    return having[0].state.schema if having else None


def listed_for(
    rank: int, shards: Sequence[TrajectoriesOnDisk], shares: Shares
) -> tuple[list[TrajectoryInfo], list[Block], EpisodeTable]:
    """Return what is known of a rank's trajectories, where they lie, and their names, oldest first."""
    places = [shares.taken(at, rank) for at in range(len(shards))]
    order = np.argsort(np.concatenate([numbers for _, numbers in places]))
    of = np.concatenate([np.full(len(own), at) for at, (own, _) in enumerate(places)])[order].tolist()
    at = np.concatenate([own for own, _ in places])[order].tolist()
    each = [(shards[shard], place) for shard, place in zip(of, at, strict=True)]
    infos, blocks = [shard.infos[place] for shard, place in each], [shard.blocks[place] for shard, place in each]
    columns = zip(*(shard.table for shard in shards), strict=True)
    parts = [
        np.concatenate([one[own] for one, (own, _) in zip(column, places, strict=True)])[order] for column in columns
    ]
    return infos, blocks, EpisodeTable(*parts)

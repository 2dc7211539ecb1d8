"""What a generation holds of each rank's trajectories, and bringing them to other ranks.

Payloads stay where they lie, whoever wrote them: what moves is the entry in a rank's list. Each payload is read by the
rank that is to have it, and by no other one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Schema
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import BLOCKS_FILE, OWN_FOLDER
from pipeline.config import TrajectoryOptions
from pipeline.distributed import Ranks
from pipeline.errors import Damaged
from pipeline.observe import events
from pipeline.replay.episode_ids import EpisodeTable
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.loading import read_values
from pipeline.replay.rank_store import RankStore
from pipeline.replay.saving import Loading
from pipeline.replay.shards import Shares, check_files, each_shard, share_out, unlike
from pipeline.replay.shelf import Shelf
from pipeline.replay.state import generator_state
from pipeline.replay.trajectory_loading import Reading, ReadTrajectories, Room, blocks_of, read_infos
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

    def read(self, reading: Reading) -> ReadTrajectories:
        """Read its trajectories, as many as there is room for.

        Raises:
            Damaged, StoreError: one cannot be read.
            ConfigError: they do not fit into memory.
        """
        shelf = reading.shelf(self.state.schema, self.infos, self.blocks, self.added)
        return ReadTrajectories(self.stored, self.state, self.unknown, {}, shelf, [])


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


class Had(NamedTuple):
    """What one rank has of a generation.

    Attributes:
        read: its trajectories, and the rest of its state.
        table: their names.
    """

    read: ReadTrajectories
    table: EpisodeTable


class TrajectoryMoving:
    """One rank's part in a load. Where shares are made anew, every rank reads what the generation lists of all shards,
    and plans from that alone."""

    def __init__(
        self, store: RankStore, ranks: Ranks, options: TrajectoryOptions, room: Room, loading: Loading
    ) -> None:
        self._store, self._ranks, self._options, self._loading = store, ranks, options, loading
        folder = store.folder
        self._reading = Reading(folder.layout, folder.tag, room, "lazy" if loading.lazily else "full")

    def as_it_was(self, shard: Stored) -> Had:
        """Return this rank's shard as it was; of a smaller capacity, the newest trajectories of it.

        Raises:
            Damaged, StoreError: something is missing, or cannot be read.
            ConfigError: the rows do not fit into memory.
        """
        own = read_trajectory_shard(shard, self._ranks.rank)
        return Had(own.read(self._reading), own.table)

    def shared_out(self, stored: Stored) -> Had:
        """Return this rank's part of all shards.

        Raises:
            ConfigError: there is no room.
            Damaged, StoreError: something is missing, or cannot be read.
            RankFailed: the ranks have planned differently, or one of them failed.
        """
        begun, ranks = time.monotonic(), self._ranks
        planned: list[tuple[list[TrajectoriesOnDisk], Schema | None, Shares]] = []

        def plan() -> str:
            shards = each_shard(stored, None, read_trajectory_shard, read_trajectory_shard)
            schema = schema_of(shards)
            planned.append((shards, schema, self._shares(shards, stored)))
            return planned[0][2].plan.digest()

        ranks.alike("plan", plan)
        shards, schema, shares = planned[0]
        infos, blocks, table = listed_for(ranks.rank, shards, shares)
        end = shares.firsts[ranks.rank] + len(infos)
        found: list[Shelf] = []

        def read() -> int:
            found.append(self._reading.shelf(schema, infos, blocks, end))
            return self._reading.bytes_read

        bytes_read = ranks.together("trajectories", read)
        self._store.log.info(
            events.RUN_RESHARDED,
            generation=stored.manifest.generation,
            shards=len(shards),
            ranks=ranks.size,
            rows=shares.rows[ranks.rank],
            evicted=shares.plan.evicted_steps,
            bytes_read=sum(bytes_read),
            seconds=time.monotonic() - begun,
        )
        # The streams of the shards are none of these ranks': each begins one of its own.
        rng = np.random.Generator(np.random.PCG64([self._options.seed, self._store.folder.incarnation, ranks.rank]))
        state = TrajectoryState(
            columns=None if schema is None else list(schema.columns),
            size=len(infos),
            total_samples=shares.rows[ranks.rank],
            trajectory_counter=end,
            generator=generator_state(rng),
        )
        read_ = ReadTrajectories(stored, state, shards[0].unknown, {}, found[0], [])
        return Had(read_, table._replace(number=np.arange(end - len(infos), end)))

    def _shares(self, shards: Sequence[TrajectoriesOnDisk], stored: Stored) -> Shares:
        return share_out(
            shards,
            self._ranks.size,
            self._options.capacity,
            rebalance=self._loading.rebalance,
            evict=self._loading.evict_oldest,
            where=stored.folder,
            counted="episodes",
        )

"""Bringing trajectories of M ranks to N others: what each rank does, and what they agree on.

Payloads stay where they lie, whoever wrote them: what moves is the entry in a rank's list. Each payload is read by the
rank that is to have it, and by no other one; but where damage is looked for, which comes before the plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Schema
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import ShardInfo
from pipeline.config import TrajectoryOptions
from pipeline.distributed import Ranks
from pipeline.observe import events
from pipeline.replay.episode_ids import EpisodeTable
from pipeline.replay.loading import Lost
from pipeline.replay.moving import part_to_read
from pipeline.replay.numbering import name_of
from pipeline.replay.rank_store import RankStore
from pipeline.replay.saving import Loading
from pipeline.replay.shards import Shares, share_out
from pipeline.replay.shelf import Shelf
from pipeline.replay.state import generator_state
from pipeline.replay.thinning import tell_lost
from pipeline.replay.trajectory_loading import Reading, ReadTrajectories, Room
from pipeline.replay.trajectory_shards import (
    TrajectoriesOnDisk,
    listed_for,
    read_trajectory_shard,
    read_trajectory_shards,
    schema_of,
)
from pipeline.replay.trajectory_state import TrajectoryState
from pipeline.store.segments import PayloadReader


class Had(NamedTuple):
    """What one rank has of a generation.

    Attributes:
        read: its trajectories, and the rest of its state.
        table: their names.
    """

    read: ReadTrajectories
    table: EpisodeTable


class _Planned(NamedTuple):
    shards: list[TrajectoriesOnDisk]
    schema: Schema | None
    shares: Shares


class TrajectoryMoving:
    """One rank's part in a load. Where shares are made anew, every rank reads what the generation lists of all shards,
    and plans from that alone."""

    def __init__(
        self, store: RankStore, ranks: Ranks, options: TrajectoryOptions, room: Room, loading: Loading
    ) -> None:
        self._store, self._ranks, self._options, self._loading = store, ranks, options, loading
        folder = store.folder
        self._came: list[Any] = []  # what tells, on all ranks alike, which trajectories came
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
        whole, lost = self._whole(stored) if self._loading.allow_partial else (None, Lost())
        shards, schema, shares = self._planned(stored, whole)
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
            numbered=name_of([stored.manifest.checksum, shares.plan.digest(), self._came]),
        )
        read_ = ReadTrajectories(stored, state, shards[0].unknown, {}, found[0], [], lost)
        return Had(read_, table._replace(number=np.arange(end - len(infos), end)))

    def _planned(self, stored: Stored, whole: list[TrajectoriesOnDisk] | None) -> _Planned:
        planned: list[_Planned] = []
        loading = self._loading

        def plan() -> str:
            shards = read_trajectory_shards(stored) if whole is None else whole
            shares = share_out(
                shards,
                self._ranks.size,
                self._options.capacity,
                rebalance=loading.rebalance or loading.allow_partial,
                evict=loading.evict_oldest,
                where=stored.folder,
                counted="episodes",
            )
            planned.append(_Planned(shards, schema_of(shards), shares))
            return shares.plan.digest()

        self._ranks.alike("plan", plan)
        return planned[0]

    def _whole(self, stored: Stored) -> tuple[list[TrajectoriesOnDisk], Lost]:
        """Read every payload, each on one rank; return what is whole of all shards, and what is not."""
        shards: list[TrajectoriesOnDisk] = []
        gone: list[ShardInfo] = []

        def look() -> list[Any]:
            shards.extend(read_trajectory_shards(stored, gone))
            return self._damaged(shards)

        found = [each for part in self._ranks.together("whole", look) for each in part]
        hurt: list[set[int]] = [set() for _ in shards]
        for shard, place, _ in found:
            hurt[shard].add(place)
        lost = Lost(
            sum(each.held for each in gone) + sum(shards[shard].infos[place].num_samples for shard, place, _ in found),
            sum(each.episodes for each in gone) + len(found),
            (*(f"{stored.folder}/shards/{each.rank:04d}" for each in gone), *sorted({path for *_, path in found})),
        )
        self._came = [[each.rank for each in gone], sorted([shard, place] for shard, place, _ in found)]
        if lost.files:
            tell_lost(self._store.log, stored, lost)
        return [shard.without(places) for shard, places in zip(shards, hurt, strict=True)], lost

    def _damaged(self, shards: Sequence[TrajectoriesOnDisk]) -> list[Any]:
        """Read this rank's part of all payloads; return of those that are not whole the shard, the place there, and the
        file."""
        layout, tag = self._store.folder.layout, self._store.folder.tag
        each = [(at, place) for at, shard in enumerate(shards) for place in range(len(shard.blocks))]
        blocks = [block for shard in shards for block in shard.blocks]
        own = part_to_read(blocks, self._ranks.rank, self._ranks.size)
        where = {blocks[number].place: each[number] for number in own}
        damaged = PayloadReader(layout, tag).damaged(where)
        return [[*where[place], layout.segment(*place[2].segment_key)] for place, _ in damaged]

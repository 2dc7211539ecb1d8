"""Saving and resuming the shards of a buffer of transitions that ranks have."""

from __future__ import annotations

import msgspec
import numpy as np

from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.ring import Ring
from pipeline.checkpoint.generations import Stored, check_generation
from pipeline.checkpoint.manifest import ShardInfo
from pipeline.config import ReplayOptions
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError
from pipeline.replay.episode_ids import EpisodeIds, EpisodeTable, Ids, table_of_rows, values_of_rows
from pipeline.replay.loading import Read
from pipeline.replay.parts import Parts
from pipeline.replay.rank_saving import RankSaverOf, check_folder
from pipeline.replay.resharding import Moved, Moving
from pipeline.replay.rooms import Room
from pipeline.replay.saving import Saver
from pipeline.replay.thinning import load_alone, says_dropped, tell_lost
from pipeline.store.files import FilesLike


def check_shardable(options: ReplayOptions) -> None:
    """Refuse options of a buffer of which each rank has a shard.

    Raises:
        ConfigError: one is in the way.
    """
    check_folder(options)
    if options.storage == "shared":
        raise ConfigError.of("storage", "shared", "with ranks= each rank has its own rows; use 'memory' or 'mapped'")


class RankSaver(RankSaverOf[Parts, Read], Saver):
    """Saves and resumes one rank's shard; verbs are called by all ranks, in the same order."""

    def __init__(self, options: ReplayOptions, room: Room, ranks: Ranks, files: FilesLike | None = None) -> None:
        super().__init__(options, room, files)
        self._join(options, ranks, files)
        self._known: EpisodeTable | None = None  # of what was read, until it is in use
        self._named = 0
        self._ids: EpisodeIds | None = None
        self._rows_ids: Ids | None = None  # where rows are of no episode

    def _names(self, ring: Ring) -> EpisodeIds | None:
        if ring.scattered:
            return None
        self._ids = self._ids or EpisodeIds(self.store.folder.incarnation, self.ranks.rank)
        return self._ids

    def _row_names(self, pool: Pool) -> dict[str, np.ndarray]:
        ids = self._rows_ids = self._rows_ids or Ids(self.store.folder.incarnation, self.ranks.rank)
        serials = pool.places()["serials"]
        return values_of_rows(*ids.of(serials, serials - ids.begin))

    def _described(self, ring: Ring, shard: ShardInfo) -> ShardInfo:
        age = 0 if self._ids is None else self._ids.age(ring)
        if self._rows_ids is not None:
            age = self._rows_ids.age_after(ring.added - self._rows_ids.begin)
        return msgspec.structs.replace(shard, age=age, own=sorted(self.attached_own))

    def _own_shard(self, shard: Stored, like: Ring) -> Read:
        if not like.scattered and says_dropped(shard):
            moved = load_alone(self.store, self._options, shard, like)
            check_generation(shard)
            return self._noted(moved)
        read_ = self._read_whole(shard, like)
        if like.scattered:
            return self._noted(Moved(read_, table_of_rows(read_.values, self.ranks.rank, shard.folder)))
        return self._noted(Moved(read_, EpisodeTable.of(read_.values, shard.folder)))

    def _moved(self, stored: Stored, like: Ring) -> Read:
        loading = self.loading
        if loading.continue_episodes:
            raise ConfigError(
                "continue_episodes: episodes are shared out to ranks anew, and their environments are not: they end "
                "where they are. Leave it out",
                option="continue_episodes",
            )
        moving = Moving(self.store, self._speaking, self._options, stored, like, partial=loading.allow_partial)
        moved = moving.rows(rebalance=loading.rebalance or loading.allow_partial, evict=loading.evict_oldest)
        if moved.read.lost.rows or moved.read.lost.files:
            tell_lost(self.store.log, stored, moved.read.lost)
        return self._noted(moved)

    def _noted(self, found: Moved) -> Read:
        self._known, self._named = found.table, found.named
        return found.read

    def adopt(self, found: Read) -> None:
        """Go on from what was read."""
        super().adopt(found)
        life, rank = self.store.folder.incarnation, self.ranks.rank
        known, named = self._known, self._named
        if found.ring.scattered:
            self._rows_ids = Ids(life, rank, age=self._age, begin=found.ring.added, known=known)
        else:
            self._ids = EpisodeIds(life, rank, age=self._age, ring=found.ring, known=known, named=named)

"""Saving and resuming the shards of a buffer of trajectories that ranks have."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import TRAJECTORY_SHARDS, ShardInfo
from pipeline.config import TrajectoryOptions
from pipeline.distributed import Ranks
from pipeline.errors import UsageError
from pipeline.replay.episode_ids import EpisodeTable, Ids
from pipeline.replay.gate import Gate
from pipeline.replay.job import SaveJob
from pipeline.replay.rank_saving import RankSaverOf, check_folder
from pipeline.replay.trajectory_loading import ReadTrajectories
from pipeline.replay.trajectory_moving import Had, TrajectoryMoving
from pipeline.replay.trajectory_saving import TrajectoryParts, TrajectorySaver
from pipeline.store.files import FilesLike


class TrajectoryRankSaver(RankSaverOf[TrajectoryParts, ReadTrajectories], TrajectorySaver):
    """Saves and resumes one rank's shard; verbs are called by all ranks, in the same order."""

    def __init__(self, options: TrajectoryOptions, gate: Gate, ranks: Ranks, files: FilesLike | None = None) -> None:
        check_folder(options)
        super().__init__(options, gate, files)
        self._join(options, ranks, files, TRAJECTORY_SHARDS)
        self._known: EpisodeTable | None = None  # of what was read, until it is in use
        self._ids: Ids | None = None

    def begin_adding(self) -> None:
        """Refuse to add before the folder is this run's: what is added is written beside the training, and to open the
        folder is what ranks do together.

        Raises:
            UsageError: ``resume`` has not been called.
        """
        if not self.begun:
            raise UsageError(
                "add_trajectories() with ranks= comes after resume(), which all ranks call: in an empty directory too"
            )

    def _job(self, parts: TrajectoryParts) -> SaveJob:
        shelf, ids = parts.shelf, self._ids or Ids(self.store.folder.incarnation, self.ranks.rank)
        self._ids = ids
        numbers = np.arange(shelf.low, shelf.next)
        uid, age = ids.of(numbers, numbers - ids.begin)
        rows = self._rows(parts)
        job = super()._job(parts)
        job.values |= {"uid.int64": uid, "age.int64": age}
        self.store.shard = ShardInfo(
            rank=self.ranks.rank,
            rows=rows,
            saved=rows,
            added=shelf.next,
            episodes=len(shelf),
            own=sorted(self.attached_own),
            age=ids.age_after(shelf.next - ids.begin),
        )
        return job

    def _own_shard(self, shard: Stored, like: Any) -> ReadTrajectories:
        return self._noted(self._moving(like).as_it_was(shard))

    def _moved(self, stored: Stored, like: Any) -> ReadTrajectories:
        return self._noted(self._moving(like).shared_out(stored))

    def _moving(self, like: TrajectoryParts) -> TrajectoryMoving:
        return TrajectoryMoving(self.store, self._speaking, self._options, like.room(self._options), self.loading)

    def _noted(self, found: Had) -> ReadTrajectories:
        self._known = found.table
        return found.read

    def adopt(self, found: ReadTrajectories) -> None:
        """Go on from what was read."""
        super().adopt(found)
        life, rank = self.store.folder.incarnation, self.ranks.rank
        self._ids = Ids(life, rank, age=self._age, begin=found.shelf.next, known=self._known)

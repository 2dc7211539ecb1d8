"""Saving and resuming the shards of a buffer that ranks have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.buffer.transitions.ring import Ring
from pipeline.checkpoint.generations import Found, Stored, check_generation
from pipeline.checkpoint.manifest import OWN_FOLDER, ShardInfo, shard_prefix
from pipeline.checkpoint.parts import shard_of
from pipeline.checkpoint.trainer_state import CapturedState, check_attachable, load_states, read_state
from pipeline.config import ReplayOptions
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, Damaged, RankFailed, UsageError
from pipeline.observe import events
from pipeline.replay.episode_ids import EpisodeIds, EpisodeTable
from pipeline.replay.job import SaveJob
from pipeline.replay.loading import Read
from pipeline.replay.parts import Parts
from pipeline.replay.rank_store import RankStore
from pipeline.replay.resharding import Moved, Moving
from pipeline.replay.rooms import Room
from pipeline.replay.saving import Saver
from pipeline.replay.shards import trainer_of
from pipeline.replay.store import Generation, ReplayStore, Saving
from pipeline.replay.thinning import load_alone, says_dropped, tell_lost
from pipeline.store.files import FilesLike
from pipeline.wiring.recovery import read_generation


def check_shardable(options: ReplayOptions) -> None:
    """Refuse options of a buffer of which each rank has a shard.

    Raises:
        ConfigError: one is in the way.
    """
    if options.directory is None:
        raise ConfigError(
            "ranks: what ranks do together is save and resume; name their folder with directory=", option="ranks"
        )
    if options.storage == "shared":
        raise ConfigError.of("storage", "shared", "with ranks= each rank has its own rows; use 'memory' or 'mapped'")


class RankSaver(Saver):
    """Saves and resumes one rank's shard; verbs are called by all ranks, in the same order."""

    store: RankStore

    def __init__(self, options: ReplayOptions, room: Room, ranks: Ranks, files: FilesLike | None = None) -> None:
        super().__init__(options, room, files)
        self.ranks = ranks.branch("buffer")
        self.store = RankStore(options, self.ranks, files)
        self.attached_own: dict[str, Any] = {}
        self._known: EpisodeTable | None = None  # of what was read, until it is in use
        self._age = self._named = 0
        self._ids: EpisodeIds | None = None

    def save(self, step: int, parts: Parts) -> Saving:
        """As :meth:`Saver.save`. The trainer's state is that of the first rank.

        What the one before failed with, if nobody was told here, is raised once this one has begun: on other ranks
        somebody may have been told, and they begin it too.

        Raises:
            RankFailed, RankLost: another rank failed, or was not heard from.
        """
        with self.lock:
            before, saves = None, self.store.saves
            try:
                try:
                    self.finish()
                except Exception as error:
                    before = error
                saving = super().save(step, parts)
            except BaseException as error:
                self.store.failed(saves, error)
                raise
            if before is not None:
                raise before
            return saving

    def _write(self, store: ReplayStore, generation: Generation, job: SaveJob) -> None:
        super()._write(store, generation, job)
        self.store.linger(generation)

    def attach_own(self, objects: Mapping[str, Any]) -> None:
        """Add what this rank saves and restores for itself.

        Raises:
            ConfigError: a name cannot be that of a file, or is that of something attached for all; or an object has no
                state.
        """
        check_attachable(objects)
        self._check_names(objects, self.attached)
        self.attached_own.update(objects)

    def attach(self, objects: Mapping[str, Any]) -> None:
        self._check_names(objects, self.attached_own)
        super().attach(objects)

    @staticmethod
    def _check_names(objects: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        for name in objects:
            if name in others:
                raise ConfigError.of("attach", name, "it is attached for all ranks, or for each of them: not both")

    def _captured(self) -> list[CapturedState]:
        return super()._captured() if self.ranks.first else []

    def _job(self, parts: Parts) -> SaveJob:
        own = {
            f"{OWN_FOLDER}/{name}.safetensors": CapturedState(name, each.state_dict()).encoded()
            for name, each in sorted(self.attached_own.items())
        }
        job = super()._job(parts)
        self.store.own_files = own
        return job

    def _names(self, ring: Ring) -> EpisodeIds | None:
        if ring.scattered:
            return None
        self._ids = self._ids or EpisodeIds(self.store.folder.incarnation, self.ranks.rank)
        return self._ids

    def _described(self, ring: Ring, shard: ShardInfo) -> ShardInfo:
        age = 0 if self._ids is None else self._ids.age(ring)
        return msgspec.structs.replace(shard, age=age, own=sorted(self.attached_own))

    def find(self, step: int | None, like: Any) -> Read | None:
        """As :meth:`Saver.find`: all ranks go on from the generation that the first one chooses, or none does.

        Raises:
            RankFailed, RankLost: another rank failed, or was not heard from; nothing was changed.
        """
        found: list[Read | None] = []
        self.ranks.together("resume", lambda: found.append(Saver.find(self, step, like)))
        return found[0]

    def _choose(self, step: int | None, like: Any) -> tuple[Stored, Found] | None:
        store, chosen = self._opened(), None

        def first() -> list[Any] | None:
            nonlocal chosen
            chosen = Saver._choose(self, step, like)
            return (
                None if chosen is None else [chosen[0].manifest.generation, chosen[0].manifest.checksum, self._newest]
            )

        told = self.ranks.of_first("resume from", first)
        if self.ranks.first or told is None:
            return chosen
        number, checksum, self._newest = told
        found = store.find()
        for stored in found.complete:
            if (stored.manifest.generation, stored.manifest.checksum) == (number, checksum):
                return stored, found
        raise RankFailed(
            f"{store.folder.layout.directory}: rank {self.ranks.rank} does not find generation {number} there as "
            "rank 0 does. All ranks need the same folder"
        )

    def _read(self, stored: Stored, like: Any) -> Read:
        ranks, loading, shard = self.ranks, self.loading, shard_of(stored, self.ranks.rank)
        self._age = max((each.age for each in stored.manifest.shards), default=0)
        as_many = stored.manifest.world_size == ranks.size
        found = self._as_it_was(shard, like) if as_many and not loading.rebalance else None
        if found is None:
            found = self._moved(stored, like)
        self._known, self._named = found.table, found.named
        states = read_generation(trainer_of(stored), list(self.attached))
        read = found.read._replace(stored=stored, states=states)
        return self._with_own(read, stored, shard if as_many else None)

    def _as_it_was(self, shard: Stored, like: Ring) -> Moved | None:
        """Return this rank's shard as it was; None: one of a rank is damaged, and all are to go on without that."""
        damage, found = "", None
        try:
            found = self._own_shard(shard, like)
        except Damaged as error:
            if not self.loading.allow_partial:
                raise
            damage = str(error)
        return None if self.loading.allow_partial and any(self.ranks.all("damage", damage)) else found

    def _own_shard(self, shard: Stored, like: Ring) -> Moved:
        if not like.scattered and says_dropped(shard):
            moved = load_alone(self.store, self._options, shard, like)
            check_generation(shard)
            return moved
        read_ = super()._read_whole(shard, like)
        return Moved(read_, None if like.scattered else EpisodeTable.of(read_.values, shard.folder))

    def _moved(self, stored: Stored, like: Ring) -> Moved:
        loading = self.loading
        if loading.continue_episodes:
            raise ConfigError(
                "continue_episodes: episodes are shared out to ranks anew, and their environments are not: they end "
                "where they are. Leave it out",
                option="continue_episodes",
            )
        moving = Moving(self.store, self.ranks, self._options, stored, like, partial=loading.allow_partial)
        moved = moving.rows(rebalance=loading.rebalance or loading.allow_partial, evict=loading.evict_oldest)
        if moved.read.lost.rows or moved.read.lost.files:
            tell_lost(self.store.log, stored, moved.read.lost)
        return moved

    def _with_own(self, read_: Read, stored: Stored, shard: Stored | None) -> Read:
        """Read what ranks had attached for themselves, of as many ranks; say what is not loaded.

        Raises:
            UsageError: other things are attached than were.
            Damaged: a file is not whole.
        """
        saved = sorted({name for each in stored.manifest.shards for name in each.own})
        left = sorted(path for path in stored.manifest.left_out if path.startswith(OWN_FOLDER + "/"))
        if left:  # a tool has put the rows together for other ranks
            shard, saved = None, [os.path.basename(path).removesuffix(".safetensors") for path in left]
        if shard is None or any(path.endswith(shard_prefix(self.ranks.rank)[:-1]) for path in read_.lost.files):
            if saved:
                ranks = {"saved": stored.manifest.world_size, "ranks": self.ranks.size}
                self.store.log.warning(events.OWN_LEFT, names=saved, **ranks)
            return read_._replace(left=tuple(saved))
        if saved != sorted(self.attached_own):
            raise UsageError(
                f"{stored.folder}: each rank had attached {saved} for itself, and this script attaches "
                f"{sorted(self.attached_own)} so. attach_own() the same before resume()"
            )
        files = [(os.path.join(shard.folder, info.path), info) for info in shard.manifest.files]
        own = {
            os.path.basename(path).removesuffix(".safetensors"): read_state(path, size=info.bytes, checksum=info.crc32c)
            for path, info in files
            if info.path.startswith(OWN_FOLDER + "/")
        }
        return read_._replace(own=own)

    def load_attached(self, found: Read) -> None:
        super().load_attached(found)
        if found.own is not None:
            load_states(self.attached_own, found.own)

    def adopt(self, found: Read) -> None:
        """Go on from what was read."""
        super().adopt(found)
        if not found.ring.scattered:
            life, rank = self.store.folder.incarnation, self.ranks.rank
            known, named = self._known, self._named
            self._ids = EpisodeIds(life, rank, age=self._age, ring=found.ring, known=known, named=named)

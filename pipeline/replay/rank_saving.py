"""What saving and resuming the shards of ranks is, whatever a shard holds: who says what to whom.

Verbs are called by all ranks, in the same order. What fails on one of them fails on all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.checkpoint.generations import Found, Stored
from pipeline.checkpoint.manifest import OWN_FOLDER, SHARDS, shard_prefix
from pipeline.checkpoint.parts import shard_of
from pipeline.checkpoint.trainer_state import CapturedState, check_attachable, load_states, read_state
from pipeline.config import SavingOptions
from pipeline.conversation import HOLDS, Conversation
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, Damaged, RankFailed, UsageError
from pipeline.observe import events
from pipeline.replay.episode_ids import check_ranks
from pipeline.replay.job import SaveJob
from pipeline.replay.loading import Lost
from pipeline.replay.rank_store import RankStore
from pipeline.replay.saving import F, Loading, P, SaverOf
from pipeline.replay.shards import trainer_of
from pipeline.replay.store import Generation, ReplayStore, Saving
from pipeline.store.files import FilesLike
from pipeline.wiring.recovery import read_generation


def check_folder(options: SavingOptions) -> None:
    """Refuse ranks without a folder.

    Raises:
        ConfigError: there is none.
    """
    if options.directory is None:
        raise ConfigError(
            "ranks: what ranks do together is save and resume; name their folder with directory=", option="ranks"
        )


class RankSaverOf(SaverOf[P, F]):
    """Saves and resumes one rank's shard of a buffer, of whatever kind. It stands before the saver of such a buffer
    without ranks."""

    store: RankStore
    ranks: Ranks
    attached_own: dict[str, Any]
    _speaking: Conversation
    """With the other ranks, of the resume that has begun."""
    _age = 0
    """Of what is added after the generation that was read."""

    def _join(self, options: SavingOptions, ranks: Ranks, files: FilesLike | None, kind: str = SHARDS) -> None:
        """Become one of several; the last of what is done when it is made.

        Raises:
            ConfigError: there are too many.
        """
        check_ranks("ranks", ranks.size)
        self.ranks = ranks.branch("buffer")
        self.store = RankStore(options, self.ranks, files, kind)
        self.attached_own = {}

    def _own_shard(self, shard: Stored, like: Any) -> F:
        """Read this rank's shard as it was."""
        raise NotImplementedError

    def _moved(self, stored: Stored, like: Any) -> F:
        """Read what this rank is to have of all shards."""
        raise NotImplementedError

    # -- saving ------------------------------------------------------------------------------------------------

    def save(self, step: int, parts: P) -> Saving:
        """As :meth:`SaverOf.save`. The trainer's state is that of the first rank.

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

    def _job(self, parts: P) -> SaveJob:
        own = {
            f"{OWN_FOLDER}/{name}.safetensors": CapturedState(name, each.state_dict()).encoded()
            for name, each in sorted(self.attached_own.items())
        }
        job = super()._job(parts)
        self.store.own_files = own
        return job

    # -- resuming ----------------------------------------------------------------------------------------------

    def find(
        self, step: int | None, like: Any, how: Callable[[], Loading], taken: Callable[[F], P]
    ) -> tuple[F, P] | None:
        """As :meth:`SaverOf.find`: all ranks go on from the generation that the first one chooses, or none does.

        Raises:
            RankFailed, RankLost: another rank failed, or was not heard from; nothing was changed.
        """
        # What fails on one rank, or is asked of it alone, others hear at once: they would wait for it in what follows.
        self.store.end_speaking(RankFailed("it was left in its midst there, and another one has begun"))
        ranks = self._speaking = self.store.speaking = Conversation(self.ranks, "resume")

        def asked() -> dict[str, bool]:
            self.loading = how()
            return {"rebalance": self.loading.rebalance, "allow_partial": self.loading.allow_partial}

        ranks.alike("resume begun", asked)
        chosen = ranks.agreed("resume chosen", lambda: self._choose(step, like))
        if chosen is None:
            return None
        stored, all_of_them = chosen

        def read() -> tuple[F, P]:
            found = self._offering(stored, all_of_them, like)
            return found, taken(found)

        return ranks.agreed("resume", read)

    def _choose(self, step: int | None, like: Any) -> tuple[Stored, Found] | None:
        self.store.open_together(self._speaking)
        store, chosen, choose = self._opened(), None, super()._choose

        def first() -> list[Any] | None:
            nonlocal chosen
            chosen = choose(step, like)
            if chosen is None:
                return None
            return [chosen[0].manifest.generation, chosen[0].manifest.checksum, self._newest, self._left]

        told = self._speaking.of_first("resume from", first)
        if self.ranks.first:
            return chosen
        self._check_first(like)
        if told is None:
            return None
        number, checksum, self._newest, self._left = told
        found = store.find()
        for stored in found.complete:
            if (stored.manifest.generation, stored.manifest.checksum) == (number, checksum):
                return stored, found
        raise RankFailed(
            f"{store.folder.layout.directory}: rank {self.ranks.rank} does not find generation {number} there as "
            "rank 0 does. All ranks need the same folder"
        )

    def _read(self, stored: Stored, like: Any) -> F:
        shard = shard_of(stored, self.ranks.rank)
        self._age = max((each.age for each in stored.manifest.shards), default=0)
        as_many = stored.manifest.world_size == self.ranks.size
        found = self._as_it_was(shard, like) if as_many and not self.loading.rebalance else None
        if found is None:
            found = self._moved(stored, like)
        states = read_generation(trainer_of(stored), list(self.attached))
        own, left = self._own_states(found.lost, stored, shard if as_many else None)
        whole: Any = found  # a named tuple, of whichever kind
        read: F = whole._replace(stored=stored, states=states, own=own, left=left)
        return read

    def _as_it_was(self, shard: Stored, like: Any) -> F | None:
        """Read this rank's shard as it was; None: one of a rank is damaged, and all are to go on without that."""
        if not self.loading.allow_partial:
            return self._own_shard(shard, like)
        found: list[F] = []

        def look() -> str:
            try:
                found.append(self._own_shard(shard, like))
            except Damaged as error:
                return str(error)
            return ""

        return None if any(self._speaking.together("damage", look)) else found[0]

    def _own_states(
        self, lost: Lost, stored: Stored, shard: Stored | None
    ) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Read what ranks had attached for themselves, of as many ranks; return names of what is not loaded beside it,
        and say so.

        Raises:
            UsageError: other things are attached than were.
            Damaged: a file is not whole.
        """
        saved = sorted({name for each in stored.manifest.shards for name in each.own})
        left = sorted(path for path in stored.manifest.left_out if path.startswith(OWN_FOLDER + "/"))
        if left:  # a tool has put the rows together for other ranks
            shard, saved = None, [os.path.basename(path).removesuffix(".safetensors") for path in left]
        if shard is None or any(path.endswith(shard_prefix(self.ranks.rank)[:-1]) for path in lost.files):
            if saved:
                ranks = {"saved": stored.manifest.world_size, "ranks": self.ranks.size}
                self.store.log.warning(events.OWN_LEFT, names=saved, **ranks)
            return None, tuple(saved)
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
        return own, ()

    def load_attached(self, found: F) -> None:
        """As :meth:`SaverOf.load_attached`. What one rank cannot load is an error on all."""

        def load() -> None:
            super(RankSaverOf, self).load_attached(found)
            whole: Any = found
            if whole.own is not None:
                load_states(self.attached_own, whole.own)

        self._speaking.agreed("resume loaded", load, but=HOLDS if self.attached or self.attached_own else "")

    def _make_newest(self, store: ReplayStore, stored: Stored, parts: P) -> None:
        saves, make = self.store.saves, super()._make_newest
        but = HOLDS if self.attached or self.attached_own else ""
        try:
            self._speaking.agreed("resume made the newest", lambda: make(store, stored, parts), but=but)
        except BaseException as error:
            self.store.failed(saves, error)  # others may wait for this one's part of it
            raise

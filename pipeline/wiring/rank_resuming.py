"""Resuming where several ranks train together: each takes its own part back, or all parts are shared out anew.

As many ranks as wrote a generation recover each its own part, as one process would. Of another number, or where what
the order of draws hangs on has changed, every rank folds all parts, comes to the same list of what has been claimed and
has not ended, and plans who gets what (:mod:`pipeline.checkpoint.reshard`); digests of the plans are compared before
anything is changed. Payloads stay where they lie. The new journals begin with what each rank has (``inherit``), so
those of before are needed no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.checkpoint.generations import Stored, check_generation, check_listed, choose, find_generations, of_kind
from pipeline.checkpoint.manifest import PIPELINE, PIPELINE_RANKS, SHARDS_FOLDER
from pipeline.checkpoint.parts import PartLayout, shard_of
from pipeline.conversation import Conversation
from pipeline.errors import Damaged, RankFailed
from pipeline.records import Opened
from pipeline.sampler import TurnSampler
from pipeline.wiring.rank_sharing import Drawing, shared_out, turns_of
from pipeline.wiring.recovery import Recovered, read_generation
from pipeline.wiring.resuming import Found, Origin, check_external, opening, recovered_of
from pipeline.wiring.state import RunState


class _Own(NamedTuple):
    """What a rank has read: the generation, and its own part, if that may be taken back as it is."""

    stored: Stored
    states: dict[str, Any]
    part: tuple[Recovered, Opened] | None


class RankResuming:
    """Finds what a rank goes on from. All methods block, and are called by all ranks."""

    def __init__(self, state: RunState, ranks: Conversation, origin: Origin, attached: Sequence[str]) -> None:
        self._state, self._ranks, self._origin, self._attached = state, ranks, origin, attached
        self._reusable: Sequence[int] | None = None

    def find(self, step: int | None, external: str | None, *, anew: bool) -> Found:
        """Read and check the generation to resume, and what came after it. Changes nothing.

        Args:
            step, external: which generation, as of one process.
            anew: share everything out anew, though there are as many ranks as before.

        Raises:
            Damaged, StoreError, UsageError: as of one process.
            RankFailed, RankLost: another rank failed, or was not heard from.
        """
        ranks, own = self._ranks, list[_Own]()

        def look() -> list[Any]:
            own.append(self._own(step, external, anew=anew))
            return [None] if own[0].part is None else _terms(own[0].part[0])

        terms = ranks.together("resume", look)
        (stored, states, part) = own[0]
        if part is not None and all(each[0] is not None and each[0] == terms[0][0] for each in terms):
            for _, lengths in terms:
                turns_of(part[0]).lengths.update({(task, epoch): length for task, epoch, length in lengths})
            return Found(stored, states, *part, self._origin)
        shared: list[Recovered] = []
        opened = opening(self._state, stored.manifest.generation, stored.manifest.step, stored.manifest.incarnation)

        def plan() -> str:
            parts = [self._part(stored, rank)[0] for rank in range(stored.manifest.world_size)]
            sharing = shared_out(Drawing.of(self._state), stored, parts, ranks.size)
            shared.append(sharing.part(ranks.rank, opened))
            return sharing.digest

        ranks.alike("plan of the resume", plan)
        return Found(stored, states, shared[0], opened, self._origin)

    def _own(self, step: int | None, external: str | None, *, anew: bool) -> _Own:
        stored = self._chosen(step, external)
        check_external(stored.manifest)
        states = read_generation(_trainer_of(stored), self._attached)
        manifest = stored.manifest
        if manifest.kind == PIPELINE_RANKS and [each.rank for each in manifest.shards] != list(
            range(manifest.world_size)
        ):
            raise Damaged(f"{stored.folder}: {manifest.world_size} ranks wrote it, and parts are listed of others")
        if manifest.kind == PIPELINE or manifest.world_size != self._ranks.size or anew:
            return _Own(stored, states, None)
        part = self._part(stored, self._ranks.rank)
        return _Own(stored, states, part if part[0].sampler.shares_event() is None else None)

    def _chosen(self, step: int | None, external: str | None) -> Stored:
        """Return the generation that the first rank chooses."""
        layout = self._origin.layout
        found = of_kind(find_generations(layout, self._origin.run_id), PIPELINE_RANKS, layout.directory, also=PIPELINE)
        if found.complete:
            self._reusable = found.complete[-1].manifest.reusable

        def first() -> list[Any]:
            if not found.complete and not found.damaged:
                raise Damaged(
                    f"{layout.generations}: journals hold rollouts, but every generation is gone; restore them"
                )
            chosen = choose(found, step, layout.directory, external)
            return [chosen.manifest.generation, chosen.manifest.checksum]

        number, checksum = self._ranks.of_first("resume from", first)
        for stored in found.complete:
            if (stored.manifest.generation, stored.manifest.checksum) == (number, checksum):
                return stored
        raise RankFailed(
            f"{layout.directory}: rank {self._ranks.rank} does not find generation {number} there as rank 0 does. All "
            "ranks need the same folder"
        )

    def _part(self, stored: Stored, rank: int) -> tuple[Recovered, Opened]:
        """Recover a rank's part of a generation."""
        state, origin, manifest = self._state, self._origin, stored.manifest
        if manifest.kind == PIPELINE:  # of one process: it is all of it
            check_generation(stored, later=[info.path for _, info in stored.trainer_files()])
            return recovered_of(state, origin, stored, self._reusable)
        part = shard_of(stored, rank)
        if not part.manifest.files:
            raise Damaged(f"{part.folder}: the part of rank {rank} is missing. resume() an older generation")
        for info in part.manifest.files:
            check_listed(part, info)
        layout = PartLayout(origin.layout, rank, manifest.incarnation, origin.tag)
        plans, seed, size = list(state.plans.values()), state.options.seed, manifest.world_size
        recovered, opened = recovered_of(
            state,
            origin._replace(layout=layout),
            part,
            self._reusable,
            sampler=lambda: TurnSampler(plans, seed, rank, size),
        )
        discarded = sorted({*opened.discarded, *layout.abandoned()})
        return recovered, msgspec.structs.replace(opened, discarded=discarded)


def _terms(recovered: Recovered) -> list[Any]:
    """What ranks must have in common to go on with the order as it is, and the lengths of epochs that each knows."""
    sampler = turns_of(recovered)
    return [[sampler.base, sampler.mixture.shares], [[*key, length] for key, length in sampler.lengths.items()]]


def _trainer_of(stored: Stored) -> Stored:
    """Return what a generation holds beside the parts of ranks."""
    files = [info for info in stored.manifest.files if not info.path.startswith(SHARDS_FOLDER + "/")]
    return Stored(stored.folder, msgspec.structs.replace(stored.manifest, files=files))

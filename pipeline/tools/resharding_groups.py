"""Resharding pipelines: what ranks have claimed and not ended, for another number of them, without any rank.

It is recovered and shared out as a resume does it (:mod:`pipeline.wiring.rank_sharing`), and written as a run that so
many ranks had left: each has what it then takes back, its journal begins with it, and its segments hold the payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pipeline.checkpoint.gathering import Gathered, opening
from pipeline.checkpoint.generations import check_generation, find_generations
from pipeline.checkpoint.lines import discards
from pipeline.checkpoint.manifest import BLOCKS_FILE, PIPELINE_RANKS, REPLAY_BUFFER, Manifest
from pipeline.checkpoint.new_ranks import write_ranks
from pipeline.checkpoint.parts import parts_of
from pipeline.checkpoint.rank_gathering import reserved_of
from pipeline.checkpoint.rank_rescue import RankRescue
from pipeline.checkpoint.rehearsal import Counting
from pipeline.checkpoint.saved_plans import plans_as_saved, source_as_saved
from pipeline.checkpoint.survey import Candidate, RankHalf
from pipeline.errors import ConfigError, Damaged
from pipeline.ledger import BUFFERED, FINISHED, LEASED
from pipeline.sampler import DrawPlan, TurnSampler
from pipeline.sampler.progress import joined
from pipeline.store.layout import Layout
from pipeline.tools.made import Made
from pipeline.tools.output import Outputs, Told
from pipeline.tools.sources import Source
from pipeline.wiring.rank_sharing import Drawing, shared_out
from pipeline.wiring.recovering import Recovering
from pipeline.wiring.recovery import Recovered

TOOL = "reshard"
_POOL = "pool of "
"""How the marks of ``tasks.prompts.DifficultyPool`` begin."""


def reshard_groups(
    source: Source, outputs: Outputs, to: int, *, rebalance: bool, dry_run: bool, told: Told | None
) -> Made:
    """Write the run of a pipeline anew, for ``to`` ranks.

    Raises:
        ConfigError: its rollouts fill a buffer, or its items come from where ranks have no order in common.
        Damaged: something is missing or was changed.
        WriteFailed: the new run could not be written; nothing of it stays.
    """
    _check_kind(source)
    check_generation(source.stored)
    job = _Job(source, to, rebalance=rebalance)
    if dry_run:
        return job.told(outputs.each[0].directory)
    with outputs:
        made = job.write(outputs, told)
        outputs.finish()
    return made


def _check_kind(source: Source) -> None:
    """Refuse what a resume refuses on ranks.

    Raises:
        ConfigError: it is that.
    """
    manifest = source.stored.manifest
    why = ""
    if any(info.path == BLOCKS_FILE for info in manifest.files):
        why = "the rollouts of this run fill a buffer of transitions, whose rows are not shared out to ranks"
    elif manifest.options.get("mixing") == "batch":
        why = "the run has mixing='batch', and ranks draw by turns, in one order"
    for name, task in manifest.tasks.items():
        mark = source_as_saved(task)
        if mark is not None and mark.kind == "stream":
            why = f"task {name!r} has a stream, which has no order that ranks could share"
        if mark is not None and mark.kind.startswith(_POOL):
            why = f"task {name!r} has a source that learns, which hangs on all groups, and a rank has its own"
    if why:
        raise ConfigError(f"{source.directory}: {why}", option="run")


class _Job:
    """What ranks are to have, and how it is written."""

    def __init__(self, source: Source, to: int, *, rebalance: bool) -> None:
        self._source = source
        manifest = source.stored.manifest
        plans = plans_as_saved(manifest, {})
        parts, openeds = _recovered(source, plans), [opening(manifest, _seed(manifest), "", rank) for rank in range(to)]
        if manifest.kind != PIPELINE_RANKS or manifest.world_size != to or rebalance:
            sharing = shared_out(Drawing(plans, _seed(manifest), {}), source.stored, parts, to)
            parts = [sharing.part(rank, opened) for rank, opened in enumerate(openeds)]
        self._parts = parts
        folds = [_fold(part, manifest, rank, to) for rank, part in enumerate(parts)]
        self._gathered = []
        for fold, part, opened in zip(folds, parts, openeds, strict=True):
            half = msgspec.structs.replace(part.ledger.consumer_half(), leases=part.pending)
            each = Gathered(fold, manifest, half, opened, [], [])
            self._gathered.append(each._replace(turns=fold.turns, reserved=[reserved_of(fold, folds)]))

    def told(self, directory: str) -> Made:
        """Return what is made."""
        manifest = self._source.stored.manifest
        groups = [
            [entry for entry in part.ledger.entries.values() if entry.state in (BUFFERED, LEASED)]
            for part in self._parts
        ]
        lengths = [
            at.length
            for part in self._parts
            for uid, members in part.places.items()
            if uid in part.ledger.entries
            for at in members.values()
        ]
        return Made(
            directory=directory,
            kind=PIPELINE_RANKS,
            step=manifest.step,
            units=sum(map(len, groups)),
            rows=sum(entry.members.count(FINISHED) for each in groups for entry in each),
            shards=[len(each) for each in groups],
            bytes=sum(lengths),
            made_of=[self._source.part()],
        )

    def write(self, outputs: Outputs, told: Told | None) -> Made:
        """Write the new run into a place that has begun."""
        output, source = outputs.each[0], self._source
        made, done = self.told(output.directory), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if told is not None:
                told(min(done, made.bytes), made.bytes)

        written = write_ranks(
            source.layout,
            source.tag,
            self._candidate(),
            self._gathered,
            Layout(output.folder),
            Counting(output.files, advance),
            output.directory,
            reason=TOOL,
            also={
                "external": source.stored.manifest.external,
                "left_out": self._left_out(),
                "made_of": made.made_of,
                "origin": "",
            },
        )
        if written.losses:  # all of it was whole a moment ago
            raise Damaged(f"{written.losses[0].what}. Has the disk a fault?")
        return msgspec.structs.replace(made, run_id=written.run_id)

    def _left_out(self) -> dict[str, str]:
        """Return what is not in the new run either; of what was to be drawn again it has journals, as of all else."""
        left_out = self._source.stored.manifest.left_out
        return {path: why for path, why in left_out.items() if path != REPLAY_BUFFER}

    def _candidate(self) -> Candidate:
        """Return the generation as if these ranks had written it."""
        stored, parts = self._source.stored, self._parts
        ranks = [
            RankHalf(each.half, part.progress, part.unknown) for each, part in zip(self._gathered, parts, strict=True)
        ]
        progress = joined([part.progress for part in parts])
        return Candidate(
            stored.manifest.generation, stored.folder, stored.manifest, None, progress, {}, None, {}, tuple(ranks)
        )


def _seed(manifest: Manifest) -> int:
    seed: int = manifest.options.get("seed", 0)
    return seed


def _recovered(source: Source, plans: Sequence[DrawPlan]) -> list[Recovered]:
    """Return what a resume finds of each part, with the tasks and the options that were saved."""
    manifest = source.stored.manifest
    newest = find_generations(source.layout, source.run_id).complete[-1].manifest
    how = Recovering(plans, _seed(manifest), discards(manifest))
    found = []
    for part in parts_of(source.layout, source.tag, source.stored):
        opened = opening(manifest, _seed(manifest), "", max(part.rank, 0))
        turns = None if part.rank < 0 else _turns(plans, _seed(manifest), part.rank, part.size)
        found.append(how.recover(part.layout, source.tag, part.stored, newest.reusable, opened, turns)[0])
    return found


def _turns(plans: Sequence[DrawPlan], seed: int, rank: int, size: int) -> Callable[[], TurnSampler]:
    return lambda: TurnSampler(plans, seed, rank, size)


def _fold(part: Recovered, manifest: Manifest, rank: int, size: int) -> RankRescue:
    """Return what a rank has as what is written of it."""
    fold = RankRescue(part.ledger.consumer_half(), manifest, _seed(manifest), [], rank, size)
    fold.ledger, fold.sampler, fold.partials = part.ledger, part.sampler, part.partials
    fold.places.places = {uid: dict(members) for uid, members in part.places.items()}
    return fold

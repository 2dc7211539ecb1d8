"""Everything that a salvage takes over but payloads and the trainer's files, of one process or rank by rank: read, and
not yet written anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from pipeline.checkpoint.gathering import Gathered, gather, hole_loss, opening
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.halves import joined_ranges
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.lost_turns import Filled, base_of, fill, first_of
from pipeline.checkpoint.manifest import CONSUMER_FILE, Manifest, shard_prefix
from pipeline.checkpoint.parts import PartLayout
from pipeline.checkpoint.payloads import locate
from pipeline.checkpoint.rank_rescue import RankRescue, rescue_ranks
from pipeline.checkpoint.remains import Hole
from pipeline.checkpoint.survey import Candidate
from pipeline.ledger import ConsumerHalf, Entry
from pipeline.records import Claimed, EpochBegan, Reserved
from pipeline.sampler import TurnSampler
from pipeline.store.layout import Layout

_MOST = 20  # items that are listed one by one


class PartsGathered(NamedTuple):
    """What a damaged run amounts to at the chosen generation.

    Attributes:
        parts: of each rank, or of the one process.
        lost: ranks of which nothing says what the weights have seen, and which begin without any group.
    """

    parts: list[Gathered]
    lost: list[int]

    @property
    def losses(self) -> list[Loss]:
        """Of all ranks."""
        return [loss for part in self.parts for loss in part.losses]


def gather_parts(
    layout: Layout,
    run_tag: int,
    run_id: str,
    chosen: Candidate,
    candidates: Sequence[Candidate],
    *,
    discard: bool = False,
) -> PartsGathered:
    """Return what a generation and the journals give, of one process or of several ranks. Blocks, and changes nothing.

    Args:
        layout, run_tag, run_id: of the damaged run.
        chosen: a generation in which one process, or at least one rank, says what the weights have seen.
        candidates: all generations.
        discard: set aside what came after it, as a resume with ``after_crash="discard"`` does.

    Raises:
        NewerFormat: a journal was written by a newer version.
    """
    manifest = chosen.manifest
    assert manifest is not None
    if chosen.ranks:
        return _of_ranks(layout, run_tag, run_id, chosen, candidates, discard=discard)
    if any(each.ranks for each in candidates):  # ranks went on from there, in journals of their own
        layout = PartLayout(layout, 0, manifest.incarnation, run_tag)
        candidates = [each for each in candidates if not each.ranks]
    return PartsGathered([gather(layout, run_tag, run_id, chosen, candidates, discard=discard)], [])


def _of_ranks(
    layout: Layout,
    run_tag: int,
    run_id: str,
    chosen: Candidate,
    candidates: Sequence[Candidate],
    *,
    discard: bool,
) -> PartsGathered:
    manifest = chosen.manifest
    assert manifest is not None
    others = [each for each in candidates if each.manifest is not None and each is not chosen]
    others = [each for each in others if each.manifest is not None and each.manifest.run_id == manifest.run_id]
    halves = [each.half or _known(rank, chosen, others) for rank, each in enumerate(chosen.ranks)]
    lost = [rank for rank, each in enumerate(chosen.ranks) if each.half is None]
    stored = Stored(chosen.folder, manifest)
    manifests = [each.manifest for each in others if each.manifest is not None]
    folds = rescue_ranks(layout, run_tag, stored, manifests, halves, discard=discard)
    losses = [[hole_loss(layout, *each) for each in fold.holes] for fold in folds]
    filled = fill(folds, halves, lambda wanted: locate(layout, run_tag, wanted))
    for rank, fold in enumerate(folds):
        losses[rank] += _filled_losses(layout, fold, filled)
        if rank in lost:
            halves[rank], given_up = _given_up(layout, chosen, folds, rank, halves[rank])
            losses[rank].append(given_up)
    parts = []
    for rank, (fold, half) in enumerate(zip(folds, halves, strict=True)):
        opened = opening(manifest, fold.turns.seed, f"{run_id}/{manifest.generation}", rank)
        fold.ledger.apply(opened)
        fold.partials.apply(opened.incarnation, opened.rank, opened)
        fold.ledger.restore(half)
        again = filled.again[rank] if rank not in lost else []
        part = Gathered(fold, manifest, half, opened, again, losses[rank])
        parts.append(part._replace(turns=fold.turns, reserved=[reserved_of(fold, folds)], anew=fold.anew))
    return PartsGathered(parts, lost)


def reserved_of(fold: RankRescue, folds: Sequence[RankRescue]) -> Reserved:
    """Return the event that says which draws a rank is still to claim, and how long epochs are of which others know."""
    turns = fold.turns
    began = [
        EpochBegan(task, epoch, length, each.mark)
        for task, each in turns.cursors.items()
        for epoch, length in _epochs(task, turns, least=min(_epoch(other.turns, task) for other in folds))
    ]
    positions = {task: (each.epoch, each.position) for task, each in turns.cursors.items()}
    draws = [(each.number, each.task, each.epoch, each.position, each.index) for each in turns.reserved.values()]
    return Reserved(draws, turns.next, began, positions, dict(turns.mixture.drawn))


def _epoch(turns: TurnSampler, task: str) -> int:
    cursor = turns.cursors.get(task)
    return -1 if cursor is None else cursor.epoch


def _epochs(task: str, turns: TurnSampler, *, least: int) -> Iterator[tuple[int, int]]:
    """Yield the epochs of a task that another rank may have to begin, the one that is drawn last, and their lengths."""
    cursor = turns.cursors[task]
    for epoch in range(least + 1, cursor.epoch):
        if (length := turns.lengths.get((task, epoch))) is not None:
            yield epoch, length
    if cursor.epoch >= 0:
        yield cursor.epoch, cursor.length


def _known(rank: int, chosen: Candidate, others: Iterable[Candidate]) -> ConsumerHalf:
    """Return what others say of what the weights have seen of a rank that does not say it."""
    manifest = chosen.manifest
    assert manifest is not None
    line = [each for each in others if each.manifest is not None and _before(each.manifest, manifest)]
    told = [each.half for found in (chosen, *line) for each in found.ranks if each.half is not None]
    mine = [each.ranks[rank].half for each in line if rank < len(each.ranks)]
    counts = next((half for half in reversed(mine) if half is not None), ConsumerHalf())
    return ConsumerHalf(
        step=manifest.step,
        trained=joined_ranges(half.trained for half in told),
        trained_by_task=counts.trained_by_task,
        masked_by_task=counts.masked_by_task,
    )


def _before(other: Manifest, manifest: Manifest) -> bool:
    """Whether what a generation calls trained is trained in another one, too."""
    return other.base == manifest.base and other.generation < manifest.generation and other.step <= manifest.step


def _filled_losses(layout: Layout, fold: RankRescue, filled: Filled) -> list[Loss]:
    holes = [hole for hole, _ in fold.holes if hole.events]
    again, unknown = filled.again[fold.rank], filled.unknown[fold.rank]
    losses = [
        _loss(
            layout,
            holes[0],
            f"{holes[0].name.path}: of {len(mine)} draws that are the turn of rank {fold.rank} no event tells",
            f"task {task}: items of index {_listed(mine)} are run from the start",
        )
        for task in sorted({each.task for each in again})
        for mine in [[each for each in again if each.task == task]]
    ]
    if unknown:
        shown = ", ".join(map(str, unknown))
        what = f"{holes[0].name.path}: of {len(unknown)} draws of rank {fold.rank} neither an event nor a payload tells"
        losses.append(_loss(layout, holes[0], what, f"uids {shown}: what they were nobody knows; they are not run"))
    return losses


def _given_up(
    layout: Layout, chosen: Candidate, folds: Sequence[RankRescue], rank: int, half: ConsumerHalf
) -> tuple[ConsumerHalf, Loss]:
    """Give up everything that a rank had claimed: as it may have been trained, it counts as that from here on, and so
    does what has ended, as nobody says which of that was trained. Return the consumer half which says so, and what is
    lost by it."""
    fold = folds[rank]
    entries = [each for uid, each in sorted(fold.ledger.entries.items()) if uid not in fold.ledger.trained]
    theirs = {uid for each in folds for uid in (*each.turns.reserved, *(each.ledger.entries if each != fold else ()))}
    base, first = base_of(folds), first_of(folds)
    mine = [n for n in range(fold.turns.next) if n < first or (n - base) % len(folds) == rank]
    uids = [*(entry.uid for entry in entries), *(n for n in mine if n not in theirs)]
    fold.ledger.trained.update(uids)
    fold.anew = True
    path = os.path.join(chosen.folder, shard_prefix(rank), CONSUMER_FILE)
    lost = f"rank {rank} begins without any group"
    if entries:
        lost += f": items of index {_listed(entries, most=None)} may have been trained already, and are not run again"
    what = "what the weights had seen of the rank is not known"
    trained = joined_ranges([half.trained, [(uid, uid) for uid in uids]])
    half = msgspec.structs.replace(half, trained=trained)
    return half, Loss(path=os.path.relpath(path, layout.directory), what=what, lost=lost)


def _listed(items: Sequence[Claimed | Entry], most: int | None = _MOST) -> str:
    shown = ", ".join(f"{each.index} (epoch {each.epoch}, uid {each.uid})" for each in items[:most])
    return shown + (f" and {len(items) - most} more" if most is not None and len(items) > most else "")


def _loss(layout: Layout, hole: Hole, what: str, lost: str) -> Loss:
    path = os.path.relpath(hole.name.path, layout.directory)
    return Loss(path=path, offset=hole.offset, bytes=hole.bytes, what=what, lost=lost)

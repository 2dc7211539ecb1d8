"""Which generation of a damaged buffer is gone on from, and what is damaged in the others. Blocks, and changes
nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.checkpoint import lost
from pipeline.checkpoint.generations import Stored, check_listed, find_generations
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import OF_SHARDS, OWN_FOLDER, SHARDS_FOLDER, TRAINER_FOLDER, Manifest, shard_prefix
from pipeline.checkpoint.survey import identify
from pipeline.errors import Damaged, ForebayError, StoreError, UsageError
from pipeline.store.layout import Layout


class Chosen(NamedTuple):
    """The generation, and what is not whole beside payloads.

    Attributes:
        stored: the newest that is whole but for its payloads, or else the newest that says how the buffer stood.
        run_tag: of the run.
        left_out: the trainer's files that are not whole, and why.
        losses: each place that is not whole.
        usable, unusable: generations that could be gone on from, and others.
    """

    stored: Stored
    run_tag: int
    left_out: dict[str, str]
    losses: list[Loss]
    usable: int
    unusable: int


def choose_generation(layout: Layout, kind: str, step: int | None = None) -> Chosen:
    """Look at every generation of a buffer's run, and choose.

    Raises:
        NotARun: there is no run.
        UsageError: it is of another kind.
        Damaged: no generation says how the buffer stood.
        StoreError: there is none of ``step``.
    """
    run, losses = identify(layout)
    found = find_generations(layout, run.run_id, forgiving=True)
    for number, error in found.damaged:
        path = os.path.join(layout.generations, f"{number:08d}", "manifest.json")
        losses.append(_loss(layout, path, error, lost.with_manifest(number)))
    faults = {stored.manifest.generation: _faults(stored) for stored in found.complete}
    chosen = _choose(layout, found.complete, faults, step)
    if chosen.manifest.kind != kind:
        raise UsageError(f"{chosen.folder}: was saved by a run of {chosen.manifest.kind}, and not of {kind}")
    for stored in found.complete:
        for path, fault in faults[stored.manifest.generation].items():
            what = lost.with_file(stored.manifest, path)
            if stored is chosen and of_trainer(path):
                what = f"this file: it is left out, and the trainer must get it from elsewhere ({path})"
            losses.append(_loss(layout, os.path.join(stored.folder, path), fault, what))
    usable = sum(_stated(each.manifest, faults[each.manifest.generation]) for each in found.complete)
    wrong = faults[chosen.manifest.generation].items()
    left_out = {path: str(error) for path, error in wrong if of_trainer(path)}
    unusable = len(faults) - usable + len(found.damaged)
    return Chosen(chosen, run.tag, left_out, losses, usable, unusable)


def _loss(layout: Layout, path: str, error: Exception, what: str) -> Loss:
    offset = error.offset if isinstance(error, Damaged) else None
    return Loss(path=os.path.relpath(path, layout.directory), offset=offset, what=str(error), lost=what)


def _faults(stored: Stored) -> dict[str, Exception]:
    faults: dict[str, Exception] = {}
    for info in stored.manifest.files:
        try:
            check_listed(stored, info)
        except (ForebayError, OSError) as error:
            faults[info.path] = error
    return faults


def of_trainer(path: str) -> bool:
    """Whether a file is the state of something attached, for all ranks or one of them."""
    parts = path.split("/")
    return parts[0] == TRAINER_FOLDER or (parts[0] == SHARDS_FOLDER and parts[2:3] == [OWN_FOLDER])


def _stated(manifest: Manifest, faults: Mapping[str, Exception]) -> bool:
    """Whether a generation says how the buffer stood; of shards, one of them is enough."""
    wrong = [path for path in faults if not of_trainer(path)]
    if manifest.kind not in OF_SHARDS:
        return not wrong
    hurt = {"/".join(path.split("/")[:2]) + "/" for path in wrong}
    return bool({shard_prefix(shard.rank) for shard in manifest.shards} - hurt)


def _choose(
    layout: Layout, complete: list[Stored], faults: Mapping[int, Mapping[str, Exception]], step: int | None
) -> Stored:
    """Return the newest generation that is whole but for its rows, or else the newest whose state is."""
    asked = [each for each in complete if step in (None, each.manifest.step)]
    if step is not None and not asked:
        steps = sorted({each.manifest.step for each in complete})
        raise StoreError(f"{layout.directory}: no generation of step {step} can be read; there are steps {steps}")
    stated = [each for each in asked if _stated(each.manifest, faults[each.manifest.generation])]
    if not stated:
        named = {each.manifest.generation: faults[each.manifest.generation].values() for each in asked}
        told = "".join(f"\n  generation {number}: {'; '.join(map(str, wrong))}" for number, wrong in named.items())
        raise Damaged(
            f"{layout.directory}: no generation says how the buffer stood, so nobody knows what its rows are. Restore "
            f"one of them from a copy:{told or ' there is none'}"
        )
    whole = [each for each in stated if not faults[each.manifest.generation]]
    return (whole or stated)[-1]


def salvage_notes(chosen: Chosen) -> dict[str, str]:
    """Return which files the new generation leaves out, and why."""
    return {path: f"damaged when the run was salvaged: {why}" for path, why in chosen.left_out.items()}


def payload_loss(layout: Layout, block: Any, error: Damaged, what: str) -> Loss:
    """Return the loss of a block."""
    path = os.path.relpath(layout.segment(*block.segment_key), layout.directory)
    return Loss(path=path, offset=block.offset, bytes=block.length, what=str(error), lost=what)


def unfollowed_loss(layout: Layout, stored: Stored, rows: int) -> list[Loss]:
    """Return the loss of rows, if there are any, that are whole but for their next observations."""
    if not rows:
        return []
    what = "next observations that rows share lie in rows that are gone"
    return [Loss(path=os.path.relpath(stored.folder, layout.directory), what=what, lost=f"{rows} rows before gaps")]

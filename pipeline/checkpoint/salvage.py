"""Salvaging: a new run out of what is whole of a damaged one, which is only read.

The new run is a fork without a pipeline: a run id of its own, one journal that begins with what it inherits, segments
with copies of the payloads, and one generation. Its marker is written last of all, so that what a failure left behind
is no run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pipeline.checkpoint.gathering import Gathered, generation_losses, segment_losses
from pipeline.checkpoint.losses import Loss, Salvaged
from pipeline.checkpoint.new_ranks import WrittenRanks, write_ranks
from pipeline.checkpoint.new_run import Written, write_run
from pipeline.checkpoint.rank_gathering import gather_parts
from pipeline.checkpoint.survey import Candidate, choose_whole, survey
from pipeline.errors import ConfigError, ForebayError, WriteFailed
from pipeline.store.files import FilesLike, OsFiles
from pipeline.store.layout import Layout


def salvage(
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    files: FilesLike | None = None,
    called: str | os.PathLike[str] | None = None,
) -> Salvaged:
    """Write everything that is whole of a damaged run into a new run. Blocks; the damaged run is only read.

    ::

        found = salvage("runs/a", "runs/a-salvaged")
        for loss in found.losses:
            print(loss.path, loss.what, loss.lost)

    The new run begins with the newest generation whose trainer files are whole; if there is none, with the newest that
    says what the weights have seen, without the files that are damaged. ``Pipeline(tasks, directory=target)`` and
    ``resume()`` go on with it: what was trained stays trained, whole groups are used, and members whose payload is gone
    are run again. Results of evaluations do not come along, as with a fork. No other process may write in the damaged
    run meanwhile.

    Of a pipeline of several ranks the new run is one of as many, and each group stays with its rank. Draws keep their
    numbers: those of which no event tells any more are run from the start. If no generation says what the weights have
    seen of all ranks, the newest is taken in which some do, and the others begin without any group.

    Args:
        directory: the damaged run's.
        target: where the new run goes; absent or empty. Nothing in it is shared with the damaged run.
        step: take the newest generation of this step.
        files: the file layer that the new run is written through.
        called: what the new run's folder will be called, where the caller is to rename it.

    Raises:
        ConfigError: ``target`` holds something, or lies inside the damaged run.
        NotARun: there is no run in ``directory``.
        NewerFormat: a newer version wrote it.
        StoreError: there is no generation of ``step``.
        Damaged: no generation says what the weights have seen; the message says what is damaged in each.
        WriteFailed: the new run could not be written; what lies in ``target`` is no run, and may be removed.
    """
    layout, new = Layout(os.fspath(directory)), Layout(os.fspath(target))
    check_target(layout.directory, new.directory)
    return _salvaged(layout, new, new if called is None else Layout(os.fspath(called)), step, files or OsFiles())


def _salvaged(layout: Layout, new: Layout, named: Layout, step: int | None, files: FilesLike) -> Salvaged:
    run, candidates, losses = survey(layout)
    chosen = choose_whole(candidates, step, layout.directory)
    told = _Told(layout, named, chosen, candidates, losses)
    try:
        gathered = gather_parts(layout, run.tag, run.run_id, chosen, candidates)
        parts = gathered.parts
        if not chosen.ranks:
            return told.of(parts, write_run(layout, run.tag, chosen, parts[0], new, files, named.directory))
        written = write_ranks(layout, run.tag, chosen, parts, new, files, named.directory)
        return msgspec.structs.replace(told.of(parts, written), ranks=written.groups, ranks_lost=gathered.lost)
    except ForebayError:
        raise
    except OSError as error:
        raise WriteFailed(f"{new.directory}: could not be written: {error}. Remove it, and try again") from error


class _Told(NamedTuple):
    """What is told of a salvage, whatever it was of."""

    layout: Layout
    new: Layout
    chosen: Candidate
    candidates: Sequence[Candidate]
    losses: list[Loss]
    """Of the marker."""

    def of(self, parts: Sequence[Gathered], written: Written | WrittenRanks) -> Salvaged:
        """Return it: what there was of each process, and what was written."""
        layout, chosen, candidates = self.layout, self.chosen, self.candidates
        losses = [*self.losses, *generation_losses(layout, candidates, chosen)]
        losses += [*(loss for each in parts for loss in each.losses), *written.losses]
        losses += segment_losses(layout, candidates, {loss.path for loss in losses})
        usable = sum(each.half is not None for each in candidates)
        return Salvaged(
            directory=self.new.directory,
            run_id=written.run_id,
            origin=parts[0].opened.origin,
            step=parts[0].manifest.step,
            losses=losses,
            groups_kept=written.groups if isinstance(written, Written) else sum(written.groups),
            members_kept=written.members,
            members_again=written.again + sum(claim.size for each in parts for claim in each.again),
            items_again=sum(len(each.again) for each in parts),
            generations_usable=usable,
            generations_unusable=len(candidates) - usable,
            left_out=chosen.left_out,
        )


def check_target(source: str, target: str) -> None:
    """Refuse a target that holds something, or that would change the damaged run.

    Raises:
        ConfigError: it does.
    """
    run, new = os.path.realpath(source), os.path.realpath(target)
    if os.path.commonpath([run, new]) == run:
        raise ConfigError.of("target", target, f"must not lie in the run to be salvaged, {source}")
    if not os.path.lexists(target):
        return
    there = os.listdir(target) if os.path.isdir(target) else [os.path.basename(target)]
    if there:
        shown = ", ".join(sorted(there)[:5])
        raise ConfigError.of("target", target, f"must be absent or an empty folder; it holds {shown}")

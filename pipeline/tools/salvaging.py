"""Salvaging a run, of rollouts or a buffer of transitions or trajectories."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from pipeline.checkpoint.losses import Loss, Salvaged
from pipeline.checkpoint.manifest import REPLAY, TRAJECTORIES
from pipeline.checkpoint.rehearsal import Copying, Counting, Rehearsal, Told
from pipeline.checkpoint.salvage import salvage
from pipeline.errors import ConfigError
from pipeline.replay.salvaging import SavedRows, whole_rows, write_rows
from pipeline.replay.salvaging_trajectories import SavedTrajectories, whole_trajectories, write_trajectories
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout
from pipeline.tools.target import RUN, find_target


class SalvagedBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`salvage_run` wrote of a buffer, and what it could not."""

    directory: str
    run_id: str
    """The new run's; empty after a rehearsal."""
    origin: str
    """Run id and generation that it was made from."""
    step: int
    losses: list[Loss]
    rows_kept: int
    rows_lost: int
    generations_usable: int
    """Generations of the damaged run that say how the buffer stood."""
    generations_unusable: int
    left_out: dict[str, str] = {}
    """The trainer's files that are not whole and did not come along, and why."""

    @property
    def whole(self) -> bool:
        """Whether nothing was lost."""
        return not self.losses


class SalvagedRows(SalvagedBuffer, frozen=True, kw_only=True):
    """Of a buffer of transitions."""

    episodes_split: int
    """Episodes of which rows in the middle are gone: what comes after these is an episode of its own."""


class SalvagedTrajectories(SalvagedBuffer, frozen=True, kw_only=True):
    """Of a buffer of trajectories."""

    trajectories_kept: int
    trajectories_lost: int


def salvage_run(
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    rehearse: bool = False,
    told: Told | None = None,
    called: str | os.PathLike[str] | None = None,
) -> Salvaged | SalvagedRows | SalvagedTrajectories:
    """Write everything that is whole of a damaged run into a new run; the damaged run is only read. Blocks.

    Of a run of rollouts see :func:`pipeline.checkpoint.salvage`. Of a buffer of transitions the rows of whole blocks
    come along, with their priorities, and of a buffer of trajectories those that are whole; they are in memory
    meanwhile.

    Args:
        directory: the damaged run's.
        target: where the new run goes; absent or empty. What a failure leaves there is to be removed.
        step: begin with the newest generation of this step.
        rehearse: write nothing; say what would come along.
        told: told of bytes as they are written, or would be.
        called: what the new run's folder will be called, where the caller is to rename it.

    Raises:
        ConfigError: ``target`` holds something, or lies inside the damaged run.
        NotARun: there is no run in ``directory``.
        UsageError: it is a run that cannot be salvaged: of shards, of rollouts that fill a buffer, or of a buffer whose
            rows lie in another way; the message says what to do instead.
        Damaged: no generation can be gone on from.
        WriteFailed: the new run could not be written.
    """
    found = find_target(directory)
    if found.what != RUN:
        raise ConfigError.of("RUN", found.path, f"a run's folder is needed, and this is a {found.what}")
    tell: Told = told or (lambda count: None)
    name = os.path.abspath(target if called is None else called)
    kind = None if found.stored is None else found.stored.manifest.kind
    if kind not in (REPLAY, TRAJECTORIES):
        files = Rehearsal(tell) if rehearse else Counting(Copying(), tell)
        return salvage(directory, target, step=step, files=files, called=name)
    _check_target(found.path, os.path.abspath(target))
    saved: _Saved = (whole_rows if kind == REPLAY else whole_trajectories)(Layout(found.path), step=step)
    origin = f"{found.run.run_id}/{saved.chosen.stored.manifest.generation}"
    run_id = "" if rehearse else _written(saved, os.path.abspath(target), origin, name, Counting(Copying(), tell))
    return _told(saved, name, run_id, origin)


_Saved = SavedRows | SavedTrajectories


def _written(saved: _Saved, target: str, origin: str, called: str, files: FilesLike) -> str:
    if isinstance(saved, SavedRows):
        return write_rows(saved, target, origin=origin, called=called, files=files)
    return write_trajectories(saved, target, origin=origin, called=called, files=files)


def _told(saved: _Saved, name: str, run_id: str, origin: str) -> SalvagedRows | SalvagedTrajectories:
    chosen = saved.chosen
    common: dict[str, Any] = {
        "directory": name,
        "run_id": run_id,
        "origin": origin,
        "step": chosen.stored.manifest.step,
        "losses": saved.losses,
        "generations_usable": chosen.usable,
        "generations_unusable": chosen.unusable,
        "left_out": chosen.left_out,
    }
    if isinstance(saved, SavedRows):
        return SalvagedRows(**common, rows_kept=saved.kept, rows_lost=saved.missing, episodes_split=saved.split)
    return SalvagedTrajectories(
        **common,
        rows_kept=saved.rows_kept,
        rows_lost=saved.rows_missing,
        trajectories_kept=saved.kept,
        trajectories_lost=saved.missing,
    )


def _check_target(source: str, target: str) -> None:
    """Refuse a target that holds something, or that would change the damaged run."""
    if os.path.commonpath([os.path.realpath(source), os.path.realpath(target)]) == os.path.realpath(source):
        raise ConfigError.of("OUT", target, f"must not lie in the run to be salvaged, {source}")
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise ConfigError.of("OUT", target, "it is there already, and is not written over")

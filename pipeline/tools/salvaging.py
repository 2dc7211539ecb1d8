"""Salvaging a run, of rollouts or a buffer of transitions."""

from __future__ import annotations

import os

import msgspec

from pipeline.checkpoint.losses import Loss, Salvaged
from pipeline.checkpoint.manifest import REPLAY
from pipeline.checkpoint.rehearsal import Copying, Counting, Rehearsal, Told
from pipeline.checkpoint.salvage import salvage
from pipeline.errors import ConfigError
from pipeline.replay.salvaging import SavedRows, whole_rows, write_rows
from pipeline.store.layout import Layout
from pipeline.tools.target import RUN, find_target


class SalvagedRows(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`salvage_run` wrote of a buffer of transitions, and what it could not."""

    directory: str
    run_id: str
    """The new run's; empty after a rehearsal."""
    origin: str
    """Run id and generation that it was made from."""
    step: int
    losses: list[Loss]
    rows_kept: int
    rows_lost: int
    episodes_split: int
    """Episodes of which rows in the middle are gone: what comes after these is an episode of its own."""
    generations_usable: int
    """Generations of the damaged run that say how the buffer stood."""
    generations_unusable: int
    left_out: dict[str, str] = {}
    """The trainer's files that are not whole and did not come along, and why."""

    @property
    def whole(self) -> bool:
        """Whether nothing was lost."""
        return not self.losses


def salvage_run(
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    rehearse: bool = False,
    told: Told | None = None,
    called: str | os.PathLike[str] | None = None,
) -> Salvaged | SalvagedRows:
    """Write everything that is whole of a damaged run into a new run; the damaged run is only read. Blocks.

    Of a run of rollouts see :func:`pipeline.checkpoint.salvage`. Of a buffer of transitions the rows of whole blocks
    come along, with their priorities; they are in memory meanwhile.

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
        UsageError: it is a run that cannot be salvaged: of trajectories, of shards, of rollouts that fill a buffer, or
            of a buffer whose rows lie in another way; the message says what to do instead.
        Damaged: no generation can be gone on from.
        WriteFailed: the new run could not be written.
    """
    found = find_target(directory)
    if found.what != RUN:
        raise ConfigError.of("RUN", found.path, f"a run's folder is needed, and this is a {found.what}")
    tell: Told = told or (lambda count: None)
    name = os.path.abspath(target if called is None else called)
    if found.stored is None or found.stored.manifest.kind != REPLAY:
        files = Rehearsal(tell) if rehearse else Counting(Copying(), tell)
        return salvage(directory, target, step=step, files=files, called=name)
    _check_target(found.path, os.path.abspath(target))
    layout = Layout(found.path)
    saved = whole_rows(layout, step=step)
    origin = f"{found.run.run_id}/{saved.stored.manifest.generation}"
    run_id = ""
    if not rehearse:
        run_id = write_rows(saved, os.path.abspath(target), origin=origin, called=name, files=Counting(Copying(), tell))
    return _of_rows(saved, name, run_id, origin)


def _of_rows(saved: SavedRows, name: str, run_id: str, origin: str) -> SalvagedRows:
    return SalvagedRows(
        directory=name,
        run_id=run_id,
        origin=origin,
        step=saved.stored.manifest.step,
        losses=saved.losses,
        rows_kept=saved.kept,
        rows_lost=saved.missing,
        episodes_split=saved.split,
        generations_usable=saved.usable,
        generations_unusable=saved.unusable,
        left_out=saved.left_out,
    )


def _check_target(source: str, target: str) -> None:
    """Refuse a target that holds something, or that would change the damaged run."""
    if os.path.commonpath([os.path.realpath(source), os.path.realpath(target)]) == os.path.realpath(source):
        raise ConfigError.of("OUT", target, f"must not lie in the run to be salvaged, {source}")
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise ConfigError.of("OUT", target, "it is there already, and is not written over")

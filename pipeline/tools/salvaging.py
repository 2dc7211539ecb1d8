"""Salvaging a run, of rollouts or a buffer of transitions or trajectories."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from pipeline.checkpoint.descent import ways_after
from pipeline.checkpoint.losses import Loss, Salvaged
from pipeline.checkpoint.manifest import REPLAY, SHARDS, TRAJECTORIES, TRAJECTORY_SHARDS, Manifest
from pipeline.checkpoint.rehearsal import Copying, Counting, Rehearsal, Told
from pipeline.checkpoint.salvage import check_target, salvage
from pipeline.checkpoint.survey import fills_buffer
from pipeline.errors import ConfigError
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout
from pipeline.tools.salvaging_buffers import SavedRows, salvage_rows
from pipeline.tools.salvaging_episodes import salvage_episodes
from pipeline.tools.salvaging_shards import SavedShards, salvage_shards
from pipeline.tools.salvaging_trajectories import SavedTrajectories, salvage_trajectories
from pipeline.tools.target import RUN, Target, find_target


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


class SalvagedTrajectoryShards(SalvagedTrajectories, frozen=True, kw_only=True):
    """Of a buffer of trajectories of several ranks."""

    shards: list[int]
    """Rows of each rank."""
    shards_lost: list[int]
    """Ranks whose shards cannot be read, which begin without trajectories."""


class SalvagedShards(SalvagedBuffer, frozen=True, kw_only=True):
    """Of the buffer of several ranks."""

    shards: list[int]
    """Rows of each rank."""
    shards_lost: list[int]
    """Ranks whose shards cannot be read, which begin without rows."""
    episodes_split: int
    """Episodes of which rows in the middle are gone: what comes after these is an episode of its own. Not counted in a
    rehearsal."""


def salvage_run(
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    rehearse: bool = False,
    told: Told | None = None,
    called: str | os.PathLike[str] | None = None,
) -> Salvaged | SalvagedBuffer:
    """Write everything that is whole of a damaged run into a new run; the damaged run is only read. Blocks.

    Of a run of rollouts, of one process or of ranks: :func:`pipeline.checkpoint.salvage`. Of a buffer of transitions
    the rows of whole blocks come along, with their priorities, a bounded part of them in memory; so they do of the
    buffer of several ranks, for as many ranks. Of a buffer of trajectories, of one process or of ranks, those come
    along that are whole, one of them in memory at a time. Of a run whose rollouts fill a buffer of transitions
    items come along as of any run of rollouts, and rows as of any buffer, those of after the generation too.

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
        UsageError: it cannot be salvaged, as its rows lie in another way; the message says what to do instead.
        Damaged: no generation can be gone on from.
        WriteFailed: the new run could not be written.
    """
    found = find_target(directory)
    if found.what != RUN:
        raise ConfigError.of("RUN", found.path, f"a run's folder is needed, and this is a {found.what}")
    tell: Told = told or (lambda count: None)
    name = os.path.abspath(target if called is None else called)
    kind, filled = ("", False) if found.stored is None else _kind_of(found.stored.manifest)
    if not filled and kind not in (REPLAY, SHARDS, TRAJECTORIES, TRAJECTORY_SHARDS):
        files = Rehearsal(tell) if rehearse else Counting(Copying(), tell)
        return salvage(directory, target, step=step, files=files, called=name)
    check_target(found.path, os.path.abspath(target))
    counting = Counting(Copying(), tell)
    if filled:
        how: dict[str, Any] = {"called": name, "files": counting, "rehearse": rehearse}
        return salvage_episodes(Layout(found.path), os.path.abspath(target), step=step, **how)
    made = _of_buffer(found, kind, os.path.abspath(target), step, name, counting, rehearse=rehearse)
    if not rehearse and kind == REPLAY:  # others say it already
        _note_source(found, Layout(os.path.abspath(target)), counting)
    return made


def _kind_of(manifest: Manifest) -> tuple[str, bool]:
    """Return what wrote a run, and whether its rollouts fill a buffer."""
    return manifest.kind, fills_buffer(manifest)


def _note_source(found: Target, new: Layout, files: FilesLike) -> None:
    """Have the marker of a new run say what it was made of."""
    assert found.stored is not None
    run = new.read_run()
    assert run is not None
    ways = ways_after(Layout(found.path), found.run.run_id, found.stored.manifest)
    new.write_marker(files, msgspec.structs.replace(run, made_of=ways))


def _of_buffer(
    found: Target, kind: str, target: str, step: int | None, called: str, files: FilesLike, *, rehearse: bool
) -> SalvagedBuffer:
    layout = Layout(found.path)
    if kind == SHARDS:
        shards = salvage_shards(layout, target, step=step, called=called, files=files, rehearse=rehearse)
        return _of_shards(shards, called)
    if kind == REPLAY:
        rows = salvage_rows(layout, target, step=step, called=called, files=files, rehearse=rehearse)
        return SalvagedRows(
            **_common(rows, called, rows.run_id, rows.origin),
            rows_kept=rows.kept,
            rows_lost=rows.missing,
            episodes_split=rows.split,
        )
    how: dict[str, Any] = {"step": step, "called": called, "files": files, "rehearse": rehearse}
    return _of_trajectories(salvage_trajectories(layout, target, kind=kind, **how), kind, called)


def _common(saved: SavedRows | SavedTrajectories | SavedShards, name: str, run_id: str, origin: str) -> dict[str, Any]:
    chosen = saved.chosen
    return {
        "directory": name,
        "run_id": run_id,
        "origin": origin,
        "step": chosen.stored.manifest.step,
        "losses": saved.losses,
        "generations_usable": chosen.usable,
        "generations_unusable": chosen.unusable,
        "left_out": chosen.left_out,
    }


def _of_shards(saved: SavedShards, name: str) -> SalvagedShards:
    rows = [each.rows for each in saved.shards]
    return SalvagedShards(
        **_common(saved, name, saved.run_id, saved.origin),
        rows_kept=sum(rows),
        rows_lost=saved.missing,
        shards=rows,
        shards_lost=saved.lost,
        episodes_split=saved.split,
    )


def _of_trajectories(saved: SavedTrajectories, kind: str, name: str) -> SalvagedTrajectories:
    fields = {
        **_common(saved, name, saved.run_id, saved.origin),
        "rows_kept": sum(each.rows for each in saved.shards),
        "rows_lost": saved.rows_missing,
        "trajectories_kept": saved.kept,
        "trajectories_lost": saved.missing,
    }
    if kind == TRAJECTORIES:
        return SalvagedTrajectories(**fields)
    rows = [each.rows for each in saved.shards]
    return SalvagedTrajectoryShards(**fields, shards=rows, shards_lost=saved.lost)

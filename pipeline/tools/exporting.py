"""Exporting: what a run holds, in a format that other programs read. The run is only read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.errors import ConfigError
from pipeline.tools.formats.folder import PART_BYTES, OutFolder, PartInfo
from pipeline.tools.formats.registry import TO, Format, format_of
from pipeline.tools.interchange.aside import aside, check_target
from pipeline.tools.interchange.filters import condition_of, filtered
from pipeline.tools.interchange.rollouts_out import rollouts_of
from pipeline.tools.interchange.rows_out import transitions_of
from pipeline.tools.interchange.runs import Opened, content_of, open_run
from pipeline.tools.interchange.streams import ROLLOUTS, TRANSITIONS, Stream
from pipeline.tools.interchange.trajectories_out import trajectories_of
from pipeline.tools.output import folder_near


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`export` wrote, or would write."""

    out: str
    to: str
    content: str
    """``transitions``, ``rollouts`` or ``trajectories``."""
    count: int | None
    """How many; None: a dry run with a condition does not know it."""
    bytes: int
    """Of the payloads that are read."""
    step: int
    """Of the generation."""
    files: list[PartInfo] = []
    """What was written; empty where nothing was."""
    notes: list[str] = []
    """What the format cannot hold in its own places, and where it lies instead."""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be exported of a run."""

    content: str | None = None
    """``rollouts``, or the ``transitions`` with which they filled a buffer; needed where a run has both."""
    step: int | None = None
    """The newest generation of this step; None: the newest of all."""
    tasks: tuple[str, ...] = ()
    """Rollouts of these alone."""
    statuses: tuple[str, ...] = ()
    """``buffered``, ``parked`` or ``trained`` rollouts alone; empty: all but parked ones."""
    where: tuple[str, ...] = ()
    """Conditions such as ``reward>=0.5``, all of which must hold: fields of rollouts, columns of one number."""


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str,
    part_bytes: int = PART_BYTES,
    fps: int | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **chosen: Any,
) -> Exported:
    """Write what a generation of a run holds into a new folder. Blocks, and takes no lock.

    ::

        export("runs/b", "rows", to="parquet", where=["reward>0"])

    Nothing is held but a block or a rollout at a time. The folder gets its name when it is whole.

    Args:
        run: the run's folder.
        out: where to write; absent or empty.
        to: the format: one of :data:`~pipeline.tools.formats.registry.TO`.
        part_bytes: about how large a file may become.
        fps: of LeRobot alone, which wants to know how many frames a second has; left out, 1.
        dry_run: look at everything, and write nothing.
        progress: told bytes that were taken in, and of how many.
        chosen: what: see :class:`Chosen`.

    Raises:
        ConfigError: an option does not fit the run; a package is missing.
        NotARun, StoreError, Damaged: the run cannot be read.
        WriteFailed: it could not be written.
    """
    form = format_of(to, "to", TO)
    _check_options(to, part_bytes, fps)
    source, target = os.fspath(run), os.fspath(out)
    check_target(target, source)
    stream, step = _chosen(source, folder_near(target), form, Chosen(**{k: _held(v) for k, v in chosen.items()}))
    found = Exported(
        out=target,
        to=to,
        content=content_of_stream(stream),
        count=stream.total,
        bytes=stream.nbytes,
        step=step,
        notes=form.told(stream) if hasattr(form, "told") else [],
    )
    return found if dry_run else _written(found, form, stream, part_bytes, fps or 1, progress)


def _written(
    found: Exported,
    form: Format,
    stream: Stream,
    part_bytes: int,
    fps: int,
    progress: Callable[[int, int], None] | None,
) -> Exported:
    with aside(found.out) as folder:
        told = progress or (lambda done, total: None)
        writing = OutFolder(folder, found.to, stream, part_bytes, lambda done: told(done, stream.nbytes), fps)
        form.write(stream, writing)
        described = writing.finish()
    return msgspec.structs.replace(found, count=described.count, files=described.files)


def _check_options(to: str, part_bytes: int, fps: int | None) -> None:
    if part_bytes < 1:
        raise ConfigError.of("part_bytes", part_bytes, "at least 1 is needed")
    if fps is not None and (to != "lerobot" or fps < 1):
        raise ConfigError.of("fps", fps, "1 or more is needed, and that for --to lerobot alone")


def _held(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int)) else tuple(value)


def _chosen(source: str, near: str, form: Format, chosen: Chosen) -> tuple[Stream, int]:
    """Return what was chosen of a run, and the step of its generation; files without a name may be in ``near``."""
    opened = open_run(source, chosen.step)
    stream = _stream(opened, near, chosen.content, frozenset(chosen.tasks), frozenset(chosen.statuses))
    kind = content_of_stream(stream)
    if kind not in form.CONTENTS:
        raise ConfigError.of("to", form.NAME, f"it holds {' or '.join(form.CONTENTS)}, and {source} has {kind}")
    return filtered(stream, [condition_of(each) for each in chosen.where]), opened.stored.manifest.step


def content_of_stream(stream: Stream) -> str:
    """Return what a stream is of."""
    return getattr(stream, "content", TRANSITIONS)


def _stream(opened: Opened, near: str, content: str | None, tasks: frozenset[str], statuses: frozenset[str]) -> Stream:
    chosen = content_of(opened, content)
    if chosen != ROLLOUTS and (tasks or statuses):
        raise ConfigError(f"{opened.layout.directory}: --task and --status are of rollouts; it has {chosen}")
    if chosen == ROLLOUTS:
        return rollouts_of(opened, tasks=tasks, statuses=statuses)
    return transitions_of(opened, near) if chosen == TRANSITIONS else trajectories_of(opened)

"""Importing: a run out of what an export, or another system, wrote. It is only read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import msgspec

from pipeline.errors import ConfigError
from pipeline.tools.formats.pickles import is_pickle, refusal
from pipeline.tools.formats.registry import FROM, format_of, guessed
from pipeline.tools.interchange.aside import aside, check_target
from pipeline.tools.interchange.renaming import renamed
from pipeline.tools.interchange.rollouts_in import write_rollouts
from pipeline.tools.interchange.rows_in import write_transitions
from pipeline.tools.interchange.streams import ROLLOUTS, Stream, Transitions
from pipeline.tools.interchange.trajectories_in import write_trajectories


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`import_data` made, or would make."""

    out: str
    from_: str
    content: str
    """``transitions``, ``rollouts``, ``trajectories`` or ``progress``."""
    count: int | None
    """How many; None: a dry run may not know it."""
    run_id: str
    """Of the new run; empty where none was made."""
    step: int
    notes: list[str] = []
    """What did not come along, or stands elsewhere."""


def import_data(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    from_: str | None = None,
    step: int | None = None,
    rename: Mapping[str, str] | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Imported:
    """Make a run of what lies at ``path``. Blocks.

    ::

        import_data("rows", "runs/new")  # ReplayBuffer(n, directory="runs/new").resume() loads it

    Nothing is held but a block or a rollout at a time. The folder gets its name when it is whole.

    Args:
        path: a file or a folder.
        out: where the run goes; absent or empty.
        from_: the format: see :data:`~pipeline.tools.formats.registry.FROM`; left out, it is guessed.
        step: the trainer's step that the run begins after; left out, that which an export says, or 0.
        rename: columns of transitions that are to be called otherwise, such as ``{"terminals": "terminated"}``.
        dry_run: look at what is there, and make nothing.
        progress: told bytes that were taken in, and of how many.

    Raises:
        ConfigError: the format is not known, or a package is missing; a pickle, which is not opened.
        Damaged: what is there is not what it should be.
        WriteFailed: it could not be written.
    """
    source, target = os.fspath(path), os.fspath(out)
    check_target(target, source)
    name = from_ or _format_of(source)
    stream = renamed(format_of(name, "from", FROM).read(source), rename or {})
    begun = stream.about.step if step is None else step
    if begun < 0:
        raise ConfigError.of("step", begun, "0 or more is needed")
    content = "transitions" if isinstance(stream, Transitions) else stream.content
    found = Imported(
        out=target, from_=name, content=content, count=stream.total, run_id="", step=begun, notes=stream.about.notes
    )
    if dry_run:
        return found
    with aside(target) as folder:
        told = progress or (lambda done, total: None)
        run_id, count = _write(stream, folder, begun, lambda done: told(done, stream.nbytes))
    return msgspec.structs.replace(found, run_id=run_id, count=count)


def _format_of(source: str) -> str:
    """Return the format in which something lies."""
    if not os.path.lexists(source):
        raise ConfigError.of("path", source, "nothing is there")
    if is_pickle(source):
        raise refusal(source)
    return guessed(source)


def _write(stream: Stream, folder: str, step: int, progress: Callable[[int], None]) -> tuple[str, int]:
    if isinstance(stream, Transitions):
        return write_transitions(stream, folder, step=step, progress=progress)
    write = write_rollouts if stream.content == ROLLOUTS else write_trajectories
    return write(stream, folder, step=step, progress=progress)

"""What a path leads to: a run, one of its generations, a rank's shard in that, a journal, or a segment."""

from __future__ import annotations

import os
from typing import NamedTuple

from pipeline.checkpoint.generations import Found, Stored, choose, find_generations
from pipeline.checkpoint.manifest import MANIFEST_FILE, SHARDS_FOLDER, decode_manifest
from pipeline.checkpoint.survey import identify
from pipeline.errors import NotARun
from pipeline.store.files import open_plain
from pipeline.store.frames import HEADER_BYTES, decode_header
from pipeline.store.layout import RUN_FILE, Layout, RunFile

RUN, GENERATION, SHARD, JOURNAL, SEGMENT = "run", "generation", "shard", "journal", "segment"
_SUFFIXES = {".fbj": JOURNAL, ".fbs": SEGMENT}


class Target(NamedTuple):
    """What a path leads to.

    Attributes:
        what: one of the words above.
        path: absolute.
        layout: of the run that it is part of, or would be.
        run: the run's marker, or what the manifests or records say of it.
        stored: the generation that is meant: the one that the path is of, or the run's newest. None: there is none.
        rank: of a shard.
    """

    what: str
    path: str
    layout: Layout
    run: RunFile
    stored: Stored | None = None
    rank: int | None = None

    @property
    def whole_run(self) -> bool:
        """Whether the run that it is of is there."""
        return os.path.lexists(self.layout.run_file)


def find_target(path: str | os.PathLike[str], *, step: int | None = None) -> Target:
    """Return what a path leads to. Blocks, and changes nothing.

    Args:
        path: of a folder or a file.
        step: of a run, the newest generation of this step instead of the newest.

    Raises:
        NotARun: it is nothing of a run.
        StoreError: there is no generation of ``step``.
        Damaged: a generation was asked for, and its manifest is not whole.
    """
    where = os.path.abspath(os.fspath(path))
    if os.path.isfile(where):
        kind = _SUFFIXES.get(os.path.splitext(where)[1])
        if kind is not None:
            return _file(kind, where)
        if os.path.basename(where) == MANIFEST_FILE:
            return _generation(os.path.dirname(where))
    elif os.path.lexists(os.path.join(where, MANIFEST_FILE)):
        return _generation(where)
    elif os.path.isdir(where):
        parent, name = os.path.split(where)
        if os.path.basename(parent) == SHARDS_FOLDER and name.isdecimal():
            found = _generation(os.path.dirname(parent))
            return found._replace(what=SHARD, path=where, rank=int(name))
        if os.path.lexists(os.path.join(where, RUN_FILE)) or os.path.isdir(os.path.join(where, "generations")):
            return _run(where, step)
    what = "holds no run" if os.path.isdir(where) else "is nothing of a run" if os.path.lexists(where) else "is absent"
    raise NotARun(
        f"{where}: {what}. A run's folder is needed, a generation's (generations/00000012), a shard's in it "
        "(shards/0003), a manifest, a journal (.fbj), or a segment (.fbs)"
    )


def _run(where: str, step: int | None) -> Target:
    layout = Layout(where)
    run, _ = identify(layout)
    found = find_generations(layout, run.run_id, forgiving=True)
    return Target(RUN, where, layout, run, _chosen(found, step, where))


def _chosen(found: Found, step: int | None, where: str) -> Stored | None:
    if step is not None:
        return choose(found, step, where)
    return found.complete[-1] if found.complete else None


def _generation(folder: str) -> Target:
    path = os.path.join(folder, MANIFEST_FILE)
    with open_plain(path) as file:
        manifest = decode_manifest(file.read(), path)
    layout = Layout(os.path.dirname(os.path.dirname(folder)))
    return Target(GENERATION, folder, layout, RunFile(run_id=manifest.run_id), Stored(folder, manifest))


def _file(kind: str, where: str) -> Target:
    with open_plain(where) as file:
        header = decode_header(file.read(HEADER_BYTES), where)
    layout = Layout(os.path.dirname(os.path.dirname(where)))
    tag = "" if header is None else f"{header.run_tag:016x}"
    return Target(kind, where, layout, RunFile(run_id=tag or "0" * 16))

"""Whole segments that a new run has in common with the one that it is made of.

A file that has been written is never changed, so both may have it, by a hard link: then nothing is copied, and what is
in it is not read either. Frames name their run by the first 16 digits of its id; so a run that has another one's
segments has these digits in common with it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping

from pipeline.errors import Damaged
from pipeline.store.files import FilesLike, open_plain
from pipeline.store.layout import Layout, RunFile, segment_key
from pipeline.store.lock import look
from pipeline.store.segments import SegmentInfo
from pipeline.tools.sources import Source

_PIECE = 16 << 20


def related_run(run_id: str) -> RunFile:
    """Return the marker of a new run that may have segments of another one."""
    return RunFile(run_id=run_id[:16] + secrets.token_hex(8))


def life_after(layout: Layout, incarnation: int) -> int:
    """Return the incarnation that comes after all of a run's, one of a generation among them."""
    lived = [name.incarnation for name in layout.list_journals()]
    lived += [segment_key(name)[0] for name in layout.list_segments()]
    return max([incarnation, *lived]) + 1


def take_segments(
    source: Source,
    infos: Iterable[SegmentInfo],
    layout: Layout,
    files: FilesLike,
    names: Mapping[str, str] | None = None,
    taken: Callable[[int], None] | None = None,
) -> int:
    """Have segments of a run in a new one: by link, or by copy where that cannot be, or where somebody may still write
    in one. Returns how many bytes are linked.

    Args:
        source: the run.
        infos: the segments.
        layout, files: the new run, and the file layer.
        names: what they are called there; None: what they are called here.
        taken: told of the bytes of each.

    Raises:
        Damaged: one is missing or too short.
        OSError: one cannot be written.
    """
    idle, linked = look(source.layout.lock_file).held is False, 0
    for info in infos:
        path = source.layout.segment(*segment_key(info.name))
        try:
            size = os.stat(path, follow_symlinks=False).st_size
        except FileNotFoundError:
            raise Damaged(f"{path}: the segment is missing. Restore the file from a copy") from None
        if size < info.bytes:
            raise Damaged(f"{path}: has {size} bytes, where {info.bytes} were written. Restore the file from a copy")
        target = os.path.join(layout.segments, info.name if names is None else names[info.name])
        if (info.sealed or idle) and _linked(files, path, target):
            linked += info.bytes
        else:
            _copy(files, path, target, info.bytes)
        if taken is not None:
            taken(info.bytes)
    files.sync_directory(layout.segments)
    return linked


def _linked(files: FilesLike, path: str, target: str) -> bool:
    try:
        files.link(path, target)
    except OSError:
        if os.path.lexists(target):  # over a network a link may be said to have failed that was made
            files.unlink(target)
        return False
    return True


def _copy(files: FilesLike, path: str, target: str, size: int) -> None:
    handle = files.create(target)
    try:
        with open_plain(path) as file:
            while size > 0 and (piece := file.read(min(size, _PIECE))):
                files.write(handle, [piece])
                size -= len(piece)
        files.sync(handle)
    finally:
        files.close(handle)
    if size > 0:
        raise Damaged(f"{path}: has become shorter while it was read. Restore the file from a copy")

"""Reading files of which parts are damaged: what is whole of them, and where it is not.

A frame that is not whole is stepped over, 64 bytes at a time, to the next that is. What the numbers of the events then
say is missing is a :class:`Hole`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from pipeline.errors import NewerFormat
from pipeline.store.files import open_plain
from pipeline.store.frames import ALIGN, EVENTS, SYNCED, Frame, frame_bytes, read_frame
from pipeline.store.journal import JournalPosition, Logged, events_of
from pipeline.store.layout import JournalName


class Stretch(NamedTuple):
    """Bytes that hold no whole frame."""

    offset: int
    bytes: int


class Hole(NamedTuple):
    """A place of a journal that cannot be read."""

    name: JournalName
    offset: int | None
    """None: the whole file."""
    bytes: int
    first: int
    """Number of the first event that is missing."""
    events: int
    """How many are, at the least; 0: none, it was a mark."""
    what: str


def whole_frames(path: str, accept: Callable[[Frame], bool]) -> Iterator[Frame | Stretch]:
    """Yield the whole frames of a file that ``accept`` takes, and what lies between them, in order.

    Raises:
        Damaged: it is no plain file.
        NewerFormat: a whole frame is of a format that this version does not know.
        OSError: the file cannot be opened.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        offset, begun = 0, -1
        while offset < size:
            frame = frame_at(file, offset, path)
            if frame is None or not accept(frame):
                begun = offset if begun < 0 else begun
                offset += ALIGN
                continue
            if begun >= 0:
                yield Stretch(begun, offset - begun)
                begun = -1
            yield frame
            offset += frame_bytes(frame.header.length)
        if begun >= 0:
            yield Stretch(begun, size - begun)


def frame_at(file: BinaryIO, offset: int, where: str) -> Frame | None:
    """Return the frame at ``offset``, or None if no whole one lies there, or the disk does not give it."""
    try:
        return read_frame(file, offset, where)
    except NewerFormat:
        raise
    except OSError:
        return None


def read_remains(name: JournalName, run_tag: int, promised: JournalPosition | None) -> Iterator[Logged | Hole]:
    """Yield the events of a journal that are whole, and the holes between them.

    A record that a crash cut off at the end is no hole: nothing was promised there.

    Args:
        name: the journal.
        run_tag: the run's tag.
        promised: how much of it there must be.

    Raises:
        NewerFormat: it was written by a newer version.
    """
    expected, end = 1, 0
    bad: Stretch | None = None

    def accept(frame: Frame) -> bool:
        header = frame.header
        ours = (header.run_tag, header.incarnation, header.rank) == (run_tag, name.incarnation, name.rank)
        return ours and (header.kind == SYNCED or (header.kind == EVENTS and header.sequence >= expected))

    try:
        for each in whole_frames(name.path, accept):
            if isinstance(each, Stretch):
                bad = each
                continue
            header, end = each.header, each.offset + frame_bytes(each.header.length)
            events = events_of(each, name, header.sequence) if header.kind == EVENTS else []
            upto = header.sequence if header.kind == EVENTS else header.sequence + 1
            if bad is not None or upto > expected:
                at = bad or Stretch(each.offset, 0)
                yield _hole(name, at, expected, upto - expected)
                bad, expected = None, max(expected, upto)
            for event in events:
                yield Logged(name.incarnation, name.rank, expected, event)
                expected += 1
    except NewerFormat:
        raise
    except OSError as error:
        yield Hole(name, None, 0, expected, max(1, _last(promised) - expected + 1), str(error))
        return
    if expected <= _last(promised):
        yield _hole(name, bad or Stretch(end, 0), expected, _last(promised) - expected + 1)


def missing_journal(name: JournalName, promised: JournalPosition | None) -> Hole:
    """Return what a journal that is not there amounts to; each life of a run wrote one."""
    return Hole(name, None, 0, 1, max(1, _last(promised)), f"{name.path}: missing")


def _last(promised: JournalPosition | None) -> int:
    return 0 if promised is None else promised.sequence


def _hole(name: JournalName, at: Stretch, first: int, events: int) -> Hole:
    what = f"{name.path} at byte {at.offset}: "
    what += f"{at.bytes} bytes hold no whole record" if at.bytes else "records are missing"
    return Hole(name, at.offset, at.bytes, first, max(0, events), what)

"""Reading journals: the events of every incarnation and rank, in their order.

Writing them is :mod:`pipeline.store.writer`'s work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from pipeline.errors import Damaged, NewerFormat
from pipeline.locations import Location
from pipeline.records import Added, AnyEvent, Evaluated, Finished, Moved, Parked, PartSaved
from pipeline.store.frames import EVENTS, SYNCED, Frame, scan
from pipeline.store.layout import JournalName, Layout
from pipeline.store.segments import Place

encode_events = msgspec.msgpack.Encoder().encode
_decode_events = msgspec.msgpack.Decoder(list[AnyEvent]).decode


EndHook = Callable[["JournalPosition", str, int], None]
"""Told of each journal that was read: where it ends, its path, and how many bytes of a torn record follow."""


class Logged(NamedTuple):
    """An event and where it stands: by these three numbers the fold is ordered."""

    incarnation: int
    rank: int
    sequence: int
    event: AnyEvent


def payload_place(logged: Logged) -> Place | None:
    """Return where the payload lies that an event names; None if it names none."""
    event = logged.event
    if not isinstance(event, (Finished, Parked, PartSaved, Evaluated, Moved, Added)) or event.segment < 0:
        return None
    at = Location(logged.incarnation, logged.rank, event.segment, event.offset, event.length)
    return (event.first, 0, at) if isinstance(event, Added) else (event.uid, event.member, at)


class JournalPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far a journal had come when a generation was taken."""

    incarnation: int
    rank: int = 0
    sequence: int = 0
    """The last event that belongs to the generation; counted from 1."""
    bytes: int = 0
    """How long the file was at the least: before this, a bad record is damage."""
    segment: int = 0
    """Of the incarnation that committed the generation: the segment that was being written; those of lower numbers had
    ended. 0: not said, or an incarnation of before, all of whose segments had."""


def read_journal(
    name: JournalName,
    *,
    run_tag: int,
    promised: int = 0,
    ended: EndHook | None = None,
    synced: Callable[[int], None] | None = None,
) -> Iterator[Logged]:
    """Yield the events of one journal, up to a torn end.

    Args:
        name: the journal.
        run_tag: the run's tag.
        promised: how long the file must be at the least.
        ended: told where the journal ends.
        synced: told at each mark up to which event everything survives a loss of power.

    Raises:
        Damaged: a record that was promised to be there is not.
        OtherRun: a record of another run.
        NewerFormat: a frame, or an event, that this version does not know.
    """
    expected = 1
    end = torn = 0

    def at_end(offset: int, left: int) -> None:
        nonlocal end, torn
        end, torn = offset, left

    for frame in scan(name.path, run_tag=run_tag, promised=promised, ended=at_end):
        if frame.header.kind != EVENTS:
            if frame.header.kind == SYNCED and synced is not None:
                synced(frame.header.sequence)
            continue
        for event in events_of(frame, name, expected):
            yield Logged(name.incarnation, name.rank, expected, event)
            expected += 1
    if ended is not None:
        position = JournalPosition(incarnation=name.incarnation, rank=name.rank, sequence=expected - 1, bytes=end)
        ended(position, name.path, torn)


def events_of(frame: Frame, name: JournalName, expected: int) -> list[AnyEvent]:
    """Return the events of a frame, the first of which must have the number ``expected``.

    Raises:
        Damaged: it is of another journal, or of another place in this one, or cannot be decoded.
        NewerFormat: it holds an event that this version does not know.
    """
    at = f"{name.path} at byte {frame.offset}"
    if (frame.header.incarnation, frame.header.rank) != (name.incarnation, name.rank):
        raise Damaged(
            f"{at}: the record is of incarnation {frame.header.incarnation}, rank {frame.header.rank}; "
            f"the file's name says {name.incarnation}, {name.rank}. Give the file its old name back.",
            offset=frame.offset,
        )
    try:
        events = _decode_events(frame.payload)
    except msgspec.ValidationError as error:
        raise NewerFormat(f"{at}: holds an event unknown to this version ({error}). Install a newer forebay.") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Damaged(f"{at}: the events cannot be decoded ({error})", offset=frame.offset) from None
    if frame.header.sequence != expected:
        raise Damaged(f"{at}: event {frame.header.sequence} follows, but {expected} was expected", offset=frame.offset)
    return events


def read_journals(
    layout: Layout,
    *,
    run_tag: int,
    promised: Mapping[tuple[int, int], int] | None = None,
    skip: Collection[tuple[int, int]] = (),
    ended: EndHook | None = None,
) -> Iterator[Logged]:
    """Yield the events of every journal of a run, by (incarnation, rank, sequence).

    Args:
        layout: the run's paths.
        run_tag: the run's tag.
        promised: by (incarnation, rank), how many bytes a generation counts on.
        skip: journals, by (incarnation, rank), that are not read and need not be there.
        ended: told of each journal where it ends.

    Raises:
        Damaged: also when a journal that a generation counts on is missing.
    """
    wanted = {key: size for key, size in (promised or {}).items() if key not in skip}
    for name in layout.list_journals():
        if (name.incarnation, name.rank) in skip:
            continue
        counted = wanted.pop((name.incarnation, name.rank), 0)
        yield from read_journal(name, run_tag=run_tag, promised=counted, ended=ended)
    missing = [layout.journal(*key) for key, size in wanted.items() if size]
    if missing:
        raise Damaged(f"{', '.join(map(os.path.basename, missing))}: missing from {layout.journals}")

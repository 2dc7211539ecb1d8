"""Ends of journals that a loss of power left without their payloads.

A process that is killed leaves what it had written, payloads before the events that name them. When the power goes, the
disk has what it had got round to, in any order: an event may be there and its payload not. Such an event was never
synced, so nothing was promised: the journal ends before it, as at a torn record.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeline.checkpoint.lines import Line
from pipeline.checkpoint.manifest import Manifest
from pipeline.records import Added, Evaluated
from pipeline.store.journal import JournalPosition, payload_place, read_journal
from pipeline.store.layout import JournalName, Layout, segment_key
from pipeline.store.segments import PayloadReader, Place


class Tail(NamedTuple):
    """A journal that ends early."""

    file: str
    incarnation: int
    rank: int
    last: int
    """The last event that counts."""
    uid: int
    member: int
    """Whose payload is missing."""


def unwritten_tails(layout: Layout, run_tag: int, line: Line, counted: Iterable[JournalPosition]) -> list[Tail]:
    """Find the journals whose end names payloads that are not whole. Blocks.

    Only events after the last synced mark are looked at, and after what the generation counts on (``counted``): what
    lies before was promised, and is damage; or nobody needs it any more, and its segment was removed.
    """
    positions = {(each.incarnation, each.rank): each.sequence for each in counted}
    caps = {(incarnation, rank): last for incarnation, rank, last in line.discarded}
    found = []
    for name in layout.list_journals():
        key = (name.incarnation, name.rank)
        if key not in line.unneeded:
            tail = _tail(layout, run_tag, name, caps.get(key), positions.get(key, 0))
            if tail is not None:
                found.append(tail)
    return found


def _tail(layout: Layout, run_tag: int, name: JournalName, cap: int | None, counted: int) -> Tail | None:
    marks = [counted]
    named: dict[Place, int] = {}
    for logged in read_journal(name, run_tag=run_tag, synced=marks.append):
        place = payload_place(logged)
        if place is not None and (cap is None or logged.sequence <= cap):
            named[place] = logged.sequence
    unsynced = [place for place, sequence in named.items() if sequence > max(marks)]
    absent = [(named[place], place) for place, _ in PayloadReader(layout, run_tag).damaged(unsynced)]
    if not absent:
        return None
    sequence, (uid, member, _) = min(absent, key=lambda each: each[0])
    return Tail(name.path, name.incarnation, name.rank, sequence - 1, uid, member)


def cut_off(line: Line, tails: list[Tail]) -> Line:
    """Return ``line`` without what comes after the ends of ``tails``."""
    caps = {(incarnation, rank): last for incarnation, rank, last in line.discarded}
    for tail in tails:
        key = (tail.incarnation, tail.rank)
        caps[key] = min(tail.last, caps.get(key, tail.last))
    return line._replace(discarded=[(*key, last) for key, last in sorted(caps.items())])


def let_go_since(layout: Layout, run_tag: int, manifest: Manifest, line: Line, *, whole: bool = False) -> bool:
    """Whether payloads that came after a generation, and that a resume of it would use, lie in no segment: any more,
    or, being rows of a buffer, yet. If it is ``whole``, none of its segments was let go: one that is missing is damage,
    and for others to find."""
    caps = {(incarnation, rank): last for incarnation, rank, last in line.discarded}
    positions = {(each.incarnation, each.rank): each.sequence for each in manifest.journals}
    there = {segment_key(name) for name in layout.list_segments()}
    for name in layout.list_journals():
        key = (name.incarnation, name.rank)
        if key in line.unneeded:
            continue
        for logged in read_journal(name, run_tag=run_tag):
            if positions.get(key, 0) < logged.sequence <= caps.get(key, logged.sequence):
                if isinstance(logged.event, Added) and logged.event.segment < 0:
                    return True
                place = payload_place(logged)
                at = None if place is None or isinstance(logged.event, Evaluated) else place[2]
                if at is not None and not whole and at.segment_key not in there:
                    return True
    return False

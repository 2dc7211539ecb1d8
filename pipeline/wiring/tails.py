"""Ends of journals that a loss of power left without their payloads.

A process that is killed leaves what it had written, payloads before the events that name them. When the power goes, the
disk has what it had got round to, in any order: an event may be there and its payload not. Such an event was never
synced, so nothing was promised: the journal ends before it, as at a torn record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeline.errors import Damaged
from pipeline.records import Evaluated, Finished, Location, Parked, PartSaved
from pipeline.store.journal import read_journal
from pipeline.store.layout import JournalName, Layout
from pipeline.store.segments import PayloadReader
from pipeline.wiring.lines import Line


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


def unwritten_tails(layout: Layout, run_tag: int, line: Line) -> list[Tail]:
    """Find the journals whose end names payloads that are not whole. Blocks.

    Only events after the last synced mark are looked at: what lies before one was promised, and is damage.
    """
    caps = {(incarnation, rank): last for incarnation, rank, last in line.discarded}
    found = []
    for name in layout.list_journals():
        key = (name.incarnation, name.rank)
        if key not in line.unneeded:
            tail = _tail(layout, run_tag, name, caps.get(key))
            if tail is not None:
                found.append(tail)
    return found


def _tail(layout: Layout, run_tag: int, name: JournalName, cap: int | None) -> Tail | None:
    marks = [0]
    named = list(_payloads(name, run_tag, marks))
    reader = PayloadReader(layout, run_tag)
    for sequence, uid, member, location in named:
        if sequence <= marks[-1] or (cap is not None and sequence > cap):
            continue
        try:
            reader.verify([(uid, member, location)])
        except Damaged:
            return Tail(name.path, name.incarnation, name.rank, sequence - 1, uid, member)
    return None


def _payloads(name: JournalName, run_tag: int, marks: list[int]) -> Iterator[tuple[int, int, int, Location]]:
    """Yield number, uid, member and place of what the events name; ``marks`` gets how far the journal was synced."""
    for logged in read_journal(name, run_tag=run_tag, synced=marks.append):
        event = logged.event
        if isinstance(event, (Finished, Parked, PartSaved, Evaluated)) and event.segment >= 0:
            place = Location(logged.incarnation, logged.rank, event.segment, event.offset, event.length)
            yield logged.sequence, event.uid, event.member, place


def cut_off(line: Line, tails: list[Tail]) -> Line:
    """Return ``line`` without what comes after the ends of ``tails``."""
    caps = {(incarnation, rank): last for incarnation, rank, last in line.discarded}
    for tail in tails:
        key = (tail.incarnation, tail.rank)
        caps[key] = min(tail.last, caps.get(key, tail.last))
    return line._replace(discarded=[(*key, last) for key, last in sorted(caps.items())])

"""Payloads of a damaged run: what can be read of them, copied one by one, and what an item is without the others."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import msgspec

from pipeline.buffer.partials import Partials
from pipeline.checkpoint.draws import Drawn
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.remains import Stretch, whole_frames
from pipeline.errors import Damaged, NewerFormat
from pipeline.ledger import FINISHED, PENDING, UNREWARDED, Entry
from pipeline.ledger.places import without_members
from pipeline.locations import Location
from pipeline.records import HeldItem, PartSaved
from pipeline.store.codec import PayloadHeader, read_header
from pipeline.store.frames import PAYLOAD
from pipeline.store.layout import Layout
from pipeline.store.segments import PayloadReader, Place
from pipeline.store.writer import StoreWriter

_MOST = 4 << 20  # bytes that are held before they are written
Places = dict[int, dict[int, Location]]


class Unreadable(NamedTuple):
    """A payload that is not whole, and why."""

    uid: int
    member: int
    at: Location
    what: str


def locate(layout: Layout, run_tag: int, wanted: Collection[int]) -> dict[int, Drawn]:
    """Return what payloads say of the items with the uids in ``wanted``, as far as any tells. Reads every segment."""
    found: dict[int, Drawn] = {}
    for name in layout.list_segments() if wanted else ():
        path = os.path.join(layout.segments, name)
        try:
            for each in whole_frames(path, lambda frame: frame.header.run_tag == run_tag):
                if isinstance(each, Stretch) or each.header.kind != PAYLOAD:
                    continue
                uid = each.header.sequence
                if uid in wanted and uid not in found:
                    header = read_header(each.payload, path)
                    found[uid] = Drawn(header.task, header.epoch, header.index)
        except NewerFormat:
            raise
        except OSError:
            continue
    return found


class PayloadCopy:
    """Copies payloads out of a damaged run's segments into those of a new one."""

    def __init__(self, layout: Layout, run_tag: int, writer: StoreWriter) -> None:
        self._layout, self._writer = layout, writer
        self._reader = PayloadReader(layout, run_tag, forgiving=True)

    def copy(self, places: Iterable[Place], lives: dict[int, int]) -> tuple[Places, list[Unreadable]]:
        """Copy what is whole.

        Returns:
            Where it lies now, and what is not whole.

        Raises:
            WriteFailed: one cannot be written.
        """
        copied: Places = {}
        lost = []
        for (uid, member, at), read in self._read(places):
            if isinstance(read, str):
                lost.append(Unreadable(uid, member, at, read))
                continue
            copied.setdefault(uid, {})[member] = self._writer.place(read, uid, member, lives[uid])
            if self._writer.queued_bytes >= _MOST:
                self.flush()
        self.flush()
        return copied, lost

    def copy_parts(self, partials: Partials, lives: dict[int, int]) -> tuple[list[PartSaved], list[Unreadable]]:
        """Copy what attempts had kept; return the events that say so, and what is not whole."""
        events, lost = [], []
        parts = {(uid, member): part for uid, member, part in partials.items() if uid in lives}
        places = [(*key, part.location) for key, part in parts.items() if part.location is not None]
        for (uid, member, at), read in self._read(places):
            if isinstance(read, str):
                lost.append(Unreadable(uid, member, at, read))
                continue
            part, newest = parts[uid, member], read_header(read, f"partial of uid {uid}").newest
            now = self._writer.place(read, uid, member, lives[uid])
            events.append(PartSaved(uid, member, part.attempt, part.oldest, newest, now.segment, now.offset, len(read)))
        self.flush()
        return events, lost

    def headers(self, places: Iterable[Place]) -> dict[tuple[int, int], PayloadHeader]:
        """Return what payloads that were read before say of themselves."""
        found = {}
        for (uid, member, _), read in self._read(places):
            if isinstance(read, str):
                raise Damaged(f"{read}; it was whole a moment ago. Has the disk a fault?")
            found[uid, member] = read_header(read)
        return found

    def flush(self) -> None:
        """Write what is queued."""
        batch = self._writer.take()
        self._writer.write(batch)
        self._writer.done(batch)

    def _read(self, places: Iterable[Place]) -> Iterator[tuple[Place, bytes | str]]:
        """Yield each place with the payload, or with what is wrong there, file by file."""
        written = []
        for place in places:
            if place[2].segment < 0:
                yield place, f"{self._layout.segments}: the payload was never written"
            else:
                written.append(place)
        for place, found in self._reader.each(written):
            yield place, str(found) if isinstance(found, Damaged) else found


def finished_places(entries: Iterable[Entry], places: Places) -> list[Place]:
    """Return where the members lie that have ended; one without a place lies nowhere."""
    nowhere = Location(0, 0, -1, 0, 0)
    return [
        (entry.uid, member, places.get(entry.uid, {}).get(member, nowhere))
        for entry in entries
        for member, status in enumerate(entry.members)
        if status in (FINISHED, UNREWARDED)
    ]


def without_lost(item: HeldItem, lost: Collection[int], kept: dict[int, PayloadHeader]) -> HeldItem:
    """Return an item some of whose finished members are to be run again.

    Args:
        item: as it was, with the places of what is kept.
        lost: the members whose payload is gone.
        kept: what the payloads of the others say.
    """
    given = dict(item.given)
    settled = PENDING not in item.members
    rewards = [given.get(m, each.reward) for m, each in kept.items() if item.members[m] == FINISHED]
    return msgspec.structs.replace(
        item,
        members=bytes(PENDING if member in lost else status for member, status in enumerate(item.members)),
        life=item.life + 1,
        deaths=0 if settled else item.deaths,  # it had finished, so none of its members is what kills the process
        order=0,
        oldest=min((each.oldest for each in kept.values()), default=None),
        newest=max((each.newest for each in kept.values()), default=0),
        effective=item.effective if kept else 0,
        rewards=sum(rewards, 0.0),
        tokens=sum(each.tokens for each in kept.values()),
        given=tuple(each for each in item.given if each[0] not in lost),
        ages=without_members(item.ages, set(lost)),
    )


def payload_losses(lost: Iterable[Unreadable], entries: dict[int, Entry], layout: Layout, what: str) -> list[Loss]:
    """Say what is lost: ``what``, with the member's number in it, of these items."""
    losses = []
    for uid, member, at, why in lost:
        entry = entries[uid]
        path = layout.segments if at.segment < 0 else layout.segment(*at.segment_key)
        item = f"uid {uid}, task {entry.task}, index {entry.index}"
        losses.append(
            Loss(
                path=os.path.relpath(path, layout.directory),
                offset=at.offset if at.segment >= 0 else None,
                bytes=at.length,
                what=why,
                lost=f"{item}: {what.format(member=member)}",
            )
        )
    return losses

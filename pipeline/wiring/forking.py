"""Forking: another run's state begins a new run, with the payloads that it needs copied into segments of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pipeline.buffer.partials import Partials
from pipeline.checkpoint.lines import inherit
from pipeline.ledger import Ledger
from pipeline.locations import Location
from pipeline.records import Opened, PartSaved
from pipeline.sampler import DrawPlan, Sampler
from pipeline.store.codec import read_header
from pipeline.store.segments import PayloadReader, Place
from pipeline.store.service import RunBlocking, WriterService
from pipeline.wiring.evaluations import Evaluations
from pipeline.wiring.recovery import Recovered

_CHUNK = 64 << 20  # bytes of payloads that are held at a time


async def copy_payloads(
    reader: PayloadReader,
    writer: WriterService,
    places: Mapping[int, Mapping[int, Location]],
    lives: Mapping[int, int],
    in_thread: RunBlocking[Any],
) -> dict[int, dict[int, Location]]:
    """Copy payloads into the writer's segments, and return where they lie there.

    Raises:
        Damaged: one cannot be read.
        WriteFailed: one cannot be written.
    """
    copied: dict[int, dict[int, Location]] = {}
    for chunk in _chunks(places):
        blobs = await in_thread(partial(reader.read_many, chunk))
        for (uid, member), blob in blobs.items():
            copied.setdefault(uid, {})[member] = writer.writer.place(blob, uid, member, lives[uid])
        await writer.flush()
    return copied


def _chunks(places: Mapping[int, Mapping[int, Location]]) -> Iterator[list[Place]]:
    chunk: list[Place] = []
    size = 0
    for uid, members in places.items():
        for member, place in members.items():
            chunk.append((uid, member, place))
            size += place.length
            if size >= _CHUNK:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def place_parts(partials: Partials, writer: WriterService, lives: Mapping[int, int]) -> list[PartSaved]:
    """Queue what attempts had kept, to be written into the writer's segments; return the events that say so."""
    events = []
    for uid, member, part in partials.items():
        assert part.blob is not None  # recovery has read it
        at = writer.writer.place(part.blob, uid, member, lives[uid])
        newest = read_header(part.blob, f"partial of uid {uid}").newest
        events.append(PartSaved(uid, member, part.attempt, part.oldest, newest, at.segment, at.offset, len(part.blob)))
    return events


def forked(
    recovered: Recovered,
    opened: Opened,
    plans: list[DrawPlan],
    seed: int,
    places: dict[int, dict[int, Location]],
    parts: list[PartSaved],
) -> Recovered:
    """Return what was recovered as the new run's own recovery will find it."""
    before = recovered.ledger
    inherited = inherit(before, recovered.sampler, places)
    half = before.consumer_half()
    ledger, sampler = Ledger(half), Sampler(plans, seed)
    ledger.apply(opened)
    ledger.apply(inherited)
    sampler.apply(inherited)
    for told in recovered.sampler.untold():
        sampler.apply(told)
    ledger.restore(half)
    partials = Partials()
    for part in parts:
        kept = recovered.partials.get(part.uid, part.member)
        partials.apply(opened.incarnation, opened.rank, part, kept.blob if kept is not None else None)
    recovered = recovered._replace(ledger=ledger, sampler=sampler, places=places, inherited=inherited)
    return recovered._replace(
        positions=[],
        set_aside=0,
        partials=partials,
        evaluations=Evaluations(),
        feedback=sampler.untold(),
        parts=parts,
    )

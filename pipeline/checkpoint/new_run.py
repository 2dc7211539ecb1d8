"""Writing the run that a salvage makes: segments and journal, one generation, and the marker last of all."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from pipeline.checkpoint.descent import ORIGIN, ways_after
from pipeline.checkpoint.fold import pending_batches
from pipeline.checkpoint.gathering import Gathered, progress_of
from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.lines import PRODUCER_FILE, inherit
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import CONSUMER_FILE, PROGRESS_FILE, SHARDS_FOLDER, TRAINER_FOLDER, FileInfo, Manifest
from pipeline.checkpoint.payloads import PayloadCopy, Places, Unreadable, finished_places, payload_losses, without_lost
from pipeline.checkpoint.survey import Candidate
from pipeline.errors import Damaged, ForebayError
from pipeline.ledger import BUFFERED, PARKED, ConsumerHalf, Ledger
from pipeline.records import AnyEvent, Closed, Inherited, PartSaved
from pipeline.sampler.progress import encode_progress
from pipeline.store.files import FilesLike, open_plain
from pipeline.store.frames import crc32c_more
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import Layout, RunFile
from pipeline.store.segments import SegmentInfo
from pipeline.store.writer import StoreWriter

_CHUNK = 16 << 20
INCARNATION = 1
REASON = "salvage"


class Written(NamedTuple):
    """What the new run holds."""

    run_id: str
    groups: int
    """Finished, with every payload."""
    members: int
    again: int
    """Members whose payload is gone."""
    losses: list[Loss]


class WrittenPart(NamedTuple):
    """What one process has of the new run, or one rank.

    Attributes:
        inherited: what its journal begins with.
        position: where that ends.
        segments: its segments.
        members: payloads that came along.
        again: members whose payload is gone.
        bytes: of these payloads.
        losses: payloads that are gone.
    """

    inherited: Inherited
    position: JournalPosition
    segments: list[SegmentInfo]
    members: int
    again: int
    bytes: int
    losses: list[Loss]


def write_run(
    layout: Layout, run_tag: int, chosen: Candidate, gathered: Gathered, new: Layout, files: FilesLike, name: str
) -> Written:
    """Write the new run into ``new``, which is empty; ``name`` is what its folder will be called. Blocks.

    Raises:
        Damaged: what was whole when it was looked at is so no more.
        OSError: it cannot be written.
    """
    manifest = gathered.manifest
    run = new.create_folders(files, made_of=ways_after(layout, manifest.run_id, manifest))
    part = write_part(layout, run_tag, gathered, new, files, run, REASON)
    options = {**gathered.manifest.options, "directory": name}
    groups = _commit(chosen, gathered, part, new, files, run.run_id, options)
    new.write_marker(files, run)
    files.sync_directory(os.path.dirname(new.directory))
    return Written(run.run_id, groups, part.members, part.again, part.losses)


def write_part(
    layout: Layout, run_tag: int, gathered: Gathered, new: Layout, files: FilesLike, run: RunFile, reason: str
) -> WrittenPart:
    """Write the journal and the segments of one process, or of one rank; ``reason``: who does that. Blocks.

    Raises:
        Damaged: what was whole when it was looked at is so no more.
        OSError: they cannot be written.
    """
    rank = gathered.opened.rank
    size = _segment_bytes(gathered)
    writer = StoreWriter(new, files, run_tag=run.tag, incarnation=INCARNATION, rank=rank, segment_bytes=size)
    try:
        copied = copy_payloads(layout, gathered, PayloadCopy(layout, run_tag, writer))
        closed = Closed(gathered.opened.wall, "closed", reason)
        inherited, more = copied.inherited, gathered.fold.feedback
        events: list[AnyEvent] = [gathered.opened, inherited, *gathered.reserved, *more, *copied.parts, closed]
        for event in events:
            writer.append(event)
        batch = writer.take()
        writer.write(batch)
        writer.done(batch)
        position, segments = writer.sync()
        writer.close()
    except BaseException:
        with suppress(ForebayError, OSError):
            writer.close()
        raise
    return WrittenPart(inherited, position, segments, copied.members, copied.again, copied.bytes, copied.losses)


def _segment_bytes(gathered: Gathered) -> int:
    given = gathered.manifest.options.get("segment_bytes")
    return given if isinstance(given, int) and given > 0 else 64 << 20


class Copied(NamedTuple):
    """What of items that have not ended was copied; the fields are as in :class:`WrittenPart`."""

    inherited: Inherited
    parts: list[PartSaved]
    members: int
    again: int
    bytes: int
    losses: list[Loss]


def copy_payloads(layout: Layout, gathered: Gathered, copier: PayloadCopy) -> Copied:
    """Copy what is whole of the payloads of items that have not ended, and return the event that lists these. Blocks.

    Raises:
        Damaged: what was whole when it was looked at is so no more.
        OSError: they cannot be written.
    """
    fold = gathered.fold
    entries = fold.ledger.entries
    lives = {uid: entry.life for uid, entry in entries.items()}
    wanted = finished_places(entries.values(), fold.places.places)
    places, lost = copier.copy(wanted, lives)
    parts, lost_parts = copier.copy_parts(fold.partials, lives)
    inherited = _inherited(gathered, places, lost, copier)
    losses = payload_losses(lost, entries, layout, "payload of member {member}; the member is run again")
    losses += payload_losses(
        lost_parts, entries, layout, "what member {member} had kept; its attempt begins from the start"
    )
    sizes = [at.length for members in places.values() for at in members.values()]
    return Copied(inherited, parts, len(sizes), len(lost), sum(sizes), losses)


def _inherited(gathered: Gathered, places: Places, lost: list[Unreadable], copier: PayloadCopy) -> Inherited:
    """Return the event that lists what the new run begins with."""
    fold, half = gathered.fold, gathered.half
    inherited = inherit(fold.ledger, fold.sampler, places)
    gone: dict[int, set[int]] = {}
    for each in lost:
        gone.setdefault(each.uid, set()).add(each.member)
    there = [(uid, member, fold.places.places[uid][member]) for uid in gone for member in places.get(uid, {})]
    headers = copier.headers(there)
    items = []
    for item in inherited.items:
        if item.uid in gone:
            inherited.totals[item.task]["reopened"] += fold.ledger.entries[item.uid].unsettled == 0
            kept = {member: headers[item.uid, member] for member in places.get(item.uid, {})}
            item = without_lost(item, gone[item.uid], kept)
        items.append(item)
    if gathered.recount:  # what was claimed, the events no longer say
        for name, totals in inherited.totals.items():
            live = sum(entry.task == name for entry in fold.ledger.entries.values())
            totals["claimed"] = live + totals["trained"] + totals["retired"] + sum(totals["dropped"].values())
    if gathered.turns is not None:
        return msgspec.structs.replace(inherited, items=items, next_uid=gathered.turns.next, turns=gathered.turns.base)
    next_uid = max(inherited.next_uid, *(last + 1 for _, last in half.trained), 0)
    return msgspec.structs.replace(inherited, items=items, next_uid=next_uid)


def _commit(
    chosen: Candidate,
    gathered: Gathered,
    part: WrittenPart,
    new: Layout,
    files: FilesLike,
    run_id: str,
    options: dict[str, Any],
) -> int:
    """Write the one generation. Returns how many groups are finished and whole."""
    half, ledger = as_found(gathered, part.inherited)
    writer = begin_generation(chosen, gathered.manifest, new, files)
    writer.add(CONSUMER_FILE, encode_half(half))
    writer.add(PROGRESS_FILE, encode_progress(progress_of(chosen, half), chosen.unknown))
    manifest = manifest_of(chosen, gathered, writer, run_id, options)
    writer.commit(
        msgspec.structs.replace(
            manifest, reclaimed=gathered.reclaimed, journals=[part.position], segments=part.segments
        )
    )
    return ledger.count(BUFFERED) + ledger.count(PARKED)


def as_found(gathered: Gathered, inherited: Inherited) -> tuple[ConsumerHalf, Ledger]:
    """Return the consumer half of the new run, and its ledger, as its own recovery will find it."""
    half = gathered.half
    ledger = Ledger(half)
    ledger.apply(gathered.opened)
    ledger.apply(inherited)
    pending = pending_batches(ledger, ledger.restore(half), gathered.fold.hints, half.step)
    ledger.check()
    return msgspec.structs.replace(half, leases=pending), ledger


def encode_half(half: ConsumerHalf) -> bytes:
    """Return the consumer half as its file has it."""
    return msgspec.json.format(msgspec.json.encode(half)) + b"\n"


def begin_generation(chosen: Candidate, before: Manifest, new: Layout, files: FilesLike) -> GenerationWriter:
    """Begin the one generation, with the trainer's files that are whole.

    Raises:
        Damaged: one is so no more.
        OSError: it cannot be written.
    """
    writer = GenerationWriter(new, files, 0)
    writer.begin()
    own = (CONSUMER_FILE, PROGRESS_FILE, PRODUCER_FILE, *chosen.left_out)
    leave = (f"{SHARDS_FOLDER}/", ORIGIN)
    for info in before.files:
        if info.path not in own and not info.path.startswith(leave):
            _copy_file(os.path.join(chosen.folder, info.path), writer, files, info)
    return writer


def manifest_of(
    chosen: Candidate, gathered: Gathered, writer: GenerationWriter, run_id: str, options: dict[str, Any]
) -> Manifest:
    """Return the manifest of the one generation, without what its writers wrote of journals and segments."""
    before = gathered.manifest
    there = {info.path for info in writer.infos}
    return Manifest(
        run_id=run_id,
        base=INCARNATION,
        step=before.step,
        incarnation=INCARNATION,
        reason=REASON,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        files=sorted(writer.infos, key=lambda info: info.path),
        attached=[name for name in before.attached if f"{TRAINER_FOLDER}/{name}.safetensors" in there],
        options=options,
        tasks=before.tasks,
        left_out={path: f"damaged when the run was salvaged: {why}" for path, why in chosen.left_out.items()},
        origin=gathered.opened.origin,
    )


def _copy_file(source: str, writer: GenerationWriter, files: FilesLike, info: FileInfo) -> None:
    """Copy a file, and check again what is copied; a link would share the fate of the damaged run's disk."""
    target = os.path.join(writer.folder, info.path)
    files.makedirs(os.path.dirname(target))
    checksum = 0
    with open_plain(source) as file:
        handle = files.create(target)
        try:
            while chunk := file.read(_CHUNK):
                checksum = crc32c_more(checksum, chunk)
                files.write(handle, [chunk])
            files.sync(handle)
        finally:
            files.close(handle)
    if f"{checksum:08x}" != info.crc32c:
        raise Damaged(f"{source}: it was whole a moment ago, and is no more. Has the disk a fault?")
    writer.infos.append(info)

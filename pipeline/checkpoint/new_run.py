"""Writing the run that a salvage makes: segments and journal, one generation, and the marker last of all."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from pipeline.checkpoint.fold import pending_batches
from pipeline.checkpoint.gathering import Gathered, progress_of
from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.lines import PRODUCER_FILE, inherit
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import CONSUMER_FILE, PROGRESS_FILE, TRAINER_FOLDER, FileInfo, Manifest
from pipeline.checkpoint.payloads import PayloadCopy, Places, Unreadable, finished_places, payload_losses, without_lost
from pipeline.checkpoint.survey import Candidate
from pipeline.errors import Damaged, ForebayError
from pipeline.ledger import BUFFERED, PARKED, Ledger
from pipeline.records import AnyEvent, Closed, Inherited, PartSaved
from pipeline.sampler.progress import encode_progress
from pipeline.store.files import FilesLike, open_plain
from pipeline.store.frames import crc32c_more
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import Layout
from pipeline.store.segments import SegmentInfo
from pipeline.store.writer import StoreWriter

_CHUNK = 16 << 20
_INCARNATION = 1


class Written(NamedTuple):
    """What the new run holds."""

    run_id: str
    groups: int
    """Finished, with every payload."""
    members: int
    again: int
    """Members whose payload is gone."""
    losses: list[Loss]


class _Copied(NamedTuple):
    inherited: Inherited
    parts: list[PartSaved]
    members: int
    again: int
    losses: list[Loss]


def write_run(
    layout: Layout, run_tag: int, chosen: Candidate, gathered: Gathered, new: Layout, files: FilesLike, name: str
) -> Written:
    """Write the new run into ``new``, which is empty; ``name`` is what its folder will be called. Blocks.

    Raises:
        Damaged: what was whole when it was looked at is so no more.
        OSError: it cannot be written.
    """
    run = new.create_folders(files)
    writer = StoreWriter(new, files, run_tag=run.tag, incarnation=_INCARNATION, segment_bytes=_segment_bytes(gathered))
    try:
        copied = _copy(layout, gathered, PayloadCopy(layout, run_tag, writer))
        closed = Closed(gathered.opened.wall, "closed", "salvage")
        events: list[AnyEvent] = [gathered.opened, copied.inherited, *gathered.fold.feedback, *copied.parts, closed]
        for event in events:
            writer.append(event)
        batch = writer.take()
        writer.write(batch)
        writer.done(batch)
        position, segments = writer.sync()
    except BaseException:
        with suppress(ForebayError, OSError):
            writer.close()
        raise
    writer.close()
    options = {**gathered.manifest.options, "directory": name}
    groups = _commit(chosen, gathered, copied.inherited, new, files, run.run_id, position, segments, options)
    new.write_marker(files, run)
    files.sync_directory(os.path.dirname(new.directory))
    return Written(run.run_id, groups, copied.members, copied.again, copied.losses)


def _segment_bytes(gathered: Gathered) -> int:
    given = gathered.manifest.options.get("segment_bytes")
    return given if isinstance(given, int) and given > 0 else 64 << 20


def _copy(layout: Layout, gathered: Gathered, copier: PayloadCopy) -> _Copied:
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
    return _Copied(inherited, parts, sum(map(len, places.values())), len(lost), losses)


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
    if fold.torn:  # what was claimed, the events no longer say
        for name, totals in inherited.totals.items():
            live = sum(entry.task == name for entry in fold.ledger.entries.values())
            totals["claimed"] = live + totals["trained"] + sum(totals["dropped"].values())
    next_uid = max(inherited.next_uid, *(last + 1 for _, last in half.trained), 0)
    return msgspec.structs.replace(inherited, items=items, next_uid=next_uid)


def _commit(
    chosen: Candidate,
    gathered: Gathered,
    inherited: Inherited,
    new: Layout,
    files: FilesLike,
    run_id: str,
    position: JournalPosition,
    segments: list[SegmentInfo],
    options: dict[str, Any],
) -> int:
    """Write the one generation. Returns how many groups are finished and whole."""
    half, before = gathered.half, gathered.manifest
    ledger = Ledger(half)  # as the new run's own recovery will find it
    ledger.apply(gathered.opened)
    ledger.apply(inherited)
    pending = pending_batches(ledger, ledger.restore(half), gathered.fold.hints, half.step)
    ledger.check()
    half = msgspec.structs.replace(half, leases=pending)
    writer = GenerationWriter(new, files, 0)
    writer.begin()
    for info in before.files:
        if info.path not in (CONSUMER_FILE, PROGRESS_FILE, PRODUCER_FILE, *chosen.left_out):
            _copy_file(os.path.join(chosen.folder, info.path), writer, files, info)
    writer.add(CONSUMER_FILE, msgspec.json.format(msgspec.json.encode(half)) + b"\n")
    writer.add(PROGRESS_FILE, encode_progress(progress_of(chosen, half), chosen.unknown))
    there = {info.path for info in writer.infos}
    manifest = Manifest(
        run_id=run_id,
        base=_INCARNATION,
        reclaimed=gathered.reclaimed,
        step=before.step,
        incarnation=_INCARNATION,
        reason="salvage",
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        journals=[position],
        segments=segments,
        files=sorted(writer.infos, key=lambda info: info.path),
        attached=[name for name in before.attached if f"{TRAINER_FOLDER}/{name}.safetensors" in there],
        options=options,
        tasks=before.tasks,
        left_out={path: f"damaged when the run was salvaged: {why}" for path, why in chosen.left_out.items()},
        origin=gathered.opened.origin,
    )
    writer.commit(manifest)
    return ledger.count(BUFFERED) + ledger.count(PARKED)


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

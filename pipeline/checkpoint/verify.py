"""Checking a run's folder from the outside: every digest, and every payload that an event names. Nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import msgspec

from pipeline.checkpoint import lost
from pipeline.checkpoint.bulk import Scan, Scanned, compare, done, reads_of
from pipeline.checkpoint.collect import Needs
from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.checkpoint.manifest import BLOCKS_FILE, FileInfo
from pipeline.checkpoint.retire import needs_of
from pipeline.checkpoint.survey import identify, without_manifest
from pipeline.errors import Damaged, ForebayError
from pipeline.locations import Location
from pipeline.records import AnyEvent
from pipeline.store.block_sums import other_blocks
from pipeline.store.journal import Logged, payload_place, read_journal
from pipeline.store.layout import JournalName, Layout, RunFile, segment_key
from pipeline.store.segments import PayloadReader, Place, SegmentInfo, read_blocks

_BY_PAYLOAD = "what lies there; payloads that are still needed are listed one by one"


class Damage(msgspec.Struct, frozen=True):
    """One place that is not as it was promised to be."""

    path: str
    """The file, relative to the run's folder."""
    what: str
    offset: int | None = None
    """Where in the file, in bytes; None: the whole of it, or not known."""
    lost: str = ""
    """What is lost by it, in words; empty: nothing more than the message says."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`verify` found."""

    run_id: str
    generations: int
    """Complete ones."""
    journals: int
    events: int
    payloads: int
    """Of rollouts and partial rollouts, named by events, whose segment was not removed; blocks of rows, of each
    generation that lists them."""
    bytes: int
    """Of all files."""
    damages: list[Damage]
    unpromised: list[str]
    """Ends of files that a crash left: nothing was promised there, and a resume does without them."""

    @property
    def whole(self) -> bool:
        """Whether everything that was promised is there."""
        return not self.damages


Told = Callable[[int], None]
"""Told how many bytes more were read."""


def verify(directory: str, *, quick: bool = False, told: Told | None = None) -> Verified:
    """Check everything in a run's folder that was promised to be there. Blocks, takes no lock, and changes nothing.

    Every file of every complete generation is compared with its manifest, every record of every journal and segment
    with its checksums, and every payload that a synced event names is looked for. A run that is being written may be
    checked; what is removed meanwhile may then be reported as missing. Two threads read, each with a block of memory.

    Args:
        directory: the run's.
        quick: manifests, journals, sizes, and the headers in segments of what is needed; no payloads, and no checksums
            of the files of generations.
        told: told of bytes as they are read, in the thread that calls this; :func:`bytes_to_verify` says of how many.

    Raises:
        NotARun: there is no run in it.
        Damaged: neither the marker nor a manifest says which run it is.
    """
    layout = Layout(directory)
    run, wrong = identify(layout)
    check = _Check(layout, run.run_id, run.tag, quick, told=told, headers=True)
    for loss in wrong:  # of the marker
        check.note(layout.run_file, loss.what, loss.lost)
    return check.result()


def bytes_to_verify(directory: str, *, quick: bool = False) -> int:
    """Return how many bytes :func:`verify` will read, about."""
    layout = Layout(directory)
    folders = [layout.journals] if quick else [layout.journals, layout.segments, layout.generations]
    return sum(_size(path) for folder in folders for path in _files(folder))


def verify_quickly(layout: Layout, run: RunFile, seen: Callable[[Logged], None]) -> Verified:
    """As :func:`verify` with ``quick``; ``seen`` is told of every event, as journals are read once."""
    return _Check(layout, run.run_id, run.tag, True, seen).result()


class _Check:
    def __init__(
        self,
        layout: Layout,
        run_id: str,
        tag: int,
        quick: bool,
        seen: Callable[[Logged], None] = lambda logged: None,
        *,
        told: Told | None = None,
        headers: bool = False,
    ) -> None:
        self.layout, self.run_id, self.tag, self.quick, self.seen = layout, run_id, tag, quick, seen
        self.told: Told = told or (lambda count: None)
        self.headers = headers
        """Whether headers in segments are looked at where payloads are not."""
        self.damages: list[Damage] = []
        self.unpromised: list[str] = []
        self.events = self.payloads = 0
        self._next = 1
        """Number of the event that would come next in the journal that is read."""
        self._whole: set[Place] = set()
        self._needs = Needs()

    def result(self) -> Verified:
        found = find_generations(self.layout, self.run_id, forgiving=True)
        for number, error in found.damaged:
            path = os.path.join(self.layout.generations, f"{number:08d}", "manifest.json")
            self.note(path, error, lost.with_manifest(number))
        for folder in without_manifest(self.layout):
            self.unpromised.append(f"{folder}: holds no manifest, so it is no generation: unfinished, or damaged since")
        self._listed_files([(stored, info) for stored in found.complete for info in stored.manifest.files])
        # Segments first: what was read there need not be read again for the events that name it.
        reusable = found.complete[-1].manifest.reusable if found.complete else None
        self._needs = needs_of(found.complete, reusable)
        # Generations differ in how far they count on a segment: the most that one of them does was promised.
        every = [info for stored in found.complete for info in stored.manifest.segments]
        listed = {info.name: info for info in sorted(every, key=lambda info: info.bytes)}
        self._segments({name: info for name, info in listed.items() if segment_key(name) in self._needs})
        journals = self.layout.list_journals()
        self._journals(journals, found.complete)
        for stored in found.complete:
            for info in stored.manifest.files:
                if os.path.basename(info.path) == BLOCKS_FILE:  # of each shard one, if there are shards
                    self._blocks(stored, os.path.join(stored.folder, info.path))
        return Verified(
            run_id=self.run_id,
            generations=len(found.complete),
            journals=len(journals),
            events=self.events,
            payloads=self.payloads,
            bytes=sum(_size(path) for path in _files(self.layout.directory)),
            damages=self._said_once(),
            unpromised=self.unpromised,
        )

    def _said_once(self) -> list[Damage]:
        """Return what is damaged; a record of which the payload is listed is not listed as well."""
        payloads = {(each.path, each.offset) for each in self.damages if each.lost != _BY_PAYLOAD}
        return [each for each in self.damages if each.lost != _BY_PAYLOAD or (each.path, each.offset) not in payloads]

    def note(self, path: str, error: Exception | str, what: str, offset: int | None = None) -> None:
        """Add a place that is damaged; ``what`` is lost by it."""
        if isinstance(error, Damaged) and offset is None:
            offset = error.offset
        self.damages.append(Damage(os.path.relpath(path, self.layout.directory), str(error), offset, what))

    def _listed_files(self, listed: Sequence[tuple[Stored, FileInfo]]) -> None:
        """Compare the files of generations with what manifests say of them."""
        reads = [] if self.quick else [reads_of(stored, info) for stored, info in listed]
        jobs = [each.checksum for part in reads for each in part]
        checksums = iter(done(jobs, sum(info.bytes for _, info in listed), self.told))
        for number, (stored, info) in enumerate(listed):
            path = os.path.join(stored.folder, info.path)
            try:
                if not self.quick:
                    compare(stored, info, reads[number], [next(checksums) for _ in reads[number]])
                elif (size := _size(path)) != info.bytes:
                    raise Damaged(
                        f"{path}: has {size} bytes; the manifest says {info.bytes}",
                        offset=size if size < info.bytes else None,
                    )
            except (ForebayError, OSError) as error:
                self.note(path, error, lost.with_file(stored.manifest, info.path))

    def _blocks(self, stored: Stored, path: str) -> None:
        """Look for the rows of a buffer that a file of a generation lists."""
        try:
            blocks = {block.place: block for block in read_blocks(path)}
        except (ForebayError, OSError):  # a file of the generation, and noted as such
            return
        self.payloads += len(blocks)
        for place, error in self._wrong([place for place in blocks if place not in self._whole]):
            path = self.layout.segment(*place[2].segment_key)
            self.note(path, error, lost.with_block(stored.manifest, blocks[place]), place[2].offset)
        for block, other in other_blocks(self.layout, [blocks[place] for place in blocks if place in self._whole]):
            path = self.layout.segment(*block.segment_key)
            self.note(path, other, lost.with_block(stored.manifest, block), block.offset)

    def _wrong(self, places: list[Place]) -> list[tuple[Place, Damaged]]:
        """Look at places in segments, and return those that are not whole, as far as that is looked at."""
        reader = PayloadReader(self.layout, self.tag, forgiving=True)
        if self.quick:
            return reader.misplaced(places) if self.headers else []
        return reader.damaged(places)

    def _journals(self, journals: list[JournalName], stored: list[Stored]) -> None:
        promised: dict[tuple[int, int], int] = {}
        for each in stored:
            for position in each.manifest.journals:
                if position.incarnation >= each.manifest.base:
                    key = (position.incarnation, position.rank)
                    promised[key] = max(promised.get(key, 0), position.bytes)
        for name in journals:
            try:
                self._journal(name, promised.pop((name.incarnation, name.rank), 0))
            except (ForebayError, OSError) as error:
                self.note(name.path, error, lost.with_events(self._next))
        for key, size in promised.items():
            if size:
                path = self.layout.journal(*key)
                self.note(path, f"{path}: missing; {size} bytes of it were promised", lost.with_events(1))

    def _journal(self, name: JournalName, promised: int) -> None:
        marks = [0]
        named: dict[Place, tuple[int, AnyEvent] | None] = {}
        self._next = 1
        for logged in read_journal(name, run_tag=self.tag, promised=promised, synced=marks.append, ended=self._ended):
            self.events += 1
            self._next = logged.sequence + 1
            self.seen(logged)
            place = payload_place(logged)
            if place is not None:
                named[place] = None if place in self._whole else (logged.sequence, logged.event)
        self.told(_size(name.path))
        unseen = {place: each for place, each in named.items() if each and not self._was_removed(place[2])}
        self.payloads += len(unseen) + sum(each is None for each in named.values())
        for place, error in self._wrong(list(unseen)):
            sequence, event = unseen[place]
            if sequence <= marks[-1]:
                path = self.layout.segment(*place[2].segment_key)
                self.note(path, error, lost.with_payload(event), place[2].offset)
            else:
                self.unpromised.append(f"{error} It had not been synced; a resume runs the item again.")

    def _was_removed(self, at: Location) -> bool:
        """Whether a segment is not there because nothing that is kept needs it."""
        return at.segment_key not in self._needs and not os.path.lexists(self.layout.segment(*at.segment_key))

    def _ended(self, position: object, path: str, left: int) -> None:
        if left:
            self.unpromised.append(f"{path}: {left} bytes at its end are a record that a crash cut off")

    def _segments(self, listed: dict[str, SegmentInfo]) -> None:
        there = set(self.layout.list_segments())
        scans: dict[str, Scan] = {}
        size = 0
        for name in sorted(there) if not self.quick else ():
            path, info = os.path.join(self.layout.segments, name), listed.get(name)
            promised = info.bytes if info is not None else 0
            if _size(path) >= promised:
                scans[name] = Scan(path, self.tag, promised)
                size += _size(path)
        found = done([each.scanned for each in scans.values()], size, self.told)
        scanned = dict(zip(scans, found, strict=True))
        for name in sorted(there | listed.keys()):
            path, info = os.path.join(self.layout.segments, name), listed.get(name)
            promised = info.bytes if info is not None else 0
            if name in scanned:
                self._take(path, scanned[name])
            elif name not in there or _size(path) < promised:
                has = f"has {_size(path)} bytes" if name in there else "missing"
                what = f"{path}: {has}; {promised} bytes of it were promised"
                self.note(path, what, _BY_PAYLOAD, _size(path) if name in there else None)

    def _take(self, path: str, scanned: Scanned) -> None:
        self._whole.update(scanned.whole)
        if scanned.torn:
            self.unpromised.append(f"{path}: {scanned.torn} bytes at its end are a record that a crash cut off")
        if scanned.error is not None:
            self.note(path, scanned.error, _BY_PAYLOAD)


def _files(directory: str) -> Iterator[str]:
    for folder, _, names in os.walk(directory):
        yield from (os.path.join(folder, name) for name in names)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:  # gone, or a link to nowhere
        return 0

"""Checking a run's folder from the outside: every digest, and every payload that an event names. Nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from pipeline.checkpoint.collect import Needs
from pipeline.checkpoint.generations import Stored, check_listed, find_generations
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.checkpoint.retire import needs_of
from pipeline.checkpoint.survey import without_manifest
from pipeline.errors import ForebayError, NotARun
from pipeline.records import Location
from pipeline.store.frames import PAYLOAD, scan
from pipeline.store.journal import payload_place, read_journal
from pipeline.store.layout import JournalName, Layout, segment_key
from pipeline.store.segments import PayloadReader, Place, SegmentInfo, read_blocks


class Damage(msgspec.Struct, frozen=True):
    """One place that is not as it was promised to be."""

    path: str
    """The file, relative to the run's folder."""
    what: str


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


def verify(directory: str, *, quick: bool = False) -> Verified:
    """Check everything in a run's folder that was promised to be there. Blocks, takes no lock, and changes nothing.

    Every file of every complete generation is compared with its manifest, every record of every journal and segment
    with its checksums, and every payload that a synced event names is looked for. A run that is being written may be
    checked; what is removed meanwhile may then be reported as missing.

    Args:
        directory: the run's.
        quick: sizes and manifests instead of checksums, and no payloads.

    Raises:
        NotARun: there is no run in it.
    """
    layout = Layout(directory)
    run = layout.read_run() if os.path.isdir(directory) else None
    if run is None:
        raise NotARun(f"{directory}: there is no run to verify")
    return _Check(layout, run.run_id, run.tag, quick).result()


class _Check:
    def __init__(self, layout: Layout, run_id: str, tag: int, quick: bool) -> None:
        self.layout, self.run_id, self.tag, self.quick = layout, run_id, tag, quick
        self.damages: list[Damage] = []
        self.unpromised: list[str] = []
        self.events = self.payloads = 0
        self._whole: set[Place] = set()
        self._needs = Needs()

    def result(self) -> Verified:
        found = find_generations(self.layout, self.run_id)
        for number, error in found.damaged:
            self._note(os.path.join(self.layout.generations, f"{number:08d}", "manifest.json"), error)
        for folder in without_manifest(self.layout):
            self.unpromised.append(f"{folder}: holds no manifest, so it is no generation: unfinished, or damaged since")
        for stored in found.complete:
            self._generation(stored)
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
            if any(info.path == BLOCKS_FILE for info in stored.manifest.files):
                self._blocks(stored)
        return Verified(
            run_id=self.run_id,
            generations=len(found.complete),
            journals=len(journals),
            events=self.events,
            payloads=self.payloads,
            bytes=sum(_size(path) for path in _files(self.layout.directory)),
            damages=self.damages,
            unpromised=self.unpromised,
        )

    def _note(self, path: str, error: Exception | str) -> None:
        self.damages.append(Damage(os.path.relpath(path, self.layout.directory), str(error)))

    def _generation(self, stored: Stored) -> None:
        for info in stored.manifest.files:
            path = os.path.join(stored.folder, info.path)
            try:
                if not self.quick:
                    check_listed(stored, info)
                elif _size(path) != info.bytes:
                    self._note(path, f"{path}: has {_size(path)} bytes; the manifest says {info.bytes}")
            except (ForebayError, OSError) as error:
                self._note(path, error)

    def _blocks(self, stored: Stored) -> None:
        """Look for the rows of a buffer that a generation lists."""
        path = os.path.join(stored.folder, BLOCKS_FILE)
        try:
            places = [block.place for block in read_blocks(path)]
        except (ForebayError, OSError):  # a file of the generation, and noted as such
            return
        self.payloads += len(places)
        if not self.quick:
            unseen = [place for place in places if place not in self._whole]
            for place, error in PayloadReader(self.layout, self.tag, forgiving=True).damaged(unseen):
                self._note(self.layout.segment(*place[2].segment_key), error)

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
                self._note(name.path, error)
        for key, size in promised.items():
            if size:
                path = self.layout.journal(*key)
                self._note(path, f"{path}: missing; {size} bytes of it were promised")

    def _journal(self, name: JournalName, promised: int) -> None:
        marks = [0]
        named: dict[Place, int] = {}
        for logged in read_journal(name, run_tag=self.tag, promised=promised, synced=marks.append, ended=self._ended):
            self.events += 1
            place = payload_place(logged)
            if place is not None:
                named[place] = logged.sequence
        there = [place for place in named if place in self._whole or not self._was_removed(place[2])]
        self.payloads += len(there)
        if self.quick:
            return
        unseen = [place for place in there if place not in self._whole]
        for place, error in PayloadReader(self.layout, self.tag, forgiving=True).damaged(unseen):
            if named[place] <= marks[-1]:
                at = place[2]
                self._note(self.layout.segment(*at.segment_key), error)
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
        for name in sorted(there | listed.keys()):
            path, info = os.path.join(self.layout.segments, name), listed.get(name)
            promised = info.bytes if info is not None else 0
            if name not in there or _size(path) < promised:
                has = f"has {_size(path)} bytes" if name in there else "missing"
                self._note(path, f"{path}: {has}; {promised} bytes of it were promised")
            elif not self.quick:
                self._segment(path, promised)

    def _segment(self, path: str, promised: int) -> None:
        incarnation, rank, number = segment_key(os.path.basename(path))

        def ended(at: int, left: int) -> None:
            if left:
                self.unpromised.append(f"{path}: {left} bytes at its end are a record that a crash cut off")

        try:
            frames = scan(path, run_tag=self.tag, promised=promised, ended=ended, payloads=False)
            for offset, header, _ in frames:
                if header.kind == PAYLOAD:
                    at = Location(incarnation, rank, number, offset, header.length)
                    self._whole.add((header.sequence, header.number, at))
        except (ForebayError, OSError) as error:
            self._note(path, error)


def _files(directory: str) -> Iterator[str]:
    for folder, _, names in os.walk(directory):
        yield from (os.path.join(folder, name) for name in names)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:  # gone, or a link to nowhere
        return 0

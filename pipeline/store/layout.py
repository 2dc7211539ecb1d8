"""Names of the files of a run, and the marker that makes a folder one.

::

    RUN/run.json                         run id and format version
    RUN/lock                             who writes here
    RUN/journals/000001-0000.fbj         incarnation, rank
    RUN/segments/000001-0000-000001.fbs  incarnation, rank, number
    RUN/generations/00000012/            one committed checkpoint

Numbers are compared as numbers; their padding only makes a listing pleasant.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from pipeline.errors import Damaged, NewerFormat, NotARun
from pipeline.store.files import FilesLike, open_plain
from pipeline.store.frames import FORMAT_VERSION

RUN_FILE = "run.json"
KIND = "forebay run"
LOCK_FILE = "lock"
SCRATCH = "scratch-"
"""What the names of files begin with that are memory, and have a name for a moment alone."""
# No longer number than a frame's header has room for is one of ours.
_JOURNAL = re.compile(r"(\d{1,9})-(\d{1,9})\.fbj")
_SEGMENT = re.compile(r"(\d{1,9})-(\d{1,9})-(\d{1,18})\.fbs")


SegmentKey: TypeAlias = tuple[int, int, int]
"""Incarnation, rank and number: what names a segment."""


def segment_name(key: SegmentKey) -> str:
    """Return the name of a segment's file."""
    return "{:06d}-{:04d}-{:06d}.fbs".format(*key)


def segment_key(name: str) -> SegmentKey:
    """Return what the name of a segment's file says.

    Raises:
        ValueError: it is no such name.
    """
    match = _SEGMENT.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no segment's name")
    return int(match[1]), int(match[2]), int(match[3])


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A run of which something may be in another one, and how it came there."""

    run_id: str = ""
    directory: str = ""
    """As it was called then, for people."""
    named: str = ""
    """The run by whose ids the first generation names it; empty: by those of the run that it came into."""
    splits: tuple[tuple[str, str], ...] = ()
    """The splits on its way: what names each, and the run that it went to. What went to another one of the same is
    none of it."""


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``run.json``."""

    kind: str = KIND
    format_version: int = FORMAT_VERSION
    run_id: str = ""
    made_of: list[Way] = []
    """Of a run that a tool made: all runs of which something may be in it."""

    @property
    def tag(self) -> int:
        """The first 64 bits of the run id, carried by every frame."""
        return int(self.run_id[:16], 16)


class JournalName(NamedTuple):
    """An incarnation of a rank, and the path of the journal that it wrote."""

    incarnation: int
    rank: int
    path: str


class Layout:
    """Paths inside one run's folder."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.run_file = os.path.join(self.directory, RUN_FILE)
        self.lock_file = os.path.join(self.directory, LOCK_FILE)
        self.stop_file = os.path.join(self.directory, "stop")
        self.journals = os.path.join(self.directory, "journals")
        self.segments = os.path.join(self.directory, "segments")
        self.generations = os.path.join(self.directory, "generations")

    def journal(self, incarnation: int, rank: int) -> str:
        return os.path.join(self.journals, f"{incarnation:06d}-{rank:04d}.fbj")

    def segment(self, incarnation: int, rank: int, number: int) -> str:
        return os.path.join(self.segments, segment_name((incarnation, rank, number)))

    def list_journals(self) -> list[JournalName]:
        """Return every journal in order of (incarnation, rank)."""
        matches = [match for name in _listdir(self.journals) if (match := _JOURNAL.fullmatch(name))]
        return sorted(JournalName(int(m[1]), int(m[2]), os.path.join(self.journals, m[0])) for m in matches)

    def list_segments(self) -> list[str]:
        """Return the names of every segment file, oldest first."""
        return sorted(filter(_SEGMENT.fullmatch, _listdir(self.segments)), key=segment_key)

    def list_scratch(self) -> list[str]:
        """Return the names of files that a killed process had for its memory, and could not take the name from."""
        return [name for name in _listdir(self.directory) if name.startswith(SCRATCH)]

    def read_run(self) -> RunFile | None:
        """Return the run's marker, or None if the folder is absent or empty.

        Raises:
            NotARun: the folder holds something else.
            NewerFormat: a newer version made the run.
            Damaged: the marker cannot be read.
        """
        try:
            with open_plain(self.run_file) as file:
                raw = file.read()
        except (FileNotFoundError, NotADirectoryError):
            self._refuse_foreign()
            return None
        try:
            run = msgspec.json.decode(raw, type=RunFile)
            run.tag  # noqa: B018  the id must be hexadecimal
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Damaged(f"{self.run_file}: the run's marker is damaged ({error}); restore it from a copy") from None
        if run.kind != KIND:
            raise NotARun(f"{self.run_file}: it says {run.kind!r}, so {self.directory} is no run of forebay")
        if run.format_version > FORMAT_VERSION:
            raise NewerFormat(
                f"{self.run_file}: the run has format {run.format_version}; this version reads up to "
                f"{FORMAT_VERSION}. Install a newer forebay."
            )
        return run

    def _refuse_foreign(self) -> None:
        if os.path.exists(self.directory) and not os.path.isdir(self.directory):
            raise NotARun(f"{self.directory} is a file; directory= must name a folder, or nothing that exists")
        # A crash before the marker was written leaves no more than these.
        leftovers = {LOCK_FILE, RUN_FILE + ".part", "stop"}
        empty = {
            os.path.basename(folder)
            for folder in (self.journals, self.segments, self.generations)
            if os.path.isdir(folder) and not os.listdir(folder)
        }
        foreign = sorted(set(_listdir(self.directory)) - leftovers - empty - set(self.list_scratch()))
        if foreign:
            shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
            raise NotARun(
                f"{self.directory} holds {shown} but no {RUN_FILE}, so it is no run of forebay. "
                "Choose an empty or absent folder."
            )

    def create_run(self, files: FilesLike) -> RunFile:
        """Make the folders and the marker of a new run."""
        run = self.create_folders(files)
        self.write_marker(files, run)
        return run

    def create_folders(self, files: FilesLike, run: RunFile | None = None, made_of: Sequence[Way] = ()) -> RunFile:
        """Make the folders of a new run, and return the marker that makes them one once it is written: ``run``, or one
        with an id of its own; ``made_of``: what it says of that."""
        run = run or RunFile(run_id=secrets.token_hex(16))
        run = msgspec.structs.replace(run, made_of=list(made_of)) if made_of else run
        for folder in (self.directory, self.journals, self.segments, self.generations):
            files.makedirs(folder)
        return run

    def write_marker(self, files: FilesLike, run: RunFile) -> None:
        """Make the folder a run."""
        fields = msgspec.to_builtins(run)
        if not run.made_of:
            del fields["made_of"]
        write_file(files, self.run_file, msgspec.json.format(msgspec.json.encode(fields)) + b"\n")


def write_file(files: FilesLike, path: str, content: bytes, *, before: Callable[[], None] = lambda: None) -> None:
    """Write a small file aside, sync it, put it under its name and sync the folder: whole, or not there. ``before`` is
    called right before it gets its name."""
    part = path + ".part"
    if os.path.lexists(part):
        files.unlink(part)
    handle = files.create(part)
    try:
        files.write(handle, [content])
        files.sync(handle)
    finally:
        files.close(handle)
    before()
    files.rename(part, path)
    files.sync_directory(os.path.dirname(path))


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []

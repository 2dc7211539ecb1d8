"""A folder of an export: files of bounded size, and ``forebay.json``, which says what they are and is written last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.errors import ConfigError, Damaged, NewerFormat
from pipeline.store.blocks import crc32c_of_file
from pipeline.store.files import OsFiles, open_plain
from pipeline.store.layout import write_file
from pipeline.tools.interchange.streams import CONTENTS, MARK_DTYPES, TRANSITIONS, About, Stream, Transitions

FILE = "forebay.json"
KIND = "forebay export"
FORMAT_VERSION = 1
PART_BYTES = 256 << 20

Progress = Callable[[int], None]
"""Told how many bytes of tensors were taken in since the last call."""


class PartInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A file of an export."""

    path: str
    bytes: int
    crc32c: str
    count: int
    """Of rows or records in it."""


class Described(msgspec.Struct, kw_only=True):
    """Content of ``forebay.json``; every field has a default, so that old files load."""

    kind: str = KIND
    format_version: int = FORMAT_VERSION
    content: str = TRANSITIONS
    to: str = ""
    """The format's name."""
    count: int = 0
    columns: list[Column] = []
    """Of transitions: dtype and shape of each."""
    marks: list[str] = []
    """Of transitions: what is told of each beside its columns."""
    about: About = msgspec.field(default_factory=About)
    details: dict[str, Any] = {}
    """What the format needs to read it back."""
    files: list[PartInfo] = []

    @property
    def schema(self) -> Schema:
        """The columns."""
        return Schema(tuple(self.columns))


class OutFolder:
    """Writes an export into a folder that is empty. Blocks."""

    def __init__(
        self, directory: str, to: str, stream: Stream, part_bytes: int, progress: Progress, fps: int = 1
    ) -> None:
        self.directory, self.part_bytes, self.progress, self.fps = directory, part_bytes, progress, fps
        self.described = Described(to=to, about=msgspec.structs.replace(stream.about, notes=[]))
        if isinstance(stream, Transitions):
            self.described.columns, self.described.marks = list(stream.schema.columns), list(stream.marks)
        else:
            self.described.content = stream.content
        self._stem = self.described.content

    def next_path(self, suffix: str) -> str:
        """Return the path of the next file."""
        return os.path.join(self.directory, f"{self._stem}-{len(self.described.files):05d}.{suffix}")

    def ended(self, path: str, count: int) -> None:
        """Take in a file that is complete, and make it survive a loss of power."""
        OsFiles().sync_path(path)
        size, checksum = crc32c_of_file(path)
        name = os.path.relpath(path, self.directory)
        self.described.files.append(PartInfo(path=name, bytes=size, crc32c=checksum, count=count))
        self.described.count += count

    def finish(self) -> Described:
        """Write the file that says what the others are."""
        content = msgspec.json.format(msgspec.json.encode(self.described)) + b"\n"
        write_file(OsFiles(), os.path.join(self.directory, FILE), content)
        return self.described


def is_described(path: str) -> bool:
    """Whether an export lies in a folder."""
    return os.path.isfile(os.path.join(path, FILE))


def read_described(directory: str, to: str) -> Described:
    """Return what an export says of itself.

    Raises:
        ConfigError: it is of another format.
        NewerFormat: a newer version wrote it.
        Damaged: it says what cannot be.
    """
    path = os.path.join(directory, FILE)
    try:
        with open_plain(path) as file:
            fields = msgspec.json.decode(file.read())
        version = fields.get("format_version", 0)
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise NewerFormat(
                f"{path}: the export has format {version}; this version reads up to {FORMAT_VERSION}. Install a newer "
                "forebay."
            )
        described = msgspec.convert(fields, Described)
        schema = described.schema
        if described.kind != KIND or described.content not in CONTENTS or set(described.marks) - set(MARK_DTYPES):
            raise ValueError(f"kind {described.kind!r}, content {described.content!r}, marks {described.marks}")
        if described.content == TRANSITIONS and not schema.columns:
            raise ValueError("transitions without columns")
    except FileNotFoundError:
        raise ConfigError(f"{directory}: there is no {FILE}, so it is no export", option="path") from None
    except (msgspec.MsgspecError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: what it says of the export cannot be ({error})") from None
    if described.to != to:
        raise ConfigError.of("from", to, f"{path} says that it is {described.to!r}")
    return described


def checked_parts(directory: str, described: Described) -> Iterator[tuple[str, PartInfo]]:
    """Yield the path of each file in its turn, once it was compared with what is said of it.

    Raises:
        Damaged: it is missing, or was changed.
    """
    for info in described.files:
        if not is_inside(info.path):
            raise Damaged(f"{directory}: {FILE} names {info.path!r}, which is not inside the folder")
        path = os.path.join(directory, info.path)
        try:
            size, checksum = crc32c_of_file(path)
        except FileNotFoundError:
            raise Damaged(f"{path}: is missing; export again, or restore it from a copy") from None
        if (size, checksum) != (info.bytes, info.crc32c):
            raise Damaged(
                f"{path}: was changed: {size} bytes with crc32c {checksum} are there, {info.bytes} with {info.crc32c} "
                "were written"
            )
        yield path, info


def is_inside(name: str) -> bool:
    """Whether a path with slashes, which a file tells, stays in the folder that it is told of."""
    return not (os.path.isabs(name) or {"", ".", ".."} & set(name.split("/")) or "\0" in name)


def bytes_of_parts(described: Described) -> int:
    """Return how many bytes all files have."""
    return sum(info.bytes for info in described.files)

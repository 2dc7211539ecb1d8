"""A run that a tool makes: written aside, beside where it goes, and there as a whole or not at all.

``OUT.part`` holds the lock, a mark that says what it is, and the new run in a folder of its own. That is renamed to
``OUT`` when everything is on the disk. A process that is killed before leaves ``OUT.part``, and the next one for the
same ``OUT`` removes it; one that has a living owner is left alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import msgspec

from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.manifest import FileInfo
from pipeline.checkpoint.removing import remove_tree
from pipeline.errors import ConfigError, ForebayError, WriteFailed
from pipeline.store.files import FilesLike, OsFiles
from pipeline.store.frames import crc32c_more
from pipeline.store.layout import LOCK_FILE, write_file
from pipeline.store.lock import RunLock

Told = Callable[[int, int], None]
"""Told how many bytes are done, and of how many."""
PART = ".part"
_MARK = "unfinished.json"
_RUN = "run"
_GATHERED = 1 << 20  # bytes that are written at once


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the mark in a folder that is not finished."""

    kind: str = "forebay unfinished"
    tool: str = ""


class Output:
    """One place where something is to go. All methods block."""

    def __init__(self, directory: str, tool: str, files: FilesLike | None = None) -> None:
        self.directory = os.path.abspath(directory)
        self.files: FilesLike = files or OsFiles()
        self.folder = os.path.join(self.directory + PART, _RUN)
        """What is to be filled, once :meth:`begin` has made it."""
        self._aside, self._tool = self.directory + PART, tool
        self._lock = RunLock(os.path.join(self._aside, LOCK_FILE))
        self._begun = False

    def check(self, sources: Sequence[str]) -> None:
        """Refuse a place that holds something, or lies in what is read.

        Raises:
            ConfigError: the message says what to do.
        """
        own = os.path.realpath(self.directory)
        for source in sources:
            read = os.path.realpath(source)
            if os.path.commonpath([read, own]) == read:
                raise ConfigError.of("out", self.directory, f"must not lie in {source}, which is only read")
        if os.path.lexists(self.directory):
            there = os.listdir(self.directory) if os.path.isdir(self.directory) else [os.path.basename(self.directory)]
            if there or os.path.islink(self.directory):
                shown = ", ".join(sorted(there)[:5]) or "a link"
                raise ConfigError.of("out", self.directory, f"must be absent or an empty folder; it holds {shown}")
        self._leftovers()

    def begin(self) -> None:
        """Make the folder aside; what a killed process left of it is removed.

        Raises:
            Locked: another process is making the same.
            ConfigError: something else has its name.
            WriteFailed: it cannot be made.
        """
        with _failing(self._aside):
            self.files.makedirs(self._aside)
            self._lock.acquire()
            try:
                self._clean()
                content = msgspec.json.encode(Mark(tool=self._tool)) + b"\n"
                write_file(self.files, os.path.join(self._aside, _MARK), content)
                self.files.makedirs(self.folder)
            except BaseException:
                self._lock.release()
                raise
        self._begun = True

    def _leftovers(self) -> list[str]:
        """Return what lies in the folder aside, which is ours to remove."""
        if not os.path.lexists(self._aside):
            return []
        names = os.listdir(self._aside) if os.path.isdir(self._aside) and not os.path.islink(self._aside) else [PART]
        own = {_RUN, _MARK, _MARK + PART, LOCK_FILE}
        marked = os.path.isfile(os.path.join(self._aside, _MARK)) or not {_RUN} & set(names)
        if set(names) - own or not marked:
            raise ConfigError.of(
                "out",
                self.directory,
                f"is written aside in {self._aside}, which holds what no tool of forebay left there. Move it away, or "
                "choose another name",
            )
        return names

    def _clean(self) -> None:
        for name in sorted(set(self._leftovers()) - {LOCK_FILE, _MARK}):
            remove_tree(self.files, os.path.join(self._aside, name))
        if os.path.lexists(os.path.join(self._aside, _MARK)):
            self.files.unlink(os.path.join(self._aside, _MARK))

    def finish(self) -> None:
        """Give what was written its name.

        Raises:
            WriteFailed: that could not be done.
        """
        with _failing(self.directory):
            self.files.sync_directory(self.folder)
            self.files.sync_directory(self._aside)
            self.files.rename(self.folder, self.directory)
            self.files.sync_directory(os.path.dirname(self.directory))
        self._remove()

    def abandon(self) -> None:
        """Remove what was written, as far as the disk lets us; the next one for the same place tries again."""
        if self._begun:
            self._remove()

    def _remove(self) -> None:
        self._begun = False
        with contextlib.suppress(OSError):
            for name in (_RUN, _MARK):
                remove_tree(self.files, os.path.join(self._aside, name))
            os.unlink(os.path.join(self._aside, LOCK_FILE))
            self.files.rmdir(self._aside)
        self._lock.release()


def folder_near(path: str) -> str:
    """Return a folder that is there, on the way to one that may not be."""
    folder = os.path.dirname(os.path.realpath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


class Outputs:
    """Several of them: all are begun together, and given up together unless they were finished."""

    def __init__(self, directories: Sequence[str], tool: str, files: FilesLike | None = None) -> None:
        self.each = [Output(directory, tool, files) for directory in directories]

    def check(self, sources: Sequence[str]) -> None:
        """As :meth:`Output.check`, of each.

        Raises:
            ConfigError: one is refused, or two are the same.
        """
        names = [os.path.realpath(each.directory) for each in self.each]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError.of("out", name, "is named twice")
        for each in self.each:
            each.check(sources)

    @property
    def near(self) -> str:
        """A folder that is there, on the way to the first of them: files without a name may be in it before any has
        begun."""
        return folder_near(self.each[0].directory)

    def __enter__(self) -> Self:
        try:
            for each in self.each:
                each.begin()
        except BaseException:
            self._abandon()
            raise
        return self

    def inside(self, names: Sequence[str]) -> Outputs:
        """Return places inside the first one, which has begun: they come and go with it."""
        found = Outputs([os.path.join(self.each[0].directory, name) for name in names], "", self.each[0].files)
        for output, name in zip(found.each, names, strict=True):
            output.folder = os.path.join(self.each[0].folder, name)
        return found

    def finish(self) -> None:
        """Give all of them their names."""
        for each in self.each:
            each.finish()

    def _abandon(self) -> None:
        for each in self.each:
            each.abandon()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._abandon()
        if isinstance(error, OSError) and not isinstance(error, ForebayError):
            place = self.each[0].directory
            raise WriteFailed(f"{place}: could not be written: {error}. Nothing of it stays") from error


class GrowingFile:
    """A file of a generation that is written piece by piece."""

    def __init__(self, files: FilesLike, writer: GenerationWriter, path: str) -> None:
        self._files, self._writer, self._path = files, writer, path
        self._handle = files.create(writer.target(path))
        self._waiting: list[bytes] = []
        self._gathered = self._bytes = self._checksum = 0

    def write(self, content: bytes) -> None:
        """Append some bytes."""
        self._waiting.append(content)
        self._gathered += len(content)
        if self._gathered >= _GATHERED:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        content = b"".join(self._waiting)
        self._files.write(self._handle, [content])
        self._checksum = crc32c_more(self._checksum, content)
        self._bytes += len(content)
        self._waiting, self._gathered = [], 0

    def finish(self) -> None:
        """Write the rest, and list the file."""
        self._flush()
        self._writer.sync_later(self._handle)
        self._handle = -1
        self._writer.infos.append(FileInfo(path=self._path, bytes=self._bytes, crc32c=f"{self._checksum:08x}"))

    def close(self) -> None:
        """Give the file up, if it was not finished."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            with contextlib.suppress(OSError):
                self._files.close(handle)


@contextlib.contextmanager
def _failing(where: str) -> Iterator[None]:
    try:
        yield
    except ForebayError:
        raise
    except OSError as error:
        raise WriteFailed(f"{where}: could not be written: {error}. Nothing of it stays") from error

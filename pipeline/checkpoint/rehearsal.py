"""File layers of a salvage: one that counts the bytes written, one that copies where others link, and one for a
rehearsal, which writes nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from pipeline.store.files import FilesLike, OsFiles

Told = Callable[[int], None]


class Counting:
    """Another file layer, with somebody told of the bytes that are written; implements
    :class:`~pipeline.store.files.FilesLike`."""

    def __init__(self, files: FilesLike, told: Told) -> None:
        self._told = told
        self._write = files.write
        self.makedirs, self.create = files.makedirs, files.create
        self.start_writing, self.sync, self.sync_path = files.start_writing, files.sync, files.sync_path
        self.close, self.rename, self.link = files.close, files.rename, files.link
        self.unlink, self.rmdir, self.sync_directory = files.unlink, files.rmdir, files.sync_directory

    def write(self, handle: int, chunks: Sequence[bytes | bytearray | memoryview]) -> int:
        written = self._write(handle, chunks)
        self._told(written)
        return written


class Copying(OsFiles):
    """The operating system's files without links: a link would share the fate of the damaged run's disk."""

    def link(self, old: str, new: str) -> None:
        raise OSError(errno.EXDEV, "not linked: it is to be a copy", new)


class Rehearsal:
    """A file layer that does nothing but count; implements :class:`~pipeline.store.files.FilesLike`."""

    def __init__(self, told: Told = lambda count: None) -> None:
        self._told = told

    def makedirs(self, path: str) -> None: ...

    def create(self, path: str) -> int:
        return -1  # as of no file: nobody then looks whether it still has its name

    def write(self, handle: int, chunks: Sequence[bytes | bytearray | memoryview]) -> int:
        written = sum(memoryview(chunk).nbytes for chunk in chunks)
        self._told(written)
        return written

    def start_writing(self, handle: int) -> None: ...

    def sync(self, handle: int) -> None: ...

    def sync_path(self, path: str) -> None: ...

    def close(self, handle: int) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def link(self, old: str, new: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

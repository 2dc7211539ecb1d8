"""Every call that the store makes to change the file system, in one replaceable object.

A test hands in a layer that fails, stops or kills at the k-th call. Reading needs no such seam, but one way to open
what may not be what its name says.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol

from pipeline.errors import Damaged, StoreError

_MOST_CHUNKS = 512  # below the least IOV_MAX in use
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        found.restype = ctypes.c_int
    return found


_sync_file_range = _find_sync_file_range()


def open_plain(path: str) -> BinaryIO:
    """Open a file for reading that must be a plain one: a pipe would be waited for, and a device has no end.

    Raises:
        FileNotFoundError: it is not there.
        Damaged: it is no plain file.
        StoreError: it cannot be opened.
    """
    return open(plain_handle(path), "rb")


def plain_handle(path: str) -> int:
    """As :func:`open_plain`, but return a descriptor, which is the caller's to close."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args) from None
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a name may be none that the operating system knows
        raise StoreError(f"{path}: cannot be opened: {error}") from error
    try:
        plain = stat.S_ISREG(os.fstat(handle).st_mode)
    except OSError as error:
        os.close(handle)
        raise StoreError(f"{path}: cannot be read: {error}") from error
    if not plain:
        os.close(handle)
        raise Damaged(f"{path}: a folder or a special file, where a plain one belongs")
    return handle


def size_of(handle: int, path: str) -> int:
    """Return how long an open file is.

    Raises:
        StoreError: that cannot be found out.
    """
    try:
        return os.fstat(handle).st_size
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error


class FilesLike(Protocol):
    """Every call that the store makes to the file system, so that a test can fail or stop any of them."""

    def makedirs(self, path: str) -> None: ...

    def create(self, path: str) -> int:
        """Open a new file for writing; one that exists is an error."""
        ...

    def write(self, handle: int, chunks: Sequence[bytes | bytearray | memoryview]) -> int:
        """Append all of ``chunks``; return the number of bytes."""
        ...

    def start_writing(self, handle: int) -> None:
        """Let the disk begin with what was written, so that the ``sync`` to come finds most of it done.

        A hint: it promises nothing, and its failure is nobody's concern. It may wait for a disk that is busy.
        """
        ...

    def sync(self, handle: int) -> None: ...

    def sync_path(self, path: str) -> None:
        """Sync a file that another life of the process wrote."""
        ...

    def close(self, handle: int) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def link(self, old: str, new: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...


class OsFiles:
    """The operating system's files; implements :class:`FilesLike`."""

    def makedirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def create(self, path: str) -> int:
        # O_EXCL: a file that is there already belongs to somebody else and is never written over.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(path, flags, 0o644)

    def write(self, handle: int, chunks: Sequence[bytes | bytearray | memoryview]) -> int:
        total = 0
        for start in range(0, len(chunks), _MOST_CHUNKS):
            part = [memoryview(chunk) for chunk in chunks[start : start + _MOST_CHUNKS] if len(chunk)]
            total += _write_all(handle, part)
        return total

    def start_writing(self, handle: int) -> None:
        if _sync_file_range is not None:
            _sync_file_range(handle, 0, 0, _START_WRITING)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def sync_path(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not be waited for
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def link(self, old: str, new: str) -> None:
        os.link(old, new, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def sync_directory(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_all(handle: int, part: list[memoryview]) -> int:
    """Write every byte of ``part``: ``writev`` may stop short, at 2 GB or when a signal comes."""
    total = 0
    while part:
        written = os.writev(handle, part)
        total += written
        while part and written >= part[0].nbytes:
            written -= part.pop(0).nbytes
        if written:
            part[0] = part[0].cast("B")[written:]
    return total

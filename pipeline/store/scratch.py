"""A file without a name that is memory for one process: gone with it, however it ends.

Its bytes are had from the disk before they are written (``posix_fallocate``): on a full disk that is an error here, and
not a signal (SIGBUS) where the memory is touched.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref

from pipeline.errors import ConfigError, StoreError, WriteFailed
from pipeline.store.layout import SCRATCH

PAGE = mmap.ALLOCATIONGRANULARITY


def free_bytes(directory: str) -> int:
    """Return how many bytes the disk of a folder, which need not be there yet, has left for this user.

    Raises:
        StoreError: that cannot be found out.
    """
    path = os.path.abspath(directory)
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot tell how much space is left: {error}") from error
    return found.f_bavail * found.f_frsize


def check_possible() -> None:
    """Raises:
    ConfigError: this system cannot promise bytes of a file before they are written.
    """
    if not hasattr(os, "posix_fallocate"):
        raise ConfigError("storage='mapped': this system has no posix_fallocate; use Linux, or storage='memory'")


class Scratch:
    """``size`` bytes of a file in ``directory``, of which none are taken yet."""

    def __init__(self, directory: str, size: int) -> None:
        """Raises:
        WriteFailed: it cannot be made.
        """
        self._directory = directory
        try:
            os.makedirs(directory, exist_ok=True)
            self._handle = unnamed(directory)
            self._close = weakref.finalize(self, os.close, self._handle)
            os.ftruncate(self._handle, size)
        except OSError as error:
            raise WriteFailed(
                f"{directory}: a file of {size:,} bytes for the rows cannot be made there: {error}. Choose another "
                "directory, or a smaller capacity"
            ) from error

    def take(self, begin: int, length: int) -> None:
        """Have bytes from the disk. They stay as they are where they were taken before.

        Raises:
            WriteFailed: the disk is full.
        """
        try:
            os.posix_fallocate(self._handle, begin, length)
        except OSError as error:
            raise WriteFailed(
                f"{self._directory}: {length:,} more bytes for rows cannot be had: {error}. Nothing was changed; make "
                "room on the disk, and try again"
            ) from error

    def map(self, begin: int, length: int) -> mmap.mmap:
        """Return a part of the file as memory; ``begin`` is a multiple of :data:`PAGE`. Written to where
        nothing was taken, it may end the process.

        Raises:
            WriteFailed: the system refuses.
        """
        try:
            return mmap.mmap(self._handle, length, offset=begin)
        except (OSError, ValueError, OverflowError) as error:
            raise WriteFailed(f"{self._directory}: {length:,} bytes cannot be mapped: {error}") from error


def unnamed(directory: str) -> int:
    """Return a descriptor of a new file without a name."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # not every file system has them
            return os.open(directory, flags | os.O_TMPFILE, 0o600)
    path = os.path.join(directory, f"{SCRATCH}{os.getpid()}-{secrets.token_hex(8)}")
    handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(FileNotFoundError):  # who opens the folder removes such names
        os.unlink(path)
    return handle

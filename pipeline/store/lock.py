"""One writer in a folder, by a lock that the kernel frees when its holder dies.

``fcntl.lockf`` belongs to the process: a forked child does not have it, and closing *any* descriptor of the
file would free it. So the file is opened once and kept open. The same process asking twice would be granted
the lock by the kernel, so holders inside this process are kept in a table of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys

import msgspec

from pipeline.errors import Locked, StoreError, WriteFailed

_held: dict[tuple[int, int], int] = {}  # (device, inode) of the lock file -> process that holds it


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the lock, for people to read."""

    host: str = ""
    boot: str = ""
    process: int = 0
    incarnation: int = 0


class RunLock:
    """The lock of one run's folder, from :meth:`acquire` to :meth:`release`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle = -1
        self._key: tuple[int, int] | None = None
        self._described: Holder | None = None

    def acquire(self) -> None:
        """Take the lock now.

        Raises:
            Locked: another process, or another pipeline of this one, holds it; the message names it.
            StoreError: the platform or the file system has no such locks.
        """
        if sys.platform == "win32":
            raise StoreError("runs in a directory need fcntl locks, which Windows lacks; use WSL")
        # No link is followed: what it leads to would be written over.
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        status = os.fstat(handle)
        key = (status.st_dev, status.st_ino)
        if _held.get(key) == os.getpid():
            # Closing this descriptor would free the lock that the other pipeline holds: it stays open.
            raise Locked(f"{self._path}: another pipeline of this process writes in this folder; close it first")
        try:
            self._take(handle)
        except Locked:
            os.close(handle)
            raise
        self._handle, self._key = handle, key
        _held[key] = os.getpid()

    def _take(self, handle: int) -> None:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = _read_holder(handle)
            raise Locked(
                f"{self._path}: process {holder.process} on host {holder.host or 'unknown'} writes in this folder. "
                "Stop it, or choose another directory."
            ) from None

    def keep(self) -> None:
        """Take the lock again, should this process have lost it: whatever in it opens and closes the file (a copy of
        the folder, made by the trainer) frees it without a word. Does nothing when it was not held.

        Raises:
            Locked: another process has taken it meanwhile, though it may have ended since: what this one knows of the
                folder is old, and it must not write there any more.
            WriteFailed: the file was removed, or replaced: it holds nobody off.
        """
        if self._key is None:
            return
        self._take(self._handle)
        holder = _read_holder(self._handle)
        if self._described is not None and holder != self._described:
            raise Locked(
                f"{self._path}: process {holder.process} on host {holder.host or 'unknown'} has written in this folder "
                f"meanwhile, as incarnation {holder.incarnation}. This run is behind it: end it, and resume."
            )
        if not _same_file(self._path, self._key):
            raise WriteFailed(
                f"{self._path}: was removed, or replaced, while it was held: another process may write here by "
                "now. End this run; if the folder is there, resume it."
            )

    def describe(self, incarnation: int) -> None:
        """Write into the file who holds it."""
        holder = Holder(host=socket.gethostname(), boot=_boot_id(), process=os.getpid(), incarnation=incarnation)
        self._described = holder
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, msgspec.json.encode(holder) + b"\n", 0)

    def holds(self) -> bool:
        """Whether this process (no forked child of it) has the lock."""
        return self._key is not None and _held.get(self._key) == os.getpid()

    def __del__(self) -> None:
        # A run that was dropped without being closed is not written any more, and nobody could close it.
        with contextlib.suppress(Exception):
            self.release()

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""
        if self._key is None:
            return
        _held.pop(self._key, None)
        self._key = None
        os.close(self._handle)


def _same_file(path: str, key: tuple[int, int]) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # it may be there all the same
        raise WriteFailed(f"{path}: cannot be looked at now: {error}. Nothing was written; a retry may work") from error
    return (status.st_dev, status.st_ino) == key


def _read_holder(handle: int) -> Holder:
    try:
        return msgspec.json.decode(os.pread(handle, 4096, 0), type=Holder)
    except msgspec.MsgspecError:
        return Holder()


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""

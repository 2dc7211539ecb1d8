"""One writer in a folder, by a lock that the kernel frees when its holder dies.

``fcntl.lockf`` belongs to the process: a forked child does not have it, and closing *any* descriptor of the
file would free it. So the file is opened once and kept open. The same process asking twice would be granted
the lock by the kernel, so holders inside this process are kept in a table of their own; who only looks asks it first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import threading
from typing import NamedTuple

import msgspec

from pipeline.errors import Locked, StoreError, WriteFailed

# What the kernel is asked with: type, whence, start, length and process; on macOS in another order.
_DARWIN = sys.platform == "darwin"
_FLOCK = struct.Struct("qqihh" if _DARWIN else "hhqqi4x")
_MOST = 4096  # bytes of a lock file that are looked at


class _Own(NamedTuple):
    process: int
    handle: int


_held: dict[tuple[int, int], _Own] = {}  # by device and inode of the lock file
_guards: dict[int, threading.RLock] = {}


def _guard() -> threading.RLock:
    """Whoever opens or closes a lock file has it. One for each process: a forked child must not wait for a thread that
    only its parent has."""
    return _guards.setdefault(os.getpid(), threading.RLock())


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
        with _guard():
            # No link is followed: what it leads to would be written over.
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            key = _key(os.fstat(handle))
            if _own(key) is not None:
                # Closing this descriptor would free the lock that the other pipeline holds: it stays open.
                raise Locked(f"{self._path}: another pipeline of this process writes in this folder; close it first")
            try:
                self._take(handle)
            except Locked:
                os.close(handle)
                raise
            self._handle, self._key = handle, key
            _held[key] = _Own(os.getpid(), handle)

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
        assert self._key is not None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, msgspec.json.encode(holder) + b"\n", 0)

    def holds(self) -> bool:
        """Whether this process (no forked child of it) has the lock."""
        return self._key is not None and _own(self._key) is not None

    def __del__(self) -> None:
        # A run that was dropped without being closed is not written any more, and nobody could close it.
        with contextlib.suppress(Exception):
            self.release()

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""
        if self._key is None:
            return
        with _guard():
            _held.pop(self._key, None)
            self._key = None
            os.close(self._handle)


class Seen(NamedTuple):
    """What a look at a lock tells."""

    held: bool | None
    """Whether somebody has it; None: the file system does not say."""
    holder: Holder
    """Who has it, or had it last; without a process: nobody that is known."""


def look(path: str) -> Seen:
    """Look who has a lock, without taking or freeing it; the file may be one that can only be read.

    Raises:
        OSError: it cannot be looked at.
    """
    with _guard():
        try:
            own = _own(_key(os.stat(path, follow_symlinks=False)))
            if own is not None:  # opening and closing the file would free the lock
                return Seen(True, _read_holder(own.handle))
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return Seen(False, Holder())
        try:
            return _asked(handle)
        finally:
            os.close(handle)


def _asked(handle: int) -> Seen:
    holder = _read_holder(handle)
    try:
        answer = fcntl.fcntl(handle, fcntl.F_GETLK, _packed(fcntl.F_RDLCK))
    except OSError:
        return Seen(None, holder)
    kind, process = _unpacked(answer)
    if kind == fcntl.F_UNLCK:
        return Seen(False, holder)
    if process > 0 and process != holder.process and (not holder.host or _is_here(holder)):
        holder = Holder(host=socket.gethostname(), boot=_boot_id(), process=process)  # it has not said yet who it is
    return Seen(True, holder)


def _packed(kind: int) -> bytes:
    return _FLOCK.pack(0, 0, 0, kind, os.SEEK_SET) if _DARWIN else _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def _unpacked(answer: bytes) -> tuple[int, int]:
    """Return type and process."""
    fields = _FLOCK.unpack(answer)
    return (fields[3], fields[2]) if _DARWIN else (fields[0], fields[4])


def is_alive(holder: Holder) -> bool | None:
    """Return whether a process with the number that a lock names is there; None: it cannot be seen from this host."""
    if holder.process <= 0 or holder.host != socket.gethostname():
        return None
    if not _is_here(holder):  # the machine was started anew
        return False
    try:
        os.kill(holder.process, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _is_here(holder: Holder) -> bool:
    return (holder.host, holder.boot) == (socket.gethostname(), _boot_id())


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _own(key: tuple[int, int]) -> _Own | None:
    """Return by what this process (no forked child of it) holds a lock."""
    own = _held.get(key)
    return own if own is not None and own.process == os.getpid() else None


def _same_file(path: str, key: tuple[int, int]) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # it may be there all the same
        raise WriteFailed(f"{path}: cannot be looked at now: {error}. Nothing was written; a retry may work") from error
    return _key(status) == key


def _read_holder(handle: int) -> Holder:
    try:
        return msgspec.json.decode(os.pread(handle, _MOST, 0), type=Holder)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Holder()


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""

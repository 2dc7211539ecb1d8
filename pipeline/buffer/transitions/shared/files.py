"""Memory without a name, and the file whose lock guards it."""

from __future__ import annotations

import os
import weakref
from multiprocessing import context, reduction
from typing import Any

from pipeline.errors import ConfigError, UsageError

_open: dict[tuple[int, int], list[int]] = {}  # by the inode of the lock: every descriptor in this process
_users: dict[tuple[int, int], int] = {}
_closed: dict[tuple[int, int], list[bool]] = {}


class Files:
    """Descriptors of a memory, of its lock, of the memory for rows that are set aside, and of that for old values.

    A POSIX lock belongs to the process, and closing *any* descriptor of its file gives it back. So descriptors are
    closed together, with the last object of this process that is about the same lock; and those that came by a fork
    are never closed, as nobody in the child knows who else uses them.
    """

    def __init__(self, memory: int, lock: int, spill: int, undo: int) -> None:
        self.memory, self.lock, self.spill, self.undo = memory, lock, spill, undo
        status = os.fstat(lock)
        self.identity = (status.st_dev, status.st_ino)
        self.closed = _closed.setdefault(self.identity, [])
        """Not empty once the descriptors are closed; then their numbers may be those of other files."""
        _users[self.identity] = _users.get(self.identity, 0) + 1
        _open.setdefault(self.identity, []).extend((memory, lock, spill, undo))
        weakref.finalize(self, _let_go, self.identity, os.getpid()).atexit = False  # the kernel does it then

    @classmethod
    def create(cls) -> Files:
        """Make an empty memory, and its lock.

        Raises:
            ConfigError: this system has no such memory.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "storage='shared': memory without a name is a thing of Linux; elsewhere, let one process own the buffer "
                "and have the others send it their rows",
                option="storage",
            )
        return cls(*(os.memfd_create(name) for name in ("forebay", "forebay-lock", "forebay-spill", "forebay-undo")))

    def __getstate__(self) -> Any:
        if context.get_spawning_popen() is None:
            raise UsageError(
                "the handle of a shared buffer goes to a process as one of its arguments (args=, initargs=), while it is "
                "started; it cannot be sent to one that runs, nor be stored"
            )
        return [reduction.DupFd(each) for each in (self.memory, self.lock, self.spill, self.undo)]

    def __setstate__(self, state: Any) -> None:
        descriptors = [each.detach() for each in state]
        for each in descriptors:
            os.set_inheritable(each, False)
        self.__init__(*descriptors)  # type: ignore[misc]


def _let_go(identity: tuple[int, int], process: int) -> None:
    if process != os.getpid():
        return
    _users[identity] -= 1
    if not _users[identity]:
        del _users[identity]
        _closed.pop(identity).append(True)
        for descriptor in _open.pop(identity):
            os.close(descriptor)

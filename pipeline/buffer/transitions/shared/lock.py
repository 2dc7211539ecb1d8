"""A lock between processes that the kernel frees when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import threading
import time
from collections.abc import Sequence
from typing import Protocol


class Guarded(Protocol):
    """What a lock guards."""

    def enter(self) -> None:
        """Called when the lock was taken."""
        ...

    def leave(self, error: BaseException | None) -> None:
        """Called before it is given back; ``error`` ended what was done under it."""
        ...


class SharedLock:
    """As ``threading.RLock``, for the threads of every process that has the file.

    A record lock (``fcntl.lockf``) tells processes apart, not threads: a lock among threads is taken first. A
    ``multiprocessing.Lock`` would stay taken for ever when its holder is killed.
    """

    def __init__(self, descriptor: int, closed: Sequence[bool] = ()) -> None:
        """Args:
        descriptor: of the file.
        closed: not empty once it is closed. Then nothing is guarded, and what is left of the buffer, such as a task of
            a loop that has ended, is cleared away in peace.
        """
        self.guarded: Guarded | None = None
        self.closed = closed
        self._descriptor = descriptor
        self._threads = threading.RLock()
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Wait for it, or, if not ``blocking``, return whether it could be had at once."""
        if not self._threads.acquire(blocking=blocking):
            return False
        if self._depth:
            self._depth += 1
            return True
        try:
            taken = self._enter(blocking=blocking)
        except BaseException:
            self._threads.release()
            raise
        if not taken:
            self._threads.release()
        return taken

    def __enter__(self) -> bool:
        return self.acquire()

    def _enter(self, *, blocking: bool) -> bool:
        if self.closed:
            self._depth = 1
            return True
        try:
            if not self._take(blocking=blocking):
                return False
            if self.guarded is not None:
                self.guarded.enter()
        except BaseException:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
            raise
        self._depth = 1
        return True

    def _take(self, *, blocking: bool) -> bool:
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX if blocking else fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if not blocking and error.errno in (errno.EAGAIN, errno.EACCES):
                    return False
                if error.errno != errno.EDEADLK:
                    raise
                # The kernel sees processes that wait for each other, where it is threads of theirs that hold two
                # buffers' locks; each gives its own back soon, and nothing tells when.
                time.sleep(0.001)

    def release(self, error: BaseException | None = None) -> None:
        """Give it back; ``error`` ended what was done under it."""
        if self._depth > 1:
            self._depth -= 1
        else:
            self._leave(error)
        self._threads.release()

    def _leave(self, error: BaseException | None) -> None:
        if self.closed:
            self._depth = 0
            return
        try:
            if self.guarded is not None:
                self.guarded.leave(error)
        finally:
            self._depth = 0
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.release(error)

    # What a threading.Condition asks of its lock.

    def _release_save(self) -> int:
        depth = self._depth
        self._leave(None)
        for _ in range(depth):
            self._threads.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        for _ in range(depth):
            self.acquire()

    def _is_owned(self) -> bool:
        return self._threads._is_owned()  # type: ignore[attr-defined,no-any-return]

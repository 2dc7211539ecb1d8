"""Files that are gone through in two threads: while one waits for the disk, or copies from the page cache, the other
checksums. Both let go of the interpreter's lock for it.

Results have the order of the jobs, and only the thread that called hears how far they are. When the call ends, by an
error or Ctrl-C too, so have the threads: each after the piece that it is at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
Told = Callable[[int], None]
"""Told how many bytes more were read; in a job, to be called after each piece."""
Job = Callable[[Told], T]
_THREADS = 2
_OFTEN = 32 << 20  # bytes, after which the caller is told


class _Left(Exception):
    """Whoever called has left."""


def abreast(jobs: Sequence[Job[T]], told: Told, *, threads: int = _THREADS) -> list[T]:
    """Do all of some jobs, in about their order, and return what they return. Blocks.

    Args:
        jobs: what is to be done; each tells of the bytes that it has read.
        told: told of these, by the thread that calls this.
        threads: how many work; 0: the one that calls this.

    Raises:
        Exception: what the first of the jobs raised that raised anything; those behind it may not have been done.
    """
    if not threads:
        return [job(told) for job in jobs]
    return _Abreast(jobs).results(told, min(threads, len(jobs)))


class _Abreast(Generic[T]):
    def __init__(self, jobs: Sequence[Job[T]]) -> None:
        self._jobs = jobs
        self._next = 0
        self._done: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}
        self._read = 0
        """Bytes that the caller has not been told of."""
        self._working = 0
        self._left = False
        self._changed = threading.Condition()

    def results(self, told: Told, threads: int) -> list[T]:
        started: list[threading.Thread] = []
        try:
            for _ in range(threads):
                thread = threading.Thread(target=self._work, name="forebay abreast")
                started.append(thread)  # before it is started: Ctrl-C may come in between
                with self._changed:
                    self._working += 1
                thread.start()
            while self._tell(told):
                pass
        finally:
            with self._changed:
                self._left = True
            for thread in started:
                if thread.ident is not None:  # else it was not started, or finds that nothing is left to do
                    thread.join()
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._done[number] for number in range(len(self._jobs))]

    def _tell(self, told: Told) -> bool:
        """Wait until there is something to tell, and tell it; False when the threads are at their end."""
        with self._changed:
            self._changed.wait_for(lambda: self._read >= _OFTEN or not self._working)
            read, self._read = self._read, 0
            working = self._working > 0
        if read:
            told(read)
        return working

    def _work(self) -> None:
        try:
            while (number := self._taken()) is not None:
                try:
                    self._done[number] = self._jobs[number](self._count)
                except _Left:
                    return
                except BaseException as error:  # it is raised where the caller waits
                    self._errors[number] = error
                    return
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _taken(self) -> int | None:
        with self._changed:
            number, self._next = self._next, self._next + 1
            # What comes before a job that failed is done all the same: its error would come first.
            return number if number < len(self._jobs) and not self._errors and not self._left else None

    def _count(self, read: int) -> None:
        with self._changed:
            if self._left:
                raise _Left
            self._read += read
            if self._read >= _OFTEN:
                self._changed.notify_all()

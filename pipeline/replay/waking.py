"""Waking processes that wait for a shared buffer.

Each that waits listens on a datagram socket with a name of its own in the abstract namespace, which the kernel forgets
when the process ends: nothing is left in a file system, and nobody looks again and again. Its number is in a list in
the shared memory while it waits. Whoever changes what is waited for sends a byte to each, before it commits the change:
killed between the two it has woken them for nothing, the other way round they would sleep on.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable

from pipeline.buffer.transitions.shared.header import IDENTITY, MOST_WAITING, WAITING, Header
from pipeline.errors import UsageError


class Waking:
    """Of one process. The caller has the buffer's lock, but for :meth:`close`."""

    def __init__(self, header: Header, number: int) -> None:
        self._header, self._number = header, number
        self._identity = header.words[IDENTITY].to_bytes(8, "little", signed=True).hex()
        self._listening: socket.socket | None = None
        self._sending: socket.socket | None = None

    def listen(self, woken: Callable[[], bool]) -> None:
        """Be woken from now on: a thread calls ``woken`` then, until that returns False."""
        if self._listening is None:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            listening.bind(self._address(self._number))
            self._listening = listening
            weakref.finalize(self, _hang_up, listening, os.getpid()).atexit = False
            threading.Thread(target=_listen, args=(listening, woken), name="forebay waking", daemon=True).start()
        header = self._header
        count = header.words[WAITING]
        if self._number in header.waiting[:count]:
            return
        if count == MOST_WAITING:
            raise UsageError(f"{count} processes wait for this buffer already, and no more can be woken")
        header.waiting[count] = self._number
        header.words[WAITING] = count + 1

    def stop(self) -> None:
        """Be left alone."""
        self._remove([self._number])

    def _remove(self, numbers: list[int]) -> None:
        header = self._header
        waiting = header.waiting[: header.words[WAITING]].tolist()
        left = [number for number in dict.fromkeys(waiting) if number not in numbers]
        header.waiting[: len(left)] = left
        header.words[WAITING] = len(left)

    def wake(self) -> None:
        """Wake all others that wait."""
        if self._sending is None:
            self._sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sending.setblocking(False)
            weakref.finalize(self, self._sending.close)
        gone = []
        for number in self._header.waiting[: self._header.words[WAITING]].tolist():
            if number == self._number:
                continue
            try:
                self._sending.sendto(b"!", self._address(number))
            except BlockingIOError:
                pass  # it has not even looked at the last ones
            except OSError:
                gone.append(number)  # killed while it waited
        if gone:
            self._remove(gone)

    def _address(self, number: int) -> str:
        return f"\0forebay-{self._identity}-{number}"


def _listen(listening: socket.socket, woken: Callable[[], bool]) -> None:
    with listening:
        while listening.recv(1) and woken():
            pass


def _hang_up(listening: socket.socket, process: int) -> None:
    if process == os.getpid():
        try:
            listening.shutdown(socket.SHUT_RD)
        except OSError:
            return

"""Waiting for what another process says, with nothing but its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio


class Bell:
    """A pipe with a name, at which any process may ring: ``tests.support.in_workers.ring(bell.path, "words")``."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "bell")
        os.mkfifo(self.path)
        self._handle = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)  # it never ends: somebody writes, which is us
        self._lines: list[str] = []

    async def hear(self) -> list[str]:
        """Return the words that are said next."""
        with anyio.fail_after(60):
            while not self._lines:
                await anyio.wait_readable(self._handle)
                self._read()
        return self._lines.pop(0).split()

    def heard(self) -> list[list[str]]:
        """Return all that has been said and not heard yet."""
        self._read()
        lines, self._lines = self._lines, []
        return [line.split() for line in lines]

    def _read(self) -> None:
        try:
            self._lines += os.read(self._handle, 1 << 16).decode().splitlines()
        except BlockingIOError:
            return

    def close(self) -> None:
        """Hear no more."""
        os.close(self._handle)


@contextmanager
def bell_in(folder: Path) -> Iterator[Bell]:
    """A bell in a folder."""
    bell = Bell(folder)
    try:
        yield bell
    finally:
        bell.close()

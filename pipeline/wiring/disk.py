"""How much of the disk a run may take, and what happens before there is no more.

Near the bound a generation is asked for, as generations let old segments go; at the bound nothing new is begun. So what
is in flight can still be written, and the trainer can still save.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from pipeline.observe import events
from pipeline.store.layout import Layout
from pipeline.store.service import RunBlocking
from pipeline.wiring.state import RunState

NEAR = 0.9
"""From this share of ``max_disk_bytes`` on a generation is asked for."""
_SEGMENTS = 2  # as many as should fit into what the file system has left


class DiskUse:
    """Counts the bytes of a run's folder: looked up after each generation, and added to in between."""

    def __init__(self, state: RunState, layout: Layout, in_thread: RunBlocking[Any]) -> None:
        self._state, self._layout, self._in_thread = state, layout, in_thread
        self._most = state.options.max_disk_bytes
        self._found = 0
        self._written = 0  # by the writer, when it was looked up
        self._asked = 0.0  # the share at which a generation was asked for
        self.ask: Callable[[str], None] = lambda reason: None
        self.relief: Callable[[], bool] = lambda: False
        """Whether a generation is about to be made, or is being made."""
        self.looking = False

    @property
    def used(self) -> int:
        """Bytes of the run's files, to within what was not looked up yet."""
        service = self._state.writer
        return self._found + (0 if service is None else service.writer.queued_in_all - self._written)

    @property
    def full(self) -> bool:
        """Whether nothing new may be begun."""
        return self._most is not None and self.used >= self._most

    def refuses(self) -> bool:
        """:attr:`full`, for who would begin something; the first to come near the bound asks for a generation."""
        most = self._most
        if most is None:
            return False
        used = self.used
        for mark in (NEAR, 1.0):
            if used >= mark * most and mark > self._asked:
                self._asked = mark
                self._state.log.warning(events.DISK_LOW, bytes=used, most=most)
                self.ask("disk")
        return used >= most

    @property
    def hopeless(self) -> bool:
        """Whether it is full, and nobody is about to make room."""
        return self.full and not self.looking and not self.relief()

    def why(self) -> str:
        """What a trainer that starves is told."""
        return (
            f"The run's folder has {self.used} bytes and may have max_disk_bytes={self._most}: nothing new is begun. "
            "A save lets go what no kept generation needs; keep fewer (keep=), or raise it"
        )

    async def look(self) -> None:
        """Look up how much there is; then what waited for room may start."""
        self.looking = True
        try:
            service = self._state.writer
            written = 0 if service is None else service.writer.queued_in_all
            self._found, free = await self._in_thread(self._count)
            self._written = written
        finally:
            self.looking = False
        if self._most is not None and self.used < NEAR * self._most:
            self._asked = 0.0
        if free < _SEGMENTS * self._state.options.segment_bytes:
            self._state.log.warning(events.DISK_LOW, bytes=self.used, free=free)
        self._state.changed.notify()

    def _count(self) -> tuple[int, int]:
        """Return the bytes of the run's files, and those that the file system has left. Blocks."""
        total = 0
        for folder, _, names in os.walk(self._layout.directory) if self._most is not None else ():
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:  # removed meanwhile
                    continue
        try:
            system = os.statvfs(self._layout.directory)
        except FileNotFoundError:  # the whole folder was: whoever writes next says so
            return total, sys.maxsize
        return total, system.f_bavail * system.f_frsize

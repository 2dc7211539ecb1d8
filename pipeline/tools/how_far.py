"""How far something is that reads: bytes, out of about so many."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from pipeline.tools.output import Told


class HowFar:
    """Bytes that are read; ``told`` is told of them."""

    def __init__(self, told: Told | None) -> None:
        self._told = told
        self._done = self._total = 0

    def expect(self, count: int) -> None:
        """Take in that so many more will be read, about."""
        self._total += count

    def expect_files(self, paths: Iterable[str]) -> None:
        """As :meth:`expect`, of whole files, some of which may be gone."""
        for path in paths:
            with suppress(OSError):
                self._total += os.stat(path).st_size

    def more(self, count: int) -> None:
        """Take in that so many were read. More than were expected are not told."""
        self._done = min(self._done + count, self._total)
        if self._told is not None and self._total:
            self._told(self._done, self._total)

    def file(self, path: str) -> None:
        """As :meth:`more`, of a whole file."""
        with suppress(OSError):
            self.more(os.stat(path).st_size)

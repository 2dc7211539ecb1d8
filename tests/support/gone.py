"""Ranks of which the test knows who is gone, so that waiting for those is over at once, and for others is not.

A time limit that is short enough for a test is too short for ranks that live, on a machine with other work.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_LOOKS_S = 0.2
"""How long one that waits does so before it looks who is gone, at most: many wait at one store."""


def names(rank: int, why: str) -> bool:
    """Whether an error says that a rank was not heard from. Others may be named beside it, which have not told yet
    what they would have told within a real limit."""
    return any(str(rank) in found[1].split(", ") for found in re.finditer(r"ranks? ([\d, ]+) w\w+ not heard from", why))


class GoneStore:
    """A store of torch. Waiting for what only ranks that are gone could still tell ends as at the time limit."""

    def __init__(self, store: Any, is_gone: Callable[[Any, int], bool]) -> None:
        """Args:
        store: the real one.
        is_gone: whether a rank is, which may look into the store for it.
        """
        self._store, self._is_gone = store, is_gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> GoneStore:
        return GoneStore(self._store.clone(), self._is_gone)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        until, looks_s = time.monotonic() + timeout.total_seconds(), 0.01
        while True:
            left = [key for key in keys if not self._store.check([key])]
            gone = [key for key in left if self._is_gone(self._store, int(key.rpartition("/")[2]))]
            left = [key for key in left if not self._store.check([key])]  # told as its last word
            if not left:
                return
            if len(gone) == len(left) or time.monotonic() > until:
                raise RuntimeError(f"nobody tells {left}")
            try:
                self._store.wait(left, timedelta(seconds=looks_s))
            except RuntimeError:
                looks_s = min(2 * looks_s, _LOOKS_S)

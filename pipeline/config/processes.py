"""The options of an engine of worker processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from pipeline.config.base import LEAST, MOST, Options
from pipeline.errors import ConfigError


class ProcessOptions(Options, frozen=True, kw_only=True):
    """Options of a :class:`~pipeline.ProcessEngine`."""

    workers: int | None = None
    """Worker processes. None: as many as this process may use processors."""
    per_worker: int | None = None
    """How many attempts of an ``async def`` runner one worker runs at once. None: such runners run in this process, and
    only plain ones in workers, of which each runs one attempt at a time."""
    grace_s: float = 1.0
    """Seconds that a worker has to end what was cut, or to leave when the pipeline closes; then it is killed."""
    env: Mapping[str, str] = {}
    """Variables that the workers have beside those of this process, such as ``{"OMP_NUM_THREADS": "1"}``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("workers", 1, none_ok=True)
        self._at_least("per_worker", 1, none_ok=True)
        if not LEAST <= self.grace_s <= MOST:
            raise ConfigError.of("grace_s", self.grace_s, f"seconds from {LEAST:g} to {MOST:g} are needed")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError.of("env", {name: value}, "no environment can hold that")
        if self.workers is None:
            msgspec.structs.force_setattr(self, "workers", usable_processors())

    @property
    def count(self) -> int:
        """``workers``, resolved."""
        assert self.workers is not None
        return self.workers


def usable_processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""When rows may be added, and when they may be sampled: three counters and two predicates."""

from __future__ import annotations

from typing import Any

from pipeline.buffer.transitions.given import MOST, whole
from pipeline.config import Limiter
from pipeline.errors import ConfigError


class Counts:
    """The counters of one :class:`~pipeline.config.Limiter`. Methods never wait."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.added = self.sampled = 0
        self.free = limiter.ratio is None
        """Whether adding is never held back."""

    def may_add(self, count: int, size: int) -> bool:
        """Whether ``count`` more rows may be added to ``size`` that are there."""
        limiter = self.limiter
        if limiter.ratio is None or size < limiter.min_size:
            return True  # while nothing can be sampled, there is nothing to wait for
        most = limiter.ratio * limiter.min_size + limiter.buffer
        return (self.added + count) * limiter.ratio - self.sampled <= most

    def may_sample(self, count: int, size: int) -> bool:
        """Whether ``count`` rows may be sampled of ``size`` that are there."""
        limiter = self.limiter
        if size < limiter.min_size:
            return False
        if limiter.ratio is None:
            return True
        least = limiter.ratio * limiter.min_size - limiter.buffer
        return self.added * limiter.ratio - self.sampled - count >= least

    def check_add(self, count: int, size: int) -> None:
        """Refuse a block that could never be added.

        Raises:
            ConfigError: it needs more than the limiter's whole range.
        """
        ratio, buffer = self.limiter.ratio, self.limiter.buffer
        if ratio is not None and count * ratio > 2 * buffer and not self.may_add(count, size):
            raise ConfigError.of(
                "error_buffer",
                buffer,
                f"{count} rows at once are {count * ratio:g} samples to come, and the limiter never has room for more "
                f"than {2 * buffer:g}; add fewer at once, or raise error_buffer",
            )

    def why_not_add(self, count: int) -> str:
        """Say what :meth:`may_add` waits for."""
        return (
            f"{count} rows cannot be added yet: {self.added} were added and {self.sampled} sampled, and "
            f"ratio={self.limiter.ratio:g} with error_buffer={self.limiter.buffer:g} wants samples first"
        )

    def why_not_sample(self, count: int, size: int) -> str:
        """Say what :meth:`may_sample` waits for."""
        if size < self.limiter.min_size:
            return f"nothing can be sampled yet: {size} rows are there, and min_size={self.limiter.min_size}"
        return (
            f"{count} rows cannot be sampled yet: {self.added} were added and {self.sampled} sampled, and "
            f"ratio={self.limiter.ratio:g} with error_buffer={self.limiter.buffer:g} wants new rows first"
        )

    def state(self) -> dict[str, Any]:
        """Return the counters. The settings are the caller's: a resume brings its own."""
        return {"added": self.added, "sampled": self.sampled}

    def load(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state` gave.

        Raises:
            LookupError, ValueError: it is no such state.
        """
        self.added = whole("limiter.added", state["added"], 0, MOST)
        self.sampled = whole("limiter.sampled", state["sampled"], 0, MOST)

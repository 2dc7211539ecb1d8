"""What is drawn where one row is not enough, as options."""

from __future__ import annotations

from typing import Literal

from pipeline.config.base import Options
from pipeline.errors import ConfigError


class Slices(Options, frozen=True):
    """Rows that follow each other in one episode: a window of ``burn_in``, then ``length``, then ``bootstrap`` rows.

    The start of a slice is the first row of the window, and is drawn as a row is: every valid start with its own
    probability.

    Attributes:
        length: how many rows are learned from.
        burn_in: rows before them, to warm a recurrent state up.
        bootstrap: rows after them, to estimate what comes.
        dilation: take every so many-th row.
        pad: also begin where fewer rows follow; the last one is repeated, and the batch's ``mask`` tells.
        start: ``any`` row, or the ``first`` of an episode alone.
        ended: of episodes that are at their end alone.
    """

    length: int
    burn_in: int = 0
    bootstrap: int = 0
    dilation: int = 1
    pad: bool = False
    start: Literal["any", "first"] = "any"
    ended: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("length", 1)
        self._at_least("burn_in", 0)
        self._at_least("bootstrap", 0)
        self._at_least("dilation", 1)

    @property
    def window(self) -> int:
        """Rows that are given out for a slice."""
        return self.burn_in + self.length + self.bootstrap

    @property
    def span(self) -> int:
        """Rows of the episode that a slice needs, from its first to its last."""
        return (self.window - 1) * self.dilation + 1

    def check(self, capacity: int) -> None:
        """Compare with what a buffer can hold.

        Raises:
            ConfigError: no slice would ever fit.
        """
        if self.span > capacity and not self.pad:
            raise ConfigError.of("length", self.length, f"a slice spans {self.span} rows, and capacity={capacity}")

"""Many numbers in a few: how many, their mean, the least, the most, and how they are spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

Numbers = np.ndarray[Any, Any]
BINS = 20
_AT_ONCE = 1 << 20
_BARS = " ▁▂▃▄▅▆▇█"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What some numbers come to."""

    count: int
    mean: float | None = None
    least: float | None = None
    most: float | None = None
    spread: list[int] = []
    """How many lie in each of equal parts between the least and the most."""
    not_finite: int = 0
    """How many are no finite number; they are in no other figure."""

    @classmethod
    def of(cls, values: Sequence[float] | Numbers) -> Figures:
        """Return what ``values`` come to."""
        given = np.asarray(values).reshape(-1)
        parts = [given[at : at + _AT_ONCE] for at in range(0, len(given), _AT_ONCE)]
        found = Gathered()
        for part in parts:
            found.bound(part)
        for part in parts:
            found.spread(part)
        return found.figures()

    @property
    def line(self) -> str:
        """The spread as a line of blocks; the highest is full."""
        top = max(self.spread, default=0)
        return "".join(_BARS[-(-each * (len(_BARS) - 1) // top)] for each in self.spread) if top else ""


class Gathered:
    """What numbers come to that cannot all be held. They are told twice over: how they are spread can only be counted
    once the least and the most are known."""

    def __init__(self) -> None:
        self._count = self._not_finite = 0
        self._least, self._most, self._sum = math.inf, -math.inf, 0.0
        self._spread: list[int] = []

    def bound(self, values: Numbers) -> None:
        """Take in some numbers for the first time."""
        numbers = _finite(values)
        self._not_finite += np.size(values) - len(numbers)
        if len(numbers):
            self._count += len(numbers)
            self._least, self._most = min(self._least, float(numbers.min())), max(self._most, float(numbers.max()))
            with np.errstate(over="ignore"):
                self._sum += float(numbers.sum())

    def spread(self, values: Numbers) -> None:
        """Take in the same numbers once more, when all have been told."""
        numbers = _finite(values)
        if len(numbers) and self._least < self._most and math.isfinite(self._most - self._least):
            try:
                counts, _ = np.histogram(numbers, BINS, (self._least, self._most))
            except ValueError:  # so near each other that there are no numbers between them
                return
            self._spread = [old + new for old, new in zip(self._spread or [0] * BINS, counts.tolist(), strict=True)]

    def figures(self) -> Figures:
        """Return what they come to."""
        if not self._count:
            return Figures(count=0, not_finite=self._not_finite)
        mean = self._sum / self._count
        return Figures(
            count=self._count,
            mean=mean if math.isfinite(mean) else None,
            least=self._least,
            most=self._most,
            spread=self._spread or [self._count],
            not_finite=self._not_finite,
        )


def _finite(values: Numbers) -> Numbers:
    given = np.asarray(values, np.float64).reshape(-1)
    return given[np.isfinite(given)]

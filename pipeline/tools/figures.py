"""Many numbers in a few: how many, their mean, the least, the most, and how they are spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

BINS = 20
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
    def of(cls, values: Sequence[float] | np.ndarray[Any, Any]) -> Figures:
        """Return what ``values`` come to."""
        given = np.asarray(values, np.float64).reshape(-1)
        numbers = given[np.isfinite(given)]
        if not len(numbers):
            return cls(count=0, not_finite=len(given))
        least, most = float(numbers.min()), float(numbers.max())
        with np.errstate(over="ignore"):
            spread = [len(numbers)] if least == most or not np.isfinite(most - least) else _spread(numbers, least, most)
            mean = float(numbers.mean())
        return cls(
            count=len(numbers),
            mean=mean if np.isfinite(mean) else None,
            least=least,
            most=most,
            spread=spread,
            not_finite=len(given) - len(numbers),
        )

    @property
    def line(self) -> str:
        """The spread as a line of blocks; the highest is full."""
        top = max(self.spread, default=0)
        return "".join(_BARS[-(-each * (len(_BARS) - 1) // top)] for each in self.spread) if top else ""


def _spread(numbers: np.ndarray[Any, Any], least: float, most: float) -> list[int]:
    try:
        counts, _ = np.histogram(numbers, BINS, (least, most))
    except ValueError:  # so near each other that there are no numbers between them
        return [len(numbers)]
    spread: list[int] = counts.tolist()
    return spread

"""Rows of figures, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pipeline import SourceMark


class Endless:
    """A source of its own indices."""

    def item(self, index: int) -> int:
        return index

    def length(self) -> int | None:
        return None

    def mark(self) -> SourceMark:
        return SourceMark(kind="endless")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line: our figure, those measured beside it in the same run, and what is asked.

    ``limit`` is the largest figure that is good enough; ``ok`` says whether ours is.
    """

    name: str
    ours: float
    unit: str
    limit: float
    asked: str
    peers: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether what was asked is reached, by the figures of this run."""
        return self.ours <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        names = ("name", "ours", "unit", "peers", "limit", "asked", "ok")
        return {name: getattr(self, name) for name in names}


def times(name: str, ours: Sequence[float], peer: str, theirs: Sequence[float], *, unit: str, most: float) -> Row:
    """Compare medians: ours may be ``most`` times the peer's."""
    mine, other = median(ours), median(theirs)
    asked = f"within {most:g}x of {peer} ({mine / other:.1f}x)"
    return Row(name=name, ours=mine, unit=unit, limit=most * other, asked=asked, peers={peer: other})


def show(rows: Sequence[Row]) -> None:
    """Print rows for a person."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        peers = ", ".join(f"{name} {value:.3g}" for name, value in row.peers.items())
        mark = "ok  " if row.ok else "MISS"
        print(f"{mark} {row.name:<{width}}  {row.ours:10.4g} {row.unit:<12} {row.asked}{'; ' + peers if peers else ''}")

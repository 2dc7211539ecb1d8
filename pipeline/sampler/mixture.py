"""Which task is drawn next: a deterministic schedule by shares.

The task with the least ``(drawn + 1) / share`` comes next, ties by order. After any number of draws each task
has its share to within one draw (d'Hondt's method of apportionment), and a task that has ended leaves its place
to the others at once. Counts begin anew when the shares change, so that a task added late does not have to
catch up on all that went before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Mixture:
    """Counts draws by task since the shares were last set."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self.drawn: dict[str, int] = {}

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Begin to count anew with these shares, each above 0."""
        self.shares = dict(shares)
        self.drawn = dict.fromkeys(shares, 0)

    def next(self, candidates: Iterable[str]) -> str | None:
        """Return which of ``candidates`` is due, or None if there are none. Changes nothing."""
        best, least = None, 0.0
        for name in candidates:
            due = (self.drawn[name] + 1) / self.shares[name]
            if best is None or due < least:
                best, least = name, due
        return best

    def count(self, name: str) -> None:
        """Note a draw of ``name``."""
        if name in self.drawn:
            self.drawn[name] += 1

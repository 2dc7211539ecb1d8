"""Which task is drawn next: a deterministic schedule by shares.

Of the tasks that are below their share, counting the draw to come, the one with the least ``(drawn + 1) / share`` comes
next, ties by order: the quota method of Balinski and Young (1975). After any number of draws each task has its share to
within one draw, however many tasks there are, and a task that has ended leaves its place to the others at once. Counts
begin anew when the shares change or a task is begun anew, so that nobody has to catch up on all that went before.
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
        names = list(candidates)
        draws = sum(self.drawn[name] for name in names) + 1
        total = sum(self.shares[name] for name in names)
        best, least = None, 0.0
        for name in names:
            drawn, share = self.drawn[name], self.shares[name]
            if drawn * total < draws * share and (best is None or (drawn + 1) / share < least):
                best, least = name, (drawn + 1) / share
        return best

    def count(self, name: str) -> None:
        """Note a draw of ``name``."""
        if name in self.drawn:
            self.drawn[name] += 1

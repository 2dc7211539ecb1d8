"""What can be asked of a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.intervals import IntervalSet
from pipeline.ledger.entry import BUFFERED, LEASED, PARKED, STATES, ConsumerHalf, Entry, TaskTotals
from pipeline.ledger.parking import ParkedGroups


class Questions:
    """The questions of :class:`~pipeline.ledger.Ledger`; none of them changes anything."""

    entries: dict[int, Entry]
    counts: dict[str, list[int]]
    totals: dict[str, TaskTotals]
    trained: IntervalSet
    dropped: IntervalSet
    retired: IntervalSet
    parked: ParkedGroups

    def consumer_half(self) -> ConsumerHalf:
        raise NotImplementedError

    def state(self, uid: int) -> str:
        """Return the state of ``uid``: one of the live states, trained, retired, dropped, or future."""
        entry = self.entries.get(uid)
        if entry is not None:
            return STATES[entry.state]
        if uid in self.trained:
            return "trained"
        if uid in self.retired:
            return "retired"
        return "dropped" if uid in self.dropped else "future"

    def count(self, state: int) -> int:
        """Return how many items of all tasks are in ``state``."""
        return sum(counts[state] for counts in self.counts.values())

    @property
    def claimed(self) -> int:
        return sum(totals.claimed for totals in self.totals.values())

    @property
    def outstanding(self) -> int:
        """Items claimed that have not ended."""
        return len(self.entries)

    def check(self) -> None:
        """Assert that every claimed item is in exactly one state.

        Raises:
            AssertionError: it is not; this is a fault of the library.
        """
        for name, totals in self.totals.items():
            live = sum(self.counts[name])
            ended = totals.trained + totals.retired + sum(totals.dropped.values())
            if totals.claimed != live + ended:
                raise AssertionError(f"task {name!r}: claimed {totals.claimed} != live {live} + ended {ended}")
        if sum(map(sum, self.counts.values())) != len(self.entries):
            raise AssertionError("the counts by state are not those of the entries")
        if len(self.parked) != self.count(PARKED):
            raise AssertionError(f"{self.count(PARKED)} groups are parked, and {len(self.parked)} are listed as such")

    def snapshot(self) -> Mapping[str, Any]:
        """Return everything that recovery must bring back, in plain comparable values."""
        fields = [name for name in Entry.__struct_fields__ if name != "order"]
        ranked = sorted(self.entries.values(), key=lambda entry: entry.order)
        return {
            "entries": {uid: {name: getattr(each, name) for name in fields} for uid, each in self.entries.items()},
            "order": [entry.uid for entry in ranked if entry.state in (BUFFERED, LEASED)],
            "consumer": msgspec.to_builtins(self.consumer_half()),
            "dropped": self.dropped.ranges(),
            "retired": self.retired.ranges(),
            "totals": msgspec.to_builtins(self.totals),
        }

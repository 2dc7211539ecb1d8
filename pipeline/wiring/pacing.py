"""``staleness_policy="wait"``: what is in flight is waited for before training would make it too old.

Two places wait. A batch, for as many old groups as would not fit into the batches that remain to them: see
:func:`pipeline.buffer.staleness.overdue`. And a weight update, for rollouts that the new version would put past their
bound; after a batch that has waited there are none, unless the trainer publishes ahead of its steps. Neither can wait
for ever: both wait only for groups with an attempt in flight or queued, which end without the trainer's help.
"""

from __future__ import annotations

from pipeline.buffer.staleness import overdue
from pipeline.ledger import BUFFERED, RUNNING, Entry
from pipeline.wiring.state import RunState


class Pacing:
    """Knows the oldest weights of every group in flight; no attempt in flight survives a crash, so nor need this."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._oldest: dict[int, tuple[int, int]] = {}  # uid: (life, version); those that have ended go when it is read

    def starts(self, entry: Entry, version: int) -> None:
        """Note that an attempt is about to start."""
        known = self._oldest.get(entry.uid)
        if known is None or known[0] != entry.life or not entry.in_flight:
            oldest = version if entry.oldest is None else min(version, entry.effective)
            self._oldest[entry.uid] = (entry.life, oldest)

    def outdated_by(self, version: int) -> bool:
        """Whether a group in flight would be too old if ``version`` were what is trained."""
        bound = self._state.options.max_staleness
        assert bound is not None
        return any(oldest < version - bound for oldest in self._running())

    def fits(self, groups: int) -> bool:
        """Whether a batch made of what has finished leaves enough batches for what is in flight."""
        state, bound = self._state, self._state.options.max_staleness
        assert bound is not None
        running = self._running()
        return not overdue(state.ledger.next_step, bound, groups, finished=state.buffer.counts(), running=running)

    def _running(self) -> dict[int, int]:
        """Return how many groups of each version are in flight."""
        entries = self._state.ledger.entries
        counts: dict[int, int] = {}
        ended = []
        for uid, (life, version) in self._oldest.items():
            entry = entries.get(uid)
            if entry is None or entry.life != life or entry.state >= BUFFERED:
                ended.append(uid)
            elif entry.state == RUNNING:
                counts[version] = counts.get(version, 0) + 1
        for uid in ended:
            del self._oldest[uid]
        return counts

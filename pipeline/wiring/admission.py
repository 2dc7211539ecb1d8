"""Whether another group may be begun now: how far the producers may run ahead of the trainer."""

from __future__ import annotations

from pipeline.buffer.staleness import admissible
from pipeline.ledger import BUFFERED, LEASED, WAITING, Entry
from pipeline.wiring.state import RunState


class Admission:
    """Asks the state how many groups may be outstanding."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._least_group = min(task.group_size for task in state.tasks.values())
        self._limited_by: tuple[int, int, int, int] | None = None  # what the limit beside it was computed from
        self._known_limit = 0

    def may_claim(self) -> bool:
        state = self._state
        return len(state.ledger.entries) - state.absent < self._limit()

    def may_rerun(self, entry: Entry) -> bool:
        """Whether a claimed group may start again: what comes to be trained before it leaves room for it.

        After a crash more may be outstanding than is admissible for the weights that were restored; what starts too
        early would be too old when its turn comes.
        """
        state = self._state
        if entry.state != WAITING:
            return True
        limit = self._limit()
        if state.outstanding <= limit:
            return True
        if state.in_draw_order:
            # What waits for a task that this run does not have is in nobody's way.
            entries = state.ledger.entries.values()
            ahead = sum(
                each.uid < entry.uid and (each.task in state.tasks or each.state >= BUFFERED) for each in entries
            )
            return ahead < limit
        waiting = sum(counts[WAITING] for name, counts in state.ledger.counts.items() if name in state.tasks)
        return state.outstanding - waiting < limit

    def _limit(self) -> int:
        """Return how many groups may be outstanding now."""
        state = self._state
        if state.options.strategy == "synchronous":
            return state.ledger.count(LEASED) + state.wanted
        # It is asked for at every rollout, and changes with the batches.
        given = (state.asked, state.progress.batch_groups, state.ledger.step, state.version)
        if given != self._limited_by:
            self._known_limit, self._limited_by = self._limit_of(*given), given
        return self._known_limit

    def _limit_of(self, asked: int, batch_groups: int, trained: int, version: int) -> int:
        options = self._state.options
        limit = admissible(
            max_staleness=options.max_staleness,
            # What the run was resumed from counts last: this trainer may ask for other batches.
            batch_groups=asked or options.batch_groups or batch_groups,
            trained=trained,
            version=version,
            capacity=options.capacity,
        )
        if limit is None:  # nobody has asked for a batch yet: no more than can run at once
            limit = -(-options.concurrency // self._least_group)
        return limit

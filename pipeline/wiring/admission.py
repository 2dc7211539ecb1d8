"""Whether another group may be begun now: how far the producers may run ahead of the trainer."""

from __future__ import annotations

from pipeline.buffer.staleness import admissible, surplus
from pipeline.ledger import BUFFERED, LEASED, WAITING, Entry
from pipeline.wiring.state import RunState


class Admission:
    """Asks the state how many groups may be outstanding."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._least_group = min(task.group_size for task in state.tasks.values())

    def may_claim(self) -> bool:
        state = self._state
        limit = state.limit
        if limit is None:
            limit = self.limit()
        if state.mixing is not None:
            return state.mixing.may_claim(limit)
        return len(state.ledger.entries) - state.absent - state.gathered < limit

    def may_rerun(self, entry: Entry) -> bool:
        """Whether a claimed group may start again: what comes to be trained before it leaves room for it.

        After a crash more may be outstanding than is admissible for the weights that were restored; what starts too
        early would be too old when its turn comes.
        """
        state = self._state
        if entry.state != WAITING:
            return True
        limit = self.limit()
        if state.mixing is not None:
            return state.mixing.may_rerun(entry, limit)
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

    def limit(self) -> int:
        """Return how many groups may be outstanding now."""
        state = self._state
        if state.options.strategy == "synchronous":
            leased, wanted = state.ledger.count(LEASED), state.wanted
            if state.options.oversample == 1:
                return leased + wanted
            more = surplus(wanted, state.options.oversample)
            most = wanted + more if state.options.capacity is None else state.options.capacity - leased
            return leased + max(wanted, min(wanted + more, most))
        # It is asked for at every rollout, and changes with the batches: whoever changes what it hangs on forgets it.
        limit = state.limit
        if limit is None:
            limit = state.limit = self._computed()
        return limit

    def _computed(self) -> int:
        state, options = self._state, self._state.options
        given = options.batch_groups and options.batch_groups // state.size  # of all ranks; the others are this one's
        limit = admissible(
            max_staleness=options.max_staleness,
            # What the run was resumed from counts last: this trainer may ask for other batches.
            batch_groups=state.asked or given or state.progress.batch_groups,
            trained=state.ledger.step,
            version=state.version,
            capacity=options.capacity,
            oversample=options.oversample,
        )
        if limit is None:  # nobody has asked for a batch yet: no more than can run at once
            limit = -(-options.concurrency // self._least_group)
        return limit

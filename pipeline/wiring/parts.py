"""Keeps what attempts have so far, and gives it to those that go on from it."""

from __future__ import annotations

from pipeline.buffer.staleness import floor
from pipeline.ledger import IN_FLIGHT
from pipeline.records import PartSaved, Rollout
from pipeline.runner.policies import check_rollout
from pipeline.runner.pool import Job
from pipeline.store.codec import pack
from pipeline.wiring.state import RunState


class PartKeeper:
    """The verbs behind ``ctx.save_partial`` and ``ctx.partial``."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def go_on(self, job: Job) -> None:
        """Give the attempt what an earlier one kept, unless that is too old to be trained by now.

        What is not made use of stays all the same: no event says that it is let go, so a recovery will read it, and its
        segment must be there.
        """
        state = self._state
        part = state.partials.get(job.item.uid, job.member)
        if part is None or not state.options.partial:
            return
        least = floor(state.ledger.next_step, state.options.max_staleness)
        if least is None or part.oldest >= least:
            job._part, job._oldest = part.blob, min(part.oldest, job.version)

    def save(self, job: Job, rollout: Rollout) -> None:
        """Keep what an attempt has so far."""
        state = self._state
        entry = state.ledger.entries.get(job.item.uid)
        if entry is None or entry.life != job.life or entry.members[job.member] != IN_FLIGHT:
            return  # its attempt is over
        check_rollout(rollout, job.item)
        oldest = rollout.oldest
        if oldest is None:
            oldest = job.version if job._oldest is None else job._oldest
        newest = max(oldest, state.version) if rollout.newest is None else rollout.newest
        blob = pack(rollout, job.item, member=job.member, attempt=job.attempt, life=job.life, versions=(oldest, newest))
        segment, offset = -1, 0
        if state.writer is not None:
            location = state.writer.writer.place(blob, job.item.uid, job.member, job.life)
            segment, offset = location.segment, location.offset
        event = PartSaved(job.item.uid, job.member, job.attempt, oldest, newest, segment, offset, len(blob))
        state.record(event)
        state.partials.apply(state.incarnation, state.options.rank, event, blob)

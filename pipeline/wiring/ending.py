"""Ends of an attempt that come to nothing yet: it waits for its reward, or was lost with the process that it ran in."""

from __future__ import annotations

from pipeline.errors import RolloutFailed, WorkerDied
from pipeline.observe import events
from pipeline.records import Dropped, Interrupted, Parked, Rollout
from pipeline.runner.policies import Verdict, error_text
from pipeline.runner.pool import Job
from pipeline.wiring.groups import GivenUp
from pipeline.wiring.state import RunState


def park(state: RunState, job: Job, rollout: Rollout, blob: bytes, versions: tuple[int, int]) -> None:
    """Keep what a member has made until it has its reward."""
    segment, offset = state.keep(job.item.uid, job.member, job.life, blob)
    state.record(
        Parked(
            job.item.uid,
            job.member,
            job.attempt,
            *versions,
            segment,
            offset,
            len(blob),
            rollout.tokens,
            state.clock.now() - job.started,
        )
    )
    state.log.debug(events.ROLLOUT_PARKED, task=job.task.name, uid=job.item.uid, member=job.member)
    state.expire_stale()
    state.changed.notify()


def lose(state: RunState, given_up: GivenUp, job: Job, error: WorkerDied) -> Verdict | None:
    """Record that an attempt was lost with its worker process.

    Returns:
        RETRY; GIVE_UP when its item has seen too many deaths and is gone; None when there is nothing to be run again.
    """
    uid, task = job.item.uid, job.task
    entry = state.ledger.entries.get(uid)
    if entry is None or entry.life != job.life:
        return None
    state.record(Interrupted(uid, job.member, job.attempt, "worker died", not error.planned))
    state.log.warning(
        events.ROLLOUT_LOST,
        task=task.name,
        uid=uid,
        member=job.member,
        attempt=job.attempt,
        deaths=entry.deaths,
        error=str(error),
    )
    if uid not in state.ledger.entries:  # it had added rows: they stay, and it is not run again
        return None
    if entry.deaths <= state.options.max_deaths:
        return Verdict.RETRY
    state.log.error(events.ROLLOUT_QUARANTINED, task=task.name, uid=uid, deaths=entry.deaths)
    state.record(Dropped(uid, "quarantined"))
    if given_up.too_many(task):
        said = error_text(error) + given_up.why(task)
        stop = RolloutFailed(f"{job.item}, member {job.member}, attempt {job.attempt}: {said}")
        stop.__cause__ = error
        state.fail(stop)
    return Verdict.GIVE_UP

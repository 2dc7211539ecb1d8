"""What a run is doing, as frozen snapshots."""

from __future__ import annotations

import msgspec

from pipeline.ledger import BUFFERED, LEASED, PARKED, RUNNING, STATES, WAITING, TaskTotals
from pipeline.runner.pool import Pool
from pipeline.wiring.state import RunState


class TaskStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One task: groups by state, and its totals for the life of the run."""

    states: dict[str, int]
    totals: TaskTotals


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a pipeline. Counts are groups unless they say otherwise."""

    step: int
    """Last step trained."""
    version: int
    incarnation: int
    claimed: int
    waiting: int
    running: int
    parked: int
    buffered: int
    leased: int
    trained: int
    dropped: int
    in_flight: int
    """Attempts in flight."""
    in_flight_peak: int
    scoring: int
    """Attempts that have given their slot back while they are scored."""
    workers: int
    waiters: int
    """Tasks that wait for a change of state."""
    buffered_peak: int
    memory_bytes: int
    """Payloads held in memory."""
    queued_bytes: int
    """Bytes that wait to be written."""
    staleness_max: int
    """Staleness of the last batch."""
    reward_mean: float | None
    """Mean reward of the last batch; None before the first."""
    tasks: dict[str, TaskStatistics]


def take_statistics(state: RunState, pool: Pool | None, last: tuple[int, float | None]) -> Statistics:
    """Return a snapshot of now."""
    ledger = state.ledger
    totals = ledger.totals
    return Statistics(
        step=ledger.step,
        version=state.version,
        incarnation=state.incarnation,
        claimed=ledger.claimed,
        waiting=ledger.count(WAITING),
        running=ledger.count(RUNNING),
        parked=ledger.count(PARKED),
        buffered=ledger.count(BUFFERED),
        leased=ledger.count(LEASED),
        trained=sum(each.trained for each in totals.values()),
        dropped=sum(sum(each.dropped.values()) for each in totals.values()),
        in_flight=pool.in_flight if pool else 0,
        in_flight_peak=pool.peak if pool else 0,
        scoring=pool.scoring if pool else 0,
        workers=pool.workers if pool else 0,
        waiters=state.changed.waiters,
        buffered_peak=state.buffer.peak,
        memory_bytes=state.buffer.storage.memory_bytes,
        queued_bytes=state.writer.writer.queued_bytes if state.writer else 0,
        staleness_max=last[0],
        reward_mean=last[1],
        tasks={
            name: TaskStatistics(
                states=dict(zip(STATES, ledger.counts[name], strict=True)),
                totals=msgspec.structs.replace(each, dropped=dict(each.dropped)),
            )
            for name, each in totals.items()
        },
    )

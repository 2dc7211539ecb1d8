"""What a run is doing, as frozen snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.buffer import Batch
from pipeline.ledger import BUFFERED, LEASED, PARKED, RUNNING, STATES, WAITING, TaskTotals
from pipeline.runner.pool import Pool
from pipeline.wiring.state import RunState


class GroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Where all claimed groups are; ``claimed`` is the sum of the others."""

    claimed: int
    waiting: int
    running: int
    parked: int
    buffered: int
    leased: int
    trained: int
    dropped: int
    retired: int = 0
    """Episodes that ended, where rollouts fill a buffer of transitions."""


class RolloutStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts: those in flight now, and how the others ended, for the life of the run."""

    in_flight: int
    in_flight_peak: int
    scoring: int
    """Attempts that have given their slot back while they are scored."""
    workers: int
    finished: int
    failed: int
    interrupted: int
    evaluating: int
    """Attempts of evaluations; the other figures but ``finished``, ``failed`` and ``interrupted`` include them."""


class BufferStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Finished groups that wait."""

    groups: int
    peak: int
    memory_bytes: int
    """Payloads held in memory, leased ones included."""
    waiters: int
    """Tasks that wait for a change of state."""


class BatchStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The last batch; None before the first."""

    step: int | None = None
    groups: int | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    reward_mean: float | None = None

    @classmethod
    def of(cls, batch: Batch) -> BatchStatistics:
        """Describe a batch, without unpacking it."""
        stale = [group.staleness for group in batch]
        return cls(
            step=batch.step,
            groups=len(batch),
            staleness_mean=_mean(stale),
            staleness_max=max(stale),
            reward_mean=_mean([group.reward_mean for group in batch]),
        )


class TaskStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One task: groups by state, totals for the life of the run, and how long its rollouts are.

    Dropping what is stale favours short rollouts: ``trained_length`` far below ``source_length`` shows it.
    """

    states: dict[str, int]
    totals: TaskTotals
    source_length: float | None
    """Mean tokens of the rollouts that finished, those of items that were run again left out: there are more long ones
    among them than in the source."""
    trained_length: float | None
    """Mean tokens of the rollouts that were trained, those that were masked as too old left out."""
    reward_mean: float | None
    """Mean reward of the rollouts that finished; None before the first."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a pipeline."""

    step: int
    """Last step trained."""
    version: int
    incarnation: int
    groups: GroupStatistics
    rollouts: RolloutStatistics
    buffer: BufferStatistics
    batch: BatchStatistics
    queued_bytes: int
    """Bytes that wait to be written."""
    tasks: dict[str, TaskStatistics]
    rows: Any = None
    """How the buffer of transitions stands, if rollouts fill one: a :class:`~pipeline.ReplayStatistics`."""


def take_statistics(state: RunState, pool: Pool | None, last: BatchStatistics) -> Statistics:
    """Return a snapshot of now."""
    ledger = state.ledger
    totals = list(ledger.totals.values())
    return Statistics(
        step=ledger.step,
        version=state.version,
        incarnation=state.incarnation,
        groups=GroupStatistics(
            claimed=ledger.claimed,
            waiting=ledger.count(WAITING),
            running=ledger.count(RUNNING),
            parked=ledger.count(PARKED),
            buffered=ledger.count(BUFFERED),
            leased=ledger.count(LEASED),
            trained=sum(each.trained for each in totals),
            dropped=sum(sum(each.dropped.values()) for each in totals),
            retired=sum(each.retired for each in totals),
        ),
        rollouts=RolloutStatistics(
            in_flight=pool.in_flight if pool else 0,
            in_flight_peak=pool.peak if pool else 0,
            scoring=pool.scoring if pool else 0,
            workers=pool.workers if pool else 0,
            finished=sum(each.finished for each in totals),
            failed=sum(each.failed for each in totals),
            interrupted=sum(each.interrupted for each in totals),
            evaluating=state.evaluating,
        ),
        buffer=BufferStatistics(
            groups=ledger.count(BUFFERED),
            peak=state.buffer.peak,
            memory_bytes=state.buffer.storage.memory_bytes,
            waiters=state.changed.waiters,
        ),
        batch=last,
        queued_bytes=state.writer.writer.queued_bytes if state.writer else 0,
        tasks={name: _task(ledger.counts[name], each) for name, each in ledger.totals.items()},
        rows=None if state.experience is None else state.experience.feed.statistics(),
    )


def _task(counts: Sequence[int], totals: TaskTotals) -> TaskStatistics:
    first = totals.finished - totals.again
    return TaskStatistics(
        states=dict(zip(STATES, counts, strict=True)),
        totals=msgspec.structs.replace(totals, dropped=dict(totals.dropped)),
        source_length=(totals.tokens - totals.again_tokens) / first if first else None,
        trained_length=totals.trained_tokens / totals.trained_rollouts if totals.trained_rollouts else None,
        reward_mean=totals.reward_sum / totals.reward_count if totals.reward_count else None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

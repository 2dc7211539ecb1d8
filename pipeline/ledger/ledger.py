"""Where every claimed item is: one state each, and counts that add up at any moment.

``apply(event)`` takes the producer half's events, in life as in recovery, and never fails on an event that a
pipeline wrote: what concerns an item that has ended is counted and otherwise ignored. The consumer half (leases,
acks) has verbs of its own, because it goes back with the weights::

    recover(g) = Ledger(consumer half of g), apply(every event of every journal), restore(consumer half of g)

This holds after each call, and :meth:`Ledger.check` asserts it::

    claimed = waiting + running + parked + buffered + leased + trained + retired + dropped
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pipeline.errors import UsageError
from pipeline.intervals import IntervalSet
from pipeline.ledger.entry import (
    BUFFERED,
    FINISHED,
    GIVEN_UP,
    IN_FLIGHT,
    LEASED,
    PARKED,
    PENDING,
    RUNNING,
    STATES,
    UNREWARDED,
    WAITING,
    ConsumerHalf,
    Entry,
    Lease,
    TaskTotals,
)
from pipeline.ledger.parking import ParkedGroups
from pipeline.ledger.places import with_at, without_members
from pipeline.ledger.questions import Questions
from pipeline.records import (
    EPISODE,
    Added,
    Aged,
    AnyEvent,
    Claimed,
    Closed,
    Dropped,
    Failed,
    Finished,
    Inherited,
    Interrupted,
    Opened,
    Parked,
    Reopened,
    Rewarded,
    Started,
)


class Ledger(Questions):
    """States of all claimed items; see the module."""

    def __init__(self, consumed: ConsumerHalf | None = None) -> None:
        half = consumed or ConsumerHalf()
        self.entries: dict[int, Entry] = {}
        self.counts: dict[str, list[int]] = {}
        self.totals: dict[str, TaskTotals] = {}
        self.next_uid = 0
        self.incarnation = 0
        self.trained = IntervalSet(half.trained)
        self.dropped, self.retired = IntervalSet(), IntervalSet()
        self.free_steps = False
        """Whether steps are the trainer's own: no batch is handed out for them, as it samples from a buffer."""
        self.step = half.step
        """Last step whose batch has been acked."""
        self.leases: dict[int, Lease] = {}
        self.parked = ParkedGroups()
        """Groups whose members have all ended, and some of which wait for their reward."""
        self._order = 0
        self._clean = True
        self.handlers: dict[type, Callable[..., Entry | None]] = {
            Claimed: self._claimed,
            Started: self._started,
            Finished: self._finished,
            Parked: self._parked,
            Rewarded: self._rewarded,
            Aged: self._aged,
            Added: self._added,
            Failed: self._failed,
            Interrupted: self._interrupted,
            Dropped: self._dropped,
            Reopened: self._reopened,
            Opened: self._opened,
            Closed: self._closed,
            Inherited: self._inherited,
        }

    # -- the producer half ---------------------------------------------------------------------------------

    def apply(self, event: AnyEvent) -> Entry | None:
        """Take in an event. Returns the entry if it just became buffered, else None."""
        handler = self.handlers.get(type(event))
        return None if handler is None else handler(event)

    def _task(self, name: str) -> list[int]:
        counts = self.counts.get(name)
        if counts is None:
            counts = self.counts[name] = [0] * len(STATES)
            self.totals[name] = TaskTotals(dropped={})
        return counts

    def _move(self, entry: Entry, state: int) -> None:
        if entry.state != state:
            counts = self.counts[entry.task]
            counts[entry.state] -= 1
            counts[state] += 1
            entry.state = state

    def _claimed(self, event: Claimed) -> None:
        counts = self._task(event.task)
        self.totals[event.task].claimed += 1
        if event.uid >= self.next_uid:
            self.next_uid = event.uid + 1
        entry = self.entries[event.uid] = Entry.of(event)
        counts[RUNNING] += 1
        if event.content is not None:  # it was given, not drawn to be started at once: it waits for its turn
            self._move(entry, WAITING)

    def _started(self, event: Started) -> None:
        entry = self.entries.get(event.uid)
        if entry is None:
            return
        entry.members[event.member] = IN_FLIGHT
        entry.attempts = (event.attempt,) if entry.size == 1 else with_at(entry.attempts, event.member, event.attempt)
        entry.in_flight += 1
        if entry.state != RUNNING:
            self._move(entry, RUNNING)

    def _finished(self, event: Finished) -> Entry | None:
        entry = self.entries.get(event.uid)
        if entry is None:
            return None
        totals = self.totals[entry.task]
        totals.finished += 1
        totals.tokens += event.tokens
        totals.reward_sum += event.reward
        totals.reward_count += 1
        totals.seconds += event.seconds
        if entry.life:
            totals.again += 1
            totals.again_tokens += event.tokens
        entry.tokens += event.tokens
        entry.rewards += event.reward
        oldest, newest = event.oldest, event.newest
        if entry.oldest is None:
            entry.oldest, entry.newest, entry.effective = oldest, newest, oldest
        else:
            if oldest < entry.oldest:
                entry.oldest = oldest
            if oldest < entry.effective:
                entry.effective = oldest
            if newest > entry.newest:
                entry.newest = newest
        entry.made = self.incarnation
        entry.members[event.member] = FINISHED
        return self._settle(entry, totals, event.rejected)

    def _parked(self, event: Parked) -> None:
        entry = self.entries.get(event.uid)
        if entry is None:
            return
        totals = self.totals[entry.task]
        totals.finished += 1
        totals.tokens += event.tokens
        totals.seconds += event.seconds
        if entry.life:
            totals.again += 1
            totals.again_tokens += event.tokens
        entry.tokens += event.tokens
        if entry.oldest is None:
            entry.oldest, entry.newest, entry.effective = event.oldest, event.newest, event.oldest
        entry.oldest = min(entry.oldest, event.oldest)
        entry.effective = min(entry.effective, event.oldest)
        entry.newest = max(entry.newest, event.newest)
        entry.made = self.incarnation
        entry.members[event.member] = UNREWARDED
        entry.parked += 1
        self._settle(entry, totals)

    def _rewarded(self, event: Rewarded) -> Entry | None:
        entry = self.entries.get(event.uid)
        if entry is None or entry.members[event.member] != UNREWARDED:
            return None
        totals = self.totals[entry.task]
        totals.reward_sum += event.reward
        totals.reward_count += 1
        entry.rewards += event.reward
        entry.given = (*entry.given, (event.member, event.reward))
        entry.members[event.member] = FINISHED
        entry.parked -= 1
        if entry.parked or entry.unsettled:
            return None
        if event.rejected:
            self._end(entry, "filtered")
            return None
        self.parked.remove(entry)
        self._order += 1
        entry.order = self._order
        self._move(entry, BUFFERED)
        totals.produced += 1
        return entry

    def _added(self, event: Added) -> None:
        entry = self.entries.get(event.uid)
        if entry is not None:
            entry.rows += event.count
            self.totals[entry.task].rows += event.count

    def _aged(self, event: Aged) -> None:
        entry = self.entries.get(event.uid)
        if entry is not None:
            # What a crash came between is said again when the member has finished again.
            others = without_members(entry.ages, {event.member})
            entry.ages = others + tuple(n for each in event.tokens.items() for n in (event.member, *each))

    def _failed(self, event: Failed) -> Entry | None:
        entry = self.entries.get(event.uid)
        if entry is None:
            return None
        totals = self.totals[entry.task]
        totals.failed += 1
        entry.failures = with_at(entry.failures, event.member, entry.failures[event.member] + 1)
        entry.rows = 0  # the next attempt begins another episode
        if event.final:
            entry.in_flight += entry.members[event.member] == PENDING  # given up before it was started
            entry.members[event.member] = GIVEN_UP
            return self._settle(entry, totals, event.rejected)
        self._unstart(entry, event.member)
        return None

    def _interrupted(self, event: Interrupted) -> None:
        entry = self.entries.get(event.uid)
        if entry is None:
            return
        self.totals[entry.task].interrupted += 1
        entry.interruptions += 1
        entry.deaths += event.unplanned
        if entry.rows:  # an episode is never gone on with: what there is of it counts
            self._retire(entry, early=True)
            return
        self._unstart(entry, event.member)

    def _unstart(self, entry: Entry, member: int) -> None:
        entry.members[member] = PENDING
        entry.in_flight -= 1
        if not entry.in_flight:
            self._move(entry, WAITING)

    def _settle(self, entry: Entry, totals: TaskTotals, rejected: bool = False) -> Entry | None:
        """A member has ended. Once all have, the group is buffered or parked, or dropped: too few, or rejected."""
        entry.unsettled -= 1
        entry.in_flight -= 1
        if entry.unsettled:
            return None
        if entry.members.count(FINISHED) + entry.parked < entry.need:
            self._end(entry, "failed")
            return None
        if entry.kind == EPISODE:
            self._retire(entry)
            return None
        if rejected:
            self._end(entry, "filtered")
            return None
        if entry.parked:
            self._move(entry, PARKED)
            self.parked.add(entry)
            return None
        self._order += 1
        entry.order = self._order
        self._move(entry, BUFFERED)
        totals.produced += 1
        return entry

    def _dropped(self, event: Dropped) -> None:
        entry = self.entries.get(event.uid)
        if entry is not None:
            self._end(entry, event.reason)

    def _end(self, entry: Entry, reason: str) -> None:
        # Only in recovery: a line that was abandoned may have dropped what the restored weights have seen.
        if entry.uid in self.trained:
            return
        if entry.state == PARKED:
            self.parked.remove(entry)
        del self.entries[entry.uid]
        self.counts[entry.task][entry.state] -= 1
        self.dropped.add(entry.uid)
        dropped = self.totals[entry.task].dropped
        dropped[reason] = dropped.get(reason, 0) + 1

    def _retire(self, entry: Entry, *, early: bool = False) -> None:
        """An episode has ended; what it made are rows."""
        del self.entries[entry.uid]
        self.counts[entry.task][entry.state] -= 1
        self.retired.add(entry.uid)
        totals = self.totals[entry.task]
        totals.retired += 1
        totals.retired_early += early
        totals.produced += not early

    def _reopened(self, event: Reopened) -> None:
        entry = self.entries.get(event.uid)
        if entry is None:
            return
        if entry.state == PARKED:
            self.parked.remove(entry)
        self.totals[entry.task].reopened += 1
        entry.reopen(event)
        self._move(entry, WAITING)

    def _opened(self, event: Opened) -> None:
        """A new life begins: nothing is in flight, and old versions are no newer than what was restored."""
        self.incarnation = event.incarnation
        for entry in list(self.entries.values()):
            if entry.in_flight:
                self.totals[entry.task].interrupted += entry.in_flight
                if entry.rows:  # an episode of a dead process is never gone on with: what there is of it counts
                    self._retire(entry, early=True)
                    continue
                entry.interruptions += 1
                entry.deaths += not self._clean
                entry.members = bytearray(PENDING if member == IN_FLIGHT else member for member in entry.members)
                entry.in_flight = 0
            if entry.state == RUNNING:
                self._move(entry, WAITING)
            entry.effective = min(entry.effective, event.version)
            if entry.ages:
                entry.ages = tuple(min(n, event.version) if i % 3 == 1 else n for i, n in enumerate(entry.ages))
        self.parked = ParkedGroups(entry for entry in self.entries.values() if entry.state == PARKED)
        self._clean = False

    def _closed(self, event: Closed) -> None:
        self._clean = True

    def _inherited(self, event: Inherited) -> None:
        """The items listed are as they are listed; counts are what they were there."""
        self.next_uid = max(self.next_uid, event.next_uid)
        for first, last in event.dropped:
            self.dropped.add_range(first, last)
        for item in event.items:
            self.entries[item.uid] = Entry.held(item)
            self._order = max(self._order, item.order)
        for name, given in event.totals.items():
            self._task(name)
            # What is trained is for the consumer half to say: an older generation may be what is recovered.
            before, totals = self.totals[name], msgspec.convert(given, TaskTotals)
            totals.trained, totals.trained_rollouts = before.trained, before.trained_rollouts
            totals.trained_tokens, totals.masked_tokens = before.trained_tokens, before.masked_tokens
            self.totals[name] = totals
        for name in self.counts:
            self.counts[name] = [0] * len(STATES)
        for entry in self.entries.values():
            self._task(entry.task)[entry.state] += 1
        self.parked = ParkedGroups(entry for entry in self.entries.values() if entry.state == PARKED)

    # -- the consumer half ---------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The step that the next batch is for."""
        return max(self.step, max(self.leases, default=0)) + 1

    def lease(self, step: int, uids: Sequence[int]) -> Lease:
        """Hand buffered groups out for ``step``."""
        entries = [self.entries[uid] for uid in uids]
        for entry in entries:
            if entry.state != BUFFERED:
                raise UsageError(f"uid {entry.uid} is {STATES[entry.state]}, not buffered; it cannot be leased")
        for entry in entries:
            self._move(entry, LEASED)
        lease = Lease(step=step, uids=list(uids), lives=[entry.life for entry in entries])
        self.leases[step] = lease
        return lease

    def release(self, step: int) -> list[Entry]:
        """Take a batch back; its groups are buffered again, in the order that they had."""
        lease = self.leases.pop(step, None)
        if lease is None:
            return []
        entries = [self.entries[uid] for uid in lease.uids]
        for entry in entries:
            self._move(entry, BUFFERED)
            entry.masked = 0
        return entries

    def check_ack(self, step: int) -> None:
        """Raise UsageError if the weights cannot include every batch up to ``step``."""
        if step < self.step:
            raise UsageError(
                f"step {step}: batches up to {self.step} are already trained; weights cannot go back without resume()"
            )
        if step > self.step and step not in self.leases and not self.free_steps:
            given = f"batches of steps {sorted(self.leases)} are leased" if self.leases else "no batch is leased"
            raise UsageError(f"step {step} was never handed out: {given}, and {self.step} is the last trained")

    def ack(self, step: int) -> list[int]:
        """Note that the weights include every batch up to ``step``. Returns the uids that became trained.

        Raises:
            UsageError: ``step`` was never handed out, or lies before what is trained already.
        """
        self.check_ack(step)
        done = [uid for leased in sorted(self.leases) if leased <= step for uid in self.leases[leased].uids]
        for uid in done:
            entry = self.entries.pop(uid)
            self.counts[entry.task][LEASED] -= 1
            totals = self.totals[entry.task]
            totals.trained += 1
            totals.trained_rollouts += entry.members.count(FINISHED)
            totals.trained_tokens += entry.tokens
            if entry.masked:
                masked = min(entry.masked, entry.tokens)
                totals.trained_tokens -= masked
                totals.masked_tokens += masked
        self.trained.update(done)
        self.leases = {leased: lease for leased, lease in self.leases.items() if leased > step}
        self.step = step
        return done

    def consumer_half(self) -> ConsumerHalf:
        """Return a copy of the consumer half as of now."""
        return ConsumerHalf(
            step=self.step,
            trained=self.trained.ranges(),
            leases=[self.leases[step] for step in sorted(self.leases)],
            trained_by_task={
                name: (totals.trained, totals.trained_rollouts, totals.trained_tokens)
                for name, totals in self.totals.items()
            },
            masked_by_task={name: each.masked_tokens for name, each in self.totals.items() if each.masked_tokens},
        )

    def restore(self, half: ConsumerHalf) -> list[Lease]:
        """End a recovery: impose the consumer half on the folded events.

        Returns:
            The leases beyond the half's step, oldest first: batches to hand out again.
        """
        for uid in [uid for uid in self.entries if uid in self.trained]:
            entry = self.entries.pop(uid)
            self.counts[entry.task][entry.state] -= 1
            if entry.state == PARKED:
                self.parked.remove(entry)
        for task, (groups, rollouts, tokens) in half.trained_by_task.items():
            self._task(task)
            totals = self.totals[task]
            totals.trained, totals.trained_rollouts, totals.trained_tokens = groups, rollouts, tokens
            totals.masked_tokens = half.masked_by_task.get(task, 0)
        return sorted(half.leases, key=lambda lease: lease.step)

    def still_whole(self, lease: Lease) -> bool:
        """Whether every group of a batch is buffered, in the life that it had."""
        for uid, life in zip(lease.uids, lease.lives, strict=True):
            entry = self.entries.get(uid)
            if entry is None or entry.state != BUFFERED or entry.life != life:
                return False
        return True

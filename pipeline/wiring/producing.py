"""The producer: which attempt starts next, and what becomes of one that has ended.

It is the pool's :class:`~pipeline.runner.pool.Work`. Everything here is synchronous: between two turns of the loop the
state is whole.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Awaitable
from typing import Protocol

from pipeline.buffer.staleness import admissible, floor
from pipeline.errors import ForebayError, GroupsRejected, RolloutFailed, RolloutInvalid, SourceError
from pipeline.ledger import BUFFERED, IN_FLIGHT, LEASED, PENDING, RUNNING, WAITING, Entry
from pipeline.observe import events
from pipeline.records import Claimed, Failed, Finished, Interrupted, Item, PartSaved, Rollout, Started
from pipeline.runner.context import RunFacts, Slots
from pipeline.runner.policies import Verdict, after_failure, check_rollout
from pipeline.runner.pool import GROUP_TIMEOUT, Job
from pipeline.store.codec import pack
from pipeline.task import Task
from pipeline.wiring.groups import Filters, GroupDeadlines, Limits
from pipeline.wiring.state import RunState


class PoolSide(Slots, Limits, Protocol):
    """What the producer asks of the pool."""

    def pump(self) -> None: ...

    def cut_group(self, uid: int) -> None: ...


class Producer:
    """Claims items, starts attempts, and records how they end."""

    def __init__(self, state: RunState) -> None:
        self.paused = True
        """Nothing starts: not started yet, in a weight update, after a failed push, or closing."""
        self._slots: PoolSide | None = None
        self._filters = Filters(state)
        self._deadlines = GroupDeadlines(self._group_late)
        self._state = state
        self._ready: deque[tuple[int, int, int]] = deque()  # (uid, life, member) to be started before new claims
        self._held: list[tuple[int, int, int]] = []  # heap of those whose turn is too far off for the weights in use
        self._opened: Entry | None = None  # the last group that was claimed, while members of it are to be started
        self._next_member = 0
        self._item: Item | None = None  # the last that was read, for the other members of its group
        self._facts: RunFacts | None = None
        self._least_group = min(task.group_size for task in state.tasks.values())
        self._limited_by: tuple[int, int, int, int] | None = None  # what the limit beside it was computed from
        self._known_limit = 0
        state.on_expired = self.requeue

    @property
    def slots(self) -> PoolSide | None:
        """The pool, once it is open."""
        return self._slots

    @slots.setter
    def slots(self, pool: PoolSide) -> None:
        self._slots = self._deadlines.pool = pool

    def requeue(self, entry: Entry) -> None:
        """Queue every member of ``entry`` that is neither in flight nor settled, before any new item."""
        for member, status in enumerate(entry.members):
            if status == PENDING:
                self._ready.append((entry.uid, entry.life, member))

    def sort_ready(self) -> None:
        """After an abort: let the oldest items begin first, in whatever order their workers were cancelled."""
        self._ready = deque(sorted(self._ready))

    def requeue_all(self) -> None:
        """After a recovery: queue what is waiting, oldest first."""
        self._ready.clear()
        self._held.clear()
        self._opened = None
        for uid in sorted(self._state.ledger.entries):
            entry = self._state.ledger.entries[uid]
            if entry.state in (WAITING, RUNNING) and entry.task in self._state.tasks:
                self.requeue(entry)

    @property
    def drained(self) -> bool:
        """Whether nothing can come any more: no attempt is due, and every source is at its end."""
        return not self._due and self._state.sampler.exhausted

    @property
    def blocked(self) -> bool:
        """Whether nothing could be started now although nothing is paused."""
        if self.paused or self._ready or self._opened is not None:
            return False
        if self._held:
            held = self._entry_of(self._held[0])
            return held is not None and not self._may_rerun(held)
        return not self._may_claim() or self._state.sampler.exhausted

    @property
    def _due(self) -> bool:
        return bool(self._ready or self._held) or self._opened is not None

    # -- Work ------------------------------------------------------------------------------------------------

    def next_job(self) -> Job | None:
        """Return the next attempt, recorded as started, or None if none may start now."""
        if self.paused or self._state.failure is not None:
            return None
        try:
            while self._ready:
                due = self._ready.popleft()
                entry = self._entry_of(due)
                if entry is not None and self._may_rerun(entry):
                    return self._start(entry, due[2])
                if entry is not None:
                    heapq.heappush(self._held, due)
                    self._state.changed.notify()  # a waiting trainer may now see that nothing comes
            if self._opened is not None:
                return self._start_next(self._opened)
            while self._held:
                due = self._held[0]
                entry = self._entry_of(due)
                if entry is not None and not self._may_rerun(entry):
                    return None
                heapq.heappop(self._held)
                if entry is not None:
                    return self._start(entry, due[2])
            claimed = self._claim() if self._may_claim() else None
            return None if claimed is None else self._start_next(claimed)
        except Exception as error:
            self._state.fail(error)
            return None

    def room(self) -> Awaitable[None] | None:
        """None, or what to wait for while the write queue is full."""
        service = self._state.writer
        if service is None or not self._state.writing or not service.writer.full:
            return None
        return service.room()

    def finished(self, job: Job, rollout: Rollout) -> None:
        """Take in what a runner returned."""
        state = self._state
        entry = state.ledger.entries.get(job.item.uid)
        if entry is None or entry.life != job.life:
            return
        try:
            fault = check_rollout(rollout, job.item)
            if fault is not None:
                self.failed(job, ValueError(f"{job.item}: {fault}"), "not finite")
                return
            oldest = rollout.oldest
            if oldest is None:  # what it went on from was made by older weights, perhaps
                oldest = job.version if job._oldest is None else job._oldest
            newest = max(oldest, state.version) if rollout.newest is None else rollout.newest
            blob = pack(
                rollout, job.item, member=job.member, attempt=job.attempt, life=job.life, versions=(oldest, newest)
            )
        except RolloutInvalid as error:
            state.log.error(
                events.ROLLOUT_INVALID, uid=job.item.uid, task=job.task.name, member=job.member, error=str(error)
            )
            state.record(Interrupted(job.item.uid, job.member, job.attempt, "invalid"))
            state.fail(error)
            return
        rejected = False
        if job.task.filter is not None:
            try:
                rejected = self._filters.rejects(job.task, entry, (job.member, blob))
            except GroupsRejected as error:  # the member has finished all the same, and its group is dropped
                rejected = True
                state.fail(error)
        self._take_in(job, rollout, blob, oldest, newest, rejected)

    def _take_in(self, job: Job, rollout: Rollout, blob: bytes, oldest: int, newest: int, rejected: bool) -> None:
        state = self._state
        segment, offset, location = -1, 0, None
        if state.writer is not None:
            location = state.writer.writer.place(blob, job.item.uid, job.member, job.life)
            segment, offset = location.segment, location.offset
        state.buffer.storage.put(job.item.uid, job.member, blob, location)
        became = state.record(
            Finished(
                job.item.uid,
                job.member,
                job.attempt,
                float(rollout.reward),
                oldest,
                newest,
                segment,
                offset,
                len(blob),
                rollout.tokens,
                state.clock.now() - job.started,
                "",
                rejected,
            )
        )
        if became is not None:
            state.expire_stale()
            state.changed.notify()
        elif rejected:
            state.changed.notify()  # a waiting trainer may now see that nothing more comes
        if job.task.group_timeout is not None and (became is not None or rejected):
            self._deadlines.end(job.item.uid, job.life)

    def failed(self, job: Job, error: BaseException, reason: str) -> None:
        """Count a failure, and retry, give up or stop as the task's policy says."""
        state = self._state
        entry = state.ledger.entries.get(job.item.uid)
        if entry is None or entry.life != job.life:
            return
        failures = entry.failures[job.member] + 1
        verdict = after_failure(job.task.on_failure, failures)
        if reason == GROUP_TIMEOUT and verdict is Verdict.RETRY:
            verdict = Verdict.GIVE_UP
        text = f"{type(error).__name__}: {error}"[:500]
        final = verdict is Verdict.GIVE_UP
        seconds = state.clock.now() - job.started
        rejected = final and self._rejected_without(job.task, entry)
        state.record(Failed(job.item.uid, job.member, job.attempt, reason, _encodable(text), final, seconds, rejected))
        log = state.log.warning if final else state.log.info
        log(
            events.ROLLOUT_FAILED,
            task=job.task.name,
            uid=job.item.uid,
            member=job.member,
            attempt=job.attempt,
            reason=reason,
            error=text,
            final=final,
        )
        if verdict is Verdict.RETRY:
            self._ready.append((job.item.uid, job.life, job.member))
        elif verdict is Verdict.STOP:
            stop = RolloutFailed(f"{job.item}, member {job.member}, attempt {job.attempt}: {text}")
            stop.__cause__ = error
            state.fail(stop)
        if final:
            state.expire_stale()  # the last member may have given up, and the group be whole without it
        state.changed.notify()

    def _rejected_without(self, task: Task, entry: Entry) -> bool:
        """Whether a group whose last member has just given up is rejected."""
        try:
            return self._filters.rejects(task, entry)
        except GroupsRejected as error:
            self._state.fail(error)
            return True

    def _group_late(self, uid: int, life: int) -> None:
        """A group's time is over: what of it has not finished is given up."""
        state = self._state
        entry = state.ledger.entries.get(uid)
        if entry is None or entry.life != life or not entry.unsettled:
            return
        task = state.tasks[entry.task]
        state.log.warning(events.GROUP_LATE, task=task.name, uid=uid, members=entry.unsettled)
        if self._opened is entry:
            self._opened = None
        text = f"the group took longer than group_timeout={task.group_timeout} s"
        for member in [place for place, status in enumerate(entry.members) if status == PENDING]:
            rejected = self._rejected_without(task, entry)
            state.record(Failed(uid, member, entry.attempts[member], GROUP_TIMEOUT, text, True, 0.0, rejected))
        assert self._slots is not None
        self._slots.cut_group(uid)
        state.expire_stale()
        state.changed.notify()
        self._slots.pump()

    def interrupted(self, job: Job, reason: str) -> None:
        """An attempt was cut through no fault of its task: it is queued again, before what is new."""
        state = self._state
        entry = state.ledger.entries.get(job.item.uid)
        if entry is None or entry.life != job.life:
            return
        state.record(Interrupted(job.item.uid, job.member, job.attempt, reason))
        self._ready.appendleft((job.item.uid, job.life, job.member))
        state.log.debug(
            events.ROLLOUT_INTERRUPTED,
            task=job.task.name,
            uid=job.item.uid,
            member=job.member,
            attempt=job.attempt,
            reason=reason,
        )

    # -- claiming and starting ---------------------------------------------------------------------------------

    def _entry_of(self, due: tuple[int, int, int]) -> Entry | None:
        """Return the group of a member that is due, or None if it has ended or begun anew since."""
        uid, life, member = due
        entry = self._state.ledger.entries.get(uid)
        return entry if entry is not None and entry.life == life and entry.members[member] == PENDING else None

    def _may_claim(self) -> bool:
        state = self._state
        return len(state.ledger.entries) - state.absent < self._limit()

    def _may_rerun(self, entry: Entry) -> bool:
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
        return state.outstanding - (state.ledger.count(WAITING) - state.absent) < limit

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

    def _claim(self) -> Entry | None:
        state = self._state
        draw = state.sampler.draw()
        if draw is None:
            state.changed.notify()  # a waiting trainer may now see that this was all
            return None
        if draw.began is not None:
            state.record(draw.began)
        task = state.tasks[draw.task]
        uid = state.ledger.next_uid
        state.record(Claimed(uid, draw.task, draw.epoch, draw.position, draw.index, task.group_size, task.min_group))
        self._opened, self._next_member = state.ledger.entries[uid], 0
        return self._opened

    def _start_next(self, entry: Entry) -> Job:
        """Start the next member of the group that was claimed last."""
        member = self._next_member
        self._next_member = member + 1
        if self._next_member == entry.size:
            self._opened = None
        return self._start(entry, member)

    def _start(self, entry: Entry, member: int) -> Job:
        state = self._state
        uid, version, attempt = entry.uid, state.version, entry.attempts[member] + 1
        item = self._item
        if item is None or item.uid != uid:
            item = self._read(entry)
        state.record(Started(uid, member, attempt, version))
        task = state.tasks[entry.task]
        if task.group_timeout is not None:
            self._deadlines.begin(entry, task.group_timeout)
        job = Job(
            item,
            member,
            attempt,
            version,
            task,
            entry.life,
            state.clock.now(),
            _failures=entry.failures[member],
            _run=self._facts or self._gather_facts(),
        )
        if state.partials.by_uid:
            self._go_on(job)
        return job

    def _gather_facts(self) -> RunFacts:
        state = self._state
        keep = self._save_partial if state.options.partial else None
        self._facts = RunFacts(state.options.seed, state.run_id, self._version_now, self.slots, keep)
        return self._facts

    def _go_on(self, job: Job) -> None:
        """Give the attempt what an earlier one kept, unless that is too old to be trained by now."""
        state = self._state
        part = state.partials.get(job.item.uid, job.member)
        if part is None:
            return
        least = floor(state.ledger.next_step, state.options.max_staleness)
        if least is not None and part.oldest < least:
            state.partials.discard(job.item.uid, job.member)
        else:
            job._part, job._oldest = part.blob, min(part.oldest, job.version)

    def _save_partial(self, job: Job, rollout: Rollout) -> None:
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

    def _version_now(self) -> int:
        return self._state.version

    def _read(self, entry: Entry) -> Item:
        """Read the item; a group's members share one reading."""
        try:
            content = self._state.tasks[entry.task].source.item(entry.index)
        except ForebayError:
            raise
        except Exception as error:
            raise SourceError(f"task {entry.task!r}: the source failed at item {entry.index}: {error!r}") from error
        item = Item(entry.task, entry.epoch, entry.index, entry.uid, content)
        self._item = item if entry.size > 1 else None
        return item


def _encodable(text: str) -> str:
    """An error's text may hold what UTF-8 cannot: it is a note for people, so it is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()

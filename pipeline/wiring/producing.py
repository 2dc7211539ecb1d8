"""The producer: which attempt starts next, and what becomes of one that has ended.

It is the pool's :class:`~pipeline.runner.pool.Work`. Everything here is synchronous: between two turns of the loop the
state is whole.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from pipeline.buffer.masks import judge
from pipeline.errors import RolloutFailed, RolloutInvalid, RolloutTooDeep, WorkerDied, WorkerFailed
from pipeline.ledger import PARKED, PENDING, RUNNING, WAITING, Entry
from pipeline.observe import events
from pipeline.records import (
    EPISODE,
    TRAIN,
    Aged,
    Claimed,
    Failed,
    Finished,
    Interrupted,
    Item,
    Rollout,
    Started,
)
from pipeline.runner.context import RunFacts
from pipeline.runner.policies import Verdict, check_rollout, encodable, error_text
from pipeline.runner.pool import GROUP_TIMEOUT, Job
from pipeline.sampler.sampler import Draw
from pipeline.store.codec import pack
from pipeline.store.contents import decode_content, encode_content
from pipeline.wiring.admission import Admission
from pipeline.wiring.disk import DiskUse
from pipeline.wiring.ending import lose, park
from pipeline.wiring.evaluating import EvaluationJob, Evaluator
from pipeline.wiring.groups import Filters, GivenUp, GroupDeadlines, PoolSide, give
from pipeline.wiring.pacing import Pacing
from pipeline.wiring.parts import PartKeeper
from pipeline.wiring.rerolling import Tail
from pipeline.wiring.state import RunState

if TYPE_CHECKING:
    from pipeline.wiring.outside import StreamFeed


class Producer:
    """Claims items, starts attempts, and records how they end."""

    def __init__(self, state: RunState) -> None:
        self.paused = True
        """Nothing starts: not started yet, in a weight update, after a failed push, or closing."""
        self._slots: PoolSide | None = None
        self.filters, self.given_up = Filters(state), GivenUp()
        self._deadlines = GroupDeadlines(self._group_late)
        self.dry: Callable[[], None] = lambda: None  # told that nothing is left to claim, where ranks share the order
        self.feeds: dict[str, StreamFeed] = {}
        """What takes items from the tasks' streams."""
        self.evaluator = Evaluator(state, self._gather_facts)
        self._evaluations = self.evaluator.queue
        self._parking = False  # whether anything has been parked in this life, or came parked from another
        self._asking = False  # whether it is already settled that the next attempt is one for the training
        self.pacing: Pacing | None = None
        self._state = state
        self._ready: deque[tuple[int, int, int]] = deque()  # (uid, life, member) to be started before new claims
        # Heaps of those whose turn is too far off for the weights in use; one for each task where they have room apart.
        self._held: dict[str, list[tuple[int, int, int]]] = {}
        self._opened: Entry | None = None  # the last group that was claimed, while members of it are to be started
        self._next_member = 0
        self._item: Item | None = None  # the last that was read, for the other members of its group
        self._facts: RunFacts | None = None
        self._admission, self._parts = Admission(state), PartKeeper(state)
        self.disk: DiskUse | None = None
        reroll = state.options.reroll
        self._tail = Tail(state, self.requeue, reroll.tail) if reroll is not None and reroll.tail > 1 else None
        state.on_expired = self.requeue if self._tail is None else self._tail.gather

    def open(self, pool: PoolSide) -> None:
        """Let ``pool`` run what is given to it."""
        self._slots = self._deadlines.pool = pool

    def requeue(self, entry: Entry) -> None:
        """Queue every member of ``entry`` that is neither in flight nor settled, before any new item."""
        if entry.task not in self._state.tasks:
            return  # nobody here can run it: it waits for a run that has its task
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
        if self._tail is not None:
            self._tail.clear()
        self._opened = None
        for uid in sorted(self._state.ledger.entries):
            entry = self._state.ledger.entries[uid]
            self._parking = self._parking or entry.parked > 0
            if entry.state in (WAITING, RUNNING) and entry.task in self._state.tasks:
                self.requeue(entry)

    @property
    def drained(self) -> bool:
        """Whether nothing can come any more: no attempt is due, no reward, and every source is at its end."""
        return not self._due and not self.rewards_due and self._state.sampler.exhausted

    @property
    def rewards_due(self) -> bool:
        """Whether a group of this run's tasks is parked: its reward may come at any time."""
        counts = self._state.ledger.counts
        return bool(self._state.ledger.parked) and any(
            counts[name][PARKED] for name in self._state.tasks if name in counts
        )

    @property
    def blocked(self) -> bool:
        """Whether nothing could be started now although nothing is paused."""
        if self.disk is not None and self.disk.full:
            return self.disk.hopeless
        if self.paused or self._ready or self._opened is not None:
            return False
        if self._tail and self._state.sampler.exhausted:
            return False
        if self._held:
            heads = [self._entry_of(heap[0]) for heap in self._held.values()]
            if any(entry is None or self._admission.may_rerun(entry) for entry in heads):
                return False
            if self._state.mixing is None:
                return True
        return not self._admission.may_claim() or self._state.sampler.exhausted

    @property
    def _due(self) -> bool:
        return bool(self._ready or self._held or self._tail) or self._opened is not None

    # -- Work ------------------------------------------------------------------------------------------------

    def next_job(self) -> Job | None:
        """Return the next attempt, recorded as started, or None if none may start now."""
        if self.paused or self._state.failure is not None or (self.disk is not None and self.disk.refuses()):
            return None
        if self._evaluations and not self._asking:
            return self._next_of_both()
        experience = self._state.experience
        if experience is not None and self._slots is not None and experience.has_lent(self._slots.in_flight):
            return None
        try:
            while self._ready:
                due = self._ready.popleft()
                entry = self._entry_of(due)
                if entry is not None and self._admission.may_rerun(entry):
                    return self._start(entry, due[2])
                if entry is not None:
                    heap = self._held.setdefault(entry.task if self._state.mixing is not None else "", [])
                    heapq.heappush(heap, due)
                    self._state.changed.notify()  # a waiting trainer may now see that nothing comes
            if self._opened is not None:
                return self._start_next(self._opened)
            if self._held:
                held = self._next_held()
                if held is not None:
                    return self._start(*held)
                if self._held and self._state.mixing is None:
                    return None
            claimed = self._claim() if self._admission.may_claim() else None
            if claimed is not None:
                return self._start_next(claimed)
            if self._tail and self._state.sampler.exhausted:  # nobody is left for whom they could wait
                self._tail.release()
                return self.next_job()
            return None
        except Exception as error:
            self._state.fail(error)
            return None

    def _next_of_both(self) -> Job | None:
        """The next attempt while there is something to evaluate as well."""
        job: Job | None = self.evaluator.next_job() if self.evaluator.due else None
        if job is not None:
            return job
        self._asking = True
        try:
            job = self.next_job()
        finally:
            self._asking = False
        if job is not None:
            self.evaluator.passed()
            return job
        return self.evaluator.next_job()

    def room(self) -> Awaitable[None] | None:
        """None, or what to wait for while the write queue is full."""
        service = self._state.writer
        if service is None or not self._state.writing or not service.writer.full:
            return None
        return service.room()

    def finished(self, job: Job, rollout: Rollout) -> bool:
        """Take in what a runner returned. Returns whether more may be started now than before."""
        state = self._state
        entry = state.ledger.entries.get(job.item.uid)
        if entry is None or entry.life != job.life:
            if type(job) is EvaluationJob:  # the ledger knows nothing of it
                self.evaluator.finished(job, rollout)
            return True
        try:
            fault = check_rollout(rollout, job.item, rows=state.experience is not None)
            if fault is not None:
                self.failed(job, ValueError(f"{job.item}: {fault}"), "not finite")
                return True
            begun = job.version if job._oldest is None else job._oldest  # what it went on from may be older
            oldest = begun if rollout.oldest is None else rollout.oldest
            ages: dict[int, int] | None = None
            if state.masks:
                oldest, newest, ages = judge(rollout, job.item, started=oldest, now=state.version)
            else:
                newest = max(oldest, state.version) if rollout.newest is None else rollout.newest
            blob = pack(
                rollout, job.item, member=job.member, attempt=job.attempt, life=job.life, versions=(oldest, newest)
            )
        except RolloutTooDeep as error:
            self.failed(job, error, "too deep")
            return True
        except (RolloutInvalid, WorkerFailed) as error:
            state.log.error(
                events.ROLLOUT_INVALID, uid=job.item.uid, task=job.task.name, member=job.member, error=str(error)
            )
            state.record(Interrupted(job.item.uid, job.member, job.attempt, "invalid"))
            state.fail(error)
            return True
        self.given_up.finished(job.task)
        if ages is not None:
            state.record(Aged(job.item.uid, job.member, ages))
        rejected = (
            job.task.filter is not None and not job.parked and self.filters.rejects(job.task, entry, (job.member, blob))
        )
        more = self._take_in(job, rollout, blob, oldest, newest, rejected)
        if state.learners and (rejected or entry.kind == EPISODE):
            state.teach(entry)  # that it teaches the weights nothing may teach the source much
        if job.task.group_timeout is not None and not entry.unsettled:
            self._deadlines.end(job.item.uid, job.life)
        return more

    def _take_in(self, job: Job, rollout: Rollout, blob: bytes, oldest: int, newest: int, rejected: bool) -> bool:
        state = self._state
        if job.parked:
            self._parking = True
            park(state, job, rollout, blob, (oldest, newest))
            return True
        # What it made lies in the buffer already.
        segment, offset = (-1, 0) if state.experience else state.keep(job.item.uid, job.member, job.life, blob)
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
            if state.learners:
                state.teach(became)
            expired = state.expire_stale()
            state.changed.notify()
            return expired
        if job.item.uid not in state.ledger.entries:  # rejected, or too few of it had finished
            state.changed.notify()  # a waiting trainer may now see that nothing more comes
            return True
        # Perhaps this was the last member that others had been parked for.
        return self._parking and state.expire_stale()

    def failed(self, job: Job, error: BaseException, reason: str) -> None:
        """Count a failure, and retry, give up or stop as the task's policy says."""
        state = self._state
        entry = state.ledger.entries.get(job.item.uid)
        if entry is None or entry.life != job.life:
            if type(job) is EvaluationJob:
                self.evaluator.failed(job, error, reason)
            return
        failures = entry.failures[job.member] + 1
        verdict = self.given_up.verdict(job.task, failures, late=reason == GROUP_TIMEOUT)
        text = error_text(error)
        final = verdict is Verdict.GIVE_UP
        seconds = state.clock.now() - job.started
        rejected = final and self.filters.rejects(job.task, entry)
        became = state.record(
            Failed(job.item.uid, job.member, job.attempt, reason, encodable(text), final, seconds, rejected)
        )
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
            said = text + self.given_up.why(job.task)
            stop = RolloutFailed(f"{job.item}, member {job.member}, attempt {job.attempt}: {said}")
            stop.__cause__ = error
            state.fail(stop)
        if became is not None or rejected:
            state.teach(entry)
        if final:
            state.expire_stale()  # the last member may have given up, and the group be whole without it
            if job.task.group_timeout is not None and not entry.unsettled:
                self._deadlines.end(job.item.uid, job.life)
        state.changed.notify()

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
            rejected = self.filters.rejects(task, entry)
            became = state.record(Failed(uid, member, entry.attempts[member], GROUP_TIMEOUT, text, True, 0.0, rejected))
            if became is not None or rejected:
                state.teach(entry)
        assert self._slots is not None
        self._slots.cut_group(uid)
        state.expire_stale()
        state.changed.notify()
        self._slots.pump()

    def lost(self, job: Job, error: WorkerDied) -> None:
        """A worker process died under an attempt: it is run again, unless its item has seen too many such deaths."""
        if type(job) is EvaluationJob:
            self.evaluator.lost(job, error)
            return
        verdict = lose(self._state, self.given_up, job, error)
        if verdict is Verdict.RETRY:
            self._ready.appendleft((job.item.uid, job.life, job.member))
        elif verdict is Verdict.GIVE_UP:
            if self._opened is not None and self._opened.uid == job.item.uid:
                self._opened = None
            self._deadlines.end(job.item.uid, job.life)
            assert self._slots is not None
            self._slots.cut_group(job.item.uid)  # the other members have nowhere to go
        self._state.changed.notify()

    def interrupted(self, job: Job, reason: str) -> None:
        """An attempt was cut through no fault of its task: it is queued again, before what is new."""
        state = self._state
        entry = state.ledger.entries.get(job.item.uid)
        if entry is None or entry.life != job.life:
            if type(job) is EvaluationJob:
                self.evaluator.interrupted(job)
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

    def _next_held(self) -> tuple[Entry, int] | None:
        """Take out the first of those that were held back and may start by now: its group, and which member it is."""
        for task, heap in list(self._held.items()):
            while heap:
                entry = self._entry_of(heap[0])
                if entry is not None and not self._admission.may_rerun(entry):
                    break
                due = heapq.heappop(heap)
                if not heap:
                    del self._held[task]
                if entry is not None:
                    return entry, due[2]
        return None

    def _claim(self) -> Entry | None:
        state = self._state
        draw = state.sampler.draw() if state.mixing is None else state.mixing.draw(self._admission.limit())
        if self.feeds and draw is not None and draw.task in self.feeds:
            self.feeds[draw.task].ask()
            return None
        if draw is None:
            self.dry()
            state.changed.notify()  # a waiting trainer may now see that this was all
            return None
        if draw.began is not None:
            state.record(draw.began)
        task = state.tasks[draw.task]
        uid = state.ledger.next_uid if draw.number < 0 else draw.number
        kind = TRAIN if state.experience is None else EPISODE
        claimed = Claimed(uid, draw.task, draw.epoch, draw.position, draw.index, task.group_size, task.min_group, kind)
        if state.learners and draw.task in state.learners:
            claimed = msgspec.structs.replace(claimed, content=self._kept(draw))
        state.record(claimed)
        self._opened, self._next_member = state.ledger.entries[uid], 0
        return self._opened

    def _kept(self, draw: Draw) -> bytes:
        """What a learning source gives now: another day it may give something else for the same index."""
        content = give(self._state.tasks[draw.task], draw.index)
        return encode_content(content, f"task {draw.task!r}, item {draw.index}")

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
        if self.pacing is not None:
            self.pacing.starts(entry, version)
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
        if entry.content is not None:
            job.kind = entry.kind
        if state.partials.by_uid:
            self._parts.go_on(job)
        return job

    def _gather_facts(self) -> RunFacts:
        state = self._state
        keep = self._parts.save if state.options.partial else None
        extend = None if state.experience is None else state.experience.extend
        self._facts = RunFacts(
            state.options.seed, state.run_id, self._version_now, self._slots, keep, extend, state.log
        )
        return self._facts

    def _version_now(self) -> int:
        return self._state.version

    def _read(self, entry: Entry) -> Item:
        """Read the item; a group's members share one reading."""
        task, index, kept = entry.task, entry.index, entry.content
        content = give(self._state.tasks[task], index) if kept is None else decode_content(kept)
        item = Item(task, entry.epoch, index, entry.uid, content)
        self._item = item if entry.size > 1 else None
        return item

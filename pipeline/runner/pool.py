"""The pool: at most ``concurrency`` attempts in flight, each on a worker that lives long.

Guarantees:

* a job that was handed out ends in exactly one of ``finished``, ``failed``, ``interrupted`` and ``lost``, whatever is
  cancelled;
* when work appears, every free slot has it within one turn of the loop (``pump`` assigns jobs itself);
* a slot that was given away for scoring is taken back before new work gets it.

Workers keep one cancel scope over many attempts, and attempts with the same timeout share a timer: a scope and a timer
per attempt would cost more than all the rest. A scope that was cancelled is left and a new one entered.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import anyio
import anyio.abc
import anyio.lowlevel

from pipeline.errors import WorkerDied
from pipeline.interfaces import Engine
from pipeline.records import Rollout
from pipeline.runner.context import Context
from pipeline.runner.deadlines import Key, TimeLimit
from pipeline.task import Task

_TURN = 16  # attempts after which a worker lets others run, though its runner never waits
_TIMEOUT: Final = "timeout"
GROUP_TIMEOUT: Final = "group timeout"


class Job(Context, eq=False):
    """An attempt that has been recorded as started; what its runner sees of it is the context."""

    task: Task
    life: int
    started: float

    def queued(self) -> None:
        if self._timer is not None:
            limit, worker = self._timer
            limit.end(worker)

    def begun(self) -> None:
        if self._timer is not None:
            limit, worker = self._timer
            self.deadline = limit.begin(worker)


class Work(Protocol):
    """Where jobs come from and go to. All but ``room`` are synchronous."""

    def next_job(self) -> Job | None: ...

    def finished(self, job: Job, rollout: Rollout) -> bool:
        """Take a rollout in. Returns whether there may be another job now, if there was none before."""
        ...

    def failed(self, job: Job, error: BaseException, reason: str) -> None: ...

    def interrupted(self, job: Job, reason: str) -> None: ...

    def lost(self, job: Job, error: WorkerDied) -> None: ...

    def room(self) -> Awaitable[None] | None:
        """None if a rollout can be taken in now, else what to wait for."""
        ...


class _Worker:
    __slots__ = ("cut", "job", "scope", "wake")

    def __init__(self, job: Job) -> None:
        self.job: Job | None = job
        self.scope: anyio.CancelScope | None = None
        self.wake: anyio.Event | None = None
        self.cut: str | None = None
        """Why the attempt is being cancelled; the first reason counts."""


class Pool:
    """Runs jobs. Enter it with ``async with``; leaving it interrupts what is in flight."""

    def __init__(self, work: Work, engine: Engine, *, concurrency: int, now: Callable[[], float]) -> None:
        self.concurrency = concurrency
        self.in_flight = 0
        self.scoring = 0
        self.peak = 0
        self._work, self._engine, self._now = work, engine, now
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._slot_waiters: deque[tuple[Context, anyio.Event]] = deque()
        self._drained: list[anyio.Event] = []
        self._limits: dict[float, TimeLimit[_Worker]] = {}
        self._last: _Worker | None = None  # whoever began the last attempt
        self._group: anyio.abc.TaskGroup | None = None
        self._new_event: Callable[[], anyio.Event] = anyio.Event
        self._closing = False
        self._dry = False  # whether there was no job when one was asked for last, and nothing has happened since

    async def __aenter__(self) -> Pool:
        # anyio.Event() looks the backend up at each call; what it makes is of that backend's own class.
        self._new_event = type(anyio.Event())
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        assert self._group is not None
        self._closing = True
        self._group.cancel_scope.cancel("the pipeline is closed")
        return await self._group.__aexit__(*exc)

    @property
    def workers(self) -> int:
        """How many worker tasks there are."""
        return len(self._workers)

    def pump(self) -> None:
        """Give work to every free slot. Call it whenever there may be new work or room."""
        if self._closing or self._group is None:
            return
        self._dry = False
        while self.in_flight < self.concurrency:
            if not self._idle and len(self._workers) >= self.concurrency + self.scoring:
                return  # some worker is between two attempts, and asks for work itself within this turn
            job = self._work.next_job()
            if job is None:
                self._dry = True
                return
            self._took()
            if self._idle:
                worker = self._idle.pop()
                worker.job = job
                assert worker.wake is not None
                worker.wake.set()
            else:
                worker = _Worker(job)
                self._workers.add(worker)
                self._group.start_soon(self._run, worker, name="forebay worker")

    def abort(self, reason: str, which: Callable[[Job], bool] | None = None) -> None:
        """Interrupt every attempt in flight, or those of ``which``; they end as interrupted with ``reason``."""
        for worker in self._workers:
            job = worker.job
            if job is None or (which is not None and not which(job)):
                continue
            if worker.scope is None or worker.wake is not None:  # its worker has not begun it
                self._ended(worker, job)
                self._work.interrupted(job, reason)
            else:
                self._cut(worker, reason)

    def cut_group(self, uid: int) -> None:
        """Cut every attempt at an item; they end as failed with :data:`GROUP_TIMEOUT`."""
        for worker in self._workers:
            job = worker.job
            if job is None or job.item.uid != uid:
                continue
            if worker.scope is None or worker.wake is not None:  # its worker has not begun it
                self._ended(worker, job)
                self._work.failed(job, _late(job, GROUP_TIMEOUT), GROUP_TIMEOUT)
            else:
                self._cut(worker, GROUP_TIMEOUT)

    def time_limit(self, timeout: float, cut: Callable[[Key], None]) -> TimeLimit[Key]:
        """Return a new time limit, whose timer runs as long as the pool does."""
        assert self._group is not None
        limit = TimeLimit(timeout, self._now, cut)
        self._group.start_soon(limit.watch, name="forebay time limit")
        return limit

    async def drained(self) -> None:
        """Return once nothing is in flight and nothing is being scored."""
        while self.in_flight or self.scoring:
            event = anyio.Event()
            self._drained.append(event)
            await event.wait()

    # -- slots -----------------------------------------------------------------------------------------------

    def give_slot(self, ctx: Context) -> None:
        """Let another attempt run while ``ctx`` is being scored."""
        ctx.has_slot = False
        self.scoring += 1
        self._free_slot()
        self.pump()

    async def take_slot(self, ctx: Context) -> None:
        """Wait for a slot again, before any new attempt gets one."""
        if self.in_flight < self.concurrency:
            self._retake(ctx)
            return
        event = anyio.Event()
        waiter = (ctx, event)
        self._slot_waiters.append(waiter)
        try:
            await event.wait()
        except BaseException:
            # Granted and cancelled in one turn: the slot is the context's, and ends with its attempt.
            if waiter in self._slot_waiters:
                self._slot_waiters.remove(waiter)
            raise

    def _retake(self, ctx: Context) -> None:
        ctx.has_slot = True
        self.scoring -= 1
        self.in_flight += 1

    def _free_slot(self) -> None:
        self.in_flight -= 1
        if self._slot_waiters:
            ctx, event = self._slot_waiters.popleft()
            self._retake(ctx)
            event.set()

    def _took(self) -> None:
        self.in_flight += 1
        if self.in_flight > self.peak:
            self.peak = self.in_flight

    def _ended(self, worker: _Worker, job: Job) -> None:
        worker.job, self._dry = None, False
        if job.has_slot:
            self._free_slot()
        else:
            self.scoring -= 1
        if self._drained and not self.in_flight and not self.scoring:
            for event in self._drained:
                event.set()
            self._drained.clear()

    # -- workers ---------------------------------------------------------------------------------------------

    async def _run(self, worker: _Worker) -> None:
        try:
            while not self._closing:
                with anyio.CancelScope() as worker.scope:
                    await self._serve(worker, worker.scope)
                worker.cut = None
        finally:
            self._workers.discard(worker)
            # Assigned and cancelled before it began to run.
            if worker.job is not None:
                job = worker.job
                self._ended(worker, job)
                self._work.interrupted(job, "shutdown")

    async def _serve(self, worker: _Worker, scope: anyio.CancelScope) -> None:
        # The attempt itself is awaited here, and not in a method of its own: each coroutine around a runner is passed
        # at every one of its resumptions.
        work, run = self._work, self._engine.run
        served = 0
        while worker.cut is None:
            job = worker.job or (None if self._dry else self._next_job(worker))
            if job is None:
                worker.wake = self._new_event()
                self._idle.append(worker)
                await worker.wake.wait()
                worker.wake = None
                continue
            timeout = job.task.timeout
            limit = None if timeout is None else self._begin(worker, job, timeout)
            self._last = worker
            try:
                rollout = await run(job.task, job.item, job)
                if limit is not None:
                    limit.end(worker)
                room = work.room()
                if room is not None:
                    await room
            except BaseException as error:
                if limit is not None:
                    limit.end(worker)
                self._ended(worker, job)
                self._failed(worker, job, error)
                if not isinstance(error, Exception) and not _is_runners(error, scope):
                    raise
            else:
                if job.has_slot and not self._slot_waiters and not self._drained:  # nobody waits for its end
                    worker.job = None
                    self.in_flight -= 1
                else:
                    self._ended(worker, job)
                if work.finished(job, rollout):
                    self._dry = False
            # Others have begun attempts meanwhile, or else this runner may be one that never waits.
            served = served + 1 if self._last is worker else 0
            if served == _TURN:
                served = 0
                await anyio.lowlevel.checkpoint()

    def _next_job(self, worker: _Worker) -> Job | None:
        if self.in_flight >= self.concurrency:
            return None
        job = self._work.next_job()
        if job is None:
            self._dry = True
        else:
            self._took()
            worker.job = job
            if self.in_flight < self.concurrency:  # a group has come: its other members are work as well
                self.pump()
        return job

    def _begin(self, worker: _Worker, job: Job, timeout: float) -> TimeLimit[_Worker]:
        limit = self._limits.get(timeout)
        if limit is None:
            limit = self._limits[timeout] = self.time_limit(timeout, lambda late: self._cut(late, _TIMEOUT))
        job.deadline = limit.begin(worker)
        job._timer = limit, worker
        return limit

    def _cut(self, worker: _Worker, reason: str) -> None:
        """Cancel the worker's attempt."""
        if worker.scope is not None and worker.cut is None:
            worker.cut = reason
            worker.scope.cancel(reason)

    def _failed(self, worker: _Worker, job: Job, error: BaseException) -> None:
        """An attempt failed, or was cancelled: by an abort, by its deadline, or because everything ends."""
        assert worker.scope is not None
        if isinstance(error, WorkerDied) and not worker.scope.cancel_called:
            self._work.lost(job, error)
        elif _is_runners(error, worker.scope):
            self._work.failed(job, error, "error")
        elif worker.cut in (_TIMEOUT, GROUP_TIMEOUT):
            self._work.failed(job, _late(job, worker.cut), worker.cut)
        else:
            self._work.interrupted(job, worker.cut or "shutdown")


def _late(job: Job, reason: str) -> TimeoutError:
    if reason == _TIMEOUT:
        return TimeoutError(f"{job.item}: the attempt took longer than timeout={job.task.timeout} s")
    return TimeoutError(f"{job.item}: the group took longer than group_timeout={job.task.group_timeout} s")


def _is_runners(error: BaseException, scope: anyio.CancelScope) -> bool:
    """Whether ``error`` is the runner's own, and not a cancellation of its attempt or the end of the process.

    A runner may let out what is no ``Exception``: ``SystemExit``, or the cancellation of something that it waited for.
    """
    if scope.cancel_called or isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return False
    if not isinstance(error, anyio.get_cancelled_exc_class()):
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False  # on trio nobody but a scope cancels
    return task is not None and not task.cancelling() and anyio.current_effective_deadline() > -math.inf

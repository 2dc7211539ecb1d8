"""The workers of one kind: who gets which, when one is started, and what becomes of those that are cut.

Guarantees:

* places are given in the order in which they were asked for, and no worker runs more than ``places`` calls;
* there are at most ``count`` workers; for an evaluation there may be one more for each that waits for a buffer's
  limiter, as that may wait for the trainer, and the trainer for the evaluation;
* a worker of which a call was cut gets no other before it has ended that one, or, after a grace, was killed for it;
* after :meth:`Crew.close` no worker is left;
* one that is too many after :meth:`Crew.resize` gets no call any more, and leaves when it has ended those that it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import anyio
import anyio.abc

from pipeline.engines.calls import Call, Worker
from pipeline.engines.local import leave
from pipeline.errors import WorkerFailed

Start: TypeAlias = Callable[[Callable[[], None], Callable[[], None]], Worker]
"""Starts a worker; given is what to call when it is ready, and when one of its calls has ended."""

_MOST_STILLBORN = 3
_SECONDS_TO_BE_KILLED = 10.0


class _Waiter:
    def __init__(self, what: object, alone: bool, urgent: bool) -> None:
        self.what, self.alone, self.urgent = what, alone, urgent
        self.event = anyio.Event()
        self.call: Call | None = None


class Crew:
    """Enter it with ``async with``. Nothing is started before the first call."""

    def __init__(self, start: Start, *, count: int, places: int, grace_s: float) -> None:
        self.places = places
        self._begin_worker, self._count, self._grace_s = start, count, grace_s
        self._workers: set[Worker] = set()
        self._waiters: deque[_Waiter] = deque()
        self._group: anyio.abc.TaskGroup | None = None
        self._stillborn = 0  # workers in a row that ended before they were ready
        self._held = 0
        self._failed: str | None = None
        self._closing = False

    async def __aenter__(self) -> Crew:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        assert self._group is not None
        with anyio.CancelScope(shield=True):
            await self.close()
        self._group.cancel_scope.cancel("the engine is closed")
        return await leave(self._group, *exc)

    @property
    def running(self) -> int:
        """How many workers there are."""
        return len(self._workers)

    # -- places ------------------------------------------------------------------------------------------------

    def call_nowait(self, what: object, *, alone: bool = False) -> Call | None:
        """Take a place if there is one at once.

        Args:
            what: it is for, as an error calls it.
            alone: in a worker that runs nothing else meanwhile.
        """
        if self._waiters:
            return None
        worker = self._free(alone)
        return None if worker is None else worker.begin(what, alone=alone)

    async def call(self, what: object, *, alone: bool = False, urgent: bool = False) -> Call:
        """Wait for a place; ``urgent``: the trainer may be waiting for this, and the other calls for the trainer.

        Raises:
            WorkerFailed: no worker can be started.
        """
        waiter = _Waiter(what, alone, urgent)
        self._waiters.append(waiter)
        self._hand_out()
        try:
            await waiter.event.wait()
        except BaseException:
            if waiter.call is not None:
                waiter.call.worker.end(waiter.call)
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
                self._hand_out()
            raise
        if waiter.call is None:
            raise WorkerFailed(self._failed or "the engine is closed")
        return waiter.call

    def cut(self, call: Call) -> None:
        """Let nobody wait for a call any more: it ends soon, or its worker is killed."""
        if call.number not in call.worker.calls:
            return
        call.let_go()
        if self._group is not None and not self._closing:
            self._group.start_soon(self._see_it_end, call, name="forebay worker that was cut")

    async def _see_it_end(self, call: Call) -> None:
        with anyio.move_on_after(self._grace_s):
            await call.over.wait()
            return
        call.worker.kill()

    def hold(self, more: int) -> None:
        """Note that one more call, or one less, waits for something that perhaps only the trainer can bring about."""
        self._held += more
        self._hand_out()

    def _free(self, alone: bool) -> Worker | None:
        most = 1 if alone else self.places
        best: Worker | None = None
        fewest = most
        for worker in self._workers:
            if len(worker.calls) < fewest and worker.takes_work:
                best, fewest = worker, len(worker.calls)
        if best is not None and not best.alive:  # nobody has been told yet: let none be lost with it
            return self._free(alone)
        return best

    def _hand_out(self) -> None:
        for each in self._workers:
            if each.leaving and not each.calls and not each.stopping:
                each.stop()
        if self._failed is not None:
            self._refuse()
            return
        while self._waiters:
            waiter = self._waiters[0]
            worker = self._free(waiter.alone)
            if worker is None:
                self._grow()
                return
            self._waiters.popleft()
            waiter.call = worker.begin(waiter.what, alone=waiter.alone)
            waiter.event.set()
        self._shrink()

    def _refuse(self) -> None:
        while self._waiters:
            self._waiters.popleft().event.set()

    # -- workers -----------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        starting = sum(not each.ready and not each.leaving for each in self._workers)
        most = self._count
        if self._held and any(each.urgent for each in self._waiters):
            most += self._held
        there = sum(not each.leaving for each in self._workers)
        while there < most and starting < len(self._waiters):
            if self._closing or not self._start():
                return
            starting += 1
            there += 1

    def _shrink(self) -> None:
        for worker in [each for each in self._workers if each.ready and not each.calls and not each.stopping]:
            if sum(not each.stopping and not each.leaving for each in self._workers) <= self._count:
                return
            worker.stop()

    def _start(self) -> bool:
        assert self._group is not None
        try:
            worker = self._begin_worker(self._began, self._hand_out)
        except OSError as error:
            if not self._workers:  # or else those that there are will do
                self._fail(f"a worker cannot be started: {error}")
            return False
        self._workers.add(worker)
        self._group.start_soon(self._live, worker, name=f"forebay {worker.name}")
        return True

    async def _live(self, worker: Worker) -> None:
        try:
            await worker.live()
        finally:
            self._workers.discard(worker)
            if not worker.ready and not worker.leaving and not self._closing:
                self._stillborn += 1
                if self._stillborn >= _MOST_STILLBORN:
                    self._fail(f"{self._stillborn} in a row; the last: {worker.death('before it was ready')}")
            self._hand_out()

    def _began(self) -> None:
        self._stillborn = 0
        self._hand_out()

    def _fail(self, why: str) -> None:
        self._failed = why
        self._refuse()

    async def resize(self, count: int) -> None:
        """Have at most ``count`` workers; return when those that are too many have ended what they run, and left."""
        self._count = count
        staying = [each for each in self._workers if not each.leaving and not each.stopping]
        # Those that are not there yet go first, and then those that have the least to end.
        staying.sort(key=lambda each: (each.ready, len(each.calls)))
        leaving = staying[: max(0, len(staying) - count)]
        for worker in leaving:
            worker.leaving = True
            if not worker.ready:
                worker.kill()
        self._hand_out()
        for worker in leaving:
            await worker.over.wait()

    # -- the end -----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Tell idle workers to leave, wait a little for the others, and kill what is left."""
        self._closing, self._failed = True, "the engine is closed"
        self._refuse()
        workers = list(self._workers)
        for worker in workers:
            if worker.ready and not worker.calls:
                worker.stop()
            elif not worker.ready:
                worker.kill()
        with anyio.move_on_after(self._grace_s):
            for worker in workers:
                while worker.calls and not worker.over.is_set():
                    await next(iter(worker.calls.values())).over.wait()
                worker.stop()
                await worker.over.wait()
        for worker in workers:
            if not worker.over.is_set():
                worker.kill()
        with anyio.move_on_after(_SECONDS_TO_BE_KILLED):
            for worker in workers:
                await worker.over.wait()

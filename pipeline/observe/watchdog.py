"""Names whoever holds the event loop, because one blocking call stops every rollout at once.

A daemon thread asks the loop to answer twice per ``limit``. If no answer comes within the limit it notes what
the loop's thread is doing, and reports once, when the answer is there. On the loop itself nothing waits or polls.

* A hold of 1.5 times the limit or longer is always reported, one below the limit never.
* A call that keeps the interpreter's lock (a large ``json.loads``) stops the watching thread too. That thread then
  wakes late, while the loop's has been computing, and looks at once: the loop's thread is still on that line, unless
  a third thread took the lock in between.
* A loop that is late because the machine is busy, and that is found idle, is not reported.
* ``seconds`` counts from when the loop was asked, so it may be short by half the limit.
"""

from __future__ import annotations

import contextvars
import gc
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Self

import msgspec

from pipeline.errors import ConfigError
from pipeline.observe.events import LOOP_HELD
from pipeline.observe.logs import logger
from pipeline.observe.stacks import Place, holder, running_loop, thread_clock


class Held(msgspec.Struct, frozen=True):
    """The event loop did not answer for ``seconds``, and what was found running in the meantime."""

    seconds: float
    where: str
    """``function (file:line)``, to read."""
    function: str
    file: str
    line: int
    task: str = ""
    """Name of the asyncio task, where there is one."""
    collected: bool = False
    """A full garbage collection ended meanwhile; then it may be what took the time, wherever it struck."""


def log_held() -> Callable[[Held], None]:
    """Return the default report: a warning ``loop.held`` at the 1st, 2nd, 4th, 8th ... time for each line of code."""
    seen: Counter[tuple[str, int]] = Counter()

    def report(held: Held) -> None:
        seen[held.file, held.line] += 1
        times = seen[held.file, held.line]
        if times & (times - 1) == 0:
            fields = {**msgspec.structs.asdict(held), "seconds": round(held.seconds, 3)}
            logger().warning(LOOP_HELD, **fields, times=times)

    return report


def _full_collections() -> int:
    return int(gc.get_stats()[-1]["collections"])


class Watchdog:
    """Watches the event loop that it is entered on, whichever thread that runs in.

    ::

        async with Watchdog(0.1):
            ...

    Args:
        limit: seconds without an answer that are too long.
        report: called in the watching thread, once for each time the loop was held. Left out, it is logged.
    """

    def __init__(self, limit: float = 0.1, report: Callable[[Held], None] | None = None) -> None:
        if not (math.isfinite(limit) and limit > 0):
            raise ConfigError.of("limit", limit, "seconds above 0 are needed")
        self._limit = limit
        self._report = log_held() if report is None else report

    async def __aenter__(self) -> Self:
        self._loop = running_loop()
        self._watched = threading.get_ident()
        self._computed = thread_clock()
        self._stop = threading.Event()
        self._asked = time.monotonic()
        self._answered: float | None = self._asked
        self._found: tuple[Place, str] | None = None
        self._collections = _full_collections()
        context = contextvars.copy_context()  # reports carry the run's context
        self._thread = threading.Thread(target=context.run, args=(self._watch,), name="forebay-watchdog", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)  # at once, unless a report takes its time

    def _watch(self) -> None:
        period = self._limit / 2
        looked, computed = time.monotonic(), self._computed()
        try:
            # This thread may have been stopped anywhere, between two looks as well: then it looks again without a wait.
            while not self._stop.wait(max(0.0, looked + period - time.monotonic())):
                now, computed_now, due = time.monotonic(), self._computed(), looked + period
                stopped = now - due > self._limit and computed_now - computed > self._limit
                self._look(now, due if stopped else now)
                looked, computed = now, computed_now
        except RuntimeError:  # the loop has ended
            pass
        self._tell(self._answered or time.monotonic())

    def _look(self, now: float, since: float) -> None:
        """See whether the loop has answered; ``since`` is before ``now`` if this thread was stopped until now."""
        if self._answered is None:
            if now - self._asked >= self._limit and self._found is None:
                self._find()  # first: asking the loop anything may let its thread go on
                if not self._loop.running():
                    self._found = None
            return
        self._tell(self._answered)
        self._asked, self._answered = now, None
        if since < now:
            self._find()  # before anything that lets the other thread go on
            if self._found is not None:
                self._asked = since
        else:
            self._collections = _full_collections()
        self._loop.call(self._answer)

    def _answer(self) -> None:
        self._answered = time.monotonic()

    def _find(self) -> None:
        place, task = holder(sys._current_frames().get(self._watched)), self._loop.task()
        if place is not None and self._answered is None:  # else it went on while we looked
            self._found = place, task

    def _tell(self, until: float) -> None:
        if self._found is None:
            return
        (place, task), self._found = self._found, None
        where = f"{place.function} ({place.file}:{place.line})"
        held = Held(until - self._asked, where, *place, task, _full_collections() > self._collections)
        try:
            self._report(held)
        except Exception:
            logger().exception(LOOP_HELD, where=where, error="the watchdog's report raised")

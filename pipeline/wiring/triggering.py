"""Triggers: what asks for a checkpoint while the trainer is busy, and when it is heard.

Requests of all kinds become one, which waits for a verb of the trainer's that says what the weights hold. A trainer
that waits meanwhile, with nothing leased, is let go for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio
import anyio.abc
import anyio.to_thread

from pipeline.checkpoint.triggers import CheckpointRequest, SignalTrap, Then
from pipeline.config import check_signals
from pipeline.control.desk import HTTP, Desk
from pipeline.errors import ConfigError, ForebayError, UsageError
from pipeline.observe import events
from pipeline.waiting import Signal
from pipeline.wiring.life_end import asked
from pipeline.wiring.state import RunState

T = TypeVar("T")

STOP_FILE = "stop file"
LOOK_EVERY_S = 1.0
"""How often the stop file is looked for. It is looked for, as no notice reaches a machine whose shared file system
another one wrote to."""


class Triggers:
    """Requests of one run, up to the moment when they are honoured. Belongs to the event loop."""

    def __init__(self, state: RunState, stop_file: str | None, *, inline: bool) -> None:
        """Args:
        state: the run's.
        stop_file: the path at which a file asks to stop.
        inline: on a virtual clock; then neither signals nor the stop file are listened to.
        """
        self._state, self._stop_file, self._inline = state, stop_file, inline
        self.pending: CheckpointRequest | None = None
        self.late = False
        """Whether a stop's deadline is over: nobody waits for a batch any more, even if the weights are not known."""
        self.trap: SignalTrap | None = None
        self.desk: Desk | None = None
        """Requests over HTTP, where the option ``control`` says so."""
        self.on_stop: Callable[[], None] = lambda: None
        self._told = False
        self._waits: list[tuple[anyio.CancelScope, bool]] = []
        self._changed = Signal()
        self._turn = 0
        self._stop_time: float | None = None
        self._save_due: float | None = None
        self._saved_step = 0

    # -- asking -------------------------------------------------------------------------------------------------

    def ask(self, reason: str, then: Then = "continue", *, within: float | None = None, code: int = 0) -> None:
        """Ask for a generation; requests that wait become one."""
        state = self._state
        within = state.options.grace_s if within is None else within
        request = CheckpointRequest(reason=reason, deadline=state.clock.now() + within, then=then, code=code)
        before, self.pending = self.pending, request if self.pending is None else self.pending.joined(request)
        if self.pending == before:
            return
        state.log.info(events.CHECKPOINT_REQUESTED, reason=reason, then=then, within=within)
        if self.stopping and not self._told:
            self._told = True
            if state.writer is not None:
                state.record(asked(state.clock.wall(), self.pending.reason))
            self.on_stop()
        self._wake()
        self._let_go()

    def _ask_by_rule(self, reason: str) -> None:
        """:meth:`ask`, where it follows from the steps alone, so that every rank asks by itself."""
        self.ask(reason)

    def hear(self) -> None:
        """Take what signals and requests have asked for."""
        if self.trap is not None and self.trap.arrived:
            for name, then, code in self.trap.take():
                self.ask(name, then, code=code)
        asked = self.desk.take() if self.desk is not None and self.desk.asked else None
        if asked is not None:
            self.ask(HTTP, asked)

    @property
    def unheard(self) -> bool:
        """Whether a signal or a request came that was not heard yet; may be asked from any thread."""
        return (self.trap is not None and self.trap.arrived) or (self.desk is not None and self.desk.asked)

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for, and has not been honoured."""
        return self.pending is not None and self.pending.then == "stop"

    def take(self) -> CheckpointRequest | None:
        """Return what is asked for; whoever takes it honours it, or gives it back."""
        request, self.pending, self.late = self.pending, None, False
        return request

    def give_back(self, request: CheckpointRequest | None) -> None:
        """What :meth:`take` gave was not honoured."""
        if request is not None:
            self.pending = request if self.pending is None else request.joined(self.pending)
            self._wake()  # its deadline counts again

    # -- signals --------------------------------------------------------------------------------------------------

    def take_signals(self) -> None:
        """Listen to signals from here on, if this is the thread that may.

        Raises:
            UsageError: it is not, and the options name signals.
        """
        options = self._state.options
        stop, save = options.stop_signals, check_signals("save_signals", options.save_signals)
        if self._inline or not stop + save:
            return
        if threading.current_thread() is not threading.main_thread():
            if options.signals or save:
                raise UsageError("signals= and save_signals= need a pipeline that is opened in the main thread")
            return
        self.trap = SignalTrap(stop, save)
        self.trap.install()

    def give_signals_back(self, *, failed: bool) -> None:
        """Undo :meth:`take_signals`; what asked to stop and was not heard is sent again, unless an error leaves."""
        trap, self.trap = self.trap, None
        if trap is not None:
            trap.remove(again=not failed and (self.stopping or trap.arrived))

    # -- steps and times ----------------------------------------------------------------------------------------

    def begin(self, group: anyio.abc.TaskGroup) -> None:
        """Start what waits for times, signals and the stop file.

        Raises:
            ConfigError: ``stop_at`` lies in the past.
        """
        options, clock = self._state.options, self._state.clock
        self._stop_time = options.stop_time
        if self._stop_time is not None and self._stop_time <= clock.wall():
            raise ConfigError.of("stop_at", options.stop_at, "lies in the past; the run would stop before it began")
        if options.save_every_s is not None:
            self._save_due = clock.now() + options.save_every_s
        group.start_soon(self._keep_time, name="forebay triggers")
        if self._stop_file is not None and not self._inline:
            group.start_soon(self._watch_file, self._stop_file, name="forebay stop file")
        if self.trap is not None:
            group.start_soon(self._listen, self.trap, name="forebay signals")

    def passed(self, step: int) -> None:
        """The weights have reached ``step``: see whether a generation is due by that."""
        for name in self.trap.taken_over() if self.trap is not None else ():
            self._state.log.warning(events.SIGNAL_TAKEN, signal=name)
        if self._due_by_steps(step):
            self._ask_by_rule(f"every {self._state.options.save_every} steps")

    def due_at(self, step: int) -> bool:
        """Whether a generation of ``step`` is asked for, or would be when it is acked."""
        return self.pending is not None or self._due_by_steps(step)

    def _due_by_steps(self, step: int) -> bool:
        every = self._state.options.save_every
        return every is not None and step // every > self._saved_step // every

    def saved(self, step: int) -> None:
        """A generation of ``step`` was captured or restored."""
        self._saved_step = step
        if self._save_due is not None:
            assert self._state.options.save_every_s is not None
            self._save_due = self._state.clock.now() + self._state.options.save_every_s
            self._wake()

    def _wake(self) -> None:
        self._turn += 1
        self._changed.notify()

    async def _keep_time(self) -> None:
        while True:
            turn, wait = self._turn, self._until_next()
            with anyio.move_on_after(wait):
                await self._changed.wait_for(partial(self._turned_from, turn))
            await self._ring()

    def _turned_from(self, turn: int) -> bool:
        return self._turn != turn

    def _until_next(self) -> float | None:
        """Seconds to the next time at which something is to be done."""
        clock = self._state.clock
        due = [] if self._save_due is None else [self._save_due - clock.now()]
        if self._stop_time is not None:
            due.append(min(self._stop_time - clock.wall(), 60.0))  # the calendar may be set meanwhile
        if self.pending is not None and self.pending.then == "stop" and not self.late:
            due.append(self.pending.deadline - clock.now())
        return max(min(due), 0.0) if due else None

    async def _ring(self) -> None:
        clock, options = self._state.clock, self._state.options
        if self._save_due is not None and options.save_every_s is not None and clock.now() >= self._save_due:
            self._save_due = clock.now() + options.save_every_s
            self.ask(f"every {options.save_every_s:g} s")
        if self._stop_time is not None and clock.wall() >= self._stop_time:
            self._stop_time = None
            self.ask("stop_at", "stop")
        request = self.pending
        if request is not None and request.then == "stop" and not self.late and clock.now() >= request.deadline:
            self.late = True
            if self._state.writer is not None:
                with suppress(ForebayError):  # kept by the writer, and raised by the next verb
                    await self._state.writer.sync()
            if self.pending is request:  # nobody has honoured it meanwhile
                self._state.log.warning(events.CHECKPOINT_LATE, reason=request.reason)
                self._let_go()

    async def _watch_file(self, path: str) -> None:
        # There is no event to wait for instead: see LOOK_EVERY_S.
        while not await anyio.to_thread.run_sync(os.path.lexists, path, abandon_on_cancel=True):  # noqa: ASYNC110
            await anyio.sleep(LOOK_EVERY_S)
        self.ask(STOP_FILE, "stop")

    async def _listen(self, trap: SignalTrap) -> None:
        while True:
            await anyio.wait_readable(trap.descriptor)
            self.hear()

    # -- letting go ---------------------------------------------------------------------------------------------

    def heard(self, *, known: bool = False, waits: bool = False) -> CheckpointRequest | None:
        """Return what is asked for, if it can be honoured now.

        Args:
            known: whether the trainer has just said what the weights hold; if not, they are known while nothing is
                leased.
            waits: whether the trainer is about to wait for a batch: past the deadline of a stop it does not.
        """
        self.hear()
        if self.pending is None or not (self.known or known or (self.late and waits)):
            return None
        return self.pending

    @property
    def known(self) -> bool:
        """Whether the trainer's state is that of the last step trained: nothing is leased that it may hold already."""
        experience = self._state.experience
        return not self._state.ledger.leases and not (experience is not None and experience.drawn)

    def _let_go(self) -> None:
        for scope, stop_only in self._waits:
            if (self.known and (self.stopping or not stop_only)) or (self.late and not stop_only):
                scope.cancel("a checkpoint is asked for")

    async def unless_asked(self, wait: Callable[[], Awaitable[T]], *, stop_only: bool = False) -> tuple[T] | None:
        """Return what ``wait`` gives, or None if something is asked for that comes first; ``wait`` is cancelled then.

        Args:
            wait: it must lose nothing when it is cancelled.
            stop_only: a request to save and go on does not disturb it.
        """
        with anyio.CancelScope() as scope:
            entry = (scope, stop_only)
            self._waits.append(entry)
            try:
                return (await wait(),)
            finally:
                self._waits.remove(entry)
        return None

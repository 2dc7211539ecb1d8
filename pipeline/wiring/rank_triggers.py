"""Triggers where several ranks train together: what one of them hears, all of them do, at one step.

A rank that saved alone would wait for others that wait for it elsewhere. So what comes to a rank is a *wish* first. It
is claimed in the store, where ranks that wait for rollouts look; then all ranks meet for the next batch, early, and
answer the wish instead (see :mod:`pipeline.wiring.rank_batches`). What follows from the steps alone (``save_every=``)
needs none of that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from pipeline.checkpoint.triggers import CheckpointRequest, Then
from pipeline.errors import ForebayError
from pipeline.observe import events
from pipeline.wiring.life_end import asked
from pipeline.wiring.triggering import T, Triggers


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """What a rank is asked for, as others hear of it."""

    rank: int
    reason: str
    then: Then = "continue"
    code: int = 0
    within: float = 30.0
    """Seconds that it may take."""


class AnswerFirst(Exception):
    """Instead of a batch: all ranks have agreed to do first what was asked for."""


class RankTriggers(Triggers):
    """Requests of one rank. ``pending`` is what all ranks do now, ``wish`` what this one is asked for."""

    wish: CheckpointRequest | None = None
    _told_wish = overdue = False

    def ask(self, reason: str, then: Then = "continue", *, within: float | None = None, code: int = 0) -> None:
        """Wish for a generation; wishes that wait become one."""
        state = self._state
        within = state.options.grace_s if within is None else within
        request = CheckpointRequest(reason=reason, deadline=state.clock.now() + within, then=then, code=code)
        before, self.wish = self.wish, request if self.wish is None else self.wish.joined(request)
        if self.wish == before:
            return
        state.log.info(events.CHECKPOINT_REQUESTED, reason=reason, then=then, within=within)
        if self.wish.then == "stop" and not self._told_wish:
            self._told_wish = True
            if state.writer is not None:
                state.record(asked(state.clock.wall(), self.wish.reason))
        self._wake()
        state.changed.notify()  # who waits for a batch meets the others for this

    def wished(self) -> Wish | None:
        """Return what this rank is asked for, to be told."""
        self.hear()
        wish, now = self.wish, self._state.clock.now()
        if wish is None:
            return None
        return Wish(self._state.options.rank, wish.reason, wish.then, wish.code, max(0.0, wish.deadline - now))

    def agree(self, wish: Wish, *, own: bool) -> None:
        """All ranks do now what one was asked for; ``own``: the wish of this rank is answered by that."""
        if own:
            self.wish, self.overdue = None, False
        at = "" if wish.rank == self._state.options.rank else f" at rank {wish.rank}"
        super().ask(wish.reason + at, wish.then, within=wish.within, code=wish.code)

    def give_signals_back(self, *, failed: bool) -> None:
        """As there; a wish that no batch came for was not heard either."""
        if self.wish is not None and self.pending is None:
            self.pending = self.wish
        super().give_signals_back(failed=failed)

    def due_at(self, step: int) -> bool:
        """Whether a generation of ``step`` is due on all ranks."""
        return self.pending is not None or self._due_by_steps(step)

    def _ask_by_rule(self, reason: str) -> None:
        super().ask(reason)

    def _let_go(self) -> None:
        """Nobody's wait is cut: ranks meet where they wait."""

    def _until_next(self) -> float | None:
        due, wish = super()._until_next(), self.wish
        if wish is None or wish.then != "stop" or self.overdue:
            return due
        left = max(wish.deadline - self._state.clock.now(), 0.0)
        return left if due is None else min(due, left)

    async def _ring(self) -> None:
        await super()._ring()
        wish, state = self.wish, self._state
        if wish is not None and wish.then == "stop" and not self.overdue and state.clock.now() >= wish.deadline:
            self.overdue = True
            if state.writer is not None:
                with suppress(ForebayError):  # kept by the writer, and raised by the next verb
                    await state.writer.sync()
            state.log.warning(events.CHECKPOINT_LATE, reason=wish.reason)

    async def unless_asked(self, wait: Callable[[], Awaitable[T]], *, stop_only: bool = False) -> tuple[T] | None:
        """Return what ``wait`` gives, or None if all ranks have agreed that something comes first."""
        try:
            return (await wait(),)
        except AnswerFirst:
            return None

"""Rewards of whole groups: members wait for each other, and are scored together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import msgspec

from pipeline.records import Rollout
from pipeline.runner.context import Context

_SCORED = "scored_with_its_group"


class _Seat(msgspec.Struct, frozen=True, eq=False):
    """A member that was played, and how its rollout is made once it has been scored."""

    ctx: Context
    state: Any
    made: Callable[[], Rollout]


class _Group:
    def __init__(self) -> None:
        self.seats: dict[int, _Seat] = {}
        self.rollouts: dict[int, Rollout] = {}
        self.ended = anyio.Event()
        self.error: Exception | None = None
        self.scoring = False


class Groups:
    """The groups of a task that are being played in this process.

    What members came to is kept for all of them before the first of them returns: whatever an interruption or a crash
    then cuts returns what it was given, since its siblings may have finished and would not be played again.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: dict[int, _Group] = {}

    def known(self, ctx: Context) -> Rollout | None:
        """Return what an interrupted attempt at this member had been scored with already."""
        partial = ctx.partial
        if partial is None or _SCORED not in partial.info:
            return None
        info = {name: each for name, each in partial.info.items() if name != _SCORED}
        return msgspec.structs.replace(partial, info=info)

    async def score(
        self,
        ctx: Context,
        state: Any,
        score: Callable[[Sequence[Any]], Awaitable[None]],
        made: Callable[[], Rollout],
    ) -> Rollout:
        """Wait until all members are here; return this one's rollout.

        Args:
            ctx: of the member's attempt.
            state: what it was played to.
            score: scores the states of all members, in the members' order.
            made: gives this member's rollout then.

        Raises:
            Exception: what ``score`` raised; every member raises it.
        """
        group = self._open.setdefault(ctx.uid, _Group())
        group.seats[ctx.member] = _Seat(ctx, state, made)
        try:
            while not group.ended.is_set():
                if len(group.seats) == self._size and not group.scoring:
                    await self._score(ctx.uid, group, score)
                else:
                    await group.ended.wait()
        finally:
            if not group.ended.is_set():  # cut: it is played again, and the others wait for that
                del group.seats[ctx.member]
                if not group.seats:
                    self._open.pop(ctx.uid, None)
        if group.error is not None:
            raise group.error
        return group.rollouts[ctx.member]

    async def _score(self, uid: int, group: _Group, score: Callable[[Sequence[Any]], Awaitable[None]]) -> None:
        """Score all members; if one of them was cut meanwhile, it comes to nothing and is done again later."""
        seats = dict(sorted(group.seats.items()))
        group.scoring = True
        try:
            await score([each.state for each in seats.values()])
        except Exception as error:
            group.error = error
        finally:
            group.scoring = False
        if group.error is None:
            if any(group.seats.get(member) is not each for member, each in seats.items()):
                return
            for member, seat in seats.items():
                rollout = group.rollouts[member] = seat.made()
                seat.ctx.save_partial(msgspec.structs.replace(rollout, info={**rollout.info, _SCORED: True}))
        del self._open[uid]
        group.ended.set()

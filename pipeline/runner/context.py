"""What a runner sees of its attempt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from pipeline.records import Item


class Slots(Protocol):
    """The part of a pool that a context uses to give its slot away for a while."""

    def give_slot(self, ctx: Context) -> None: ...

    async def take_slot(self, ctx: Context) -> None: ...


class Context:
    """One attempt: ``async def solve(item, ctx)``.

    Attributes:
        item: what to work on.
        member: the attempt's place in the group, from 0.
        attempt: which try at this member it is, from 1.
        version: version number of the weights in use when it started.
        resource: what the task's ``resource`` opened.
        deadline: time on the event loop's clock at which it is cut; infinity for none.
    """

    __slots__ = (
        "_failures",
        "_rng",
        "_run",
        "_seed",
        "_slots",
        "_version_now",
        "attempt",
        "deadline",
        "has_slot",
        "item",
        "member",
        "resource",
        "version",
    )

    def __init__(
        self,
        item: Item,
        member: int,
        attempt: int,
        version: int,
        *,
        failures: int = 0,
        seed: int = 0,
        run: str = "",
        version_now: Callable[[], int] | None = None,
        slots: Slots | None = None,
    ) -> None:
        self.item, self.member, self.attempt, self.version = item, member, attempt, version
        self.resource: Any = None
        self.deadline = float("inf")
        self.has_slot = True
        self._failures, self._seed, self._run = failures, seed, run
        self._version_now, self._slots = version_now, slots
        self._rng: np.random.Generator | None = None

    @property
    def uid(self) -> int:
        """The item's uid."""
        return self.item.uid

    @property
    def key(self) -> str:
        """A label for what this attempt makes outside: unique over all runs."""
        return f"{self._run}/{self.item.uid}/{self.member}/{self.attempt}"

    @property
    def rng(self) -> np.random.Generator:
        """A random stream of this member's own, keyed by (seed, uid, member, failures).

        An attempt that is cut by a crash starts again with the same stream; one after a failure gets another.
        """
        if self._rng is None:
            key = (self._seed % 2**64, self.item.uid, self.member, self._failures)
            self._rng = np.random.default_rng(key)
        return self._rng

    @property
    def version_changed(self) -> bool:
        """Whether the weights have been updated since this attempt started."""
        return self._version_now is not None and self._version_now() != self.version

    def scoring(self) -> AbstractAsyncContextManager[None]:
        """Give the slot back while a judge works; it is waited for again at the end.

        ::

            async with ctx.scoring():
                reward = await judge(reply)
        """
        return self._scoring()

    @asynccontextmanager
    async def _scoring(self) -> AsyncIterator[None]:
        if self._slots is None:
            yield
            return
        self._slots.give_slot(self)
        try:
            yield
        finally:
            await self._slots.take_slot(self)

"""Telling somebody of each generation, so that it can be copied elsewhere; beside everything else."""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec

from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import MANIFEST_FILE
from pipeline.observe import events
from pipeline.store.layout import RUN_FILE, Layout
from pipeline.store.service import RunBlocking
from pipeline.waiting import Signal
from pipeline.wiring.state import RunState


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that is on the disk.

    ``files`` are all that a resume of it needs, relative to ``directory``; copied to another folder, in any order, they
    are a run. A journal may grow meanwhile, which does no harm. Names are never used again for another content, so what
    was copied for an earlier generation, journals of the newest life and its last segment aside, need not be copied
    again.
    """

    directory: str
    generation: int
    step: int
    reason: str
    files: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """The files with the folder."""
        return [os.path.join(self.directory, name) for name in self.files]


OnCommit: TypeAlias = Callable[[Committed], Awaitable[None] | None]


def committed(layout: Layout, stored: Stored) -> Committed:
    """Return what is told of a generation."""
    manifest = stored.manifest
    own = os.path.relpath(stored.folder, layout.directory)
    names = [RUN_FILE, *(os.path.join(own, info.path) for info in manifest.files), os.path.join(own, MANIFEST_FILE)]
    journals = [layout.journal(each.incarnation, each.rank) for each in manifest.journals if each.bytes]
    segments = [os.path.join(layout.segments, info.name) for info in manifest.segments]
    names += [os.path.relpath(path, layout.directory) for path in [*journals, *segments]]
    return Committed(
        directory=layout.directory,
        generation=manifest.generation,
        step=manifest.step,
        reason=manifest.reason,
        files=tuple(names),
    )


class Sharing:
    """Calls ``on_commit`` for one generation at a time; of those that come meanwhile, the newest is next."""

    def __init__(self, state: RunState, layout: Layout, tell: OnCommit, in_thread: RunBlocking[Any]) -> None:
        self._state, self._layout, self._tell, self._in_thread = state, layout, tell, in_thread
        self._next: Stored | None = None
        self._now: Stored | None = None
        self._free = Signal()

    def held(self) -> frozenset[int]:
        """Return the numbers of the generations that are being told of: they are not removed meanwhile."""
        return frozenset(each.manifest.generation for each in (self._now, self._next) if each is not None)

    def add(self, stored: Stored) -> bool:
        """Let ``stored`` be told of. Returns whether :meth:`run` is to be started for it."""
        self._next = stored
        return self._now is None

    async def run(self) -> None:
        """Tell of what waits, until nothing does. An error is logged: the run does not hang on a copy."""
        try:
            while self._next is not None:
                self._now, self._next = self._next, None
                told = committed(self._layout, self._now)
                try:
                    await self._call(told)
                except Exception as error:
                    self._state.log.error(
                        events.GENERATION_UNSHARED, generation=told.generation, step=told.step, error=repr(error)
                    )
        finally:
            self.forget()

    def forget(self) -> None:
        """Nobody is told of what waits: the run has ended."""
        self._now = self._next = None
        self._free.notify()

    async def _call(self, told: Committed) -> None:
        if inspect.iscoroutinefunction(self._tell):
            await self._tell(told)
        else:
            answer = await self._in_thread(lambda: self._tell(told))
            if inspect.isawaitable(answer):
                await answer

    async def idle(self) -> None:
        """Wait until nothing is told of."""
        await self._free.wait_for(lambda: self._now is None and self._next is None)

"""What follows a commit: others are told, the disk is looked at, a sparse segment is emptied. Nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.checkpoint.generations import Stored
from pipeline.store.service import RunBlocking
from pipeline.wiring.compacting import Compactor
from pipeline.wiring.disk import DiskUse
from pipeline.wiring.folder import RunFolder
from pipeline.wiring.saving import Saver
from pipeline.wiring.sharing import OnCommit, Sharing
from pipeline.wiring.state import RunState

Spawn = Callable[..., bool]
"""Starts a task by (function, name, arguments); returns False if the run has ended."""


class AfterCommit:
    """The background work of a run with a folder. Nobody waits for it but the end of the run."""

    def __init__(
        self,
        state: RunState,
        folder: RunFolder,
        saver: Saver,
        disk: DiskUse,
        spawn: Spawn,
        in_thread: RunBlocking[Any],
        on_commit: OnCommit | None,
    ) -> None:
        self._state, self._disk, self._spawn = state, disk, spawn
        self._compactor = Compactor(state, folder.layout, folder.tag, in_thread)
        self._sharing = None if on_commit is None else Sharing(state, folder.layout, on_commit, in_thread)
        self.pump: Callable[[], None] = lambda: None
        """Lets attempts start, where there is room for them now."""
        saver.on_committed = self.committed
        if self._sharing is not None:
            saver.retention.held = self._sharing.held

    def committed(self, stored: Stored) -> None:
        """Begin what follows the commit of ``stored``."""
        sharing, compactor = self._sharing, self._compactor
        if sharing is not None and sharing.add(stored) and not self._spawn(sharing.run, "forebay on_commit"):
            sharing.forget()
        self._disk.looking = self._spawn(self._look, "forebay disk")
        key = compactor.sparsest(stored.manifest) if self._state.writing and not compactor.busy else None
        if key is not None:
            self._spawn(compactor.empty, "forebay compaction", key)

    async def _look(self) -> None:
        await self._disk.look()
        self.pump()

    async def idle(self) -> None:
        """Wait until everybody has been told; the rest may be cut at any time."""
        if self._sharing is not None:
            await self._sharing.idle()

"""The verbs of a pipeline that make generations, and what it does when a trigger asks for one.

:class:`~pipeline.Pipeline` has them by inheritance; they stand apart so that both read at one sitting.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from pipeline.checkpoint.triggers import CheckpointRequest, Then
from pipeline.errors import UsageError
from pipeline.wiring.run import Run
from pipeline.wiring.saving import Capture, Saving

T = TypeVar("T")


class SavingVerbs:
    """How a pipeline saves: when it is told to, or when a trigger asks."""

    _run: Run

    async def save(
        self, step: int, *, replay_buffer: bool = True, external: str | os.PathLike[str] | None = None
    ) -> Saving:
        """Commit a generation: the weights include every batch up to ``step``, which is acked in the same commit.

        Rollouts go on. Returns once the trainer's tensors have been read, so that they may change; the rest is written
        beside the trainer, and an error there is raised by the next verb (or by ``committed()`` of what is returned).
        Without a directory, it only acks.

        Args:
            step: the trainer's step.
            replay_buffer: False saves a list of what has not been trained instead of the rollouts: after a resume all
                of it is drawn again, oldest first. Such a generation needs neither journals nor segments.
            external: path of a checkpoint of the trainer's own, whole already, that the generation goes with. A resume
                says which it was, and is refused where it is gone.

        Raises:
            UsageError: ``step`` was never handed out, or something attached cannot be stored.
            WriteFailed: it could not be written; the generations before it stand, and a retry may work.
        """
        self._run.require_open()
        own = self._run.saves.check_external(external)
        return await self._save(step, "save", replay_buffer=replay_buffer, external=own)

    async def _save(self, step: int | None, reason: str, *, replay_buffer: bool = True, external: str = "") -> Saving:
        run = self._run
        if not await run.saves.acquire():
            assert step is not None
            request, saving = run.saves.memory_save(step)
        else:
            capture = None
            try:
                states = run.saves.capture_states()
                capture = run.saves.begin(step, reason, states, replay_buffer=replay_buffer, external=external)
                await run.in_thread(capture.write_trainer)
            except BaseException:
                run.saves.fail(capture)
                raise
            request, saving = capture.request, run.commit_later(capture)
        await self._leave(request, saving)
        return saving

    @asynccontextmanager
    async def checkpoint(self, step: int) -> AsyncIterator[str]:
        """Like ``save``, and the files that the body writes into the folder it gets are committed with the rest.

        ::

            async with pipe.checkpoint(step) as folder:
                dcp.save(state, checkpoint_id=folder)

        A body that raises commits nothing.

        Raises:
            UsageError: there is no directory, or ``step`` was never handed out.
            WriteFailed: it could not be written.
        """
        self._run.require_open()
        self._run.saves.own_files = True
        async with self._saving(step, "checkpoint") as capture:
            yield await self._run.in_thread(capture.own_folder)
        await self._leave(capture.request, capture.saving)

    @asynccontextmanager
    async def _saving(self, step: int | None, reason: str) -> AsyncIterator[Capture]:
        """A generation that is committed when the body ends well."""
        run, capture = self._run, None
        if not await run.saves.acquire():
            raise UsageError(f"{reason}() needs a directory")
        try:
            capture = run.saves.begin(step, reason, run.saves.capture_states())
            await run.in_thread(capture.write_trainer)
            try:
                yield capture
            except BaseException:
                capture.abandon()
                raise
        except BaseException:
            run.saves.fail(capture)
            raise
        try:
            await run.saves.commit(capture)
        except BaseException:
            run.triggers.give_back(capture.request)
            raise

    # -- when a trigger asks for a checkpoint ----------------------------------------------------------------------

    def request_save(self, reason: str = "request", *, then: Then = "continue", within: float | None = None) -> None:
        """Ask for a generation at the trainer's next verb that says what the weights hold; called from the loop.

        Requests that wait become one. So may signals, times and the file ``stop`` ask; see ``signals=``,
        ``save_every=``, ``save_every_s=`` and ``stop_at=``.

        Args:
            reason: stands in the log and the manifest.
            then: ``stop`` raises :class:`~pipeline.Stopped` in the trainer once it is committed.
            within: seconds until a stop is late: what the rollouts did is synced then, and the newest generation
                stands. Left out, ``grace_s=``.
        """
        self._run.require_open()
        self._run.triggers.ask(reason, then, within=within)

    def save_due(self, step: int) -> bool:
        """Whether a trigger asks for a generation, or will when ``step`` is acked.

        For trainers whose generations are made by ``checkpoint``: no trigger can write their files, so none makes a
        generation of its own.
        """
        self._run.triggers.hear()
        return self._run.triggers.due_at(step)

    async def _honour(self, *, known: bool = False, waits: bool = False) -> None:
        """Do what triggers ask for, if the weights are known.

        Raises:
            Stopped: they asked to stop.
        """
        run = self._run
        while (request := run.triggers.heard(known=known, waits=waits)) is not None:
            answer = run.saves.answer(request, known=run.triggers.known or known)
            if answer == "leave":
                return
            if answer == "save":
                await self._save(None, request.reason)
            else:
                await self._leave(run.triggers.take(), None)

    async def _leave(self, request: CheckpointRequest | None, saving: Saving | None) -> None:
        stopped = await self._run.saves.settle(request, saving)
        if stopped is not None:
            raise stopped

    async def _unless_asked(self, wait: Callable[[], Awaitable[T]], *, stop_only: bool = False) -> T:
        while True:
            await self._honour(waits=not stop_only)
            got = await self._run.triggers.unless_asked(wait, stop_only=stop_only)
            if got is not None:
                return got[0]

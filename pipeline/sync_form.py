"""The synchronous form: the same verbs, on an event loop in a thread of its own.

What touches the trainer's objects runs on the thread that calls the verb; everything else on the loop's thread.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from pipeline.buffer import Batch
from pipeline.checkpoint.trainer_state import load_states
from pipeline.checkpoint.triggers import CheckpointRequest, Then
from pipeline.errors import ClosedError, EndOfSource, ForebayError, Stopped, StoppedExit, TimedOut, UsageError
from pipeline.ledger import Ledger
from pipeline.records import Rollout
from pipeline.sampler import Progress
from pipeline.task import Task
from pipeline.wiring.checkpointing import Checkpointing
from pipeline.wiring.evaluations import Evaluation
from pipeline.wiring.experience import give_back
from pipeline.wiring.resuming import Resumed
from pipeline.wiring.saving import Capture, Saving
from pipeline.wiring.statistics import Statistics
from pipeline.wiring.weights import Running

if TYPE_CHECKING:
    from pipeline.pipeline import Pipeline
    from pipeline.serve.server import Serving

T = TypeVar("T")


class SyncSaving:
    """A generation that is being committed."""

    def __init__(self, saving: Saving, call: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
        self._saving, self._call = saving, call
        self.generation, self.step = saving.generation, saving.step

    def committed(self) -> None:
        """Return once it is on the disk.

        Raises:
            WriteFailed: it could not be written.
        """
        self._call(self._saving.committed)

    def __repr__(self) -> str:
        return f"SyncSaving(generation={self.generation}, step={self.step})"


class SyncServing:
    """A pipeline that is served. ``address`` is what ``connect`` takes instead of the run's folder."""

    def __init__(self, serving: Serving, call: Callable[..., Any]) -> None:
        self._serving, self._call = serving, call
        self.address, self.far_address = serving.address, serving.far_address

    def ended(self) -> bool:
        """See :meth:`pipeline.serve.Serving.ended`."""
        ended, stopped = self._call(_without_stop, self._serving.ended)
        if stopped is not None:
            raise StoppedExit(stopped.code, stopped.reason, stopped.step, stopped.generation)
        return bool(ended)


async def _without_stop(wait: Callable[[], Awaitable[T]]) -> tuple[T | None, Stopped | None]:
    try:  # Raised on the loop it would end that.
        return await wait(), None
    except Stopped as stopped:
        return None, stopped


class _Turn:
    """The right to make the next generation, for a verb that may be interrupted at any moment. All on the loop."""

    def __init__(self, saves: Checkpointing) -> None:
        self._saves = saves
        self._held = self._given_up = False

    async def take(self) -> bool:
        """Wait for the generation before. Returns whether there is a directory to save in."""
        held = await self._saves.acquire()
        if held and self._given_up:  # whoever waited for it was interrupted
            self._saves.fail(None)
        else:
            self._held = held
        return held

    def hand_on(self) -> None:
        """Leave the rest to the loop, which gives the turn back at its end."""
        self._held = False

    def give_up(self, capture: Capture | None) -> bool:
        """Give the turn back; return False if it was handed on."""
        self._given_up = True
        held, self._held = self._held, False
        if held:
            self._saves.fail(capture)
        return held


class SyncPipeline:
    """A :class:`~pipeline.Pipeline` for scripts that do not await. Use it with ``with``."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._run = pipe._run
        self._portal_context: AbstractContextManager[BlockingPortal] | None = None
        self._portal: BlockingPortal | None = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        self._run.triggers.take_signals()
        self._process = os.getpid()
        try:
            self._portal_context = start_blocking_portal("asyncio", name="forebay loop")
            self._portal = self._portal_context.__enter__()
            try:
                self._call(self._run.open)
            except BaseException:
                self._stop_loop()
                raise
        except BaseException:
            self._run.triggers.give_signals_back(failed=True)
            if self._run.pool is None:
                give_back(self._run.state)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._run.left_by = error
        try:
            self._close()
        except ForebayError:
            if error is None:
                raise
        finally:
            self._run.triggers.give_signals_back(failed=error is not None)

    def close(self) -> None:
        """Interrupt what runs, end the leases, write what is queued, free the folder, and end the thread. In a forked
        child it does nothing: all of that is the parent's.

        Raises:
            ForebayError: something failed in the background and no verb has raised it yet.
        """
        try:
            self._close()
        finally:
            self._run.triggers.give_signals_back(failed=False)

    def _close(self) -> None:
        if self._portal is None or os.getpid() != self._process:
            return
        try:
            self._do(self._run.no_more_verbs)
            self._call(self._run.close)
        finally:
            self._stop_loop()

    def _stop_loop(self) -> None:
        context, self._portal_context, self._portal = self._portal_context, None, None
        if context is not None:
            context.__exit__(None, None, None)

    def _call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function on the loop. If this thread is interrupted, so is the function."""
        future = self._opened().start_task_soon(function, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _do(self, function: Callable[..., T], *args: Any) -> T:
        """Run a plain function on the loop's thread: state changes nowhere else."""
        return self._opened().call(function, *args)

    def _opened(self) -> BlockingPortal:
        if self._portal is None:
            raise ClosedError("the pipeline is not open; use `with Pipeline(...).sync() as pipe:`")
        if os.getpid() != self._process:  # the loop's thread is not here: whoever called would wait for ever
            raise UsageError(
                f"this pipeline was opened by process {self._process}, of which this is a fork: use it there"
            )
        return self._portal

    # -- before the first rollout --------------------------------------------------------------------------------

    def attach(self, **objects: Any) -> None:
        """See :meth:`pipeline.Pipeline.attach`."""
        self._run.attach(objects)

    def resume(
        self,
        step: int | None = None,
        *,
        from_: str | os.PathLike[str] | None = None,
        external: str | os.PathLike[str] | None = None,
        restart: Sequence[str] = (),
        rebalance: bool = False,
    ) -> Resumed:
        """See :meth:`pipeline.Pipeline.resume`. Attached objects are loaded on this thread."""
        self._honour()
        how: dict[str, Any] = {"from_": from_, "external": external, "rebalance": rebalance}
        found = self._call(partial(self._run.find, step, restart, **how))
        if found is None:
            return Resumed()
        try:
            self._do(self._run.check_sources, found, restart)
            load_states(self._run.attached, found.states)
        except BaseException as error:
            self._run.not_resumed(error)
            raise
        resumed = self._call(self._run.take_over, found, restart)
        self._honour()
        return resumed

    def start(self, *, weights_current: bool = False) -> None:
        """See :meth:`pipeline.Pipeline.start`."""
        self._honour()
        if self._call(self._run.prepare_start, weights_current):
            saved = self._generation(None, "start", self._commit_now)
            assert saved is not None
            self._leave(*saved)
        self._honour()
        self._do(self._run.produce)

    # -- batches ---------------------------------------------------------------------------------------------------

    def get_batch(self, groups: int, *, timeout: float | None = None) -> Batch:
        """See :meth:`pipeline.Pipeline.get_batch`.

        Args:
            groups: how many groups the batch has.
            timeout: seconds to wait, where the asynchronous form has ``anyio.fail_after``; None: for ever.

        Raises:
            TimedOut: there is no batch yet; nothing was changed, and nothing is lost.
        """
        batch = self._unless_asked(lambda: self._batch_within(groups, timeout))
        batch._release = lambda step: self._do(self._run.consumer.release, step)
        return batch

    async def _batch_within(self, groups: int, seconds: float | None) -> Batch:
        with anyio.move_on_after(seconds):
            return await self._pipe._next_batch(groups)
        raise TimedOut(f"get_batch(groups={groups}): there is no such batch after {seconds:g} s; call it again")

    def sample(self, count: int, **how: Any) -> Any:
        """See :meth:`pipeline.Pipeline.sample`."""
        return self._unless_asked(lambda: self._pipe._next_sample(count, how))

    def batches(self, groups: int, *, until: int | None = None) -> Iterator[Batch]:
        """See :meth:`pipeline.Pipeline.batches`."""
        while until is None or self._do(lambda: self._run.state.ledger.next_step) <= until:
            try:
                batch = self.get_batch(groups)
            except EndOfSource:
                if until is None:
                    return
                raise
            yield batch
            self._do(self._run.ack_if_leased, batch)
            self._honour()

    def ack(self, step: int) -> None:
        """See :meth:`pipeline.Pipeline.ack`."""
        self._do(self._run.require_open)
        self._do(self._run.ack, step)
        self._honour(known=True)

    def release(self, batch: Batch) -> None:
        """Give a batch back untrained: its groups are buffered again."""
        batch.release()

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    @contextmanager
    def weight_update(self, version: int, running: Running | None = None) -> Iterator[None]:
        """See :meth:`pipeline.Pipeline.weight_update`."""
        self._do(self._run.require_open)
        self._unless_asked(lambda: self._run.weights.begin(version, running), stop_only=True)
        end = self._run.weights.end
        try:
            yield
        except BaseException as error:
            failure = error
            self._do(lambda: end(version, failure, failed=True))
            raise
        self._do(lambda: end(version, None, failed=False))

    @property
    def version(self) -> int:
        """Version of the weights that rollouts are made with."""
        return self._pipe.version

    def save(
        self, step: int, *, replay_buffer: bool = True, external: str | os.PathLike[str] | None = None
    ) -> SyncSaving:
        """See :meth:`pipeline.Pipeline.save`. The trainer's tensors are read on this thread."""
        self._do(self._run.require_open)
        own = self._run.saves.check_external(external)
        return self._save(step, "save", replay_buffer=replay_buffer, external=own)

    def _save(self, step: int | None, reason: str, *, replay_buffer: bool = True, external: str = "") -> SyncSaving:
        how = {"replay_buffer": replay_buffer, "external": external}
        saved = self._generation(step, reason, self._commit_later, **how)
        if saved is None:
            assert step is not None
            saved = self._do(self._run.saves.memory_save, step)
        self._leave(*saved)
        return SyncSaving(saved[1], self._call)

    def _generation(
        self, step: int | None, reason: str, commit: Callable[[_Turn, Capture], None], **how: Any
    ) -> tuple[CheckpointRequest | None, Saving] | None:
        """Begin a generation, write the trainer's part of it on this thread, and leave the rest to the loop. None
        without a directory. Interrupted before that, nothing of it stays."""
        saves, capture = self._run.saves, None
        turn = _Turn(saves)
        try:
            if not self._call(turn.take):
                return None
            states = saves.capture_states()
            capture = self._do(partial(saves.begin, step, reason, states, **how))
            capture.write_trainer()
            commit(turn, capture)
        except BaseException:
            if self._do(turn.give_up, capture) and capture is not None:
                capture.abandon()
            raise
        return capture.request, capture.saving

    def _commit_now(self, turn: _Turn, capture: Capture) -> None:
        async def commit() -> None:
            turn.hand_on()
            await self._run.saves.commit(capture)

        self._call(commit)

    def _commit_later(self, turn: _Turn, capture: Capture) -> None:
        def commit() -> None:
            turn.hand_on()
            self._run.commit_later(capture)

        self._do(commit)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[str]:
        """See :meth:`pipeline.Pipeline.checkpoint`."""
        self._do(self._run.require_open)
        self._run.saves.own_files = True
        context = self._pipe._saving(step, "checkpoint")
        capture = self._call(context.__aenter__)
        try:
            yield capture.own_folder()
        except BaseException as error:
            self._call(context.__aexit__, type(error), error, error.__traceback__)
            raise
        self._call(context.__aexit__, None, None, None)
        self._leave(capture.request, capture.saving)

    # -- when a trigger asks for a checkpoint ----------------------------------------------------------------------

    def request_save(self, reason: str = "request", *, then: Then = "continue", within: float | None = None) -> None:
        """See :meth:`pipeline.Pipeline.request_save`. May be called from any thread."""
        self._do(partial(self._pipe.request_save, reason, then=then, within=within))

    def save_due(self, step: int) -> bool:
        """See :meth:`pipeline.Pipeline.save_due`."""
        return self._do(self._pipe.save_due, step)

    def _honour(self, *, known: bool = False, waits: bool = False) -> None:
        run = self._run
        if self._portal is None or (run.triggers.pending is None and not run.triggers.unheard):
            return
        while (request := self._do(partial(run.triggers.heard, known=known, waits=waits))) is not None:
            answer = run.saves.answer(request, known=run.triggers.known or known)
            if answer == "leave":
                return
            if answer == "save":
                self._save(None, request.reason)
            else:
                self._leave(self._do(run.triggers.take), None)

    def _leave(self, request: CheckpointRequest | None, saving: Saving | None) -> None:
        # Raised here and not on the loop, which it would end.
        stopped = self._call(self._run.saves.settle, request, saving)
        if stopped is not None:
            raise StoppedExit(stopped.code, stopped.reason, stopped.step, stopped.generation)

    def _unless_asked(self, wait: Callable[[], Awaitable[T]], *, stop_only: bool = False) -> T:
        while True:
            self._honour(waits=not stop_only)
            got = self._call(partial(self._run.triggers.unless_asked, wait, stop_only=stop_only))
            if got is not None:
                return got[0]

    # -- not only training -----------------------------------------------------------------------------------------

    def reward(self, uid: int, value: float, member: int = 0, *, attempt: int | None = None) -> None:
        """See :meth:`pipeline.Pipeline.reward`."""
        self._call(lambda: self._pipe.reward(uid, value, member, attempt=attempt))

    def discard(self, uid: int) -> None:
        """See :meth:`pipeline.Pipeline.discard`."""
        self._call(self._pipe.discard, uid)

    def submit(self, task: Task | str, content: Any) -> int:
        """See :meth:`pipeline.Pipeline.submit`."""
        return self._call(self._pipe.submit, task, content)

    def put(self, task: Task | str, rollouts: Rollout | Sequence[Rollout], content: Any = None) -> int:
        """See :meth:`pipeline.Pipeline.put`."""
        return self._call(self._pipe.put, task, rollouts, content)

    def set_share(self, task: Task | str, share: float) -> None:
        """See :meth:`pipeline.Pipeline.set_share`."""
        self._call(self._pipe.set_share, task, share)

    def evaluate(
        self,
        task: Task | str,
        version: int | None = None,
        *,
        items: int | Sequence[int] | None = None,
        samples: int = 1,
    ) -> Evaluation:
        """See :meth:`pipeline.Pipeline.evaluate`."""
        evaluate = self._run.evaluate
        return self._unless_asked(lambda: evaluate(task, version, items, samples), stop_only=True)

    def serve(self, *, via: Literal["ray"] | None = None, name: str | None = None) -> SyncServing:
        """See :meth:`pipeline.Pipeline.serve`."""
        return SyncServing(self._call(partial(self._pipe.serve, via=via, name=name)), self._call)

    # -- seeing ----------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """See :attr:`pipeline.Pipeline.progress`."""
        return self._do(lambda: self._pipe.progress)

    @property
    def ledger(self) -> Ledger:
        """See :attr:`pipeline.Pipeline.ledger`."""
        return self._pipe.ledger

    def statistics(self) -> Statistics:
        """See :meth:`pipeline.Pipeline.statistics`."""
        return self._do(self._pipe.statistics)

    def metrics(self) -> dict[str, float]:
        """See :meth:`pipeline.Pipeline.metrics`."""
        return self._do(self._pipe.metrics)

    @staticmethod
    def try_one(task: Any, index: int = 0, *, seed: int = 0, version: int = 0, engine: Any = None) -> Any:
        """See :meth:`pipeline.Pipeline.try_one`."""
        from pipeline.pipeline import Pipeline

        return anyio.run(lambda: Pipeline.try_one(task, index, seed=seed, version=version, engine=engine))

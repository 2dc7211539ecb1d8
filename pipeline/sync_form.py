"""The synchronous form: the same verbs, on an event loop in a thread of its own.

What touches the trainer's objects runs on the thread that calls the verb; everything else on the loop's thread.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from pipeline.buffer import Batch
from pipeline.errors import ClosedError, EndOfSource, ForebayError
from pipeline.ledger import Ledger
from pipeline.records import Rollout
from pipeline.sampler import Progress
from pipeline.task import Task
from pipeline.wiring.evaluations import Evaluation
from pipeline.wiring.resuming import Resumed
from pipeline.wiring.saving import Saving
from pipeline.wiring.statistics import Statistics
from pipeline.wiring.weights import Running

if TYPE_CHECKING:
    from pipeline.pipeline import Pipeline

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


class SyncPipeline:
    """A :class:`~pipeline.Pipeline` for scripts that do not await. Use it with ``with``."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._run = pipe._run
        self._portal_context: AbstractContextManager[BlockingPortal] | None = None
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        self._portal_context = start_blocking_portal("asyncio", name="forebay loop")
        self._portal = self._portal_context.__enter__()
        try:
            self._call(self._run.open)
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.close()
        except ForebayError:
            if exc[1] is None:
                raise

    def close(self) -> None:
        """Interrupt what runs, end the leases, write what is queued, free the folder, and end the thread.

        Raises:
            ForebayError: something failed in the background and no verb has raised it yet.
        """
        if self._portal is None:
            return
        try:
            self._call(self._run.close)
        finally:
            self._stop_loop()

    def _stop_loop(self) -> None:
        context, self._portal_context, self._portal = self._portal_context, None, None
        if context is not None:
            context.__exit__(None, None, None)

    def _call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function on the loop. If this thread is interrupted, so is the function."""
        if self._portal is None:
            raise ClosedError("the pipeline is not open; use `with Pipeline(...).sync() as pipe:`")
        future = self._portal.start_task_soon(function, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _do(self, function: Callable[..., T], *args: Any) -> T:
        """Run a plain function on the loop's thread: state changes nowhere else."""
        if self._portal is None:
            raise ClosedError("the pipeline is not open; use `with Pipeline(...).sync() as pipe:`")
        return self._portal.call(function, *args)

    # -- before the first rollout --------------------------------------------------------------------------------

    def attach(self, **objects: Any) -> None:
        """See :meth:`pipeline.Pipeline.attach`."""
        self._run.attach(objects)

    def resume(
        self, step: int | None = None, *, from_: str | os.PathLike[str] | None = None, restart: Sequence[str] = ()
    ) -> Resumed:
        """See :meth:`pipeline.Pipeline.resume`. Attached objects are loaded on this thread."""
        found = self._call(self._run.find, step, restart, None if from_ is None else os.fspath(from_))
        if found is None:
            return Resumed()
        self._do(self._run.check_sources, found, restart)
        for name, each in self._run.attached.items():
            each.load_state_dict(found.recovered.states[name])
        return self._call(self._run.take_over, found, restart)

    def start(self, *, weights_current: bool = False) -> None:
        """See :meth:`pipeline.Pipeline.start`."""
        if self._call(self._run.prepare_start, weights_current) and self._call(self._run.acquire_saver):
            try:
                capture = self._do(self._run.begin_first, self._run.capture_states())
                self._run.write_trainer(capture)
            except BaseException:
                self._do(self._run.release_saver)
                raise
            self._call(self._run.commit, capture)
        self._do(self._run.produce)

    # -- batches ---------------------------------------------------------------------------------------------------

    def get_batch(self, groups: int) -> Batch:
        """See :meth:`pipeline.Pipeline.get_batch`."""
        batch = self._call(self._pipe.get_batch, groups)
        batch._release = lambda step: self._do(self._run.consumer.release, step)
        return batch

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
            self._do(self._pipe._ack_if_leased, batch)

    def ack(self, step: int) -> None:
        """See :meth:`pipeline.Pipeline.ack`."""
        self._call(self._pipe.ack, step)

    def release(self, batch: Batch) -> None:
        """Give a batch back untrained: its groups are buffered again."""
        batch.release()

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    @contextmanager
    def weight_update(self, version: int, running: Running | None = None) -> Iterator[None]:
        """See :meth:`pipeline.Pipeline.weight_update`."""
        self._do(self._run.require_open)
        self._call(self._run.weights.begin, version, running)
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

    def save(self, step: int, *, replay_buffer: bool = True) -> SyncSaving:
        """See :meth:`pipeline.Pipeline.save`. The trainer's tensors are read on this thread."""
        if not self._call(self._run.acquire_saver):
            return SyncSaving(self._do(self._run.memory_save, step), self._call)
        try:
            states = self._run.capture_states()
            capture = self._do(partial(self._run.begin_save, step, "save", states, replay_buffer=replay_buffer))
            self._run.write_trainer(capture)
        except BaseException:
            self._do(self._run.release_saver)
            raise
        return SyncSaving(self._do(self._run.commit_later, capture), self._call)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[str]:
        """See :meth:`pipeline.Pipeline.checkpoint`."""
        context = self._pipe.checkpoint(step)
        folder = self._call(context.__aenter__)
        try:
            yield folder
        except BaseException as error:
            self._call(context.__aexit__, type(error), error, error.__traceback__)
            raise
        self._call(context.__aexit__, None, None, None)

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
        return self._call(lambda: self._pipe.evaluate(task, version, items=items, samples=samples))

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
    def try_one(task: Any, index: int = 0, *, seed: int = 0, version: int = 0) -> Any:
        """See :meth:`pipeline.Pipeline.try_one`."""
        from pipeline.pipeline import Pipeline

        return anyio.run(lambda: Pipeline.try_one(task, index, seed=seed, version=version))

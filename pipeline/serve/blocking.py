"""A served pipeline for scripts that do not await: the client's verbs, on a loop in a thread of its own."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from pipeline.buffer import Batch
from pipeline.checkpoint.triggers import Then
from pipeline.errors import ClosedError, EndOfSource, Stopped, StoppedExit, UsageError
from pipeline.records import Rollout
from pipeline.sampler import Progress
from pipeline.serve.client import Client, Joined, RemoteSaving
from pipeline.task import Task
from pipeline.wiring.evaluations import Evaluation
from pipeline.wiring.resuming import Resumed
from pipeline.wiring.statistics import Statistics
from pipeline.wiring.weights import Running

T = TypeVar("T")


class SyncRemoteSaving:
    """A generation that the producer commits."""

    def __init__(self, saving: RemoteSaving, call: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
        self._saving, self._call = saving, call
        self.generation, self.step = saving.generation, saving.step

    def committed(self) -> None:
        """Return once it is on the disk.

        Raises:
            WriteFailed: it could not be written.
        """
        self._call(self._saving.committed)


class SyncClient:
    """A :class:`~pipeline.serve.Client` for scripts that do not await. Use it with ``with``."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._portal_context: AbstractContextManager[BlockingPortal] | None = None
        self._portal: BlockingPortal | None = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        self._process = os.getpid()
        self._portal_context = start_blocking_portal("asyncio", name="forebay client")
        self._portal = self._portal_context.__enter__()
        try:
            self._call(self._client.open)
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._close(failed=exc[1] is not None)

    def close(self) -> None:
        """Give back what is leased, and end the connection. In a forked child it does nothing."""
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        if self._portal is None or os.getpid() != self._process:
            return
        try:
            self._call(partial(self._client.aclose, failed=failed))
        finally:
            self._stop_loop()

    def _stop_loop(self) -> None:
        context, self._portal_context, self._portal = self._portal_context, None, None
        if context is not None:
            context.__exit__(None, None, None)

    def _call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function on the loop. If this thread is interrupted, so is the function."""
        future = self._opened().start_task_soon(partial(_told, function), *args)
        try:
            result = future.result()
        except BaseException:
            future.cancel()
            raise
        if isinstance(result, _Stop):
            stopped = result.stopped
            raise StoppedExit(stopped.code, stopped.reason, stopped.step, stopped.generation)
        return result

    def _opened(self) -> BlockingPortal:
        if self._portal is None:
            raise ClosedError("the client is not open; use `with connect(run).sync() as pipe:`")
        if os.getpid() != self._process:  # the loop's thread is not here: whoever called would wait for ever
            raise UsageError(
                f"this client was opened by process {self._process}, and this is a fork of it: use it there"
            )
        return self._portal

    @property
    def joined(self) -> Joined:
        """What the run told when this client came."""
        return self._client.joined

    # -- before the first rollout ------------------------------------------------------------------------------------

    def resume(
        self,
        step: int | None = None,
        *,
        from_: str | os.PathLike[str] | None = None,
        external: str | os.PathLike[str] | None = None,
        restart: Sequence[str] = (),
    ) -> Resumed:
        """See :meth:`pipeline.Pipeline.resume`; what is attached there is loaded there."""
        return self._call(partial(self._client.resume, step, from_=from_, external=external, restart=restart))

    def start(self, *, weights_current: bool = False) -> None:
        """See :meth:`pipeline.Pipeline.start`."""
        self._call(partial(self._client.start, weights_current=weights_current))

    # -- batches -----------------------------------------------------------------------------------------------------

    def get_batch(self, groups: int) -> Batch:
        """See :meth:`pipeline.Pipeline.get_batch`. With ``part=``, this client's share of it."""
        batch = self._get_batch(groups, None)
        assert batch is not None
        return batch

    def _get_batch(self, groups: int, until: int | None) -> Batch | None:
        batch = self._call(self._client._get_batch, groups, until)
        if batch is not None:
            release = batch._release
            batch._release = lambda step: self._opened().call(release, step)
        return batch

    def batches(self, groups: int, *, until: int | None = None) -> Iterator[Batch]:
        """See :meth:`pipeline.Pipeline.batches`."""
        while True:
            try:
                batch = self._get_batch(groups, until)
            except EndOfSource:
                if until is None:
                    return
                raise
            if batch is None:
                return
            yield batch
            if not batch.released:
                self._call(partial(self._client._ask, "ack", step=batch.step, if_leased=True))

    def ack(self, step: int) -> None:
        """See :meth:`pipeline.Pipeline.ack`."""
        self._call(self._client.ack, step)

    def release(self, batch: Batch) -> None:
        """Give a batch back untrained: its groups are buffered again."""
        batch.release()

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    @contextmanager
    def weight_update(self, version: int, running: Running | None = None) -> Iterator[None]:
        """See :meth:`pipeline.Pipeline.weight_update`. If this process ends in the body, that is a failed push."""
        with self._body(self._client.weight_update(version, running)):
            yield

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[str]:
        """See :meth:`pipeline.Pipeline.checkpoint`: the trainer's own files are committed with the run."""
        with self._body(self._client.checkpoint(step)) as folder:
            yield folder

    @contextmanager
    def _body(self, context: Any) -> Iterator[Any]:
        entered = self._call(context.__aenter__)
        try:
            yield entered
        except BaseException as error:
            self._call(context.__aexit__, type(error), error, error.__traceback__)
            raise
        self._call(context.__aexit__, None, None, None)

    @property
    def version(self) -> int:
        """Version of the weights that rollouts are made with, as of the last answer."""
        return self._client.version

    def save(
        self, step: int, *, replay_buffer: bool = True, external: str | os.PathLike[str] | None = None
    ) -> SyncRemoteSaving:
        """See :meth:`Client.save`."""
        saving = self._call(partial(self._client.save, step, replay_buffer=replay_buffer, external=external))
        return SyncRemoteSaving(saving, self._call)

    def request_save(self, reason: str = "request", *, then: Then = "continue", within: float | None = None) -> None:
        """See :meth:`pipeline.Pipeline.request_save`."""
        self._call(partial(self._client.request_save, reason, then=then, within=within))

    def save_due(self, step: int) -> bool:
        """See :meth:`pipeline.Pipeline.save_due`."""
        return self._call(self._client.save_due, step)

    # -- not only training -------------------------------------------------------------------------------------------

    def reward(self, uid: int, value: float, member: int = 0, *, attempt: int | None = None) -> None:
        """See :meth:`pipeline.Pipeline.reward`."""
        self._call(partial(self._client.reward, uid, value, member, attempt=attempt))

    def discard(self, uid: int) -> None:
        """See :meth:`pipeline.Pipeline.discard`."""
        self._call(self._client.discard, uid)

    def submit(self, task: Task | str, content: Any) -> int:
        """See :meth:`pipeline.Pipeline.submit`."""
        return self._call(self._client.submit, task, content)

    def put(self, task: Task | str, rollouts: Rollout | Sequence[Rollout], content: Any = None) -> int:
        """See :meth:`pipeline.Pipeline.put`."""
        return self._call(self._client.put, task, rollouts, content)

    def set_share(self, task: Task | str, share: float) -> None:
        """See :meth:`pipeline.Pipeline.set_share`."""
        self._call(self._client.set_share, task, share)

    def evaluate(
        self,
        task: Task | str,
        version: int | None = None,
        *,
        items: int | Sequence[int] | None = None,
        samples: int = 1,
    ) -> Evaluation:
        """See :meth:`pipeline.Pipeline.evaluate`."""
        return self._call(partial(self._client.evaluate, task, version, items=items, samples=samples))

    # -- seeing ------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far the run is: a copy."""
        return self._call(self._client.progress)

    def statistics(self) -> Statistics:
        """See :meth:`pipeline.Pipeline.statistics`."""
        return self._call(self._client.statistics)

    def metrics(self) -> dict[str, float]:
        """See :meth:`pipeline.Pipeline.metrics`."""
        return dict(self._call(self._client.metrics))


class _Stop:
    def __init__(self, stopped: Stopped) -> None:
        self.stopped = stopped


async def _told(function: Callable[..., Awaitable[T]], *args: Any) -> T | _Stop:
    try:
        return await function(*args)
    except Stopped as stopped:  # raised on the loop, it would end that
        return _Stop(stopped)

"""A run: every component, wired, with the verbs in pieces that both forms of the pipeline use.

The pieces that touch the trainer's objects (``state_dict``, ``load_state_dict``, writing their tensors) are synchronous
and belong to the trainer's thread; the rest belongs to the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from pipeline.buffer import Batch
from pipeline.checkpoint.trainer_state import check_attachable
from pipeline.clock import running_clock
from pipeline.config import PipelineOptions
from pipeline.errors import ClosedError, ConfigError, StoreError, UsageError
from pipeline.interfaces import Engine
from pipeline.observe import Watchdog, events
from pipeline.records import Opened
from pipeline.runner.pool import Pool
from pipeline.store.files import FilesLike, OsFiles
from pipeline.store.segments import PayloadReader
from pipeline.store.service import WriterService
from pipeline.supervisor import Supervisor, root_cause
from pipeline.task import StreamSource, Task
from pipeline.wiring.after_commit import AfterCommit
from pipeline.wiring.checkpointing import Checkpointing
from pipeline.wiring.collecting import sync_dead_lives
from pipeline.wiring.controlling import Controlling
from pipeline.wiring.disk import DiskUse
from pipeline.wiring.evaluating import check_evaluation, examine
from pipeline.wiring.evaluations import Evaluation
from pipeline.wiring.experience import Experience
from pipeline.wiring.feed import Feed
from pipeline.wiring.kinds import Parts
from pipeline.wiring.life_end import ended
from pipeline.wiring.outside import Outside, StreamFeed
from pipeline.wiring.pacing import Pacing
from pipeline.wiring.producing import Producer
from pipeline.wiring.resuming import (
    Found,
    Origin,
    Resumed,
    adopt,
    check_fork,
    check_sources,
    describe,
    find_to_resume,
    fork,
    load_for_filters,
    opening,
    settle,
)
from pipeline.wiring.saving import OWN_FILES, Capture, Saving, link_trainer
from pipeline.wiring.sharing import OnCommit
from pipeline.wiring.state import RunState
from pipeline.wiring.weights import Weights

T = TypeVar("T")


class Run:
    """The parts of a pipeline from opening to closing."""

    _parts = Parts()

    def __init__(
        self,
        tasks: Sequence[Task],
        options: PipelineOptions,
        *,
        files: FilesLike | None = None,
        engine: Engine,
        inline: bool | Literal["eager"] = False,
        on_commit: OnCommit | None = None,
        feed: Feed | None = None,
    ) -> None:
        self.options = options
        self.state = RunState(tasks, options)
        if feed is not None:
            self.state.experience = Experience(feed, self.state)
            self.state.ledger.free_steps = True
        self.producer = Producer(self.state)
        self.consumer = self._parts.consumer(self.state, self.producer, self._the_pool, self.in_thread)
        self.outside = self._parts.outside(self.state, self.producer, self._the_pool)
        # In draw order pacing the starts is enough: a batch waits for its groups anyway.
        waits = options.staleness_policy == "wait" and not options.in_draw_order
        self.producer.pacing = self.consumer.pacing = Pacing(self.state) if waits else None
        self.weights = Weights(self.state, self.producer, self._the_pool, self.producer.pacing)
        self.started = False
        self._files = files or OsFiles()
        self._engine = engine
        self.inline, self._eager = bool(inline), inline == "eager"
        folder = self._folder = (
            self._parts.folder(options.directory, self._files) if options.directory is not None else None
        )
        self._saver = self._parts.saver(self.state, self._files, folder.layout, self.in_thread) if folder else None
        stop_file = folder.layout.stop_file if folder else None
        self.triggers = self._parts.triggers(self.state, stop_file, inline=self.inline)
        self.triggers.on_stop = self.weights.hurry
        self.saves = Checkpointing(self.state, self.consumer, self._saver, self.triggers, self.in_thread, stop_file)
        self.control = Controlling(self.state, self.triggers, self._saver, inline=self.inline)
        self.attached = self.saves.attached
        self.left_by: BaseException | None = None  # what the script's body was left by
        self._half_resumed = False
        self._supervisor: Supervisor | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._pool: Pool | None = None
        self._on_commit = on_commit
        self._after: AfterCommit | None = None

    # -- opening and closing -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the folder's lock and start the supervisor. Nothing is produced yet."""
        if self._supervisor is not None:
            raise UsageError("this pipeline was opened before; make a new one")
        self.state.clock = running_clock()
        self._supervisor = Supervisor("forebay supervisor")
        folder = self._folder
        if folder is not None:
            await self.in_thread(folder.open)
            self.state.run_id, self.state.incarnation = folder.run_id, folder.incarnation
            self.state.context.update(run=folder.run_id[:8], incarnation=folder.incarnation)
            self.consumer.reader = PayloadReader(folder.layout, folder.tag)
            assert self._saver is not None
            self._saver.next_generation = folder.next_generation
            self._saver.keep_lock = folder.keep
            disk = self.producer.disk = DiskUse(self.state, folder.layout, self.in_thread)
            disk.ask, disk.relief = self.triggers.ask, self.saves.is_about_to_save
            self._after = AfterCommit(
                self.state, folder, self._saver, disk, self._spawn, self.in_thread, self._on_commit
            )
            self._after.pump = self._pump
        try:
            await self.control.begin(folder, self.in_thread)
            await self._supervisor.start(self._body)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self.control.close(self.in_thread, error)
            if folder is not None:
                folder.release()
            raise

    async def _body(self, ready: Callable[[], None]) -> None:
        """The supervisor's task: everything that runs, nested so that it ends in the right order."""
        assert self._supervisor is not None
        options = self.options
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self.control.hearing())
                if options.watchdog is not None and not self.inline:
                    await stack.enter_async_context(Watchdog(options.watchdog))
                async with anyio.create_task_group() as group:
                    self._group = group
                    async with self._engine:
                        pool = Pool(
                            self.producer, self._engine, concurrency=options.concurrency, now=self.state.clock.now
                        )
                        async with pool:
                            self._pool = pool
                            self.producer.open(pool)
                            self.triggers.begin(group)
                            ready()
                            await self._supervisor.stopping.wait()
                    if self._saver is not None:
                        await self._saver.idle()
                    if self._after is not None:
                        await self._after.idle()
                    group.cancel_scope.cancel("the pipeline is closed")
        except Exception as error:
            self.state.log.error(events.RUN_FAILED, error=repr(root_cause(error)))
            self.state.fail(root_cause(error))
            raise
        finally:
            # However the run ended: the journal is sealed and the lock is free.
            with anyio.CancelScope(shield=True):
                await self._seal()

    def _pump(self) -> None:
        if not self.producer.paused and self._pool is not None:
            self._pool.pump()

    async def _seal(self) -> None:
        self.producer.paused = True
        self.consumer.closed = self.state.ended = True
        self.state.changed.notify()
        try:
            if self.state.writer is not None:
                writer = self.state.writer
                if writer.writer.error is None and (self.state.writing or self.options.durability != "none"):
                    error = self.state.failure or self.left_by
                    self.state.record(ended(self.state.clock.wall(), error, self.saves.stopped_by))
                    await writer.close()
                else:
                    await self.in_thread(writer.writer.close)
        finally:
            await self.control.close(self.in_thread, self.state.failure)
            self.left_by = None  # it holds the script's frames
            if self._folder is not None:
                self._folder.release()
            self.state.log.info(events.RUN_CLOSED, step=self.state.ledger.step)

    async def close(self) -> None:
        """Interrupt what runs, write what is queued, free the lock. Leases end; calling it again does nothing.

        Raises:
            ForebayError: writing failed, or the run had failed and nobody was told yet.
        """
        supervisor = self._supervisor
        if supervisor is None:
            return
        first = not supervisor.stopping.is_set()
        self.producer.paused = True
        self.consumer.release_all()
        await supervisor.stop()
        for error in (supervisor.error, self.state.failure):
            if first and error is not None and not (self.state.told and error is self.state.failure):
                raise error
        if first and self._saver is not None:
            self._saver.raise_failed()

    def no_more_verbs(self) -> None:
        """Note that the trainer's thread calls no verb any more, and that one which was interrupted will not go on."""
        if self._saver is not None:
            self._saver.no_more_verbs = True

    # -- attach, resume, start -----------------------------------------------------------------------------------

    def attach(self, objects: dict[str, Any]) -> None:
        """Add what is to be saved and restored with the run."""
        if self.started:
            raise UsageError("attach() comes before start(): every generation holds the same objects")
        check_attachable(objects)
        self.attached.update(objects)

    def require_open(self) -> None:
        """Raise unless the pipeline is open and healthy."""
        if self._supervisor is None:
            raise ClosedError("the pipeline is not open; use `async with Pipeline(...) as pipe:`")
        if self.consumer.closed and not self._supervisor.stopping.is_set():
            self.consumer.raise_failure()
        if self.consumer.closed or self._supervisor.stopping.is_set():
            raise ClosedError("the pipeline is closed; make a new one to go on")
        if self._half_resumed:
            raise UsageError("resume() failed in its midst: make another pipeline, and resume() that one")
        if self._saver is not None:
            self._saver.raise_failed()

    async def find(
        self,
        step: int | None,
        restart: Sequence[str],
        *,
        from_: str | os.PathLike[str] | None = None,
        external: str | os.PathLike[str] | None = None,
        rebalance: bool = False,
    ) -> Found | None:
        """Read and check the generation to resume and what came after it. Changes nothing.

        Returns:
            None in an empty directory, or without one.
        """
        self.require_open()
        if self.started or self.state.writer is not None:
            raise UsageError("resume() comes once, before start()")
        if unknown := set(restart) - set(self.state.tasks):
            raise ConfigError.of("restart", sorted(unknown), f"the run's tasks are {', '.join(self.state.tasks)}")
        folder = self._folder
        if from_ is not None:
            check_fork(self.state, os.fspath(from_), free=folder is not None and not folder.used)
        if folder is None or (from_ is None and not folder.used):
            if step is not None or external is not None:
                asked = f"resume(step={step}, external={external})"
                raise StoreError(f"{asked}: {self.options.directory or 'memory'} holds no generation")
            return None

        def look() -> Found:
            own = Origin(folder.layout, folder.run_id, folder.tag, False)
            origin = own if from_ is None else Origin.other(os.fspath(from_))
            return self._look(origin, step, None if external is None else os.fspath(external), restart, rebalance)

        return await self.in_thread(look)

    def _look(
        self, origin: Origin, step: int | None, external: str | None, restart: Sequence[str], rebalance: bool
    ) -> Found:
        if rebalance:
            raise UsageError("resume(rebalance=True) is for a pipeline with ranks=")
        return find_to_resume(self.state, origin, step, list(self.attached), external)

    def check_sources(self, found: Found, restart: Sequence[str]) -> None:
        """Refuse another source than the run's, before anything is changed."""
        check_sources(self.state, found, restart)

    def not_resumed(self, error: BaseException) -> None:
        """Take in that what was found is not taken over."""

    async def _all_are_here(self) -> None:
        """Wait until who has the run together with this process is as far."""

    async def take_over(self, found: Found, restart: Sequence[str]) -> Resumed:
        """Put a checked generation in use, and commit a new one at once: old files are never changed."""
        state, saver = self.state, self._saver
        assert saver is not None
        await self._all_are_here()
        self._half_resumed = True
        writer = await self._open_writer(found.opened, apply=False)
        found = await self._bring(found, writer)
        await self._all_are_here()
        adopt(state, found)
        self.weights.require_update(state.version)
        if found.recovered.inherited is not None:  # folded already, as the event before it
            writer.writer.append(found.recovered.inherited)
            for told in found.recovered.feedback:
                writer.writer.append(told)
            for part in found.recovered.parts:
                writer.writer.append(part)
        settle(state, restart)
        assert self.consumer.reader is not None
        await load_for_filters(state, self.consumer.reader, self.in_thread)
        self.producer.requeue_all()
        saver.parent = -1 if found.origin.forked else found.stored.manifest.generation
        saver.journals, saver.reclaimed = found.recovered.positions, found.stored.manifest.reclaimed
        saver.base = found.stored.manifest.base if found.recovered.inherited is None else state.incarnation
        self._half_resumed = False  # all of it is in use; what start() finds is committed then, if it is not now
        await saver.acquire()
        capture, since = None, found.stored.manifest.incarnation
        try:
            if not found.origin.forked:
                await self.in_thread(
                    lambda: sync_dead_lives(found.origin.layout, self._files, since, state.incarnation)
                )
            capture = saver.begin("fork" if found.origin.forked else "resume", [], list(self.attached))
            external = found.stored.manifest.external
            capture.manifest = msgspec.structs.replace(capture.manifest, origin=found.opened.origin, external=external)
            link_trainer(capture, found.stored)
            await self.in_thread(capture.write_trainer)
        except BaseException:
            if capture is not None:
                capture.let_rows_go()
            saver.release()
            raise
        await saver.finish(capture)
        self.triggers.saved(state.ledger.step)
        self.saves.answer_by_newest(stops=False)
        own = (info.path.startswith(OWN_FILES + "/") for info in found.stored.manifest.files)
        self.saves.own_files = bool(external) or any(own)
        resumed = describe(state, found)
        state.log.info(events.RUN_RECOVERED, events=found.recovered.events, **msgspec.structs.asdict(resumed))
        return resumed

    async def _bring(self, found: Found, writer: WriterService) -> Found:
        """Bring what this run's own files need into them."""
        return await fork(self.state, found, writer, self.in_thread) if found.origin.forked else found

    async def _open_writer(self, opened: Opened, *, apply: bool) -> WriterService:
        """Begin this incarnation's journal. Its first event was folded already when ``apply`` is false."""
        folder, options = self._folder, self.options
        assert folder is not None
        writer = await self.in_thread(lambda: folder.writer(opened.incarnation, options))
        synced = options.durability == "power"
        self.state.writer = WriterService(writer, synced=synced, inline=self.inline, eager=self._eager)
        self.state.writing = options.durability != "none"
        writer.append(opened)
        if apply:
            self.state.apply(opened)
        if self.state.writing:
            self._spawn(self.state.writer.run, "forebay writer")
        if synced:
            self._spawn(self.state.writer.keep_synced, "forebay syncing")
        self.state.log.info(events.RUN_OPENED, directory=options.directory, generation=opened.generation)
        return self.state.writer

    async def prepare_start(self, weights_current: bool) -> bool:
        """First half of ``start``. Returns whether generation 0 is to be committed."""
        self.require_open()
        if self.started:
            raise UsageError("start() was called before")
        if self._folder is not None and self._folder.used and self.state.writer is None:
            raise UsageError(
                f"{self.options.directory} holds a run; call resume() before start(), or choose another directory"
            )
        self.weights.check_start(weights_current)
        if self._folder is not None and self.state.writer is None:
            await self._open_writer(opening(self.state, -1, 0), apply=True)
        # An earlier start() or resume() may have failed before its generation was committed.
        return self._saver is not None and not self._saver.committed

    def produce(self) -> None:
        """Second half of ``start``: let rollouts run."""
        state = self.state
        for name, before, after in state.sampler.changed_shares():
            state.log.info(events.SHARE_CHANGED, task=name, before=before, after=after, by="task")
        if (shares := state.sampler.shares_event()) is not None:
            state.record(shares)
        self._feed_streams()
        self.started = True
        self.weights.open_gate()
        state.log.info(
            events.RUN_STARTED, version=state.version, tasks=list(state.tasks), concurrency=self.options.concurrency
        )
        self._the_pool().pump()

    def _feed_streams(self) -> None:
        assert self._group is not None
        for name, task in self.state.tasks.items():
            if isinstance(task.source, StreamSource):
                feed = self.producer.feeds[name] = StreamFeed(task, self.state, self.producer, self._the_pool)
                self._group.start_soon(feed.run, name=f"forebay stream of {name}")

    # -- from outside --------------------------------------------------------------------------------------------

    async def from_outside(self, change: Callable[[Outside], T]) -> T:
        """Let something come from outside: ``change`` at once, or not at all, and return when it is written."""
        self.require_open()
        if self._folder is not None and self.state.writer is None:
            raise UsageError("the run's directory is not in use yet: this comes after start(), or after resume()")
        changed = change(self.outside)
        await self.outside.written()
        return changed

    async def evaluate(
        self, task: Task | str, version: int | None, items: int | Sequence[int] | None, samples: int
    ) -> Evaluation:
        """See :meth:`pipeline.Pipeline.evaluate`."""
        self.require_open()
        self.consumer.raise_failure()
        if isinstance(task, Task):
            self._engine.check(task)
        check_evaluation(self.started, self.weights.updating)
        return await self.producer.evaluator.evaluate(
            examine(self.state, task, version, items, samples),
            pool=self._the_pool(),
            reader=self.consumer.reader,
            in_thread=self.in_thread,
            raise_failure=self.consumer.raise_failure,
            written=self.outside.written,
        )

    # -- what both forms use ---------------------------------------------------------------------------------------

    def ack(self, step: int) -> None:
        """Note that the weights include every batch up to ``step``; a generation may be due by that."""
        self.consumer.ack(step)
        self.triggers.passed(self.state.ledger.step)

    def ack_if_leased(self, batch: Batch) -> None:
        """What the next of ``batches`` does with the one before."""
        if not batch.released and batch.step in self.state.ledger.leases:
            self.ack(batch.step)

    def commit_later(self, capture: Capture) -> Saving:
        """Leave the rest of a save to a task beside the trainer.

        Raises:
            ForebayError: the run ended while the trainer's files were being written; there is no such generation.
        """
        if self._saver is not None:
            self._saver.finishing = True
        if self._spawn(self.saves.finish_later, "forebay commit", capture):
            return capture.saving
        capture.abandon()
        self.saves.fail(capture)
        self.consumer.raise_failure()
        if self.state.writer is not None and self.state.writer.writer.error is not None:  # about to be the failure
            raise self.state.writer.writer.error
        raise ClosedError("the pipeline was closed while it saved; make a new one to go on")

    def _spawn(self, function: Callable[..., Coroutine[Any, Any, Any]], name: str, *args: Any) -> bool:
        """Start a task beside everything else. Returns False if the run has ended, and takes no more."""
        if self._group is None:
            return False
        try:
            self._group.start_soon(function, *args, name=name)
        except RuntimeError:  # anyio's word for a task group that is over
            return False
        return True

    @property
    def pool(self) -> Pool | None:
        """The pool, once the run is open."""
        return self._pool

    def _the_pool(self) -> Pool:
        if self._pool is None:
            raise ClosedError("the pipeline is not open; use `async with Pipeline(...) as pipe:`")
        return self._pool

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what blocks off the loop; or on it, when the run is ``inline``."""
        return work() if self.inline else await anyio.to_thread.run_sync(work)

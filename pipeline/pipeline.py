"""The pipeline: rollouts in, batches out, killed and resumed.

::

    async with Pipeline([task], directory="runs/a", max_staleness=2) as pipe:
        pipe.attach(model=model, optimizer=optimizer)
        async with pipe.weight_update(version=(await pipe.resume()).version):
            push(model)
        await pipe.start()
        async for batch in pipe.batches(groups=64, until=1000):
            train_step(model, batch.padded())
            async with pipe.weight_update(version=batch.step):
                push(model)
            if batch.step % 20 == 0:
                await pipe.save(batch.step)

``Pipeline(...).sync()`` has the same verbs for scripts that do not await.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
import msgspec

from pipeline.buffer import Batch
from pipeline.checkpoint.trainer_state import load_states
from pipeline.config import PipelineOptions
from pipeline.distributed import Ranks
from pipeline.engines.local import LocalEngine
from pipeline.errors import ConfigError, EndOfSource, ForebayError, UsageError
from pipeline.interfaces import Engine
from pipeline.ledger import Ledger
from pipeline.observe import flatten
from pipeline.records import Item, Rollout
from pipeline.runner.context import Context, RunFacts
from pipeline.runner.policies import check_rollout
from pipeline.sampler import Progress
from pipeline.store.files import FilesLike
from pipeline.task import Task
from pipeline.wiring.experience import check_rows, give_back
from pipeline.wiring.feed import Fillable
from pipeline.wiring.rank_run import RankRun, with_ranks
from pipeline.wiring.resuming import Resumed
from pipeline.wiring.run import Run
from pipeline.wiring.sharing import OnCommit
from pipeline.wiring.statistics import BatchStatistics, Statistics, take_statistics
from pipeline.wiring.verbs import OutsideVerbs
from pipeline.wiring.weights import Running

if TYPE_CHECKING:
    from pipeline.serve.server import Serving
    from pipeline.sync_form import SyncPipeline


class Pipeline(OutsideVerbs):
    """Runs the rollouts of some tasks, keeps the finished ones, and hands out batches.

    Args:
        tasks: what to run, with distinct names.
        options: a :class:`~pipeline.PipelineOptions` or a mapping of plain values.
        engine: where attempts run: this process, if left out, or a :class:`~pipeline.ProcessEngine`.
        buffer: a :class:`~pipeline.ReplayBuffer` for rollouts that make transitions: they add rows with ``ctx.extend``,
            and the trainer draws with :meth:`sample` instead of ``get_batch``. Its rows, draws and priorities are saved
            and resumed with the run, so it has no directory of its own.
        on_commit: told of each generation once it is on the disk, beside everything else: an async function, or a plain
            one, which gets a thread. It gets a :class:`~pipeline.Committed`, whose files it may copy elsewhere.
        ranks: this process among those that train together: each makes its own share of the rollouts and gets its
            share of each batch, in one run; see ``docs/scaling.md``. All of them make the same pipeline, and call the
            same verbs in the same order.
        files: the file layer, for tests.
        inline: write on the event loop, for tests on a virtual clock; ``"eager"``: each event at once.
        **more: single options; they win over ``options``.

    Raises:
        ConfigError: an option is unknown or out of range, or two tasks have one name.
    """

    def __init__(
        self,
        tasks: Sequence[Task] | Task,
        options: PipelineOptions | Mapping[str, Any] | None = None,
        *,
        engine: Engine | None = None,
        files: FilesLike | None = None,
        on_commit: OnCommit | None = None,
        buffer: Fillable | None = None,
        ranks: Ranks | None = None,
        inline: bool | Literal["eager"] = False,
        **more: Any,
    ) -> None:
        given = [tasks] if isinstance(tasks, Task) else list(tasks) if isinstance(tasks, Sequence) else []
        if not all(isinstance(task, Task) for task in given):
            raise ConfigError.of("tasks", tasks, "a Task, or a sequence of them, is needed")
        if not isinstance(options, (PipelineOptions, Mapping, type(None))):
            raise ConfigError.of("options", options, "PipelineOptions, or a mapping of plain values, is needed")
        names = [task.name for task in given]
        if not names:
            raise ConfigError.of("tasks", tasks, "at least one task is needed")
        if len(set(names)) != len(names):
            raise ConfigError.of("tasks", names, "task names must be distinct")
        base = options.to_dict() if isinstance(options, PipelineOptions) else dict(options or {})
        self.options = PipelineOptions.of({**base, **more})
        self._tasks = given
        if ranks is not None:
            self.options = with_ranks(given, self.options, ranks, buffer=buffer)
        if buffer is not None:
            check_rows(given, self.options)
        engine = LocalEngine() if engine is None else engine
        for task in given:
            engine.check(task)
        self.options = _within(self.options, engine.slots(given))
        how: dict[str, Any] = {"files": files, "engine": engine, "inline": inline, "on_commit": on_commit}
        feed = None if buffer is None else buffer.feed()  # late: what failed before leaves the buffer as it is
        try:
            self._run = (
                Run(given, self.options, feed=feed, **how)
                if ranks is None
                else RankRun(given, self.options, ranks, feed=feed, **how)
            )
        except BaseException:
            if feed is not None:
                feed.give_back()
            raise
        self._last = BatchStatistics()
        self._run.control.statistics = self.statistics

    # -- opening and closing -----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._run.triggers.take_signals()
        try:
            await self._run.open()
        except BaseException:
            self._run.triggers.give_signals_back(failed=True)
            if self._run.pool is None:
                give_back(self._run.state)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._run.left_by = error
        try:
            await self._run.close()
        except ForebayError:
            # An error that is already on its way out says more than what closing found.
            if error is None:
                raise
        finally:
            self._run.triggers.give_signals_back(failed=error is not None)

    async def aclose(self) -> None:
        """Interrupt what runs, end the leases, write what is queued, free the folder. May be called from any task.

        Raises:
            ForebayError: something failed in the background and no verb has raised it yet.
        """
        try:
            await self._run.close()
        finally:
            self._run.triggers.give_signals_back(failed=False)

    def sync(self) -> SyncPipeline:
        """Return the same pipeline for scripts that do not await: ``with Pipeline(...).sync() as pipe:``."""
        from pipeline.sync_form import SyncPipeline

        return SyncPipeline(self)

    # -- before the first rollout --------------------------------------------------------------------------------

    def attach(self, **objects: Any) -> None:
        """Save and restore these with the run: anything with ``state_dict`` and ``load_state_dict``.

        Raises:
            ConfigError: one has not, or its name cannot be a file's.
            UsageError: the pipeline was started before.
        """
        self._run.attach(objects)

    async def resume(
        self,
        step: int | None = None,
        *,
        from_: str | os.PathLike[str] | None = None,
        external: str | os.PathLike[str] | None = None,
        restart: Sequence[str] = (),
        rebalance: bool = False,
    ) -> Resumed:
        """Go on from the newest generation, or from the newest one of ``step``; nothing is produced yet.

        Everything is checked before anything is changed. Attached objects are loaded in place, and a new generation is
        committed at once. In an empty directory, and without one, this does nothing.

        Args:
            step: the trainer's step to go back to.
            from_: another run's directory. Its state begins a new run in this pipeline's own directory, which must hold
                none yet; the other run is only read.
            external: the path of a checkpoint of the trainer's own: the generation that was saved with it.
            restart: tasks to begin anew, because their source is another one now.
            rebalance: with ``ranks=``, share out what is not trained anew, though there are as many ranks as before.

        Raises:
            Damaged: something that was promised to be there is not; the message says what and where.
            SourceMismatch: a task's source is another one.
            StoreError: there is no generation of ``step`` or for ``external``, or no run in ``from_``; or what the
                generation was saved with as ``external`` is gone.
            UsageError: other names are attached than were saved, another seed, or resumed or started before.
        """
        await self._honour()
        found = await self._run.find(step, restart, from_=from_, external=external, rebalance=rebalance)
        if found is None:
            return Resumed()
        try:
            self._run.check_sources(found, restart)
            load_states(self._run.attached, found.states)
        except BaseException as error:
            self._run.not_resumed(error)
            raise
        resumed = await self._run.take_over(found, restart)
        await self._honour()
        return resumed

    async def start(self, *, weights_current: bool = False) -> None:
        """Let rollouts run. In an empty directory generation 0 is committed first.

        Args:
            weights_current: what serves the rollouts holds the restored weights already.

        Raises:
            UsageError: the directory holds a run and ``resume`` was not called; or no weight update has set the
                restored version.
        """
        await self._honour()
        if await self._run.prepare_start(weights_current):
            async with self._saving(None, "start") as capture:
                pass
            await self._leave(capture.request, capture.saving)
        await self._honour()
        self._run.produce()

    # -- batches ---------------------------------------------------------------------------------------------------

    async def get_batch(self, groups: int) -> Batch:
        """Wait for a batch of ``groups`` groups and lease it for the next step. With ``ranks=`` it is shared evenly by
        all of them.

        A finite source ends with a last batch that may be shorter, and then with EndOfSource. While groups are parked
        it waits for their rewards (``reward``, or ``discard``), and while a stream is open for its items. Cancelling
        the call loses nothing.

        Raises:
            EndOfSource: nothing is left.
            RolloutFailed: a task's policy is to stop at a failure; the cause is the original error.
            RolloutInvalid: a runner returned what is no rollout.
            Starved: nothing that could still be produced would be accepted.
            UsageError: not started.
        """
        return await self._unless_asked(lambda: self._next_batch(groups))

    async def _next_batch(self, groups: int) -> Batch:
        self._run.require_open()
        if not self._run.started:
            raise UsageError("get_batch() comes after start()")
        batch = await self._run.consumer.get_batch(groups)
        self._last = BatchStatistics.of(batch)
        return batch

    async def sample(self, count: int, **how: Any) -> Any:
        """Wait until ``count`` rows may be drawn from the run's buffer, and return them.

        ::

            batch = await pipe.sample(256, n_step=3, gamma=0.99)
            buffer.update_priorities(batch.keys, agent.update(batch))
            await pipe.ack(step)

        Takes the arguments of :meth:`pipeline.ReplayBuffer.sample`, but for ``timeout``. Until ``ack`` or ``save`` says
        what the weights hold, no trigger makes a generation.

        Raises:
            ConfigError: what is asked can never be had.
            EndOfSource: too few rows are there, and no more will come.
            RolloutFailed, RolloutInvalid: as ``get_batch``.
            Starved: rows and samples wait for each other.
            UsageError: not started, or there is no buffer.
        """
        return await self._unless_asked(lambda: self._next_sample(count, how))

    async def _next_sample(self, count: int, how: dict[str, Any]) -> Any:
        self._run.require_open()
        if not self._run.started:
            raise UsageError("sample() comes after start()")
        if "timeout" in how:
            raise UsageError("timeout= is for threads: here anyio.fail_after() says how long to wait")
        return await self._run.consumer.sample(count, how)

    async def batches(self, groups: int, *, until: int | None = None) -> AsyncIterator[Batch]:
        """Yield batches; asking for the next one acks the one before.

        After ``break`` the last batch stays leased until ``ack`` or ``save``. A batch that was released in the body is
        not acked.

        Args:
            groups: how many groups a batch has.
            until: the last step. Left out, the loop ends when every source has; with it, a source that ends before is
                an error.

        Raises:
            EndOfSource: the sources end before step ``until``.
        """
        while until is None or self._run.state.ledger.next_step <= until:
            try:
                batch = await self.get_batch(groups)
            except EndOfSource:
                if until is None:
                    return
                raise
            yield batch
            self._run.ack_if_leased(batch)
            await self._honour()

    async def ack(self, step: int) -> None:
        """Note that the weights include every batch up to ``step``.

        Raises:
            UsageError: ``step`` was never handed out, or lies before what is trained already.
        """
        self._run.require_open()
        self._run.ack(step)
        await self._honour(known=True)

    def release(self, batch: Batch) -> None:
        """Give a batch back untrained: its groups are buffered again."""
        batch.release()

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def weight_update(self, version: int, running: Running | None = None) -> AsyncIterator[None]:
        """Push new weights in the body; no attempt starts meanwhile.

        Args:
            version: the trainer's step whose weights they are.
            running: what becomes of attempts in flight. ``keep``: they go on (the default). ``finish``: the body begins
                when they have ended (the default with ``partial=False``, which refuses ``keep``). ``abort``: they are
                cut, and run again afterwards from what they kept with ``ctx.save_partial``; this counts as no failure.

        Under ``staleness_policy="wait"``, ``keep`` lets the body begin when those rollouts have ended that ``version``
        would put past ``max_staleness``; attempts start until then.

        If the body raises, the weights are in doubt, and nothing starts until an update succeeds.
        """
        self._run.require_open()
        await self._unless_asked(lambda: self._run.weights.begin(version, running), stop_only=True)
        try:
            yield
        except BaseException as error:
            self._run.weights.end(version, error, failed=True)
            raise
        self._run.weights.end(version, None, failed=False)

    @property
    def version(self) -> int:
        """Version of the weights that rollouts are made with."""
        return self._run.state.version

    # -- trainers in other processes ----------------------------------------------------------------------------------

    async def serve(self, *, via: Literal["ray"] | None = None, name: str | None = None) -> Serving:
        """Let trainers in other processes of this machine use this pipeline: ``forebay.connect(directory)``.

        Served until it is closed. What a trainer holds is given back when its process ends, however it does.

        Args:
            via: ``"ray"``: trainers on any node of the Ray cluster may, with ``connect(directory, via="ray")`` or
                ``connect("ray://NAME")``; those of this machine as ever.
            name: what it is called there; else by the run's id and the incarnation, which ``directory`` says.

        Returns:
            What knows the address, which a run without a directory needs, and waits for the trainers:
            ``await serving.ended()``.

        Raises:
            ServingError: the system has no such sockets, or the run is served already, or Ray cannot be used.
            UsageError: rollouts fill a buffer of transitions; share that buffer instead.
        """
        if via not in (None, "ray") or (name is not None and not (via and isinstance(name, str) and name)):
            raise ConfigError(f"serve(via={via!r}, name={name!r}): via='ray' is allowed, and a name with it")
        from pipeline.serve.server import Serving

        self._run.require_open()
        if self._run.state.size > 1:
            raise UsageError("serve(): with ranks= each rank has batches of its own; serve a pipeline without them")
        if self._run.state.experience is not None:
            raise UsageError(
                "serve(): these rollouts fill a buffer; ReplayBuffer(storage='shared') is for other processes"
            )
        serving = Serving(self)
        await (serving.begin() if via is None else serving.begin_far(name))
        return serving

    # -- seeing ----------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far the run is; always the same object, brought up to date when it is asked for. With ``ranks=``, that of
        all of them together, as of the last ``get_batch`` or save."""
        return self._run.consumer.progress

    @property
    def ledger(self) -> Ledger:
        """Where every item is: ``pipe.ledger.state(uid)``. To be read only."""
        return self._run.state.ledger

    def statistics(self) -> Statistics:
        """Return a frozen snapshot of everything that queues, with peaks and waiters."""
        return take_statistics(self._run.state, self._run.pool, self._last)

    def metrics(self) -> dict[str, float]:
        """Return the statistics as flat floats, for a logger: ``{"tasks/math/totals/trained": 12.0, ...}``."""
        return flatten(self.statistics())

    @staticmethod
    async def try_one(
        task: Task, index: int = 0, *, seed: int = 0, version: int = 0, engine: Engine | None = None
    ) -> Rollout:
        """Run one item of a task, with no run at all: nothing is stored and errors are raised as they are.

        Args:
            task: it need not be of any pipeline.
            index: of the item.
            seed: as the pipeline's.
            version: what ``ctx.version`` is.
            engine: where it runs; this process if left out.

        Raises:
            RolloutInvalid: the runner returned what is no rollout.
            ValueError: its reward is not finite.
        """
        item = Item(task.name, 0, index, 0, task.source.item(index))
        ctx = Context(item, 0, 1, version, _run=RunFacts(seed, "try_one"))
        where: Engine = LocalEngine() if engine is None else engine
        where.check(task)
        async with where:
            with anyio.fail_after(task.timeout):
                rollout = await where.run(task, item, ctx)
        fault = check_rollout(rollout, item)
        if fault is not None:
            raise ValueError(f"{item}: {fault}")
        return rollout


def _within(options: PipelineOptions, slots: int | None) -> PipelineOptions:
    """Begin no more attempts than the engine can run: one that waits for its place would only grow old."""
    if slots is None or slots >= options.concurrency:
        return options
    return msgspec.structs.replace(options, concurrency=slots)

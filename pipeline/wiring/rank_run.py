"""A run that several ranks have together: what differs from that of one process, wired.

Each rank produces its own draws of the one order (:mod:`pipeline.sampler.turns`), keeps them in a ledger, a journal and
segments of its own, and gets its share of each batch. The first rank has the lock of the one folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio.to_thread
import msgspec

from pipeline.buffer.partials import Partials
from pipeline.config import PipelineOptions
from pipeline.conversation import Conversation
from pipeline.distributed import Ranks
from pipeline.errors import ClosedError, ConfigError, RankFailed, RankLost, UsageError
from pipeline.interfaces import LearningSource
from pipeline.records import Rollout
from pipeline.sampler import TurnSampler
from pipeline.store.service import WriterService
from pipeline.task import StreamSource, Task
from pipeline.wiring.folder import RunFolder
from pipeline.wiring.forking import place_parts
from pipeline.wiring.kinds import Parts
from pipeline.wiring.outside import Outside
from pipeline.wiring.rank_batches import RankConsumer
from pipeline.wiring.rank_resuming import RankResuming
from pipeline.wiring.rank_saving import RankSaver
from pipeline.wiring.rank_triggers import RankTriggers
from pipeline.wiring.reserving import Reserver
from pipeline.wiring.resuming import Found, Origin, Resumed
from pipeline.wiring.run import Run

T = TypeVar("T")
_MAKE_ANOTHER = (
    ", but for what is attached: it holds the checkpoint's state. Make another pipeline, and resume() that one"
)


def with_ranks(tasks: Sequence[Task], options: PipelineOptions, ranks: Ranks, *, buffer: object) -> PipelineOptions:
    """Return the options of one of several ranks.

    Raises:
        ConfigError: something cannot be done by several ranks.
    """
    if buffer is not None:
        raise ConfigError(
            "buffer: rows of rollouts are not shared out to ranks; leave ranks= out, or give each rank a "
            "ReplayBuffer(ranks=...) of its own",
            option="buffer",
        )
    if options.mixing == "batch":
        raise ConfigError.of("mixing", "batch", "with ranks= draws come by turns, in one order; use 'long_run'")
    if options.rank not in (0, ranks.rank):
        raise ConfigError.of("rank", options.rank, f"with ranks= it is said there: this one is {ranks.rank}")
    if options.batch_groups is not None and options.batch_groups % ranks.size:
        raise ConfigError.of(
            "batch_groups", options.batch_groups, f"a batch is shared evenly: a multiple of {ranks.size} is needed"
        )
    for task in tasks:
        if isinstance(task.source, StreamSource):
            raise ConfigError.of("tasks", task.name, "a stream has no order that ranks could share; leave ranks= out")
        if isinstance(task.source, LearningSource):
            raise ConfigError.of(
                "tasks",
                task.name,
                "what its source learns hangs on all groups, and a rank has its own; leave ranks= out",
            )
    return msgspec.structs.replace(options, rank=ranks.rank)


class RankFolder(RunFolder):
    """The one folder of all ranks: the first has its lock, and tells the others what they need to know."""

    ranks: Ranks

    def open(self) -> None:
        """As :meth:`RunFolder.open`, on the first rank; on the others RankFailed says why not."""

        def look() -> list[Any]:
            RunFolder.open(self)
            return [self.run_id, self.incarnation, self.next_generation, self.used]

        run_id, incarnation, generation, used = self.ranks.of_first("open", look)
        if not self.ranks.first:
            self.follow(run_id, incarnation, generation)
            self.used = used

    def keep(self) -> None:
        """As :meth:`RunFolder.keep`; the lock is the first rank's."""
        if self.ranks.first:
            super().keep()


class RankOutside(Outside):
    """What may come from outside to one of several ranks: rewards of its own rollouts."""

    def submit(self, task: Task | str, content: Any) -> int:
        raise UsageError(f"submit(): {_ORDER}")

    def put(self, task: Task | str, rollouts: Rollout | Sequence[Rollout], content: Any = None) -> int:
        raise UsageError(f"put(): {_ORDER}")

    def set_share(self, task: Task | str, share: float) -> None:
        raise UsageError(
            "set_share(): ranks share one order, which it changes at a place of its own on each. Make the tasks with "
            "other shares, and resume() all ranks"
        )


_ORDER = "with ranks= items come from the one order that all ranks share; give them by a source, or leave ranks= out"


class RankRun(Run):
    """One rank's side of a run. Verbs are called by all ranks, in the same order."""

    _parts = Parts(RankConsumer, RankOutside, RankFolder, RankSaver, RankTriggers)
    consumer: RankConsumer
    triggers: RankTriggers
    _speaking: Conversation | None = None
    """With the other ranks, of the resume that has begun."""

    def __init__(self, tasks: Sequence[Task], options: PipelineOptions, ranks: Ranks, **more: Any) -> None:
        """Args:
        tasks, options, more: as of :class:`Run`.
        ranks: this rank among the others.
        """
        super().__init__(tasks, options, **more)
        self.ranks = ranks.branch("pipeline")
        state, consumer = self.state, self.consumer
        state.size = ranks.size
        state.sampler = TurnSampler(list(state.plans.values()), options.seed, ranks.rank, ranks.size)
        consumer.ranks, consumer.triggers, consumer.listen = self.ranks, self.triggers, self._listen
        if isinstance(self._folder, RankFolder):
            self._folder.ranks = self.ranks
        if isinstance(self._saver, RankSaver):
            self._saver.ranks, self._saver.of_all = self.ranks, consumer.of_all
        self._reserver = Reserver(state, self.ranks, self.in_thread)
        self._reserver.spawn, self._reserver.pump = self._spawn, self._pump
        self.producer.dry = self._reserver.ask

    async def open(self) -> None:
        """As :meth:`Run.open`. Others who came further, and wait for this rank, hear that it does not come."""
        first = self._supervisor is None
        try:
            await super().open()
        except BaseException as error:
            if first:
                self._leave(error)
            raise

    def produce(self) -> None:
        """As :meth:`Run.produce`; signs of life begin."""
        super().produce()
        if not self.inline:
            self._spawn(self.consumer.keep_looking, "forebay ranks")

    def _look(
        self, origin: Origin, step: int | None, external: str | None, restart: Sequence[str], rebalance: bool
    ) -> Found:
        assert self._speaking is not None
        resuming = RankResuming(self.state, self._speaking, origin, list(self.attached))
        return resuming.find(step, external, anew=rebalance or bool(restart))

    async def find(self, step: int | None, restart: Sequence[str], **more: Any) -> Found | None:
        """As :meth:`Run.find`. An error on one rank, here or until all of it is in use, is an error on all."""
        self.not_resumed(RankFailed("it was left in its midst there, and another one has begun"))
        self._speaking = Conversation(self.ranks, "resume")
        try:
            if more.get("from_") is not None:
                raise UsageError("resume(from_=): ranks do not fork; copy the run's folder, and resume() the copy")
            return await super().find(step, restart, **more)
        except BaseException as error:
            self.not_resumed(error)
            raise

    def not_resumed(self, error: BaseException) -> None:
        """As :meth:`Run.not_resumed`: whoever waits for this rank hears why."""
        if self._speaking is not None:
            self._speaking.tell("resume", error=error)

    async def _all_are_here(self) -> None:
        speaking = self._speaking
        assert speaking is not None
        await self.in_thread(lambda: speaking.agreed("resume", lambda: None, but=_MAKE_ANOTHER))

    async def take_over(self, found: Found, restart: Sequence[str]) -> Resumed:
        """As :meth:`Run.take_over`. An error on one rank is an error on all."""
        saver = self._saver
        assert isinstance(saver, RankSaver)
        saves = saver.saves
        try:
            resumed = await super().take_over(found, restart)
            await self._all_are_here()
        except BaseException as error:
            self._half_resumed = self._half_resumed or (saver.saves > saves and saver.committed)
            saver.never_began(saves, error)
            self.not_resumed(error)
            raise
        return resumed

    async def _bring(self, found: Found, writer: WriterService) -> Found:
        """Copy what attempts of before had kept, which is small, to where this rank's own journal can name it."""
        recovered = found.recovered
        if recovered.inherited is None:
            return found
        kept, partials = recovered.partials, Partials()
        events = place_parts(kept, writer, {uid: entry.life for uid, entry in recovered.ledger.entries.items()})
        await writer.flush()
        for event in events:
            part = kept.get(event.uid, event.member)
            partials.apply(found.opened.incarnation, found.opened.rank, event, None if part is None else part.blob)
        return msgspec.structs.replace(found, recovered=recovered._replace(partials=partials, parts=events))

    async def _seal(self) -> None:
        left_by = self.left_by
        try:
            await super()._seal()
        finally:
            error = self.state.failure or left_by or ClosedError("the pipeline was closed there")
            with contextlib.suppress(RankLost):
                await self.in_thread(lambda: self._leave(error))

    def _leave(self, error: BaseException) -> None:
        """Tell whoever waits for this rank, in whatever, that it does not come. Blocks, but for the store alone."""
        self.consumer.leave(error)
        if isinstance(self._saver, RankSaver):
            self._saver.leave(error)
        self.not_resumed(error)
        Conversation(self.ranks, "resume").tell("resume", error=error)  # the next one: others may have begun it

    async def close(self) -> None:
        """As :meth:`Run.close`. The first rank, whose process may serve the store, waits a moment for the others."""
        opened = self._supervisor is not None and not self._supervisor.stopping.is_set()
        try:
            await super().close()
        finally:
            if opened:
                with contextlib.suppress(RankLost):
                    await self.in_thread(self._part_with)

    def _part_with(self) -> None:
        if self.ranks.first:
            self.ranks.linger("closed", 0, range(1, self.ranks.size))
        else:
            self.ranks.tell("closed", number=0)

    async def _listen(self, work: Callable[[], T]) -> T:
        return work() if self.inline else await anyio.to_thread.run_sync(work, abandon_on_cancel=True)

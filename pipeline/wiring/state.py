"""The state of a run, and the one way in which it changes.

``record(event)`` applies an event to every component and hands it to the writer; ``recover`` applies the same events
in the same way. Whoever waits for a change of state waits on ``changed``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from pipeline.buffer import GroupBuffer, MixedBuffer
from pipeline.buffer.partials import Partials
from pipeline.buffer.staleness import floor
from pipeline.clock import Clock
from pipeline.config import PipelineOptions
from pipeline.errors import SourceError
from pipeline.ledger import BUFFERED, FINISHED, LEASED, ConsumerHalf, Entry, Lease, Ledger, TaskTotals
from pipeline.observe import RunContext, events, logger
from pipeline.records import (
    EXTERNAL,
    AnyEvent,
    Claimed,
    Dropped,
    Failed,
    Feedback,
    Finished,
    Interrupted,
    Reopened,
    Rewarded,
    Started,
)
from pipeline.sampler import DrawPlan, Progress, Sampler
from pipeline.store.layout import SegmentKey
from pipeline.store.service import WriterService
from pipeline.task import Task
from pipeline.waiting import Signal
from pipeline.wiring.evaluations import Evaluations
from pipeline.wiring.experience import Experience
from pipeline.wiring.mixing import Mixing
from pipeline.wiring.rerolling import too_old_members


class RunState:
    """Everything that is known of a run, in memory."""

    unknown_half: Mapping[str, object] = MappingProxyType({})
    """Fields of the saved consumer half that this version does not know: they are saved again."""
    experience: Experience | None = None
    """The buffer of transitions that rollouts fill; then they make no batches."""
    size = 1
    """How many ranks train together."""

    def __init__(self, tasks: Sequence[Task], options: PipelineOptions) -> None:
        self.options = options
        self.tasks = {task.name: task for task in tasks}
        self.plans = {t.name: DrawPlan(t.name, t.source, t.share, t.epochs, t.shuffle) for t in tasks}
        self.context = RunContext(rank=options.rank)
        self.log = logger(self.context)
        self.clock = Clock(time.monotonic, time.time)
        """The event loop's, once the run is open."""
        self.in_draw_order = options.in_draw_order
        """Whether batches are made in draw order."""
        self.ledger = Ledger()
        self.sampler = Sampler(list(self.plans.values()), options.seed)
        self.sampler.teach()
        self.learners = self.sampler.learners
        """Tasks whose source learns from what its groups came to."""
        self.evaluations = Evaluations()
        self.moving: set[SegmentKey] = set()  # segments that are copied into, and no event has said so yet
        self.mixing = Mixing(self) if options.mixing == "batch" else None
        self.buffer = self._new_buffer()
        self.partials = Partials()
        self.progress = Progress()
        self.unknown_progress: dict[str, object] = {}
        self.pending: deque[Lease] = deque()
        """Batches of before a crash, to be handed out again first; their groups are not in the buffer's selection."""
        self.version = 0
        self.run_id = ""
        self.incarnation = 1
        self.writer: WriterService | None = None
        self.writing = False
        """Whether payloads and events are written as they come."""
        self.changed = Signal()
        self.failure: BaseException | None = None
        self.told = False  # whether a verb has raised ``failure``
        self.weights_failed = False
        """A push of weights failed: nothing starts until one succeeds."""
        self.updating = False  # whether a weight update is open
        self.absent = 0
        """Items that wait for a task which this run does not have; they are kept, and in nobody's way."""
        self.evaluating = 0  # attempts of evaluations: they are in flight, and in nobody's batch
        self.ended = False
        """Whether the run was closed, for whatever reason."""
        self.gathered = 0  # groups that wait for a tail batch: in nobody's way either
        self.limit: int | None = None  # groups that may be outstanding; None: to be computed again, by Admission
        self.wanted = 0
        """Groups that a trainer waits for now."""
        self.asked = 0
        """Groups of the last batch that was asked for in this life; 0 before the first."""
        self.on_expired: Callable[[Entry], None] = lambda entry: None
        self.masks = options.staleness_policy == "mask"
        """Whether tokens are judged one by one."""

    def record(self, event: AnyEvent) -> Entry | None:
        """Let ``event`` have happened: apply it, and queue it to be written. Never blocks."""
        writer = self.writer
        if writer is not None:
            writer.writer.append(event)
            if self.writing:
                writer.notify()
        return self.apply(event)

    def keep(self, uid: int, member: int, life: int, blob: bytes) -> tuple[int, int]:
        """Hold a payload and queue it to be written. Returns its segment (-1: none) and its offset there."""
        if self.writer is None:
            self.buffer.storage.put(uid, member, blob, None)
            return -1, 0
        location = self.writer.writer.place(blob, uid, member, life)
        self.buffer.storage.put(uid, member, blob, location)
        return location.segment, location.offset

    def apply(self, event: AnyEvent) -> Entry | None:
        """Apply an event to every component: the path that life and recovery share."""
        kind = type(event)
        handler = self.ledger.handlers.get(kind)
        became = None if handler is None else handler(event)
        if kind is Started:  # a third of all events, and the ledger's business alone
            return None
        if self.partials.by_uid:
            self.partials.apply(self.incarnation, self.options.rank, event)
            if isinstance(event, Interrupted) and event.uid not in self.ledger.entries:
                self.partials.by_uid.pop(event.uid, None)  # it had added rows, and is not gone on with
        if self.experience is not None:
            self.experience.apply(event)
        if kind is Finished:
            if became is not None:
                if self.in_draw_order:
                    self.buffer.closed(became.uid)
                self.buffer.add(became.uid, became.freshest if self.masks else became.effective)
            elif event.uid not in self.ledger.entries:  # type: ignore[union-attr]  # rejected, or too few had finished
                self._forget_ended(event.uid)  # type: ignore[union-attr]
        elif kind is Claimed:
            self.sampler.apply(event)
            if self.in_draw_order:
                self.buffer.opened(event.uid)  # type: ignore[union-attr]
        elif kind is Dropped or kind is Failed:
            self._forget_ended(event.uid)  # type: ignore[union-attr]
        elif kind is Reopened:
            self.buffer.opened(event.uid)  # type: ignore[union-attr]
        elif kind is Rewarded:
            if became is not None:
                self._enter(became)
            elif event.uid not in self.ledger.entries:  # type: ignore[union-attr]  # rejected by its filter
                self._forget_ended(event.uid)  # type: ignore[union-attr]
        else:
            self.sampler.apply(event)
            self.evaluations.apply(self.incarnation, self.options.rank, event)
        return became

    def _enter(self, entry: Entry) -> None:
        """A group became buffered; the buffer has not been told yet."""
        self.buffer.closed(entry.uid)
        self.buffer.add(entry.uid, self.judged(entry))
        self.count_absent()

    def _forget_ended(self, uid: int) -> None:
        entry = self.ledger.entries.get(uid)
        if entry is None:
            self.buffer.closed(uid)
            if uid in self.buffer:
                self.buffer.remove(uid)
            self.buffer.storage.discard(uid)
        elif entry.state == BUFFERED:  # the last member failed, and enough others had finished
            self.buffer.closed(uid)
            self.buffer.add(uid, self.judged(entry))

    def judged(self, entry: Entry) -> int:
        """Return the version by which a finished group is too old or not."""
        return entry.freshest if self.masks else entry.effective

    def fail(self, error: BaseException) -> None:
        """End the run with ``error``: whoever waits is woken and raises it. The first error counts."""
        if self.failure is None:
            self.failure = error
        self.changed.notify()

    @property
    def outstanding(self) -> int:
        """Items claimed and not ended, of the tasks that this run has, without those that wait for a tail batch."""
        return len(self.ledger.entries) - self.absent - self.gathered

    # -- staleness -------------------------------------------------------------------------------------------

    def expire_stale(self) -> bool:
        """Take groups out that are too old for the next batch: to be run again, or dropped after too many times.

        Returns whether there were any.
        """
        if self.options.max_staleness is None:
            return False
        least = floor(self.ledger.next_step, self.options.max_staleness)
        expired = [] if least is None else self.buffer.older_than(least)
        if least is not None and self.ledger.parked:
            expired += self.ledger.parked.older_than(least)
        if expired:
            self.log.info(events.STALE_EXPIRED, count=len(expired), oldest=least, version=self.version)
        for uid in expired:
            self._expire(self.ledger.entries[uid], least or 0)
        if expired:
            self.count_absent()
        return bool(expired)

    def _expire(self, entry: Entry, least: int) -> None:
        uid, options = entry.uid, self.options
        # Weights that went back in a crash are no fault of the item: that does not use up its rerolls.
        reason = "expired" if entry.made == self.ledger.incarnation else "outlived"
        spent = reason == "expired" and entry.rerolls >= options.max_rerolls
        if spent or (entry.kind == EXTERNAL and entry.content is None):  # a rollout alone cannot be run again
            self.log.warning(events.ITEM_EXPIRED, task=entry.task, uid=uid, index=entry.index, rerolls=entry.rerolls)
            self.record(Dropped(uid, "expired"))
            return
        if uid in self.buffer:  # or else it is parked
            self.buffer.remove(uid)
        part = None
        # What was rewarded later has its reward elsewhere, and what is parked none: such a group is run again whole.
        later = entry.given or entry.parked
        if options.reroll is not None and options.reroll.tail == 1 and entry.size > 1 and not later:
            part = too_old_members(uid, reason, self.buffer.storage.get(uid), least)
        if part is None:
            self.buffer.storage.discard(uid)
        else:
            self.buffer.storage.discard_members(uid, part.members)
        self.record(part or Reopened(uid, reason))
        if entry.task in self.tasks:
            self.on_expired(entry)

    def teach(self, entry: Entry) -> None:
        """Tell the source of a group that has finished what it came to, if it learns from that."""
        if entry.task not in self.learners or entry.kind == EXTERNAL:
            return
        value = entry.rewards / entry.members.count(FINISHED)
        try:
            self.record(Feedback(entry.task, entry.uid, entry.index, value))
        except Exception as error:
            failed = SourceError(
                f"task {entry.task!r}: its source's feedback() failed at item {entry.index}: {error!r}"
            )
            failed.__cause__ = error
            self.fail(failed)

    # -- the window since the last batch -----------------------------------------------------------------------

    def mark_window(self) -> None:
        """Begin the counts since the last batch anew."""
        self.progress.window_marks = {name: window_marks(totals) for name, totals in self.ledger.totals.items()}

    def refresh_progress(self) -> Progress:
        """Bring the produced side of the progress up to date and return it."""
        progress, totals = self.progress, self.ledger.totals
        window = {
            name: [
                now - then
                for now, then in zip(window_marks(each), progress.window_marks.get(name, [0] * 7), strict=True)
            ]
            for name, each in totals.items()
        }
        progress.produced_samples = {name: int(each[0]) for name, each in window.items()}
        progress.produced_tokens = {name: int(each[1]) for name, each in window.items()}
        progress.failed_samples = {name: int(each[2]) for name, each in window.items()}
        progress.filtered_samples = {name: int(each[3]) for name, each in window.items()}
        progress.raw_rewards_sum = {name: each[4] for name, each in window.items()}
        progress.raw_rewards_count = {name: int(each[5]) for name, each in window.items()}
        progress.produce_time_s = {name: each[6] for name, each in window.items()}
        progress.next_consumer_step = self.ledger.step + 1
        # Batches that are made: what waits or runs is what producers work for now.
        made = self.ledger.count(BUFFERED) + self.ledger.count(LEASED)
        ahead = made // progress.batch_groups if progress.batch_groups else 0
        progress.producer_future_step = progress.next_consumer_step + ahead
        progress.model_step = self.version
        progress.replay_buffer_saved = True
        return progress

    # -- recovery ----------------------------------------------------------------------------------------------

    def rebuild(self, ledger: Ledger, sampler: Sampler, pending: Iterable[Lease]) -> None:
        """Take over what recovery found: fill the selection with what is buffered and not pending."""
        self.ledger, self.sampler = ledger, sampler
        self.ledger.free_steps = self.experience is not None
        self.pending = deque(pending)
        reserved = {uid for lease in self.pending for uid in lease.uids}
        fresh = self._new_buffer()
        fresh.storage = self.buffer.storage
        self.buffer = fresh
        self.count_absent()
        for entry in ledger.entries.values():
            if entry.state != BUFFERED and entry.task in self.tasks:
                fresh.opened(entry.uid)
        for entry in sorted(ledger.entries.values(), key=lambda entry: entry.order):
            if entry.state == BUFFERED and entry.uid not in reserved:
                fresh.add(entry.uid, self.judged(entry))

    def count_absent(self) -> None:
        """Count again what waits for tasks that this run does not have; call it where such items change."""
        self.absent = sum(
            sum(counts) - counts[BUFFERED] - counts[LEASED]
            for name, counts in self.ledger.counts.items()
            if name not in self.tasks
        )

    def release_broken(self) -> None:
        """Give up batches that were to be handed out again, from the first of which a group was dropped."""
        whole = [self.ledger.still_whole(lease) for lease in self.pending]
        self.release_pending(whole.index(False) if not all(whole) else len(whole))

    def release_pending(self, kept: int = 0) -> None:
        """Give up all but ``kept`` of the batches to be handed out again: their groups may be selected, first."""
        while len(self.pending) > kept:
            entries = [self.ledger.entries.get(uid) for uid in self.pending.pop().uids]
            self.buffer.put_back([(entry.uid, self.judged(entry)) for entry in entries if entry is not None])

    def _new_buffer(self) -> GroupBuffer:
        order: Literal["strict", "finished"] = "strict" if self.in_draw_order else "finished"
        if self.mixing is None:
            return GroupBuffer(order=order, selector=self.options.selector)
        return MixedBuffer(
            order=order,
            selector=self.options.selector,
            task_of=lambda uid: self.ledger.entries[uid].task,
            places=self.mixing.places,
        )

    def consumer_half(self) -> ConsumerHalf:
        """Return a copy of the consumer half: leases, and what is pending from before a crash."""
        half = self.ledger.consumer_half()
        half.leases = sorted([*half.leases, *self.pending], key=lambda lease: lease.step)
        return half


def window_marks(totals: TaskTotals) -> list[float]:
    """Return the lifetime totals that the counts since the last batch begin from."""
    return [
        totals.produced,
        totals.tokens,
        totals.failed,
        totals.dropped.get("filtered", 0),
        totals.reward_sum,
        totals.reward_count,
        totals.seconds,
    ]

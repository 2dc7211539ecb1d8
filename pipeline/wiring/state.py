"""The state of a run, and the one way in which it changes.

``record(event)`` applies an event to every component and hands it to the writer; ``recover`` applies the same events
in the same way. Whoever waits for a change of state waits on ``changed``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pipeline.buffer import GroupBuffer
from pipeline.buffer.partials import Partials
from pipeline.buffer.staleness import floor
from pipeline.clock import Clock
from pipeline.config import PipelineOptions
from pipeline.ledger import BUFFERED, ConsumerHalf, Entry, Lease, Ledger, TaskTotals
from pipeline.observe import RunContext, events, logger
from pipeline.records import AnyEvent, Claimed, Dropped, Failed, Finished, Inherited, Location, Reopened, Started
from pipeline.sampler import DrawPlan, Progress, Sampler
from pipeline.store.service import WriterService
from pipeline.task import Task
from pipeline.waiting import Signal


class RunState:
    """Everything that is known of a run, in memory."""

    def __init__(self, tasks: Sequence[Task], options: PipelineOptions) -> None:
        self.options = options
        self.tasks = {task.name: task for task in tasks}
        self.plans = {t.name: DrawPlan(t.name, t.source, t.share, t.epochs, t.shuffle) for t in tasks}
        self.context = RunContext(rank=options.rank)
        self.log = logger(self.context)
        self.clock = Clock(time.monotonic, time.time)
        """The event loop's, once the run is open."""
        self.in_draw_order = options.order == "strict" or options.strategy == "synchronous"
        """Whether batches are made in draw order. A synchronous batch waits for all its groups anyway: in draw order it
        does not tell which of them a crash delayed."""
        self.ledger = Ledger()
        self.sampler = Sampler(list(self.plans.values()), options.seed)
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
        self.told = False
        """Whether a verb has raised ``failure``."""
        self.weights_failed = False
        """A push of weights failed: nothing starts until one succeeds."""
        self.absent = 0
        """Items that wait for a task which this run does not have; they are kept, and in nobody's way."""
        self.wanted = 0
        """Groups that a trainer waits for now."""
        self.asked = 0
        """Groups of the last batch that was asked for in this life; 0 before the first."""
        self.on_expired: Callable[[Entry], None] = lambda entry: None

    def record(self, event: AnyEvent) -> Entry | None:
        """Let ``event`` have happened: apply it, and queue it to be written. Never blocks."""
        writer = self.writer
        if writer is not None:
            writer.writer.append(event)
            if self.writing:
                writer.notify()
        return self.apply(event)

    def apply(self, event: AnyEvent) -> Entry | None:
        """Apply an event to every component: the path that life and recovery share."""
        kind = type(event)
        if self.partials.by_uid:
            self.partials.apply(self.incarnation, self.options.rank, event)
        handler = self.ledger.handlers.get(kind)
        became = None if handler is None else handler(event)
        if kind is Started:  # half of all events, and the ledger's business alone
            return None
        if kind is Finished:
            if became is not None:
                if self.in_draw_order:
                    self.buffer.closed(became.uid)
                self.buffer.add(became.uid, became.effective)
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
        else:
            self.sampler.apply(event)
        return became

    def _forget_ended(self, uid: int) -> None:
        entry = self.ledger.entries.get(uid)
        if entry is None:
            self.buffer.closed(uid)
            if uid in self.buffer:
                self.buffer.remove(uid)
            self.buffer.storage.discard(uid)
        elif entry.state == BUFFERED:  # the last member failed, and enough others had finished
            self.buffer.closed(uid)
            self.buffer.add(uid, entry.effective)

    def fail(self, error: BaseException) -> None:
        """End the run with ``error``: whoever waits is woken and raises it. The first error counts."""
        if self.failure is None:
            self.failure = error
        self.changed.notify()

    @property
    def outstanding(self) -> int:
        """Items claimed and not ended, of the tasks that this run has."""
        return len(self.ledger.entries) - self.absent

    # -- staleness -------------------------------------------------------------------------------------------

    def expire_stale(self) -> None:
        """Take groups out that are too old for the next batch: to be run again, or dropped after too many times."""
        if self.options.max_staleness is None:
            return
        least = floor(self.ledger.next_step, self.options.max_staleness)
        expired = [] if least is None else self.buffer.older_than(least)
        if expired:
            self.log.info(events.STALE_EXPIRED, count=len(expired), oldest=least, version=self.version)
        for uid in expired:
            entry = self.ledger.entries[uid]
            # Weights that went back in a crash are no fault of the item: that does not use up its rerolls.
            reason = "expired" if entry.made == self.ledger.incarnation else "outlived"
            if reason == "expired" and entry.rerolls >= self.options.max_rerolls:
                self.record(Dropped(uid, "expired"))
            else:
                self.buffer.remove(uid)
                self.buffer.storage.discard(uid)
                self.record(Reopened(uid, reason))
                self.on_expired(entry)

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
        ahead = self.ledger.outstanding // progress.batch_groups if progress.batch_groups else 0
        progress.producer_future_step = progress.next_consumer_step + ahead
        progress.model_step = self.version
        progress.replay_buffer_saved = True
        return progress

    # -- recovery ----------------------------------------------------------------------------------------------

    def rebuild(self, ledger: Ledger, sampler: Sampler, pending: Iterable[Lease]) -> None:
        """Take over what recovery found: fill the selection with what is buffered and not pending."""
        self.ledger, self.sampler = ledger, sampler
        self.pending = deque(pending)
        reserved = {uid for lease in self.pending for uid in lease.uids}
        fresh = self._new_buffer()
        fresh.storage = self.buffer.storage
        self.buffer = fresh
        self.absent = 0
        for entry in ledger.entries.values():
            if entry.state != BUFFERED and entry.task in self.tasks:
                fresh.opened(entry.uid)
            elif entry.state != BUFFERED:
                self.absent += 1
        for entry in sorted(ledger.entries.values(), key=lambda entry: entry.order):
            if entry.state == BUFFERED and entry.uid not in reserved:
                fresh.add(entry.uid, entry.effective)

    def release_broken(self) -> None:
        """Give up batches that were to be handed out again, from the first of which a group was dropped."""
        whole = [self.ledger.still_whole(lease) for lease in self.pending]
        self.release_pending(whole.index(False) if not all(whole) else len(whole))

    def release_pending(self, kept: int = 0) -> None:
        """Give up all but ``kept`` of the batches to be handed out again: their groups may be selected, first."""
        while len(self.pending) > kept:
            entries = [self.ledger.entries.get(uid) for uid in self.pending.pop().uids]
            self.buffer.put_back([(entry.uid, entry.effective) for entry in entries if entry is not None])

    def _new_buffer(self) -> GroupBuffer:
        return GroupBuffer(order="strict" if self.in_draw_order else "finished", selector=self.options.selector)

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


class PayloadPlaces(msgspec.Struct):
    """Where the payloads of live groups lie, as the events said; collected while journals are folded."""

    places: dict[int, dict[int, Location]] = {}

    def apply(self, incarnation: int, rank: int, event: AnyEvent) -> None:
        """Note where a finished member lies; a group that is run again begins anew."""
        if type(event) is Finished:
            where = Location(incarnation, rank, event.segment, event.offset, event.length)
            self.places.setdefault(event.uid, {})[event.member] = where
        elif type(event) is Reopened or type(event) is Dropped:
            self.places.pop(event.uid, None)
        elif type(event) is Inherited:
            for item in event.items:
                self.places[item.uid] = {place[0]: Location(*place[1:]) for place in item.places}

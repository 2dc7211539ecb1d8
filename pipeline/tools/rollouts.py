"""What a run of rollouts holds: its producer events folded, as a resume of a generation would find them."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from pipeline.checkpoint.fold import ProducerFold
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.halves import half_or_why_not
from pipeline.checkpoint.lines import PRODUCER_FILE, read_inherited
from pipeline.checkpoint.manifest import REPLAY_BUFFER
from pipeline.checkpoint.parts import Part, parts_of
from pipeline.errors import ForebayError
from pipeline.ledger import BUFFERED, STATES
from pipeline.records import AnyEvent, Claimed, Evaluated, Failed, Finished, Inherited, Opened, Parked, Rewarded
from pipeline.store.journal import Logged, read_journal
from pipeline.store.layout import Layout
from pipeline.tools.figures import Figures

UNFIT = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, msgspec.MsgspecError)
"""What an event that no pipeline wrote may raise when it is applied."""
_MOST_ERRORS = 5


class Taker(Protocol):
    """Is told events."""

    def take(self, logged: Logged) -> None: ...


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one task's items, and what its rollouts are like."""

    task: str
    claimed: int
    states: dict[str, int]
    """Items by ``waiting``, ``running``, ``parked``, ``buffered``, ``leased``, ``trained``, ``retired``."""
    dropped: dict[str, int]
    """By reason."""
    epoch: int
    """The one that is drawn, from 0; -1: none was begun."""
    drawn: int
    """Items of it."""
    length: int
    """How many it has; -1: no end."""
    finished: int
    """Members, for life."""
    failed: int
    """Attempts."""
    interrupted: int
    reopened: int
    tokens: int
    rows: int
    rewards: Figures
    """Of the members that finished, as the journals say."""
    lengths: Figures
    """Tokens of these."""
    seconds: Figures
    """How long their attempts took."""
    versions: dict[int, int]
    """Groups that wait to be trained, by the oldest version of weights that made them."""
    errors: dict[str, int]
    """What attempts failed with, the most frequent first."""
    evaluated: int
    """Evaluations that were made."""


class Seen:
    """The numbers of one task."""

    def __init__(self) -> None:
        self.rewards, self.lengths, self.seconds = array("d"), array("d"), array("d")
        self.errors: Counter[str] = Counter()
        self.evaluated = 0


class RolloutReader:
    """Is told the events of every journal in their order, and takes those of one part; what does not fit is noted, not
    raised."""

    def __init__(self, part: Part) -> None:
        """Args:
        part: of the generation that a resume would go on from.
        """
        self._part, manifest = part, part.stored.manifest
        self._half, self.wrong = half_or_why_not(part.stored.folder)
        self._listed = REPLAY_BUFFER in manifest.left_out
        discarded = part.line().discarded
        self.fold = ProducerFold(self._half, (), seed=0, line=manifest, discarded=discarded, sampler=part.sampler())
        self._tasks: dict[int, str] = {}
        self.seen: dict[str, Seen] = {}

    def take(self, logged: Logged) -> None:
        """Take in the next event, if it counts."""
        if self._listed or self.wrong is not None or not self._part.wrote(logged.incarnation, logged.rank):
            return
        try:
            self._apply(logged)
        except UNFIT as error:
            name = f"incarnation {logged.incarnation}, rank {logged.rank}"
            self.wrong = f"journal of {name}: event {logged.sequence} does not fit what came before it ({error!r})"

    def _apply(self, logged: Logged) -> None:
        event = logged.event
        if type(event) is Claimed and event.size > 1 << 20:
            raise ValueError(f"a group of {event.size}")
        if self.fold.apply(logged):
            self._note(event)

    def _note(self, event: AnyEvent) -> None:
        if isinstance(event, Claimed):
            self._tasks[event.uid] = event.task
        elif isinstance(event, Inherited):
            self._tasks.update((item.uid, item.task) for item in event.items)
        elif isinstance(event, (Finished, Parked)):
            seen = self._of(event.uid)
            seen.lengths.append(event.tokens)
            seen.seconds.append(event.seconds)
            if isinstance(event, Finished):
                seen.rewards.append(event.reward)
        elif isinstance(event, Rewarded):
            self._of(event.uid).rewards.append(event.reward)
        elif isinstance(event, Failed):
            self._of(event.uid).errors[event.error.splitlines()[0][:200] if event.error else event.reason] += 1
        elif isinstance(event, Evaluated):
            self.seen.setdefault(event.task, Seen()).evaluated += 1

    def _of(self, uid: int) -> Seen:
        return self.seen.setdefault(self._tasks.get(uid, ""), Seen())

    def finish(self, *, running: bool) -> None:
        """End the fold: impose the consumer half.

        Args:
            running: whether a process has the run: then what was in flight still is.
        """
        try:
            self._finish(running)
        except (OSError, *UNFIT) as error:
            self.wrong = self.wrong or f"{self._part.stored.folder}: does not fit the journals ({error})"

    def _finish(self, running: bool) -> None:
        ledger = self.fold.ledger
        if self._listed:
            listed = read_inherited(os.path.join(self._part.stored.folder, PRODUCER_FILE))
            self.fold.apply(Logged(0, 0, 0, listed))
        if not running:
            ledger.apply(Opened(ledger.incarnation + 1, version=self._part.stored.manifest.step))
        for lease in ledger.restore(self._half):
            if lease.step > self._half.step and ledger.still_whole(lease):
                ledger.lease(lease.step, lease.uids)


class RolloutReaders:
    """Is told the events of every journal in their order; each part has a reader of its own."""

    def __init__(self, layout: Layout, run_tag: int, stored: Stored) -> None:
        """Args:
        layout: the run's paths.
        run_tag: its tag.
        stored: the generation that a resume would go on from.
        """
        self._manifest = stored.manifest
        self.parts = [RolloutReader(part) for part in parts_of(layout, run_tag, stored)]

    def take(self, logged: Logged) -> None:
        """Take in the next event, if it counts."""
        at = logged.rank if len(self.parts) > 1 else 0
        if at < len(self.parts):
            self.parts[at].take(logged)

    @property
    def wrong(self) -> str | None:
        """What does not fit."""
        return next((part.wrong for part in self.parts if part.wrong is not None), None)

    def finish(self, *, running: bool) -> None:
        """As :meth:`RolloutReader.finish`, of every part."""
        for part in self.parts:
            part.finish(running=running)

    def holder(self, uid: int) -> ProducerFold:
        """Return the fold of the part that an item is of; of one that none knows, any."""
        folds = [part.fold for part in self.parts]
        return next((fold for fold in folds if uid in fold.ledger.entries or uid in fold.ledger.trained), folds[0])

    @property
    def next_uid(self) -> int:
        """One more than the largest number of an item."""
        return max(part.fold.ledger.next_uid for part in self.parts)

    def result(self, *, running: bool) -> list[TaskFacts]:
        """Return what there is, task by task, of all parts together; see :meth:`RolloutReader.finish`."""
        self.finish(running=running)
        names = {name for part in self.parts for name in part.fold.ledger.totals}
        return [self._facts(name) for name in sorted(names | set(self._manifest.tasks))]

    def _facts(self, name: str) -> TaskFacts:
        ledgers = [part.fold.ledger for part in self.parts]
        totals = [each.totals[name] for each in ledgers if name in each.totals]
        seen = [part.seen[name] for part in self.parts if name in part.seen]
        cursors = [cursor for part in self.parts if (cursor := part.fold.sampler.cursors.get(name)) is not None]
        cursor = max(cursors, key=lambda each: (each.epoch, each.position), default=None)
        counts = [
            sum(each) for each in zip(*(each.counts.get(name, [0] * len(STATES)) for each in ledgers), strict=True)
        ]
        entries = [entry for each in ledgers for entry in each.entries.values()]
        versions = Counter(entry.effective for entry in entries if entry.task == name and entry.state == BUFFERED)
        errors = sum((each.errors for each in seen), Counter[str]())

        def summed(field: str) -> int:
            return sum(getattr(each, field) for each in totals)

        def joined(field: str) -> Figures:
            return Figures.of(array("d", [value for each in seen for value in getattr(each, field)]))

        return TaskFacts(
            task=name,
            claimed=summed("claimed"),
            states={
                **dict(zip(STATES, counts, strict=True)),
                "trained": summed("trained"),
                "retired": summed("retired"),
            },
            dropped=dict(sum((Counter(each.dropped) for each in totals), Counter[str]())),
            epoch=cursor.epoch if cursor else -1,
            drawn=cursor.position if cursor else 0,
            length=cursor.length if cursor else 0,
            finished=summed("finished"),
            failed=summed("failed"),
            interrupted=summed("interrupted"),
            reopened=summed("reopened"),
            tokens=summed("tokens"),
            rows=summed("rows"),
            rewards=joined("rewards"),
            lengths=joined("lengths"),
            seconds=joined("seconds"),
            versions=dict(sorted(versions.items())),
            errors=dict(errors.most_common(_MOST_ERRORS)),
            evaluated=sum(each.evaluated for each in seen),
        )


def read_events(
    layout: Layout, run_tag: int, *takers: Taker, read: Callable[[str], None] = lambda path: None
) -> list[str]:
    """Tell everybody the events of every journal; return what could not be read. ``read`` is told the path of each
    journal that was."""
    wrong = []
    for name in layout.list_journals():
        try:
            for logged in read_journal(name, run_tag=run_tag):
                for taker in takers:
                    taker.take(logged)
        except (ForebayError, OSError) as error:
            wrong.append(str(error))
        read(name.path)
    return wrong

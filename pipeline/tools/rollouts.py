"""What a run of rollouts holds: its producer events folded, as a resume of a generation would find them."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from typing import Protocol

import msgspec

from pipeline.checkpoint.fold import ProducerFold
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.halves import half_or_why_not
from pipeline.checkpoint.lines import PRODUCER_FILE, line_as_saved, read_inherited
from pipeline.checkpoint.manifest import REPLAY_BUFFER
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


class _Seen:
    """The numbers of one task."""

    def __init__(self) -> None:
        self.rewards, self.lengths, self.seconds = array("d"), array("d"), array("d")
        self.errors: Counter[str] = Counter()
        self.evaluated = 0


class RolloutReader:
    """Is told the events of every journal in their order; what does not fit is noted, not raised."""

    def __init__(self, layout: Layout, run_tag: int, stored: Stored) -> None:
        """Args:
        layout: the run's paths.
        run_tag: its tag.
        stored: the generation that a resume would go on from.
        """
        self._half, self.wrong = half_or_why_not(stored.folder)
        self._stored, manifest = stored, stored.manifest
        self._listed = REPLAY_BUFFER in manifest.left_out
        line = line_as_saved(layout, run_tag, manifest)
        self.fold = ProducerFold(self._half, (), seed=0, line=manifest, discarded=line.discarded)
        self._tasks: dict[int, str] = {}
        self._seen: dict[str, _Seen] = {}

    def take(self, logged: Logged) -> None:
        """Take in the next event, if it counts."""
        if self._listed or self.wrong is not None or logged.incarnation < self._stored.manifest.base:
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
            self._seen.setdefault(event.task, _Seen()).evaluated += 1

    def _of(self, uid: int) -> _Seen:
        return self._seen.setdefault(self._tasks.get(uid, ""), _Seen())

    def result(self, *, running: bool) -> list[TaskFacts]:
        """Return what there is, task by task; see :meth:`finish`."""
        self.finish(running=running)
        names = [*self.fold.ledger.totals, *(set(self._stored.manifest.tasks) - set(self.fold.ledger.totals))]
        return [self._facts(name) for name in sorted(names)]

    def finish(self, *, running: bool) -> None:
        """End the fold: impose the consumer half.

        Args:
            running: whether a process has the run: then what was in flight still is.
        """
        try:
            self._finish(running)
        except (OSError, *UNFIT) as error:
            self.wrong = self.wrong or f"{self._stored.folder}: does not fit the journals ({error})"

    def _finish(self, running: bool) -> None:
        ledger = self.fold.ledger
        if self._listed:
            listed = read_inherited(os.path.join(self._stored.folder, PRODUCER_FILE))
            self.fold.apply(Logged(0, 0, 0, listed))
        if not running:
            ledger.apply(Opened(ledger.incarnation + 1, version=self._stored.manifest.step))
        for lease in ledger.restore(self._half):
            if lease.step > self._half.step and ledger.still_whole(lease):
                ledger.lease(lease.step, lease.uids)

    def _facts(self, name: str) -> TaskFacts:
        ledger, seen = self.fold.ledger, self._seen.get(name, _Seen())
        counts = ledger.counts.get(name, [0] * len(STATES))
        totals = ledger.totals.get(name)
        cursor = self.fold.sampler.cursors.get(name)
        versions = Counter(
            entry.effective for entry in ledger.entries.values() if entry.task == name and entry.state == BUFFERED
        )
        states = dict(zip(STATES, counts, strict=True))
        return TaskFacts(
            task=name,
            claimed=totals.claimed if totals else 0,
            states={**states, "trained": totals.trained if totals else 0, "retired": totals.retired if totals else 0},
            dropped=dict(totals.dropped) if totals else {},
            epoch=cursor.epoch if cursor else -1,
            drawn=cursor.position if cursor else 0,
            length=cursor.length if cursor else 0,
            finished=totals.finished if totals else 0,
            failed=totals.failed if totals else 0,
            interrupted=totals.interrupted if totals else 0,
            reopened=totals.reopened if totals else 0,
            tokens=totals.tokens if totals else 0,
            rows=totals.rows if totals else 0,
            rewards=Figures.of(seen.rewards),
            lengths=Figures.of(seen.lengths),
            seconds=Figures.of(seen.seconds),
            versions=dict(sorted(versions.items())),
            errors=dict(seen.errors.most_common(_MOST_ERRORS)),
            evaluated=seen.evaluated,
        )


def read_events(layout: Layout, run_tag: int, *takers: Taker) -> list[str]:
    """Tell everybody the events of every journal; return what could not be read."""
    wrong = []
    for name in layout.list_journals():
        try:
            for logged in read_journal(name, run_tag=run_tag):
                for taker in takers:
                    taker.take(logged)
        except (ForebayError, OSError) as error:
            wrong.append(str(error))
    return wrong

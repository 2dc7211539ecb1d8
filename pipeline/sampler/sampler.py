"""Draws the next item of each task.

``draw`` says what comes next and changes nothing; the event that records the draw does, through ``apply``, in
life as in recovery. So the sampler's whole state is what the journal says was drawn.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.errors import SourceError, SourceMismatch
from pipeline.interfaces import ChoosingSource, LearningSource, Source
from pipeline.records import EXTERNAL, AnyEvent, Claimed, EpochBegan, Feedback, Inherited, Mixed, SourceMark
from pipeline.sampler.mixture import Mixture
from pipeline.sampler.order import in_order, shuffled

_BLOCK = 512  # positions whose indices are computed at a time


class DrawPlan(NamedTuple):
    """What the sampler needs of a task."""

    name: str
    source: Source
    share: float
    epochs: int | None
    shuffle: bool


class Draw(msgspec.Struct, frozen=True):
    """The next item to claim; ``began`` is recorded first when the draw opens an epoch."""

    task: str
    epoch: int
    position: int
    index: int
    began: EpochBegan | None
    number: int = -1
    """Where ranks share the order: among all its draws, from 0."""


class Cursor(msgspec.Struct):
    """How far a task has been drawn: part of the folded state, so it outlives the task's absence."""

    epoch: int = -1
    position: int = 0
    length: int = 0
    mark: SourceMark = SourceMark()
    base: int = 0
    """The epoch in which the task was begun anew last: what ``epochs`` counts from."""

    @property
    def at_end(self) -> bool:
        """Whether the epoch that was begun has been drawn to its end (none begun: yes)."""
        return 0 <= self.length <= self.position


class Sampler:
    """Order and mixture of a run's tasks, and how far each has been drawn."""

    def __init__(self, plans: Sequence[DrawPlan], seed: int) -> None:
        self.seed = seed
        self.cursors: dict[str, Cursor] = {plan.name: Cursor() for plan in plans}
        self.mixture = Mixture()
        self._plans = {plan.name: plan for plan in plans}
        self._blocks: dict[str, tuple[tuple[int, int, int], list[int]]] = {}
        self._open = list(self._plans)
        self.learners = frozenset(plan.name for plan in plans if isinstance(plan.source, LearningSource))
        """Tasks whose source is told what its groups came to."""
        self._choosers = {plan.name: plan.source for plan in plans if isinstance(plan.source, ChoosingSource)}
        self.awaited: set[str] = set()
        """Streams that have been asked for an item: the others are drawn until it comes."""
        self._teaching = False
        self._untold = (array("I"), array("q"), array("d"))  # task by number, index, value: what was only folded yet
        self._shares: dict[str, tuple[float, float]] = {}  # by task: as it was made with, and as it is in use
        self._at_end = True  # whether a cursor has come to the end of its epoch since `_open` was looked through
        self._apply: dict[type, Callable[..., None]] = {
            Claimed: self._claimed,
            EpochBegan: self._epoch_began,
            Mixed: self._mixed,
            Inherited: self._inherited,
            Feedback: self._fed,
        }

    def apply(self, event: AnyEvent) -> None:
        """Take in an event; those that are none of the sampler's business do nothing."""
        handler = self._apply.get(type(event))
        if handler is not None:
            handler(event)

    @property
    def given_shares(self) -> dict[str, float]:
        """The shares that this run's tasks were made with."""
        return {name: float(plan.share) for name, plan in self._plans.items()}

    @property
    def inherited_shares(self) -> dict[str, float]:
        """The shares that tasks were made with, for those that have others now."""
        return {name: given for name, (given, share) in self._shares.items() if given != share}

    def untold(self) -> list[Feedback]:
        """Return what has been folded for sources that learn, and told to none yet."""
        names = list(self._plans)
        return [Feedback(names[number], -1, index, value) for number, index, value in zip(*self._untold, strict=True)]

    def shares_event(self) -> Mixed | None:
        """Return the event to record when the tasks or their shares are not those last recorded.

        A share that was set while the run went on stays, unless the task is made with another one than before.
        """
        given, shares = self.given_shares, self._kept_shares()
        known = {name: self._shares[name][0] for name in given if name in self._shares}
        if shares == self.mixture.shares and given == known:
            return None
        return Mixed(shares) if shares == given else Mixed(shares, given)

    def share_event(self, task: str, share: float) -> Mixed:
        """Return the event that gives ``task`` another share from here on."""
        return Mixed({**self.mixture.shares, task: share}, self.given_shares)

    def changed_shares(self) -> list[tuple[str, float, float]]:
        """Return task, share in use and share now of each task that is made with another share than before."""
        kept = self._kept_shares()
        return [(name, self._shares[name][1], kept[name]) for name in kept if self._differs(name)]

    def _kept_shares(self) -> dict[str, float]:
        given = self.given_shares
        return {
            name: self._shares[name][1] if name in self._shares and not self._differs(name) else share
            for name, share in given.items()
        }

    def _differs(self, name: str) -> bool:
        return name in self._shares and self._shares[name][0] != float(self._plans[name].share)

    def draw(self) -> Draw | None:
        """Return the next item in order, or None when every source has been drawn to its end."""
        # Those at their end leave first: who is next hangs on who takes part, in life as after a recovery.
        names = self.open_tasks() if self._at_end else self._open
        if self.awaited:
            names = [name for name in names if name not in self.awaited]
        name = names[0] if len(names) == 1 else self.mixture.next(names)
        return None if name is None else self.draw_of(name)

    def open_tasks(self) -> list[str]:
        """Return the tasks whose source has not been drawn to its end, in order."""
        if self._at_end:
            self._open = [name for name in self._open if not self._ended(name)]
            self._at_end = any(self.cursors[name].at_end for name in self._open)
        return self._open

    @property
    def exhausted(self) -> bool:
        """Whether every source has been drawn to its end, and no stream is waited for."""
        return not self.awaited and self.draw() is None

    def end(self, name: str) -> None:
        """Note that the stream of a task has ended: nothing of it is drawn any more in this life."""
        self.awaited.discard(name)
        self._open.remove(name)

    def teach(self) -> None:
        """From here on tell sources what their groups came to, beginning with what was folded.

        Recovery only collects it: it may still be refused, and what a source was told cannot be taken back.
        """
        self._teaching = True
        names = list(self._plans)
        for number, index, value in zip(*self._untold, strict=True):
            self._tell(names[number], index, value)
        self._untold = (array("I"), array("q"), array("d"))

    def _ended(self, name: str) -> bool:
        plan, cursor = self._plans[name], self.cursors[name]
        if not cursor.at_end:
            return False
        return (plan.epochs is not None and cursor.epoch + 1 - cursor.base >= plan.epochs) or plan.source.length() == 0

    def draw_of(self, name: str) -> Draw:
        """Return the next item of a task, whosever turn it is. Changes nothing."""
        plan, cursor = self._plans[name], self.cursors[name]
        epoch, position, length, began = cursor.epoch, cursor.position, cursor.length, None
        if cursor.at_end:
            epoch, position = epoch + 1, 0
            # The length is fixed for an epoch when it begins: what is added meanwhile counts from the next.
            given = plan.source.length()
            length = -1 if given is None else given
            began = EpochBegan(name, epoch, length, plan.source.mark())
        return Draw(name, epoch, position, self._index(plan, epoch, position, length), began)

    def _index(self, plan: DrawPlan, epoch: int, position: int, length: int) -> int:
        chooser = self._choosers.get(plan.name)
        if chooser is not None:
            return self._chosen(plan.name, chooser, epoch, position)
        if length < 0:
            return position
        first = position - position % _BLOCK
        key = (epoch, length, first)
        cached = self._blocks.get(plan.name)
        if cached is None or cached[0] != key:
            positions = np.arange(first, min(first + _BLOCK, length), dtype=np.int64)
            order = shuffled if plan.shuffle else in_order
            cached = (key, order(self.seed, epoch, positions, length).tolist())
            self._blocks[plan.name] = cached
        return cached[1][position - first]

    def _chosen(self, name: str, source: ChoosingSource, epoch: int, position: int) -> int:
        try:
            return operator.index(source.choose(self.seed, epoch, position))
        except Exception as error:
            raise SourceError(f"task {name!r}: its source's choose() failed at {epoch, position}: {error!r}") from error

    def _claimed(self, event: Claimed) -> None:
        if event.kind == EXTERNAL:
            return
        cursor = self.cursors.get(event.task)
        if cursor is None:
            cursor = self.cursors[event.task] = Cursor()
        if event.epoch == cursor.epoch and event.position >= cursor.position:
            cursor.position = event.position + 1
            if cursor.position == cursor.length:
                self._at_end = True
        self.mixture.count(event.task)

    def _epoch_began(self, event: EpochBegan) -> None:
        before = self.cursors.get(event.task)
        base = event.epoch if event.restarted else before.base if before is not None else 0
        self.cursors[event.task] = Cursor(event.epoch, 0, event.length, event.mark, base)
        self._at_end = True
        if event.task in self._plans and event.task not in self._open:
            self._open = [name for name in self._plans if name in self._open or name == event.task]
        if event.restarted:
            self.mixture.set_shares(self.mixture.shares)

    def _mixed(self, event: Mixed) -> None:
        self.mixture.set_shares(event.shares)
        for name, share in event.shares.items():
            self._shares[name] = (event.given.get(name, share), share)

    def _fed(self, event: Feedback) -> None:
        if event.task not in self.learners:
            return
        if self._teaching:
            self._tell(event.task, event.index, event.value)
            return
        numbers, indices, values = self._untold
        numbers.append(list(self._plans).index(event.task))
        indices.append(event.index)
        values.append(event.value)

    def _tell(self, name: str, index: int, value: float) -> None:
        source = self._plans[name].source
        assert isinstance(source, LearningSource)
        source.feedback(index, value)

    def _inherited(self, event: Inherited) -> None:
        for name, cursor in event.cursors.items():
            self.cursors[name] = Cursor(*cursor)
        self.mixture.shares, self.mixture.drawn = dict(event.shares), dict(event.drawn)
        for name, share in event.shares.items():
            self._shares[name] = (event.given.get(name, share), share)
        self._open, self._at_end = list(self._plans), True


def check_marks(sampler: Sampler, plans: Mapping[str, DrawPlan]) -> list[tuple[str, SourceMark, SourceMark]]:
    """Compare each task's source with the one that the run was begun with.

    Returns:
        Task, mark before and mark now of each source that is the same but has grown or been corrected.

    Raises:
        SourceError: a source is another one, or has become shorter than what was drawn of it.
    """
    notes = []
    for name, plan in plans.items():
        cursor = sampler.cursors[name]
        if cursor.epoch < 0:
            continue
        now, before = plan.source.mark(), cursor.mark
        if now == before:
            continue
        if not now.agrees(before):
            raise SourceMismatch(
                f"task {name!r}: the run was begun with the source {before}, and this is {now}. Use the source that "
                f"the run was begun with, another directory, or resume(restart=[{name!r}]) to begin this task anew."
            )
        if 0 <= now.length < before.length:
            raise SourceError(
                f"task {name!r}: its source had {before.length} items when epoch {cursor.epoch} began and has "
                f"{now.length} now. Give the source its rows back, or resume(restart=[{name!r}]) to begin it anew."
            )
        notes.append((name, before, now))
    return notes

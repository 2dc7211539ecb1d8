"""What a resume of the newest generation would find to do: the producer events folded, without sources or payloads."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.halves import half_or_why_not
from pipeline.checkpoint.lines import PRODUCER_FILE, line_as_saved, read_inherited
from pipeline.checkpoint.manifest import PIPELINE_RANKS, REPLAY_BUFFER, shard_prefix
from pipeline.ledger import BUFFERED, PARKED, WAITING, Ledger
from pipeline.records import AnyEvent, Claimed, Inherited, Opened, Reserved
from pipeline.sampler import Sampler, TurnSampler
from pipeline.sampler.turns import unreserved
from pipeline.store.journal import Logged
from pipeline.store.layout import Layout

_UNFIT = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, msgspec.MsgspecError)
"""What an event that no pipeline wrote may raise when it is applied."""
_MOST_MEMBERS = 1 << 20
_MOST_DRAWS = 1 << 20
_STREAM = "stream"


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """How far a task has been drawn."""

    epoch: int
    """The one that is drawn; -1: none was begun."""
    drawn: int
    """Items of it."""
    length: int
    """How many it has; -1: no end."""
    epochs: int | None
    """How often the task goes through its source; None: without end."""
    ended: bool | None
    """Whether it is drawn to its end; None: of a stream, whose end stands nowhere."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to do, as a resume would find it."""

    buffered: int
    """Finished groups that wait to be trained."""
    waiting: int
    """Items that are to be run, those that were in flight among them, and those that are some rank's turn."""
    parked: int
    """Groups that wait for a reward."""
    tasks: dict[str, Drawn]
    """Those that the generation was saved with."""
    left: int
    """Items of these that have been drawn and have not ended."""

    @property
    def ended(self) -> bool | None:
        """Whether every source is drawn to its end; None: that of a stream is not known."""
        each = [task.ended for task in self.tasks.values()]
        return False if False in each or not each else None if None in each else True


class _Part:
    """What one process has, or one of several ranks."""

    def __init__(self, folder: str, sampler: Sampler) -> None:
        self.half, self.wrong = half_or_why_not(folder)
        self.ledger, self.sampler = Ledger(self.half), sampler
        self.over = False
        """Whether what comes is of lives that had shared everything out anew, which no generation tells of."""

    def apply(self, event: AnyEvent) -> None:
        if type(event) is Claimed and event.size > _MOST_MEMBERS:
            raise ValueError(f"a group of {event.size}")
        turns = self.sampler
        if type(event) is Reserved and isinstance(turns, TurnSampler) and event.next - turns.next > _MOST_DRAWS:
            raise ValueError(f"a turn from {turns.next} to {event.next}")
        # What the generation calls trained has ended, whatever is said of it: it need not be kept in memory.
        uid = getattr(event, "uid", None)
        if uid is None or uid not in self.ledger.trained:
            self.ledger.apply(event)
        self.sampler.apply(event)

    def end(self, step: int) -> None:
        """No event comes any more."""
        self.ledger.apply(Opened(self.ledger.incarnation + 1, version=step))  # nothing is in flight after that
        self.ledger.restore(self.half)


class Outlook:
    """Is told the events of every journal in their order. What does not fit together is noted, not raised."""

    def __init__(self, layout: Layout, run_tag: int, stored: Stored) -> None:
        """Args:
        layout: the run's paths.
        run_tag: its tag.
        stored: the newest generation.
        """
        manifest = self._manifest = stored.manifest
        self._folder, self._layout = stored.folder, layout
        self._of_ranks, size = manifest.kind == PIPELINE_RANKS, manifest.world_size
        if self._of_ranks:
            self._parts = [
                _Part(os.path.join(stored.folder, shard_prefix(rank)), TurnSampler((), 0, rank, size))
                for rank in range(size)
            ]
        else:
            self._parts = [_Part(stored.folder, Sampler((), 0))]
        self.wrong: str | None = next((part.wrong for part in self._parts if part.wrong is not None), None)
        """What does not fit."""
        self._listed = REPLAY_BUFFER in manifest.left_out  # then no journal is folded
        line = line_as_saved(layout, run_tag, manifest)
        self._last = {(incarnation, rank): last for incarnation, rank, last in line.discarded}

    def take(self, logged: Logged) -> None:
        """Take in the next event, if it counts."""
        key = (logged.incarnation, logged.rank)
        if self._listed or self.wrong is not None or key[0] < self._manifest.base:
            return
        if logged.sequence > self._last.get(key, sys.maxsize):
            return
        part = self._part_of(logged)
        if part is None:
            return
        try:
            part.apply(logged.event)
        except _UNFIT as error:
            path = self._layout.journal(*key)
            self.wrong = f"{path}: event {logged.sequence} does not fit what came before it ({error!r})"

    def _part_of(self, logged: Logged) -> _Part | None:
        """Return what an event belongs to, if it is not of other ranks than those of the generation."""
        if not self._of_ranks:
            return self._parts[0]
        if logged.rank >= len(self._parts):
            return None
        part = self._parts[logged.rank]
        part.over |= type(logged.event) is Inherited and logged.incarnation > self._manifest.incarnation
        return None if part.over else part

    def result(self) -> Work | None:
        """Return what there is to do; None if something does not fit."""
        try:
            return self._result() if self.wrong is None else None
        except (OSError, *_UNFIT) as error:
            self.wrong = f"{self._folder}: does not fit the journals ({error})"
            return None

    def _result(self) -> Work:
        parts, manifest = self._parts, self._manifest
        if self._listed:
            listed = read_inherited(os.path.join(self._folder, PRODUCER_FILE))
            parts[0].ledger.apply(listed)
            parts[0].sampler.apply(listed)
        for part in parts:
            part.end(manifest.step)
        samplers = [part.sampler for part in parts if isinstance(part.sampler, TurnSampler)]
        ahead = max(samplers, key=lambda each: each.next) if samplers else parts[0].sampler
        tasks = {name: _drawn(ahead, name, given.get("epochs")) for name, given in manifest.tasks.items()}
        left = [entry.task for part in parts for entry in part.ledger.entries.values()]
        turns = [draw.task for sampler in samplers for draw in sampler.reserved.values()]
        free = unreserved(samplers)
        return Work(
            buffered=_count(parts, BUFFERED),
            waiting=_count(parts, WAITING) + len(turns) + len(free),
            parked=_count(parts, PARKED),
            tasks=tasks,
            left=sum(name in tasks for name in (*left, *turns)) + len(free),
        )


def _count(parts: Sequence[_Part], state: int) -> int:
    return sum(part.ledger.count(state) for part in parts)


def _drawn(sampler: Sampler, name: str, epochs: Any) -> Drawn:
    cursor = sampler.cursors.get(name)
    if cursor is None:
        return Drawn(epoch=-1, drawn=0, length=0, epochs=epochs, ended=False)
    ended: bool | None = None
    if cursor.mark.kind != _STREAM and cursor.epoch >= 0:
        rounds = cursor.epoch + 1 - cursor.base
        ended = cursor.at_end and epochs is not None and rounds >= epochs
    return Drawn(epoch=cursor.epoch, drawn=cursor.position, length=cursor.length, epochs=epochs, ended=ended)

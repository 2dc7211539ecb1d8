"""What the journals of a run whose rollouts fill a buffer say of its rows: who made them, and what came after the
generation.

Of an item that was begun before a hole in a journal nothing is folded after that. But its rows are there, whatever else
is missing, and what the buffer has must not be played again: so it is told here what became of such an item.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

from pipeline.intervals import IntervalSet
from pipeline.ledger import Entry, Ledger
from pipeline.locations import Location
from pipeline.records import (
    EPISODE,
    EXTERNAL,
    Added,
    AnyEvent,
    Claimed,
    Dropped,
    Failed,
    Finished,
    Inherited,
    Interrupted,
)
from pipeline.store.journal import Logged

PLAYED = "played"
"""Why an item without a claim is not to be claimed again: it has rows."""
_FEW = 1024


class Made(NamedTuple):
    """Rows that one attempt added at once: their keys, and its item."""

    first: int
    end: int
    uid: int


class Beyond:
    """What is known of an item from events that do not fit what came before them."""

    def __init__(self) -> None:
        self.rows = 0
        """Of the attempt that went on last."""
        self.attempt = 1
        self.end: AnyEvent | None = None

    def take(self, event: AnyEvent) -> None:
        """Take in the next."""
        if isinstance(event, Added):
            self.rows, self.attempt = self.rows + event.count, event.attempt
        elif isinstance(event, Finished) or (isinstance(event, Failed) and event.final):
            self.end = event
        elif isinstance(event, Failed):
            self.rows = 0  # its rows stay, and another attempt follows
        elif isinstance(event, Interrupted) and self.rows:
            self.end = event

    @property
    def over(self) -> bool:
        """Whether the item is not to be played any more."""
        return self.rows > 0 or self.end is not None

    def apply(self, uid: int, ledger: Ledger) -> None:
        """Let it happen to the item, which has been claimed."""
        if self.rows:
            ledger.apply(Added(uid, 0, self.attempt, 0, 0, self.rows, 0))
        ledger.apply(self.end or Interrupted(uid, 0, self.attempt, "lost"))


class Played:
    """See the module."""

    def __init__(self, positions: Mapping[tuple[int, int], int], capacity: int) -> None:
        """Args:
        positions: the last event of each journal that the generation's own buffer knows of.
        capacity: of the buffer: rows that are gone for longer do not count.
        """
        self._positions, self._capacity = positions, capacity
        self.later: list[tuple[Added, Location]] = []
        """Rows that were added after the generation, in their order, and where they lie."""
        self.made: deque[Made] = deque()
        """Who made the rows that may be there, in their order."""
        self.tasks: dict[int, str] = {}
        """Tasks of the items that have such, or may get some."""
        self.beyond: dict[int, Beyond] = {}
        """Items of which events came that do not fit."""
        self._doubtful: set[int] = set()
        self._most = _FEW

    def take(self, logged: Logged, live: Collection[int]) -> None:
        """Take in the next event that counts; ``live`` are the items that have not ended."""
        incarnation, rank, sequence, event = logged
        if isinstance(event, Claimed):
            self.tasks[event.uid] = event.task
        elif isinstance(event, Inherited):
            self.tasks |= {item.uid: item.task for item in event.items}
        elif isinstance(event, Added):
            self.made.append(Made(event.first, event.first + event.count, event.uid))
            if sequence > self._positions.get((incarnation, rank), 0):
                at = Location(incarnation, rank, event.segment, event.offset, event.length)
                self.later.append((event, at))
            self._forget_gone(event.first + event.count - self._capacity)
        if len(self.tasks) > self._most:
            needed = {made.uid for made in self.made}
            self.tasks = {uid: task for uid, task in self.tasks.items() if uid in needed or uid in live}
            self._most = 2 * len(self.tasks) + _FEW

    def _forget_gone(self, oldest: int) -> None:
        while self.made and self.made[0].end <= oldest:
            self.made.popleft()

    def hole(self, key: tuple[int, int], first: int, live: Collection[int]) -> None:
        """Take in that the events of a journal are missing from one on. If the generation knew of them, those of the
        ``live`` items that are not heard of any more may have been played there: it has the rows of these."""
        if first <= self._positions.get(key, 0):
            self._doubtful |= set(live)

    def left_out(self, event: AnyEvent) -> None:
        """Take in an event that does not fit what came before it."""
        uid = getattr(event, "uid", None)
        if uid is not None and not isinstance(event, (Claimed, Dropped)):
            self._doubtful.discard(uid)
            self.beyond.setdefault(uid, Beyond()).take(event)

    @property
    def unwritten(self) -> bool:
        """Whether rows that came after the generation lie in no segment: all that came after it is set aside."""
        return any(at.segment < 0 for _, at in self.later)

    def without_claim(self, seen: IntervalSet) -> dict[int, str]:
        """Return the items that are not to be played again, and of whose claim no event tells."""
        return {uid: PLAYED for uid, each in self.beyond.items() if each.over and uid not in seen}

    def settle(self, ledger: Ledger) -> list[Entry]:
        """Let happen what did not fit, to the items that it ends. Returns those that were given up, as nobody knows
        whether they were played."""
        for uid, each in self.beyond.items():
            if each.over and uid in ledger.entries:
                each.apply(uid, ledger)
        given_up = [ledger.entries[uid] for uid in sorted(self._doubtful & ledger.entries.keys())]
        for entry in given_up:
            ledger.apply(Dropped(entry.uid, "discarded"))
        return given_up


def claimed_as_episode(event: AnyEvent) -> AnyEvent:
    """Return a claim that was made up as one whose rollout makes rows."""
    if isinstance(event, Claimed) and event.kind != EXTERNAL:
        return Claimed(event.uid, event.task, event.epoch, event.position, event.index, 1, 1, EPISODE, event.content)
    return event

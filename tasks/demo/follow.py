"""Goes through the events of a run once, in their order, and keeps what the audit asks for.

It interprets the records by itself, and nothing it keeps comes from the library's ledger: see `audit.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pipeline.records import (
    BatchHint,
    Claimed,
    Closed,
    Dropped,
    Failed,
    Finished,
    Interrupted,
    Opened,
    Reopened,
    Started,
)
from pipeline.store.journal import Logged
from tasks.demo.books import Books


class Finding(NamedTuple):
    """Something that must not be; ``uid`` is -1 where no single item is meant."""

    uid: int
    why: str

    @property
    def text(self) -> str:
        """The finding as a sentence."""
        return self.why if self.uid < 0 else f"uid {self.uid}: {self.why}"


class Made(NamedTuple):
    """A finished rollout: who made it, and what its record says."""

    incarnation: int
    rank: int
    event: Finished


class Trained(NamedTuple):
    """A group as it stood when its batch was handed out."""

    uid: int
    made: tuple[Made, ...]
    staleness: int


class Item:
    """What the events so far say of one uid."""

    __slots__ = ("claim", "done", "dropped", "flying", "given_up", "idle", "life")

    def __init__(self, claim: Claimed, now: int) -> None:
        self.claim = claim
        self.life = 0
        self.dropped = ""
        self.begin_anew(now)

    def begin_anew(self, now: int) -> None:
        """Forget the attempts: none has been made in this life of the item."""
        self.done: dict[int, Made] = {}
        self.given_up: set[int] = set()
        self.flying: set[int] = set()
        self.idle: int | None = now
        """Since when it has waited for an attempt; None while one runs, or when none is needed."""

    @property
    def settled(self) -> bool:
        """Whether every member has finished or was given up."""
        return len(self.done) + len(self.given_up) >= self.claim.size

    def took_off(self, member: int) -> None:
        """Note that an attempt began."""
        self.flying.add(member)
        self.idle = None

    def landed(self, member: int, now: int) -> None:
        """Note that an attempt ended."""
        self.flying.discard(member)
        if not self.flying and not self.settled:
            self.idle = now


class Follower:
    """What the events say, taken together."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.items: dict[int, Item] = {}
        self.versions: dict[int, int] = {}
        """By incarnation, the version of the weights that it began with."""
        self.closed: set[int] = set()
        """Incarnations that ended on purpose."""
        self.batches: dict[int, tuple[int, list[Trained]]] = {}
        """By step of the surviving line, the incarnation and the batch that was handed out last."""
        self.given: dict[int, dict[int, list[int]]] = {}
        """By incarnation and step, surviving or not, the uids of the batch."""
        self.awaited: set[int] = set()
        """Uids of batches beyond the newest checkpoint: they will be handed out again."""
        self.last_claim = self.produced = self.cut = self.outdated = 0
        self.lost: list[Finding] = []
        self._now = 0
        handlers: dict[type, Callable[[Logged, Any], None]] = {
            Opened: self._opened,
            Closed: self._ended,
            Claimed: self._claimed,
            BatchHint: self._handed_out,
        }
        of_item: dict[type, Callable[[Logged, Item, Any], None]] = {
            Started: self._started,
            Finished: self._finished,
            Failed: self._failed,
            Interrupted: self._interrupted,
            Dropped: self._dropped,
            Reopened: self._reopened,
        }
        for logged in books.logged:
            self._now += 1
            kind = type(logged.event)
            if kind in handlers:
                handlers[kind](logged, logged.event)
            elif kind in of_item:
                uid: int = logged.event.uid  # type: ignore[union-attr]
                if uid in self.items:
                    of_item[kind](logged, self.items[uid], logged.event)

    @property
    def reached(self) -> int:
        """The last step that anybody in the newest incarnation was given a batch for."""
        return max([self.books.step, *self.given.get(max(self.given, default=0), {})])

    def version(self, made: tuple[Made, ...]) -> int:
        """Return the oldest version in terms of the weights in use now: each resume brought older weights back."""
        return min(
            min([each.event.oldest, *(v for life, v in self.versions.items() if life > each.incarnation)])
            for each in made
        )

    # -- the run -----------------------------------------------------------------------------------------------

    def _opened(self, logged: Logged, event: Opened) -> None:
        self.versions[event.incarnation] = event.version
        self.given[event.incarnation] = {}
        for item in self.items.values():
            if item.flying:
                self.cut += 1
                item.flying.clear()
                item.idle = self._now

    def _ended(self, logged: Logged, event: Closed) -> None:
        self.closed.add(logged.incarnation)

    def _claimed(self, logged: Logged, event: Claimed) -> None:
        if event.uid in self.items:
            self.lost.append(Finding(event.uid, "its uid was given to another item"))
        self.items[event.uid] = Item(event, self._now)
        self.last_claim = self._now

    def _handed_out(self, logged: Logged, event: BatchHint) -> None:
        self.given[logged.incarnation][event.step] = event.uids
        if event.step > self.books.step:
            self.awaited.update(event.uids)
        line = self.books.line
        if not any(s.incarnation == logged.incarnation and s.after < event.step <= s.upto for s in line):
            return
        groups = []
        for uid, life in zip(event.uids, event.lives, strict=True):
            item = self.items.get(uid)
            if item is None or not item.settled or not item.done or item.life != life:
                self.lost.append(Finding(uid, f"step {event.step} was trained on it, but it had not finished"))
                continue
            made = tuple(item.done[member] for member in sorted(item.done))
            groups.append(Trained(uid, made, max(0, event.step - 1 - self.version(made))))
        self.batches[event.step] = (logged.incarnation, groups)

    # -- one item ----------------------------------------------------------------------------------------------

    def _started(self, logged: Logged, item: Item, event: Started) -> None:
        item.took_off(event.member)

    def _finished(self, logged: Logged, item: Item, event: Finished) -> None:
        self.produced += 1
        item.done[event.member] = Made(logged.incarnation, logged.rank, event)
        item.landed(event.member, self._now)
        if event.rejected:
            item.dropped = "filtered"

    def _failed(self, logged: Logged, item: Item, event: Failed) -> None:
        if event.final:
            item.given_up.add(event.member)
        item.landed(event.member, self._now)
        if item.settled and len(item.done) < item.claim.need:
            item.dropped = "failed"
        elif event.rejected:
            item.dropped = "filtered"

    def _interrupted(self, logged: Logged, item: Item, event: Interrupted) -> None:
        item.landed(event.member, self._now)

    def _dropped(self, logged: Logged, item: Item, event: Dropped) -> None:
        item.dropped = event.reason

    def _reopened(self, logged: Logged, item: Item, event: Reopened) -> None:
        kept = {member: made for member, made in item.done.items() if event.members and member not in event.members}
        given_up = set(item.given_up) if event.members else set()
        self.outdated += len(item.done) - len(kept)
        item.begin_anew(self._now)
        item.done, item.given_up = kept, given_up
        item.life += 1

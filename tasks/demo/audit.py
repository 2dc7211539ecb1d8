"""What became of every rollout, worked out from the files of a run alone.

It shares the decoders of records with the library and none of its accounting: no ledger, no fold, no recovery, and
nothing that the training process remembers. So a rollout that the library forgot, or trained twice, shows here. A batch
that a killed process had trained and its successor trained again counts once, because the weights went back as well:
what counts are the steps on the line of checkpoints that leads to the newest one.

An item is *lost* if it was claimed and is neither trained, nor dropped with a reason, nor still there to be trained:

* its claim is missing: uids, and places in the source, have no gaps;
* it waits although newer items were claimed: what waits is always served first, so it was forgotten;
* it is finished and too old to be trained any more, so nothing will ever take it;
* its payload is not in its segment;
* the newest checkpoint calls it trained, and no batch on its line holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

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


class Step(NamedTuple):
    """A trainer's step that survives in the newest checkpoint."""

    step: int
    incarnation: int
    groups: list[Trained]
    repeated: bool
    """A killed process had been given the same batch for this step."""

    @property
    def returns(self) -> list[float]:
        """The returns of its rollouts."""
        return [made.event.reward for group in self.groups for made in group.made]


class Kill(NamedTuple):
    """A process that ended without saying so."""

    incarnation: int
    step: int
    """The last step that it had a batch for."""
    resumed_from: int | None
    """The step of the checkpoint that the next process began with; None if there was no next one."""


class Finding(NamedTuple):
    """Something that must not be; ``uid`` is -1 where no single item is meant."""

    uid: int
    why: str

    @property
    def text(self) -> str:
        """The finding as a sentence."""
        return self.why if self.uid < 0 else f"uid {self.uid}: {self.why}"


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The result. ``claimed = trained + dropped + buffered + unfinished + lost``, counting each uid once."""

    claimed: int
    produced: int
    """Rollouts that finished, those that were run again included."""
    trained: int
    recovered: int
    """Trained after a kill, and finished before it."""
    buffered: int
    """Finished at the end of the run, and waiting to be trained."""
    unfinished: int
    """Running or waiting at the end of the run."""
    dropped: dict[str, int]
    cut: int
    """Items in flight at a kill; they are run again."""
    outdated: int
    """Finished rollouts that became too old to be trained; they are run again."""
    staleness: dict[int, int]
    """How many trained groups were how stale."""
    steps: list[Step]
    kills: list[Kill]
    lost: list[Finding]
    twice: list[Finding]

    @property
    def sound(self) -> bool:
        """Whether nothing was lost and nothing trained twice."""
        return not self.lost and not self.twice


class _Item:
    """What the events so far say of one uid."""

    __slots__ = ("claim", "done", "dropped", "flying", "given_up", "idle", "life")

    def __init__(self, claim: Claimed, now: int) -> None:
        self.claim = claim
        self.idle: int | None = now
        """When the last attempt ended without the item being settled; None while one runs."""
        self.begin_anew()
        self.life = 0
        self.dropped = ""

    def begin_anew(self) -> None:
        """Forget the attempts: none has been made in this life of the item."""
        self.done: dict[int, Made] = {}
        self.given_up: set[int] = set()
        self.flying: set[int] = set()

    @property
    def settled(self) -> bool:
        """Whether every member has finished or was given up."""
        return len(self.done) + len(self.given_up) >= self.claim.size

    def landed(self, member: int, now: int) -> None:
        """Note that an attempt ended."""
        self.flying.discard(member)
        if not self.flying and not self.settled:
            self.idle = now


class Auditor:
    """Goes through the events once, in order; `finish` draws the conclusions."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._items: dict[int, _Item] = {}
        self._versions: dict[int, int] = {}  # by incarnation: the version of the weights that it began with
        self._closed: set[int] = set()
        self._batches: dict[int, tuple[int, list[Trained]]] = {}  # by surviving step, the last that was handed out
        self._given: dict[int, dict[int, list[int]]] = {}  # by incarnation and step: the uids of the batch
        self._now = self._last_claim = self._produced = self._cut = self._outdated = 0
        self._incarnation = 0
        self._handed: set[int] = set()  # uids of batches beyond the newest checkpoint: they will be handed out again
        self.lost: list[Finding] = []
        self.twice: list[Finding] = []
        self._handlers: dict[type, Callable[[Logged, Any], None]] = {
            Opened: self._opened,
            Closed: self._ended,
            Claimed: self._claimed,
            Started: self._started,
            Finished: self._finished,
            Failed: self._failed,
            Interrupted: self._interrupted,
            Dropped: self._dropped,
            Reopened: self._reopened,
            BatchHint: self._handed_out,
        }

    def run(self) -> Audit:
        """Return the audit."""
        for logged in self._books.logged:
            self._now += 1
            handler = self._handlers.get(type(logged.event))
            if handler is not None:
                handler(logged, logged.event)
        return self._finish()

    # -- events ------------------------------------------------------------------------------------------------

    def _opened(self, logged: Logged, event: Opened) -> None:
        self._incarnation = event.incarnation
        self._versions[event.incarnation] = event.version
        self._given[event.incarnation] = {}
        for item in self._items.values():
            if item.flying:
                self._cut += 1
                item.flying.clear()
                item.idle = self._now

    def _ended(self, logged: Logged, event: Closed) -> None:
        self._closed.add(logged.incarnation)

    def _claimed(self, logged: Logged, event: Claimed) -> None:
        if event.uid in self._items:
            self.lost.append(Finding(event.uid, "its uid was given to another item"))
        self._items[event.uid] = _Item(event, self._now)
        self._last_claim = self._now

    def _started(self, logged: Logged, event: Started) -> None:
        item = self._items.get(event.uid)
        if item is not None:
            item.flying.add(event.member)
            item.idle = None

    def _finished(self, logged: Logged, event: Finished) -> None:
        self._produced += 1
        item = self._items.get(event.uid)
        if item is not None:
            item.done[event.member] = Made(logged.incarnation, logged.rank, event)
            item.landed(event.member, self._now)

    def _failed(self, logged: Logged, event: Failed) -> None:
        item = self._items.get(event.uid)
        if item is not None:
            if event.final:
                item.given_up.add(event.member)
            item.landed(event.member, self._now)
            if item.settled and len(item.done) < item.claim.need:
                item.dropped = "failed"

    def _interrupted(self, logged: Logged, event: Interrupted) -> None:
        item = self._items.get(event.uid)
        if item is not None:
            item.landed(event.member, self._now)

    def _dropped(self, logged: Logged, event: Dropped) -> None:
        item = self._items.get(event.uid)
        if item is not None:
            item.dropped = event.reason

    def _reopened(self, logged: Logged, event: Reopened) -> None:
        item = self._items.get(event.uid)
        if item is not None:
            self._outdated += len(item.done)
            item.begin_anew()
            item.life += 1
            item.idle = self._now

    def _handed_out(self, logged: Logged, event: BatchHint) -> None:
        self._given[logged.incarnation][event.step] = event.uids
        if event.step > self._books.step:
            self._handed.update(event.uids)
        if not any(s.incarnation == logged.incarnation and s.after < event.step <= s.upto for s in self._books.line):
            return
        groups = []
        for uid, life in zip(event.uids, event.lives, strict=True):
            item = self._items.get(uid)
            if item is None or not item.settled or item.life != life:
                self.lost.append(Finding(uid, f"the batch of step {event.step} holds it, but it had not finished"))
                continue
            made = tuple(item.done[member] for member in sorted(item.done))
            groups.append(Trained(uid, made, max(0, event.step - 1 - self._version(made))))
        self._batches[event.step] = (logged.incarnation, groups)

    def _version(self, made: tuple[Made, ...]) -> int:
        """Return the oldest version in terms of the weights in use now: older weights came back with each resume."""
        return min(
            min([each.event.oldest, *(v for life, v in self._versions.items() if life > each.incarnation)])
            for each in made
        )

    # -- conclusions -------------------------------------------------------------------------------------------

    def _finish(self) -> Audit:
        steps = [self._step(step) for step in sorted(self._batches)]
        trained = Counter(group.uid for step in steps for group in step.groups)
        self._check_steps(steps)
        self._check_trained(trained)
        self._check_claims()
        lost = {finding.uid for finding in self.lost}
        states: Counter[str] = Counter()
        for uid, item in self._items.items():
            if uid in trained or uid in lost:
                continue
            states[self._fate(uid, item)] += 1
        dropped = Counter(item.dropped for uid, item in self._items.items() if item.dropped and uid not in trained)
        return Audit(
            claimed=len(self._items),
            produced=self._produced,
            trained=len(trained),
            recovered=sum(self._survived(step, group) for step in steps for group in step.groups),
            buffered=states["buffered"],
            unfinished=states["unfinished"],
            dropped=dict(sorted(dropped.items())),
            cut=self._cut,
            outdated=self._outdated,
            staleness=dict(sorted(Counter(group.staleness for step in steps for group in step.groups).items())),
            steps=steps,
            kills=self._kills(),
            lost=self.lost,
            twice=self.twice,
        )

    def _step(self, step: int) -> Step:
        incarnation, groups = self._batches[step]
        uids = [group.uid for group in groups]
        before = [given.get(step) for life, given in self._given.items() if life < incarnation]
        return Step(step, incarnation, groups, uids in before)

    def _check_steps(self, steps: list[Step]) -> None:
        missing = set(range(1, self._books.step + 1)) - {step.step for step in steps}
        self.lost += [Finding(-1, f"the batch of step {step} is on no record") for step in sorted(missing)]

    def _check_trained(self, trained: Counter[int]) -> None:
        """A uid, or an item of the source under two uids, is trained once; and the checkpoint says the same."""
        self.twice += [Finding(uid, f"trained {count} times") for uid, count in sorted(trained.items()) if count > 1]
        places: dict[tuple[str, int, int], int] = {}
        for uid in sorted(trained):
            claim = self._items[uid].claim
            first = places.setdefault((claim.task, claim.epoch, claim.position), uid)
            if first != uid:
                self.twice.append(Finding(uid, f"is the item that was trained as uid {first}"))
        said = self._books.trained_by_checkpoint()
        self.lost += [Finding(uid, "called trained, but in no batch") for uid in sorted(said - trained.keys())]
        self.twice += [
            Finding(uid, "in a batch, but not called trained: it would be trained again")
            for uid in sorted(trained.keys() - said)
        ]

    def _check_claims(self) -> None:
        """Numbers and places are given out without gaps."""
        known = {finding.uid for finding in self.lost}
        absent = set(range(max(self._items, default=-1) + 1)) - self._items.keys() - known
        self.lost += [Finding(uid, "its claim is on no record") for uid in sorted(absent)]
        places: dict[tuple[str, int], set[int]] = {}
        for item in self._items.values():
            places.setdefault((item.claim.task, item.claim.epoch), set()).add(item.claim.position)
        for (task, epoch), taken in places.items():
            gaps = set(range(max(taken) + 1)) - taken
            self.lost += [Finding(-1, f"item {gap} of epoch {epoch} of {task} was passed over") for gap in sorted(gaps)]

    def _fate(self, uid: int, item: _Item) -> str:
        """Return where an item that was not trained is: ``dropped``, ``buffered``, ``unfinished`` or ``lost``."""
        if item.dropped:
            return "dropped"
        why = self._why_unreachable(uid, item) if item.settled else self._why_forgotten(item)
        if why:
            self.lost.append(Finding(uid, why))
            return "lost"
        return "buffered" if item.settled else "unfinished"

    def _why_forgotten(self, item: _Item) -> str:
        if item.idle is not None and item.idle < self._last_claim:
            return "it waits, unfinished, though newer items were claimed: it was forgotten"
        return ""

    def _why_unreachable(self, uid: int, item: _Item) -> str:
        made = tuple(item.done.values())
        if not all(self._books.holds_payload(each.incarnation, each.rank, each.event) for each in made):
            return "it finished, but its payload is not in its segment"
        bound = self._books.newest.manifest.options.get("max_staleness") if self._books.newest else None
        reached = max([self._books.step, *self._given.get(self._incarnation, {})])
        # Whoever took the last batch looked for what was too old for that one, and at nothing since.
        if uid not in self._handed and bound is not None and reached - 1 - self._version(made) > bound:
            return f"it finished, and at step {reached} it is too old to be trained: it was left behind"
        return ""

    def _survived(self, step: Step, group: Trained) -> bool:
        """Whether a kill lies between the rollouts' end and the training."""
        ends = range(max(made.incarnation for made in group.made), step.incarnation)
        return any(life in self._versions and life not in self._closed for life in ends)

    def _kills(self) -> list[Kill]:
        lives = sorted(self._versions)
        following = dict(pairwise(lives))
        return [
            Kill(life, max(self._given[life], default=self._versions[life]), self._versions.get(following.get(life, 0)))
            for life in lives
            if life not in self._closed
        ]


def audit(books: Books) -> Audit:
    """Work out what became of every rollout."""
    return Auditor(books).run()

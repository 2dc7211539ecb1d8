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
from itertools import pairwise
from typing import NamedTuple

import msgspec

from tasks.demo.books import Books
from tasks.demo.follow import Finding, Follower, Item, Trained


class Step(NamedTuple):
    """A trainer's step that survives in the newest checkpoint."""

    step: int
    incarnation: int
    groups: list[Trained]
    repeated: bool
    """A process before had been given the same batch for this step."""

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


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The result: ``claimed = trained + buffered + unfinished + dropped + lost`` uids."""

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
    """In flight when a process ended without a word; they are run again."""
    outdated: int
    """Finished rollouts that became too old to be trained; they are run again."""
    staleness: dict[int, int]
    """How many trained groups were how stale."""
    steps: list[Step]
    kills: list[Kill]
    lost: list[Finding]
    twice: list[Finding]


def audit(books: Books) -> Audit:
    """Work out what became of every rollout."""
    follower = Follower(books)
    steps = [_step(follower, step) for step in sorted(follower.batches)]
    groups = [group for step in steps for group in step.groups]
    trained = Counter(group.uid for group in groups)
    missing = set(range(1, books.step + 1)) - follower.batches.keys()
    lost = [
        *follower.lost,
        *(Finding(-1, f"the batch of step {step} is on no record") for step in sorted(missing)),
        *_called_trained(books, trained),
        *_gaps(follower),
    ]
    dropped, states = Counter[str](), Counter[str]()
    known = {finding.uid for finding in lost}
    for uid, item in follower.items.items():
        if uid in trained or uid in known:
            continue
        if item.dropped:
            dropped[item.dropped] += 1
        elif why := _why_lost(follower, uid, item):
            lost.append(Finding(uid, why))
        else:
            states["buffered" if item.settled else "unfinished"] += 1
    return Audit(
        claimed=len(follower.items),
        produced=follower.produced,
        trained=len(trained),
        recovered=sum(_survived_a_kill(follower, step, group) for step in steps for group in step.groups),
        buffered=states["buffered"],
        unfinished=states["unfinished"],
        dropped=dict(sorted(dropped.items())),
        cut=follower.cut,
        outdated=follower.outdated,
        staleness=dict(sorted(Counter(group.staleness for group in groups).items())),
        steps=steps,
        kills=_kills(follower),
        lost=lost,
        twice=_twice(follower, trained),
    )


def _step(follower: Follower, step: int) -> Step:
    incarnation, groups = follower.batches[step]
    before = [given.get(step) for life, given in follower.given.items() if life < incarnation]
    return Step(step, incarnation, groups, [group.uid for group in groups] in before)


def _twice(follower: Follower, trained: Counter[int]) -> list[Finding]:
    """A uid, or an item of the source under two uids, is trained once; and the checkpoint knows that it was."""
    twice = [Finding(uid, f"trained {count} times") for uid, count in sorted(trained.items()) if count > 1]
    places: dict[tuple[str, int, int], int] = {}
    for uid in sorted(trained):
        claim = follower.items[uid].claim
        first = places.setdefault((claim.task, claim.epoch, claim.position), uid)
        if first != uid:
            twice.append(Finding(uid, f"it is the item that was trained as uid {first}"))
    unknown = trained.keys() - follower.books.trained_by_checkpoint()
    return twice + [Finding(uid, "trained, but the checkpoint would train it again") for uid in sorted(unknown)]


def _called_trained(books: Books, trained: Counter[int]) -> list[Finding]:
    unknown = books.trained_by_checkpoint() - trained.keys()
    return [Finding(uid, "the checkpoint calls it trained, but no batch holds it") for uid in sorted(unknown)]


def _gaps(follower: Follower) -> list[Finding]:
    """Uids, and places in a source, are given out without gaps."""
    items = follower.items
    absent = set(range(max(items, default=-1) + 1)) - items.keys() - {finding.uid for finding in follower.lost}
    found = [Finding(uid, "its claim is on no record") for uid in sorted(absent)]
    places: dict[tuple[str, int], set[int]] = {}
    for item in items.values():
        places.setdefault((item.claim.task, item.claim.epoch), set()).add(item.claim.position)
    for (task, epoch), taken in places.items():
        passed = set(range(max(taken) + 1)) - taken
        found += [Finding(-1, f"item {place} of epoch {epoch} of {task} was passed over") for place in sorted(passed)]
    return found


def _why_lost(follower: Follower, uid: int, item: Item) -> str:
    """Return why an item that was neither trained nor dropped can never be trained, or nothing if it can."""
    if not item.settled:
        forgotten = item.idle is not None and item.idle < follower.last_claim
        return "it waits, unfinished, though newer items were claimed since: it was forgotten" if forgotten else ""
    books, made = follower.books, tuple(item.done.values())
    if not all(books.holds_payload(each.incarnation, each.rank, each.event) for each in made):
        return "it finished, but its payload is not in its segment"
    bound = books.newest.manifest.options.get("max_staleness") if books.newest else None
    # Whoever took the last batch looked for what was too old for that one, and at nothing since.
    if uid in follower.awaited or bound is None or follower.reached - 1 - follower.version(made) <= bound:
        return ""
    return f"it finished, and at step {follower.reached} it is too old to be trained: it was left behind"


def _survived_a_kill(follower: Follower, step: Step, group: Trained) -> bool:
    """Whether a kill lies between the end of the rollouts and the training."""
    made = max(each.incarnation for each in group.made)
    return any(made <= life < step.incarnation and life not in follower.closed for life in follower.versions)


def _kills(follower: Follower) -> list[Kill]:
    lives = sorted(follower.versions)
    following = dict(pairwise(lives))
    kills = []
    for life in lives:
        if life not in follower.closed:
            step = max(follower.given[life], default=follower.versions[life])
            resumed_from = follower.versions[following[life]] if life in following else None
            kills.append(Kill(life, step, resumed_from))
    return kills

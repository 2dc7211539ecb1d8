"""Which draws of the order that ranks share a damaged run's journals do not tell of, so that each is trained once.

The uid of an item is its number in that order, and whose it is follows from the number. So a number below the end of
the order that nobody claims, holds, or has trained was lost with its event, or waited for its rank. What it is the
order itself says: it is run again from where the events of any rank say that it began, or from the beginning of the
run, and it is believed if all that is known of other draws fits. Else the payload may tell; and what nobody knows is
given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pipeline.checkpoint.draws import Drawn
from pipeline.checkpoint.rank_rescue import RankRescue
from pipeline.checkpoint.saved_plans import plans_as_saved
from pipeline.errors import Damaged, ForebayError
from pipeline.intervals import IntervalSet
from pipeline.ledger import ConsumerHalf
from pipeline.records import EXTERNAL, Claimed, Dropped, Inherited
from pipeline.sampler import Draw, Sampler, TurnSampler
from pipeline.sampler.turns import Order, joined_lengths
from pipeline.store.journal import Logged

_UNFIT = (LookupError, TypeError, ValueError, ArithmeticError, ForebayError)


class Filled(NamedTuple):
    """What is known of lost events in the end.

    Attributes:
        again: by rank, claims of items that are run from the start.
        unknown: by rank, numbers of which nothing is known.
    """

    again: list[list[Claimed]]
    unknown: list[list[int]]


def fill(
    folds: Sequence[RankRescue],
    halves: Sequence[ConsumerHalf],
    locate: Callable[[set[int]], Mapping[int, Drawn]],
) -> Filled:
    """Claim what was claimed where events are missing, and let ranks of which some are go on where the order ends.

    Args:
        folds: of all ranks, by rank.
        halves: what the weights have seen of each.
        locate: says what payloads tell of items with some uids.

    Raises:
        Damaged: nothing that is left says how far the order had come, and items would be trained twice.
    """
    filled = Filled([[] for _ in folds], [[] for _ in folds])
    if not any(fold.torn for fold in folds):
        return filled
    trained = [last + 1 for half in halves for _, last in half.trained]
    upto = max([*(fold.turns.next for fold in folds), *(fold.ledger.next_uid for fold in folds), *trained])
    reserved = [_still_reserved(fold) for fold in folds]
    missing = _missing(folds, reserved, upto)
    found, stands = _drawn(folds, _Facts.of(folds, halves), set(missing), upto)
    untold = set(missing) - found.keys()
    told = locate(untold) if untold else {}
    for number, rank in missing.items():
        fold = folds[rank]
        draw = found.get(number) or _by_payload(fold, number, told)
        if draw is None:
            filled.unknown[rank].append(number)
            fold.ledger.dropped.add(number)
            continue
        size, need = fold.draws.size_of(draw.task)
        claimed = Claimed(number, draw.task, draw.epoch, draw.position, draw.index, size, need)
        fold.add(Logged(0, 0, 0, claimed))
        if number in fold.ended:
            fold.add(Logged(0, 0, 0, Dropped(number, fold.ended[number])))
        else:
            filled.again[rank].append(claimed)
    for fold in folds:
        if fold.torn:
            _go_on(fold, stands, base_of(folds), reserved[fold.rank])
    return filled


def base_of(folds: Sequence[RankRescue]) -> int:
    """Return the draw from which turns are counted."""
    return next((fold.turns.base for fold in folds if fold.inherited is not None), 0)


def _missing(folds: Sequence[RankRescue], reserved: Sequence[Mapping[int, Draw]], upto: int) -> dict[int, int]:
    """Return the numbers that nobody tells of, and whose they are: of ranks of which events are missing."""
    base, held = base_of(folds), {uid for fold in folds for uid in (*fold.ledger.entries, *reserved[fold.rank])}
    told = [each for fold in folds for each in (fold.ledger.trained, fold.ledger.dropped, fold.claimed)]
    # What was shared out to a rank is known by the event alone with which its journal begins, and is of any turn.
    heir = next((fold for fold in folds if fold.torn and fold.inherited is None), None)
    missing = {}
    for number in range(upto):
        owner = folds[(number - base) % len(folds)]
        rank = owner.rank if owner.torn else -1 if heir is None or number >= first_of(folds) else heir.rank
        if rank >= 0 and number not in held and not any(number in each for each in told):
            missing[number] = rank
    return missing


def _still_reserved(fold: RankRescue) -> dict[int, Draw]:
    """Return the draws that a rank has not claimed yet, as far as events say. It claims them in their order, so one
    before another that it has claimed was claimed by an event that is gone."""
    if not fold.torn:
        return fold.turns.reserved
    claimed = fold.claimed.ranges()
    last = claimed[-1][1] if claimed else -1
    reserved = {number: draw for number, draw in fold.turns.reserved.items() if number > last}
    return {n: draw for n, draw in reserved.items() if n not in fold.ended and n not in fold.ledger.trained}


def first_of(folds: Sequence[RankRescue]) -> int:
    """Return a draw before which everything was shared out, as far as an event says so."""
    return min((fold.inherited.next_uid for fold in folds if fold.inherited is not None), default=0)


def _drawn(
    folds: Sequence[RankRescue], facts: _Facts, wanted: set[int], upto: int
) -> tuple[dict[int, Draw], Inherited]:
    """Return what the order has at the numbers that are wanted, as far as that can be told; and how it stands at its
    end."""
    first = first_of(folds)
    found: dict[int, Draw] = {}
    ends: Inherited | None = None
    for begins in _beginnings(folds):
        number = begins.next_uid
        reach = upto if number >= first else first
        left = {each for each in wanted - found.keys() if each >= number}
        if number <= reach and (left or ends is None) and (ran := _run(folds, begins, reach, facts, left)) is not None:
            found |= ran[0]
            ends = ran[1] if ends is None and reach == upto else ends
    if ends is None:  # then what the newest event of any rank says of it, if it says that of all draws
        ahead = max(folds, key=lambda fold: (fold.turns.next, not fold.torn)).turns
        if ahead.next < upto:
            raise Damaged(
                f"generation {folds[0].line.generation}: {upto} items were drawn, and nothing that is left of the "
                f"journals says which those from {ahead.next} on were: with the tasks as they are now the order would "
                "have been another one. They would be trained twice. Salvage an older generation (step=), or restore "
                "a journal of any rank"
            )
        ends = ahead.stands()
    given = {name: share for fold in folds for name, share in fold.turns.inherited_shares.items()}
    return found, msgspec.structs.replace(ends, given=given)


class _Facts(NamedTuple):
    """What is known of an order.

    Attributes:
        draws: by number, task, epoch, position, and index.
        stands: by number of the next draw, epoch and position of each task.
        trained: the numbers that the weights have seen.
        counts: how many of these are of each task; empty: that is not known of all.
    """

    draws: dict[int, tuple[str, int, int, int]]
    stands: dict[int, dict[str, tuple[int, int]]]
    trained: IntervalSet
    counts: Mapping[str, int]

    @classmethod
    def of(cls, folds: Sequence[RankRescue], halves: Sequence[ConsumerHalf]) -> _Facts:
        trained = IntervalSet(each for half in halves for each in half.trained)
        counts: Counter[str] = Counter()
        for half in halves:
            counts.update({task: groups for task, (groups, *_) in half.trained_by_task.items()})
        known = counts.total() == sum(last + 1 - begin for begin, last in trained.ranges())
        found = cls({}, {}, trained, +counts if known else {})
        for fold in folds:
            for entry in fold.ledger.entries.values():
                if entry.kind != EXTERNAL and entry.epoch >= 0:
                    found.draws[entry.uid] = (entry.task, entry.epoch, entry.position, entry.index)
            for draw in fold.turns.reserved.values():
                found.draws[draw.number] = (draw.task, draw.epoch, draw.position, draw.index)
            if fold.inherited is not None:
                cursors = fold.inherited.cursors
                found.stands[fold.inherited.next_uid] = {task: (each[0], each[1]) for task, each in cursors.items()}
            if not fold.torn:
                found.stands[fold.turns.next] = _places(fold.turns)
        return found

    def deny(self, draw: Draw, sampler: Sampler) -> bool:
        """Whether a draw, after which an order stands so, is not of this run."""
        fact, stood = self.draws.get(draw.number), self.stands.get(draw.number + 1)
        if fact is not None and fact != (draw.task, draw.epoch, draw.position, draw.index):
            return True
        return stood is not None and any(stood.get(task, place) != place for task, place in _places(sampler).items())

    def miscounted(self, counts: Mapping[str, int]) -> bool:
        """Whether an order from its beginning on has other tasks than those whose items the weights have seen;
        ``counts``: of which it has how many at their numbers."""
        return bool(self.counts) and +Counter(counts) != self.counts


def _places(sampler: Sampler) -> dict[str, tuple[int, int]]:
    return {task: (each.epoch, each.position) for task, each in sampler.cursors.items()}


def _beginnings(folds: Sequence[RankRescue]) -> Iterator[Inherited]:
    """Yield from where the order may be run: as whole journals say, as others do, and from the beginning."""
    inherited = any(fold.inherited is not None for fold in folds)
    for fold in sorted(folds, key=lambda fold: fold.torn):
        begins = fold.begins
        if begins is None and fold.inherited is not None:  # of no turn since then an event is left
            begins = fold.turns.stands()
        if begins is not None and begins.shares and (fold.inherited is not None or not inherited):
            yield begins
    line = folds[0].line
    shares = {name: float(task.get("share", 1.0)) for name, task in line.tasks.items()}
    if shares and not line.reclaimed:
        yield Inherited([], {}, shares, dict.fromkeys(shares, 0), {}, [], 0)


def _run(
    folds: Sequence[RankRescue],
    begins: Inherited,
    upto: int,
    facts: _Facts,
    wanted: set[int],
) -> tuple[dict[int, Draw], Inherited] | None:
    """Run the order from some place; None: it is not the order of this run."""
    marks = {name: each.mark for fold in folds for name, each in fold.turns.cursors.items() if each.epoch >= 0}
    plans = [plan for plan in plans_as_saved(folds[0].line, marks) if plan.name in begins.shares]
    lengths = joined_lengths([fold.turns for fold in folds])
    found: dict[int, Draw] = {}
    counts: Counter[str] = Counter()
    try:
        order = Order(plans, folds[0].turns.seed, begins, lambda task, epoch, at: lengths.get((task, epoch), at))
        for draw in order.draws(upto):
            if facts.deny(draw, order.sampler):
                return None
            counts[draw.task] += draw.number in facts.trained
            if draw.number in wanted:
                found[draw.number] = draw
    except _UNFIT:
        return None
    if not begins.next_uid and upto == order.number and facts.miscounted(counts):
        return None
    stood = TurnSampler((), folds[0].turns.seed, 0, 1)
    stood.cursors, stood.mixture, stood.next = order.sampler.cursors, order.sampler.mixture, order.number
    return found, stood.stands()


def _by_payload(fold: RankRescue, number: int, told: Mapping[int, Drawn]) -> Draw | None:
    drawn = told.get(number)
    if drawn is None or drawn.epoch < 0:
        return None
    places = fold.draws.places_of({number: drawn}, fold.turns)
    position = next((place.position for place in places), drawn.item)
    return Draw(drawn.task, drawn.epoch, position, drawn.item, None, number)


def _go_on(fold: RankRescue, stands: Inherited, base: int, reserved: Mapping[int, Draw]) -> None:
    """Let a rank go on where the order ends; what it had reserved it is still to claim."""
    before = fold.turns
    turns = TurnSampler((), before.seed, fold.rank, fold.size)
    turns.apply(msgspec.structs.replace(stands, turns=base))
    turns.reserved, turns.lengths = dict(reserved), dict(before.lengths)
    fold.sampler, fold.anew = turns, True

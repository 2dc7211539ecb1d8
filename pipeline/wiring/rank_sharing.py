"""Sharing out what M ranks had claimed and not ended to N of them: a pure function of what was recovered.

Every group, and every item that waits, counts as one episode of one step, and its age is its uid, which is its place in
the one order. So the plan is that of :mod:`pipeline.checkpoint.reshard`: oldest first, by turns. Batches that were to
be handed out again are not made up again; their groups come first. Counts go to the first rank, so that their sum is
what it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.buffer.partials import Partials
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.lines import inherit
from pipeline.checkpoint.listed import AGAIN, PARKED, PARTIAL, WAITING, Episode, Shard, Stamp
from pipeline.checkpoint.planned import Target
from pipeline.checkpoint.reshard import plan
from pipeline.distributed import Ranks
from pipeline.errors import UsageError
from pipeline.intervals import IntervalSet
from pipeline.ledger import PARKED as HAS_PARKED
from pipeline.ledger import WAITING as WAITS
from pipeline.ledger import ConsumerHalf, Entry, Ledger, TaskTotals
from pipeline.locations import Location
from pipeline.records import HeldItem, Inherited, Opened
from pipeline.sampler import Draw, Progress, TurnSampler
from pipeline.sampler.progress import joined
from pipeline.sampler.turns import holes
from pipeline.wiring.evaluations import Evaluations
from pipeline.wiring.recovery import Recovered
from pipeline.wiring.state import RunState


def turns_of(recovered: Recovered) -> TurnSampler:
    """Return the sampler of a rank's part."""
    assert isinstance(recovered.sampler, TurnSampler)
    return recovered.sampler


class Gathered(NamedTuple):
    """What all parts hold together, by uid."""

    entries: dict[int, Entry]
    places: dict[int, Mapping[int, Location]]
    draws: dict[int, Draw]
    """Draws below the highest reservation that no uid has taken yet: they wait."""
    shards: dict[int, int]
    """Which part each is of; of a draw that nobody has reserved, the one whose turn it is."""
    again: set[int]
    """Groups of batches that were to be handed out again."""
    partials: dict[int, dict[int, Any]]


def shared_out(
    state: RunState, ranks: Ranks, stored: Stored, parts: Sequence[Recovered], opened: Opened
) -> tuple[str, Recovered]:
    """Return the digest of the plan, and what this rank goes on with.

    Args:
        state: the run's.
        ranks: those that there are now.
        stored: the generation.
        parts: what was recovered of each rank that wrote it.
        opened: the event that begins this rank's journal.

    Raises:
        UsageError: draws wait of a task that this run does not have.
    """
    gathered = _gathered(state, stored, parts)
    sizes = Counter(gathered.shards.values())
    planned = plan(
        _listed(gathered),
        ranks.size,
        1,
        shards=[Shard(rank=rank, steps=sizes[rank], episodes=sizes[rank]) for rank in range(len(parts))],
        rebalance=True,
        where=stored.folder,
    )
    held = [_held(state, stored, gathered, target) for target in planned.targets]
    return planned.digest(), _part(state, ranks, parts, opened, gathered, held)


def _gathered(state: RunState, stored: Stored, parts: Sequence[Recovered]) -> Gathered:
    found = Gathered({}, {}, {}, {}, set(), {})
    for rank, part in enumerate(parts):
        found.entries.update(part.ledger.entries)
        found.places.update(part.places)
        found.partials.update(part.partials.by_uid)
        found.again.update(uid for lease in part.pending for uid in lease.uids)
        found.shards.update(dict.fromkeys(part.ledger.entries, rank))
    samplers = [part.sampler for part in parts if isinstance(part.sampler, TurnSampler)]
    if not samplers:  # of one process
        return found
    try:
        left = [*holes(samplers, list(state.plans.values()))]
    except LookupError as error:
        raise UsageError(
            f"{stored.folder}: items of task {error.args[0]!r} wait that its source would have to give, and this run "
            "does not have the task. Resume once with all tasks of before"
        ) from None
    for sampler in samplers:
        left += sampler.reserved.values()
    for draw in left:
        found.draws[draw.number] = draw
        found.shards[draw.number] = (draw.number - samplers[0].base) % len(samplers)
    return found


def _listed(gathered: Gathered) -> list[Episode]:
    listed = []
    for uid, shard in gathered.shards.items():
        entry = gathered.entries.get(uid)
        flags = AGAIN if uid in gathered.again else 0
        if entry is None or entry.state == WAITS:
            flags |= WAITING | (PARTIAL if uid in gathered.partials else 0)
        elif entry.state == HAS_PARKED:
            flags |= PARKED
        size = sum(at.length for at in gathered.places.get(uid, {}).values())
        listed.append(Episode(uid, Stamp(0, 0, uid), 1, 1, shard, flags=flags, bytes=size))
    return listed


def _held(state: RunState, stored: Stored, gathered: Gathered, target: Target) -> list[HeldItem]:
    """Return what one rank is to have, in the order in which finished groups are handed out."""
    again = set(target.again)
    order = [*target.again, *(uid for uid in target.uids if uid not in again)]
    items = []
    for number, uid in enumerate(order, 1):
        entry = gathered.entries.get(uid)
        if entry is None:
            items.append(_waiting(state, stored, gathered.draws[uid]))
        else:
            item = entry.hold(sorted(gathered.places.get(uid, {}).items()))
            items.append(msgspec.structs.replace(item, order=number))
    return items


def _waiting(state: RunState, stored: Stored, draw: Draw) -> HeldItem:
    task, saved = state.tasks.get(draw.task), stored.manifest.tasks.get(draw.task, {})
    size = saved.get("group_size", 1) if task is None else task.group_size
    need = saved.get("min_group", 1) if task is None else task.min_group
    zeros, where = (0,) * size, (draw.number, draw.task, draw.epoch, draw.index, draw.position)
    return HeldItem(*where, size, need, "train", None, bytes(size), zeros, zeros)


def _part(
    state: RunState,
    ranks: Ranks,
    parts: Sequence[Recovered],
    opened: Opened,
    gathered: Gathered,
    held: Sequence[Sequence[HeldItem]],
) -> Recovered:
    first, own = ranks.first, held[ranks.rank]
    half = _half([part.ledger.consumer_half() for part in parts], first)
    stands = _stands(parts)
    inherited = Inherited(
        list(own),
        stands.cursors,
        stands.shares,
        stands.drawn,
        _totals(parts, gathered, held, ranks.rank),
        _joined(part.ledger.dropped.ranges() for part in parts) if first else [],
        stands.next_uid,
        stands.given,
        _first_turn(stands.next_uid, sum(map(len, held)), ranks.size),
    )
    ledger = Ledger(half)
    sampler = TurnSampler(list(state.plans.values()), state.options.seed, ranks.rank, ranks.size)
    ledger.apply(opened)
    ledger.apply(inherited)
    sampler.apply(inherited)
    ledger.restore(half)
    partials = Partials()
    partials.by_uid.update({uid: gathered.partials[uid] for uid in ledger.entries if uid in gathered.partials})
    return Recovered(
        ledger,
        sampler,
        _progress([part.progress for part in parts], ranks),
        parts[0].unknown if first else {},
        [],
        {uid: gathered.places[uid] for uid in ledger.entries if uid in gathered.places},
        sum(part.events for part in parts),
        [],
        Evaluations(),
        partials,
        sum(part.set_aside for part in parts) if first else 0,
        inherited,
        unknown_half=parts[0].unknown_half,
    )


def _stands(parts: Sequence[Recovered]) -> Inherited:
    """Return how the order stands above the highest reservation."""
    samplers = [part.sampler for part in parts if isinstance(part.sampler, TurnSampler)]
    if not samplers:
        return inherit(parts[0].ledger, parts[0].sampler)
    return max(samplers, key=lambda each: each.next).stands()


def _first_turn(number: int, items: int, size: int) -> int:
    """Return a draw from which turns are counted, so that the next one is for the rank which has one item less."""
    return number + (-items) % size


def _half(halves: Sequence[ConsumerHalf], first: bool) -> ConsumerHalf:
    """Return the consumer half of a rank: all know what is trained, and the first has the counts."""
    groups: dict[str, tuple[int, int, int]] = {}
    masked: Counter[str] = Counter()
    for half in halves if first else ():
        masked.update(half.masked_by_task)
        for task, counts in half.trained_by_task.items():
            before = groups.get(task, (0, 0, 0))
            groups[task] = (before[0] + counts[0], before[1] + counts[1], before[2] + counts[2])
    trained = _joined(half.trained for half in halves)
    return ConsumerHalf(step=halves[0].step, trained=trained, trained_by_task=groups, masked_by_task=dict(masked))


def _joined(ranges: Iterable[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    return IntervalSet(each for some in ranges for each in some).ranges()


def _totals(
    parts: Sequence[Recovered], gathered: Gathered, held: Sequence[Sequence[HeldItem]], rank: int
) -> dict[str, dict[str, Any]]:
    """Return the counts for life of a rank: what it holds was claimed by it, and all else by the first."""
    claimed = [Counter(item.task for item in items) for items in held]
    if rank:
        return {task: msgspec.to_builtins(TaskTotals(claimed=count)) for task, count in claimed[rank].items()}
    totals: dict[str, TaskTotals] = {}
    for part in parts:
        for task, given in part.ledger.totals.items():
            totals[task] = _sum(totals.get(task, TaskTotals(dropped={})), given)
    for draw in gathered.draws.values():
        before = totals.setdefault(draw.task, TaskTotals(dropped={}))
        before.claimed += 1
    for others in claimed[1:]:
        for task, count in others.items():
            totals[task].claimed -= count
    return {task: msgspec.to_builtins(each) for task, each in totals.items()}


def _sum(one: TaskTotals, other: TaskTotals) -> TaskTotals:
    dropped = Counter(one.dropped)
    dropped.update(other.dropped)
    counts = {
        name: getattr(one, name) + getattr(other, name) for name in TaskTotals.__struct_fields__ if name != "dropped"
    }
    return TaskTotals(dropped=dict(dropped), **counts)


def _progress(parts: Sequence[Progress], ranks: Ranks) -> Progress:
    """Return the progress of a rank: the counts are the first one's."""
    all_of_it = joined(parts)
    groups = all_of_it.batch_groups // ranks.size
    if ranks.first:
        return msgspec.structs.replace(all_of_it, batch_groups=groups)
    return Progress(
        next_consumer_step=all_of_it.next_consumer_step,
        producer_future_step=all_of_it.producer_future_step,
        target_upto_future_step=all_of_it.target_upto_future_step,
        model_step=all_of_it.model_step,
        batch_groups=groups,
    )

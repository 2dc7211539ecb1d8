"""Sharing out what M ranks had claimed and not ended to N of them: a pure function of what was recovered.

Every group, and every item that waits, counts as one episode of one step, and its age is its uid, which is its place in
the one order. So the plan is that of :mod:`pipeline.checkpoint.reshard`: oldest first, by turns. Batches that were to
be handed out again are not made up again; their groups come first. Counts go to the first rank, so that their sum is
what it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.buffer.partials import Partials
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.halves import joined_halves, joined_ranges
from pipeline.checkpoint.lines import inherit
from pipeline.checkpoint.listed import AGAIN, PARKED, PARTIAL, WAITING, Episode, Shard, Stamp
from pipeline.checkpoint.planned import Target
from pipeline.checkpoint.reshard import plan
from pipeline.errors import UsageError
from pipeline.ledger import PARKED as HAS_PARKED
from pipeline.ledger import WAITING as WAITS
from pipeline.ledger import ConsumerHalf, Entry, Ledger, TaskTotals
from pipeline.locations import Location
from pipeline.records import HeldItem, Inherited, Opened
from pipeline.sampler import Draw, DrawPlan, Progress, TurnSampler
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


class Drawing(NamedTuple):
    """What draws hang on.

    Attributes:
        plans: the tasks that there are now.
        seed: the run's.
        sizes: of these, by name, the size of a group, and how many of it must finish.
    """

    plans: Sequence[DrawPlan]
    seed: int
    sizes: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, state: RunState) -> Drawing:
        """Return that of a run."""
        sizes = {name: (task.group_size, task.min_group) for name, task in state.tasks.items()}
        return cls(list(state.plans.values()), state.options.seed, sizes)


class Sharing(NamedTuple):
    """What was recovered of M ranks, shared out to N.

    Attributes:
        digest: of the plan.
        drawing, parts: what it was made of.
        gathered: all of it.
        held: by rank, what each is to have.
    """

    digest: str
    drawing: Drawing
    parts: Sequence[Recovered]
    gathered: Gathered
    held: Sequence[Sequence[HeldItem]]

    def part(self, rank: int, opened: Opened) -> Recovered:
        """Return what a rank goes on with, whose journal begins with ``opened``."""
        return _part(self, rank, opened)


def shared_out(drawing: Drawing, stored: Stored, parts: Sequence[Recovered], size: int) -> Sharing:
    """Return who of some ranks gets what.

    Args:
        drawing: what draws hang on now.
        stored: the generation.
        parts: what was recovered of each rank that wrote it.
        size: how many ranks there are now.

    Raises:
        UsageError: draws wait of a task that this run does not have.
    """
    gathered = _gathered(drawing, stored, parts)
    sizes = Counter(gathered.shards.values())
    planned = plan(
        _listed(gathered),
        size,
        1,
        shards=[Shard(rank=rank, steps=sizes[rank], episodes=sizes[rank]) for rank in range(len(parts))],
        rebalance=True,
        where=stored.folder,
    )
    held = [_held(drawing, stored, gathered, target) for target in planned.targets]
    return Sharing(planned.digest(), drawing, parts, gathered, held)


def _gathered(drawing: Drawing, stored: Stored, parts: Sequence[Recovered]) -> Gathered:
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
        left = [*holes(samplers, drawing.plans)]
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


def _held(drawing: Drawing, stored: Stored, gathered: Gathered, target: Target) -> list[HeldItem]:
    """Return what one rank is to have, in the order in which finished groups are handed out."""
    again = set(target.again)
    order = [*target.again, *(uid for uid in target.uids if uid not in again)]
    items = []
    for number, uid in enumerate(order, 1):
        entry = gathered.entries.get(uid)
        if entry is None:
            items.append(_waiting(drawing, stored, gathered.draws[uid]))
        else:
            item = entry.hold(sorted(gathered.places.get(uid, {}).items()))
            items.append(msgspec.structs.replace(item, order=number))
    return items


def _waiting(drawing: Drawing, stored: Stored, draw: Draw) -> HeldItem:
    saved = stored.manifest.tasks.get(draw.task, {})
    size, need = drawing.sizes.get(draw.task, (saved.get("group_size", 1), saved.get("min_group", 1)))
    zeros, where = (0,) * size, (draw.number, draw.task, draw.epoch, draw.index, draw.position)
    return HeldItem(*where, size, need, "train", None, bytes(size), zeros, zeros)


def _part(sharing: Sharing, rank: int, opened: Opened) -> Recovered:
    parts, gathered, held = sharing.parts, sharing.gathered, sharing.held
    first, own, size = rank == 0, held[rank], len(held)
    half = _half([part.ledger.consumer_half() for part in parts], first)
    stands = _stands(parts)
    inherited = Inherited(
        list(own),
        stands.cursors,
        stands.shares,
        stands.drawn,
        _totals(parts, gathered, held, rank),
        joined_ranges(part.ledger.dropped.ranges() for part in parts) if first else [],
        stands.next_uid,
        stands.given,
        _first_turn(stands.next_uid, sum(map(len, held)), size),
    )
    ledger = Ledger(half)
    sampler = TurnSampler(sharing.drawing.plans, sharing.drawing.seed, rank, size)
    ledger.apply(opened)
    ledger.apply(inherited)
    sampler.apply(inherited)
    ledger.restore(half)
    partials = Partials()
    partials.by_uid.update({uid: gathered.partials[uid] for uid in ledger.entries if uid in gathered.partials})
    return Recovered(
        ledger,
        sampler,
        _progress([part.progress for part in parts], rank, size),
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
    half = joined_halves(halves)
    return half if first else msgspec.structs.replace(half, trained_by_task={}, masked_by_task={})


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


def _progress(parts: Sequence[Progress], rank: int, size: int) -> Progress:
    """Return the progress of a rank: the counts are the first one's."""
    all_of_it = joined(parts)
    groups = all_of_it.batch_groups // size
    if rank == 0:
        return msgspec.structs.replace(all_of_it, batch_groups=groups)
    return Progress(
        next_consumer_step=all_of_it.next_consumer_step,
        producer_future_step=all_of_it.producer_future_step,
        target_upto_future_step=all_of_it.target_upto_future_step,
        model_step=all_of_it.model_step,
        batch_groups=groups,
    )

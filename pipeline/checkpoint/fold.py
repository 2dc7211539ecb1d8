"""The fold: what the producers did, from the events of the journals.

Recovery folds every event that counts; :func:`~pipeline.checkpoint.salvage` those that are left of a damaged run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import msgspec

from pipeline.buffer.partials import Partials
from pipeline.checkpoint.manifest import Manifest
from pipeline.ledger import ConsumerHalf, Lease, Ledger
from pipeline.locations import Location
from pipeline.records import AnyEvent, BatchHint, Dropped, Finished, Inherited, Moved, Parked, Reopened
from pipeline.sampler import DrawPlan, Sampler
from pipeline.store.journal import Logged


class PayloadPlaces(msgspec.Struct):
    """Where the payloads of live groups lie, as the events said; collected while journals are folded."""

    places: dict[int, dict[int, Location]] = {}

    def apply(self, incarnation: int, rank: int, event: AnyEvent) -> None:
        """Note where a finished member lies; a group that is run again begins anew."""
        if type(event) is Finished or type(event) is Parked:
            where = Location(incarnation, rank, event.segment, event.offset, event.length)
            self.places.setdefault(event.uid, {})[event.member] = where
        elif type(event) is Moved:
            if event.member in self.places.get(event.uid, {}):
                where = Location(incarnation, rank, event.segment, event.offset, event.length)
                self.places[event.uid][event.member] = where
        elif type(event) is Reopened and event.members:
            for member in event.members:
                self.places.get(event.uid, {}).pop(member, None)
        elif type(event) is Reopened or type(event) is Dropped:
            self.places.pop(event.uid, None)
        elif type(event) is Inherited:
            for item in event.items:
                self.places[item.uid] = {place[0]: Location(*place[1:]) for place in item.places}


class ProducerFold:
    """Applies events, in the order of the journals, to ledger, sampler, payloads' places and partial rollouts."""

    def __init__(
        self,
        half: ConsumerHalf,
        plans: Sequence[DrawPlan],
        *,
        seed: int,
        line: Manifest | None = None,
        discarded: Iterable[tuple[int, int, int]] = (),
        sampler: Sampler | None = None,
    ) -> None:
        """Args:
        half: the consumer half of the generation that is recovered.
        plans: the tasks that the run has now; none where nothing is to be drawn.
        seed: the run's seed.
        line: the generation's manifest, for the batches that its own line handed out after it.
        discarded: journals of which not every event counts: incarnation, rank, and the last that does.
        sampler: what draws are folded into; a plain one, if it is left out.
        """
        self.ledger, self.sampler = Ledger(half), sampler or Sampler(plans, seed)
        self.places = PayloadPlaces(places={})
        self.partials = Partials()
        self.hints: list[BatchHint] = []
        """The batches that the generation's own line handed out after it. The line is what the incarnation that
        committed the generation did next; others are abandoned, and their hints ignored."""
        self.events = self.set_aside = 0
        self._caps = {(incarnation, rank): last for incarnation, rank, last in discarded}
        self._incarnation = -1 if line is None else line.incarnation
        self.positions = (
            {} if line is None else {(each.incarnation, each.rank): each.sequence for each in line.journals}
        )
        """The last event of each journal that the generation counts on."""

    def apply(self, logged: Logged) -> bool:
        """Take in the next event, and return whether it counts."""
        incarnation, rank, sequence, event = logged
        if self._caps and sequence > self.last(incarnation, rank):
            self.set_aside += 1
            return False
        self.events += 1
        self.ledger.apply(event)
        self.sampler.apply(event)
        self.places.apply(incarnation, rank, event)
        self.partials.apply(incarnation, rank, event)
        if type(event) is BatchHint and incarnation == self._incarnation and sequence > self._from(incarnation, rank):
            self.hints.append(event)
        return True

    def last(self, incarnation: int, rank: int) -> int:
        """Return the number of the last event of a journal that counts."""
        return self._caps.get((incarnation, rank), sys.maxsize)

    def _from(self, incarnation: int, rank: int) -> int:
        return self.positions.get((incarnation, rank), 0)


def pending_batches(ledger: Ledger, leases: Iterable[Lease], hints: Iterable[BatchHint], step: int) -> list[Lease]:
    """Return the batches to hand out again: from ``step + 1`` on without a gap, as long as they are still whole."""
    by_step = {lease.step: lease for lease in leases}
    for hint in hints:  # the last word on a step counts: a batch may have been released and composed anew
        by_step[hint.step] = Lease(step=hint.step, uids=hint.uids, lives=hint.lives, consumer=hint.consumer)
    pending: list[Lease] = []
    used: set[int] = set()
    while (lease := by_step.get(step + len(pending) + 1)) is not None:
        if not ledger.still_whole(lease) or used & set(lease.uids):
            break
        used |= set(lease.uids)
        pending.append(lease)
    return pending

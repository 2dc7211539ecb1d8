"""What the producers of several ranks did, as far as a damaged run's journals still say it.

Each rank's journals are folded as those of one process are. What else is different: items are not drawn one after the
other by one process, but numbered in one order that all ranks share, and every event of any rank which reserves draws
says how that order stands (:mod:`pipeline.checkpoint.lost_turns`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from pipeline.checkpoint.draws import Draws
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.parts import PartLayout, shard_of
from pipeline.checkpoint.remains import read_remains
from pipeline.checkpoint.rescue import Capped, Journals, Rescue
from pipeline.intervals import IntervalSet
from pipeline.ledger import ConsumerHalf
from pipeline.records import Claimed, EpochBegan, Inherited, Reserved
from pipeline.sampler import Sampler, TurnSampler
from pipeline.store.journal import Logged
from pipeline.store.layout import Layout


class RankRescue(Rescue):
    """The fold over one rank's journals with holes."""

    def __init__(
        self, half: ConsumerHalf, line: Manifest, seed: int, discarded: list[Capped], rank: int, size: int
    ) -> None:
        turns = TurnSampler((), seed, rank, size)
        super().__init__(half, line, seed, discarded, sampler=turns, draws=_TurnDraws(line, seed))
        self.line, self.rank, self.size = line, rank, size
        self.inherited: Inherited | None = None
        """What the line began with, where others had shared it out and the event that says so can be read."""
        self.begins: Inherited | None = None
        """How the order stood before the first turn since then."""
        self.claimed = IntervalSet()
        """Numbers that an event claims."""
        self.anew = False
        """Whether counts of what was claimed are to be made anew, as events are missing or were given up."""

    @property
    def turns(self) -> TurnSampler:
        """What draws are folded into."""
        assert isinstance(self.sampler, TurnSampler)
        return self.sampler

    def add(self, logged: Logged) -> bool:
        """As :meth:`Rescue.add`."""
        event = logged.event
        if isinstance(event, Claimed):
            self.claimed.add(event.uid)
        elif isinstance(event, Inherited):
            self.inherited, self.begins = event, None
        elif isinstance(event, Reserved):
            self.begins = self.begins or self.turns.stands()
            logged = logged._replace(event=self._with_epochs(event))
        return super().add(logged)

    def _with_epochs(self, event: Reserved) -> Reserved:
        """Return the event with the epochs that must have begun before it, and of which none tells any more."""
        began = {each.task: each.epoch for each in event.began}
        more = []
        for task, (epoch, _) in event.positions.items():
            cursor = self.turns.cursors.get(task)
            if epoch >= 0 and epoch not in (began.get(task), -1 if cursor is None else cursor.epoch):
                length, mark = self.draws.source(task, self.turns)
                more.append(EpochBegan(task, epoch, length, mark))
        return msgspec.structs.replace(event, began=[*more, *event.began]) if more else event


class _TurnDraws(Draws):
    """Knows what events claim; where an epoch begins, other events say."""

    def began(self, event: Claimed, sampler: Sampler) -> EpochBegan | None:
        return None


def rescue_ranks(
    layout: Layout,
    run_tag: int,
    stored: Stored,
    others: Sequence[Manifest],
    halves: Sequence[ConsumerHalf],
    *,
    discard: bool = False,
) -> list[RankRescue]:
    """Fold what can be read of every journal that counts for a generation of several ranks, rank by rank. Blocks.

    Args:
        layout: the damaged run's paths.
        run_tag: its tag.
        stored: the generation.
        others: the manifests of the other generations, which say too how long the journals were.
        halves: what the weights have seen of each rank.
        discard: set aside what came after the generation.

    Raises:
        NewerFormat: a journal was written by a newer version.
    """
    manifest = stored.manifest
    before = _shared_out_in(layout, run_tag, manifest)
    same = [each for each in others if manifest.base <= each.incarnation < before]
    folds = []
    for rank, half in enumerate(halves):
        own = PartLayout(layout, rank, manifest.incarnation, run_tag, before)
        line = shard_of(stored, rank).manifest
        journals = Journals.of(own, run_tag, line, [_of_rank(each, rank) for each in same])
        fold = RankRescue(half, line, journals.seed, journals.caps(discard=discard), rank, len(halves))
        told = {(life, of) for each in journals.opened for life, of, last in each.discarded if of == rank and last}
        journals.read_into(fold, {key for key in told if key not in journals.names and key[0] < before})
        folds.append(fold)
    return folds


def _of_rank(manifest: Manifest, rank: int) -> Manifest:
    return msgspec.structs.replace(manifest, journals=[each for each in manifest.journals if each.rank == rank])


def _shared_out_in(layout: Layout, run_tag: int, manifest: Manifest) -> int:
    """Return the first life after a generation that had shared everything out anew: any rank's journal tells."""
    later = [name for name in layout.list_journals() if name.incarnation > manifest.incarnation]
    for name in sorted(later):
        events = (each for each in read_remains(name, run_tag, None) if isinstance(each, Logged))
        if any(isinstance(each.event, Inherited) for each in takewhile(lambda each: each.sequence <= 2, events)):
            return name.incarnation
    return sys.maxsize

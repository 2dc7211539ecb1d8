"""What the producers did, as far as a damaged run's journals still say it.

Every item's own events form a state by themselves, so what is folded of an item must be its first events without a gap.
After a hole that is so for the items that are claimed there for the first time: all of their events lie behind it. An
item that was begun before the hole stays as it was then, and only leaves if a later event says that it did; what it had
finished is kept, and what was in flight is run again. Which items were claimed inside the hole is looked for in
:mod:`pipeline.checkpoint.draws`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from pipeline.checkpoint.draws import Draws
from pipeline.checkpoint.fold import ProducerFold
from pipeline.checkpoint.lines import find_line, last_counted
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.played import Played
from pipeline.checkpoint.remains import Hole, missing_journal, read_remains
from pipeline.ledger import ConsumerHalf
from pipeline.records import Claimed, Dropped, Evaluated, Feedback, Inherited, Opened
from pipeline.sampler import Sampler
from pipeline.store.journal import JournalPosition, Logged
from pipeline.store.layout import JournalName, Layout

Key: TypeAlias = tuple[int, int]
Capped: TypeAlias = tuple[int, int, int]


class Rescue(ProducerFold):
    """The fold over journals with holes."""

    def __init__(
        self,
        half: ConsumerHalf,
        line: Manifest,
        seed: int,
        discarded: list[Capped],
        *,
        sampler: Sampler | None = None,
        draws: Draws | None = None,
        played: Played | None = None,
    ) -> None:
        super().__init__(half, (), seed=seed, line=line, discarded=discarded, sampler=sampler)
        self.played = played
        """What is said of the rows of a buffer, where rollouts fill one."""
        self.draws = draws or Draws(line, seed)
        self.feedback: list[Feedback] = []
        self.holes: list[tuple[Hole, int]] = []
        """Each with the number of events after it that had to be left out."""
        self.ended: dict[int, str] = {}
        """Items that left after a hole, and whose claim is not known; with the reason."""
        self.torn = False
        """Whether events are missing."""
        self._before: set[int] = set()

    def apply(self, logged: Logged) -> bool:
        """Take in the next event if it can be, and return whether it could."""
        if logged.sequence > self.last(logged.incarnation, logged.rank):
            self.set_aside += 1
            return False
        if self.played is not None:
            self.played.take(logged, self.ledger.entries.keys())
        if self.torn and not self._fits(logged):
            hole, left_out = self.holes[-1]
            self.holes[-1] = (hole, left_out + 1)
            if self.played is not None:
                self.played.left_out(logged.event)
            return False
        return self.add(logged)

    def add(self, logged: Logged) -> bool:
        """Take in an event that fits."""
        event = logged.event
        if isinstance(event, Claimed):
            began = self.draws.began(event, self.sampler)
            if began is not None:
                self.draws.note(began, self.sampler)
                self.sampler.apply(began)
        elif isinstance(event, Feedback):
            self.feedback.append(event)
        self.draws.note(event, self.sampler)
        return super().apply(logged)

    def hole(self, hole: Hole) -> None:
        """Take in that events are missing, or a mark."""
        if hole.first > self.last(hole.name.incarnation, hole.name.rank):
            return  # they would not have counted
        self.holes.append((hole, 0))
        if hole.events:
            self.torn = True
            self._before = set(self.ledger.entries)
            if self.played is not None:
                self.played.hole((hole.name.incarnation, hole.name.rank), hole.first, self._before)

    def _fits(self, logged: Logged) -> bool:
        event = logged.event
        if isinstance(event, Inherited):
            self._before = set()  # it says of every item how it stands
            return True
        uid = getattr(event, "uid", None)
        if uid is None or isinstance(event, (Feedback, Evaluated)):
            return True
        if isinstance(event, Claimed):
            return uid not in self.draws.seen
        if uid in self.ledger.entries:
            return uid not in self._before or isinstance(event, Dropped)
        if isinstance(event, Dropped) and uid not in self.draws.seen:
            self.ended[uid] = event.reason
        return False


def rescue(
    layout: Layout,
    run_tag: int,
    line: Manifest,
    others: list[Manifest],
    half: ConsumerHalf,
    *,
    discard: bool = False,
    played: Played | None = None,
) -> Rescue:
    """Fold what can be read of every journal that counts for a generation. Blocks.

    Args:
        layout: the damaged run's paths.
        run_tag: its tag.
        line: the generation's manifest.
        others: those of the other generations, which say too how long the journals were.
        half: the generation's consumer half.
        discard: set aside what came after the generation.
        played: told of the events, where rollouts fill a buffer.

    Raises:
        NewerFormat: a journal was written by a newer version.
    """
    journals = Journals.of(layout, run_tag, line, others)
    fold = Rescue(half, line, journals.seed, journals.caps(discard=discard), played=played)
    lives = {incarnation for incarnation, _ in journals.names.keys() | journals.promised.keys()}
    journals.read_into(fold, {(life, 0) for life in range(1, max(lives, default=0)) if life not in lives})
    return fold


class Journals(NamedTuple):
    """The journals that may count for a generation, and what is said of them.

    Attributes:
        layout: the damaged run's paths.
        run_tag: its tag.
        line: the generation's manifest.
        promised: how long journals must be.
        names: those that are there.
        opened: the first events of these, as far as they can be read.
    """

    layout: Layout
    run_tag: int
    line: Manifest
    promised: dict[Key, JournalPosition]
    names: dict[Key, JournalName]
    opened: list[Opened]

    @classmethod
    def of(cls, layout: Layout, run_tag: int, line: Manifest, others: list[Manifest]) -> Journals:
        """Look at them. Blocks."""
        names = {(name.incarnation, name.rank): name for name in layout.list_journals()}
        opened = [first for name in names.values() if (first := _first(name, run_tag)) is not None]
        return cls(layout, run_tag, line, _promised([line, *others]), names, opened)

    @property
    def seed(self) -> int:
        """The run's."""
        seed: int = self.line.options.get("seed", self.opened[0].seed if self.opened else 0)
        return seed

    def caps(self, *, discard: bool) -> list[Capped]:
        """Return the last event that counts, of each journal of which not all do."""
        if discard:
            return find_line(self.layout, self.run_tag, self.line, discard=True).discarded
        return _caps(self.line, self.opened)

    def read_into(self, fold: Rescue, gone: set[Key]) -> None:
        """Fold them; ``gone``: what must have been there too. Blocks."""
        for key in sorted({*self.names, *self.promised, *gone}):
            if key[0] >= self.line.base:
                for each in _read(self.layout, self.run_tag, key, self.names.get(key), self.promised.get(key)):
                    if isinstance(each, Hole):
                        fold.hole(each)
                    else:
                        fold.apply(each)


def look_beyond(layout: Layout, run_tag: int, line: Manifest) -> tuple[int, list[Feedback]]:
    """Return a uid above all that the journals name, and the feedback of a generation without its buffer."""
    caps = {(each.incarnation, each.rank): each.sequence for each in line.journals}
    told: list[Feedback] = []
    next_uid = 0
    for name in layout.list_journals():
        for each in read_remains(name, run_tag, None):
            if isinstance(each, Hole):
                continue
            if isinstance(each.event, Claimed):
                next_uid = max(next_uid, each.event.uid + 1)
            elif isinstance(each.event, Feedback) and each.sequence <= caps.get(each[:2], 0):
                told.append(each.event)
    return next_uid, told


def _promised(manifests: list[Manifest]) -> dict[Key, JournalPosition]:
    found: dict[Key, JournalPosition] = {}
    for manifest in manifests:
        for each in manifest.journals:
            key = (each.incarnation, each.rank)
            if each.sequence > (found[key].sequence if key in found else 0):
                found[key] = each
    return found


def _caps(line: Manifest, opened: list[Opened]) -> list[Capped]:
    """Return the last event that counts, of each journal of which not all do."""
    positions = {(each.incarnation, each.rank): each.sequence for each in line.journals}
    caps = last_counted(opened, positions)
    for key, last in positions.items():
        if key[0] < line.incarnation:  # that life was over: what the generation counted of it is all that counts
            caps[key] = min(last, caps.get(key, last))
    return [(*key, last) for key, last in sorted(caps.items())]


def _first(name: JournalName, run_tag: int) -> Opened | None:
    first = next(read_remains(name, run_tag, None), None)
    return first.event if isinstance(first, Logged) and isinstance(first.event, Opened) else None


def _read(
    layout: Layout, run_tag: int, key: Key, name: JournalName | None, promised: JournalPosition | None
) -> Iterator[Logged | Hole]:
    if name is not None:
        yield from read_remains(name, run_tag, promised)
    else:
        yield missing_journal(JournalName(*key, layout.journal(*key)), promised)

"""The one order that the ranks of a run have in common, and which of its draws are whose.

Draws are numbered over all tasks and epochs, from 0 for the first of the run; the number is the uid of the item. With N
ranks the draws come by turns: the rank r claims those of which the number, less that of the first draw of this layout
(:attr:`TurnSampler.base`), leaves r when it is divided by N. Each rank runs the whole order itself, which costs a few
microseconds a draw, and needs no word from the others; all that could differ is how long a source is that grows, and
that is agreed when an epoch begins (``agreed``).

So the items of the first k draws are the same for any number of ranks. A rank journals the draws that it is about to
claim (:class:`~pipeline.records.Reserved`), and how the order stands after them: no draw is run twice in a recovery.
What lies above the highest reservation of any rank is free; what lies below it, and no uid has taken, waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from pipeline.records import EXTERNAL, Claimed, EpochBegan, Inherited, Mixed, Reserved, SourceMark
from pipeline.sampler.sampler import Cursor, Draw, DrawPlan, Sampler

Agreed: TypeAlias = Callable[[str, int, int], int]
"""Says how long an epoch is, -1 for endless: of a task, its epoch, and how long this rank finds it."""
TURN = 16
"""How many draws a rank reserves at once."""


class Block(NamedTuple):
    """The next turn of all ranks, as one of them journals it."""

    reserved: Reserved
    ended: bool
    """Every source is at its end: there is no draw after these."""


class _Agreed:
    """A source whose epochs are as long as all ranks find them. Only what an order asks of a source."""

    def __init__(self, plan: DrawPlan, cursor: Callable[[], Cursor], agreed: Agreed) -> None:
        self._source, self._name, self._cursor, self._agreed = plan.source, plan.name, cursor, agreed
        self._known: tuple[int, int] = (-1, 0)

    def length(self) -> int | None:
        """Of the epoch that is about to begin."""
        epoch = self._cursor().epoch + 1
        if self._known[0] != epoch:
            given = self._source.length()
            self._known = (epoch, self._agreed(self._name, epoch, -1 if given is None else given))
        return None if self._known[1] < 0 else self._known[1]

    def mark(self) -> SourceMark:
        return self._source.mark()


class Order:
    """The order from some draw on. Asking for more may block, where ranks agree about a length."""

    def __init__(self, plans: Sequence[DrawPlan], seed: int, stands: Inherited, agreed: Agreed) -> None:
        """Args:
        plans: the tasks.
        seed: the run's.
        stands: how the order stands: cursors, shares, draws so far, and the number of the next draw (``next_uid``).
        agreed: says how long epochs are.
        """
        self.number = stands.next_uid
        wrapped = [plan._replace(source=_Agreed(plan, self._cursor_of(plan.name), agreed)) for plan in plans]  # type: ignore[arg-type]
        self.sampler = Sampler(wrapped, seed)
        self.sampler.apply(stands)

    def _cursor_of(self, name: str) -> Callable[[], Cursor]:
        return lambda: self.sampler.cursors[name]

    def draws(self, upto: int) -> Iterator[Draw]:
        """Yield the draws below number ``upto``; they end earlier if every source does."""
        while self.number < upto and (draw := self.sampler.draw()) is not None:
            if draw.began is not None:
                self.sampler.apply(draw.began)
            self.sampler.apply(Claimed(self.number, draw.task, draw.epoch, draw.position, draw.index))
            yield Draw(draw.task, draw.epoch, draw.position, draw.index, draw.began, self.number)
            self.number += 1

    def block(self, base: int, rank: int, size: int) -> Block:
        """Return the next turn of all ranks, with the draws in it that are one rank's."""
        began, own, upto = [], [], self.number + TURN * size
        for draw in self.draws(upto):
            if draw.began is not None:
                began.append(draw.began)
            if (draw.number - base) % size == rank:
                own.append((draw.number, draw.task, draw.epoch, draw.position, draw.index))
        mixture, cursors = self.sampler.mixture, self.sampler.cursors
        positions = {name: (each.epoch, each.position) for name, each in cursors.items()}
        return Block(Reserved(own, self.number, began, positions, dict(mixture.drawn)), self.number < upto)


class TurnSampler(Sampler):
    """Gives one rank its draws of the order; its cursors say how the order stands at :attr:`next`."""

    def __init__(self, plans: Sequence[DrawPlan], seed: int, rank: int, size: int) -> None:
        super().__init__(plans, seed)
        self.rank, self.size = rank, size
        self.base = self.next = 0
        self.reserved: dict[int, Draw] = {}
        """Draws that this rank is still to claim, in their order."""
        self.ended = False
        """Whether the order has no draw from :attr:`next` on."""
        self.lengths: dict[tuple[str, int], int] = {}
        """How long epochs are, by task and epoch, as far as it is known here."""
        self._own = list(plans)
        self._order: Order | None = None
        self._apply[Reserved] = self._reserved

    def draw(self) -> Draw | None:
        """Return the next draw that is reserved, or None if one must be reserved first, or none is left."""
        return next(iter(self.reserved.values()), None)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is reserved, and every source has been drawn to its end."""
        return self.ended and not self.reserved

    def reserve(self, agreed: Agreed) -> Block:
        """Return what is to be recorded next, so that there is more to claim. May block; changes nothing but the order
        that it runs ahead."""
        if self._order is None:
            self._order = Order(self._own, self.seed, self.stands(), self._known_or(agreed))
        return self._order.block(self.base, self.rank, self.size)

    def stands(self) -> Inherited:
        """Return how the order stands at :attr:`next`."""
        cursors = {
            name: (each.epoch, each.position, each.length, each.mark, each.base) for name, each in self.cursors.items()
        }
        return Inherited([], cursors, dict(self.mixture.shares), dict(self.mixture.drawn), {}, [], self.next)

    def _known_or(self, agreed: Agreed) -> Agreed:
        def length(task: str, epoch: int, found: int) -> int:
            known = self.lengths.get((task, epoch))
            return agreed(task, epoch, found) if known is None else known

        return length

    def _claimed(self, event: Claimed) -> None:
        if event.kind != EXTERNAL:
            self.reserved.pop(event.uid, None)

    def _reserved(self, event: Reserved) -> None:
        for began in event.began:
            self._epoch_began(began)
        for number, task, epoch, position, index in event.draws:
            self.reserved[number] = Draw(task, epoch, position, index, None, number)
        self.next = event.next
        self.mixture.drawn = dict(event.drawn)
        for name, (epoch, position) in event.positions.items():
            cursor = self.cursors.setdefault(name, Cursor())
            if cursor.epoch == epoch:
                cursor.position = position

    def _epoch_began(self, event: EpochBegan) -> None:
        super()._epoch_began(event)
        self.lengths[event.task, event.epoch] = event.length
        if event.restarted:
            self._order = None

    def _mixed(self, event: Mixed) -> None:
        super()._mixed(event)
        self._order = None

    def _inherited(self, event: Inherited) -> None:
        super()._inherited(event)
        self.next = event.next_uid
        self.base = self.next if event.turns < 0 else event.turns
        self.reserved.clear()
        self._order = None


def holes(samplers: Sequence[TurnSampler], plans: Sequence[DrawPlan]) -> list[Draw]:
    """Return the draws below the highest reservation that their ranks have not reserved yet.

    Args:
        samplers: of all ranks of a layout, by rank.
        plans: the tasks that there are now.

    Raises:
        LookupError: the order cannot be run without a task that is gone; it is named.
    """
    ahead, behind = max(samplers, key=_next), min(samplers, key=_next)
    if ahead.next == behind.next:
        return []
    stands, shares = behind.stands(), ahead.mixture.shares
    if behind.mixture.shares != shares:  # it was killed before it had set them, which all do where their turns begin
        stands = msgspec.structs.replace(stands, shares=dict(shares), drawn=dict.fromkeys(shares, 0))
    gone = sorted(shares.keys() - {plan.name for plan in plans})
    if gone:
        raise LookupError(gone[0])
    lengths = joined_lengths(samplers)
    order = Order(
        [plan for plan in plans if plan.name in shares],
        behind.seed,
        stands,
        lambda task, epoch, found: lengths.get((task, epoch), found),
    )
    free = unreserved(samplers)
    return [draw for draw in order.draws(ahead.next) if draw.number in free]


def unreserved(samplers: Sequence[TurnSampler]) -> set[int]:
    """Return the numbers of the draws below the highest reservation that their ranks have not reserved yet.

    Args:
        samplers: of all ranks of a layout, by rank.
    """
    if not samplers:
        return set()
    ahead, behind = max(samplers, key=_next), min(samplers, key=_next)
    return {
        number
        for number in range(behind.next, ahead.next)
        if number >= samplers[(number - behind.base) % behind.size].next
    }


def _next(sampler: TurnSampler) -> int:
    return sampler.next


def joined_lengths(samplers: Sequence[TurnSampler]) -> Mapping[tuple[str, int], int]:
    """Return how long epochs are, as far as a rank knows."""
    lengths: dict[tuple[str, int], int] = {}
    for each in samplers:
        lengths.update(each.lengths)
    return lengths

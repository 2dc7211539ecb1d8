"""The order that ranks share: whose each draw is, and what is known of it after a crash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.records import AnyEvent, Claimed, EpochBegan, Inherited, Mixed
from pipeline.sampler import Draw, DrawPlan, Sampler, TurnSampler
from pipeline.sampler.turns import TURN, holes, unreserved
from tests.support.runs import numbers

COUNTS = {"a": 37, "b": 11}


class Growing:
    """A source whose length is another one each time that it is asked."""

    def __init__(self, count: int) -> None:
        self.source, self.count = numbers(1), count

    def length(self) -> int:
        self.count += 1
        return self.count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


def plans(epochs: int | None = 2) -> list[DrawPlan]:
    return [
        DrawPlan("a", numbers(COUNTS["a"]), 3.0, epochs, True),
        DrawPlan("b", numbers(COUNTS["b"]), 1.0, epochs, False),
    ]


def as_found(task: str, epoch: int, found: int) -> int:
    return found


def begin(sampler: Sampler) -> AnyEvent:
    """Set the shares, as a run does when it starts."""
    shares = sampler.shares_event()
    assert shares is not None
    sampler.apply(shares)
    return shares


def single(epochs: int | None = 2, most: int = 1000) -> list[tuple[str, int, int, int]]:
    """Return what one process draws."""
    sampler = Sampler(plans(epochs), 5)
    begin(sampler)
    drawn: list[tuple[str, int, int, int]] = []
    while len(drawn) < most and (draw := sampler.draw()) is not None:
        if draw.began is not None:
            sampler.apply(draw.began)
        sampler.apply(Claimed(len(drawn), draw.task, draw.epoch, draw.position, draw.index))
        drawn.append((draw.task, draw.epoch, draw.position, draw.index))
    return drawn


class Rank:
    """One rank's sampler, and what it has journaled."""

    def __init__(self, rank: int, size: int, journal: list[AnyEvent] | None = None) -> None:
        self.sampler = TurnSampler(plans(), 5, rank, size)
        self.journal: list[AnyEvent] = []
        for event in journal or [begin(TurnSampler(plans(), 5, rank, size))]:
            self.record(event)

    def record(self, event: AnyEvent) -> None:
        self.sampler.apply(event)
        self.journal.append(event)

    def claim(self) -> Draw | None:
        """Claim the next draw, and reserve more first if there is none."""
        sampler = self.sampler
        while not sampler.reserved and not sampler.ended:
            block = sampler.reserve(as_found)
            self.record(block.reserved)
            sampler.ended = block.ended
        draw = sampler.draw()
        if draw is not None:
            self.record(Claimed(draw.number, draw.task, draw.epoch, draw.position, draw.index))
        return draw

    def claims(self, count: int = 1000) -> Iterator[Draw]:
        for _ in range(count):
            draw = self.claim()
            if draw is None:
                return
            yield draw


def what(draw: Draw) -> tuple[str, int, int, int]:
    return draw.task, draw.epoch, draw.position, draw.index


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_together_ranks_draw_what_one_process_draws_and_number_it_alike(size: int) -> None:
    drawn = {draw.number: what(draw) for rank in range(size) for draw in Rank(rank, size).claims()}
    assert [drawn[number] for number in sorted(drawn)] == single()
    assert sorted(drawn) == list(range(len(single())))


def test_an_epoch_is_as_long_as_another_rank_had_found_it_before_the_crash() -> None:
    sampler = Rank(0, 2).sampler
    sampler.lengths["a", 0] = 20

    def agreed(task: str, epoch: int, found: int) -> int:
        assert (task, epoch) != ("a", 0), "it is known"
        return found

    began = {(each.task, each.epoch): each.length for each in sampler.reserve(agreed).reserved.began}
    assert began == {("a", 0): 20, ("a", 1): COUNTS["a"], ("b", 0): COUNTS["b"]}


def test_draws_that_their_ranks_have_not_reserved_yet_are_theirs_by_turns() -> None:
    ahead, behind = Rank(0, 2), Rank(1, 2)
    assert unreserved([]) == unreserved([ahead.sampler, behind.sampler]) == set()
    assert len(list(ahead.claims(TURN + 1))) == TURN + 1  # so it is in its second turn
    assert len(list(behind.claims(1))) == 1
    assert unreserved([ahead.sampler, behind.sampler]) == set(range(2 * TURN + 1, 4 * TURN, 2))


@pytest.mark.parametrize("size", [1, 3])
def test_a_rank_knows_after_a_crash_at_any_event_what_it_is_to_claim_next(size: int) -> None:
    whole = Rank(size - 1, size)
    draws = [what(draw) for draw in whole.claims()]
    for cut in range(1, len(whole.journal) + 1):
        again = Rank(size - 1, size, whole.journal[:cut])
        before = sum(isinstance(event, Claimed) for event in whole.journal[:cut])
        assert [what(draw) for draw in again.claims()] == draws[before:], cut
    assert whole.sampler.exhausted


@pytest.mark.parametrize(("size", "claimed"), [(2, [0, 40]), (3, [5, 70, 21]), (3, [1, 1, 1]), (2, [50, 50])])
def test_another_number_of_ranks_goes_on_with_the_same_order(size: int, claimed: list[int]) -> None:
    ranks = [Rank(rank, size) for rank in range(size)]
    drawn = {draw.number for rank, count in zip(ranks, claimed, strict=True) for draw in rank.claims(count)}
    samplers = [each.sampler for each in ranks]
    waiting = [*holes(samplers, plans()), *(draw for each in samplers for draw in each.reserved.values())]
    stands = max(samplers, key=lambda each: each.next).stands()
    assert sorted([*drawn, *(draw.number for draw in waiting)]) == list(range(stands.next_uid))
    assert all(single()[draw.number] == what(draw) for draw in waiting)
    after: dict[int, Any] = {}
    for rank in range(4):  # so many go on
        other = Rank(rank, 4, [stands])
        after |= {draw.number: what(draw) for draw in other.claims()}
    assert sorted(after) == list(range(stands.next_uid, len(single())))
    assert all(single()[number] == draw for number, draw in after.items())


def test_a_rank_that_was_killed_before_it_began_has_the_shares_of_the_others() -> None:
    killed, other = TurnSampler(plans(), 5, 0, 2), Rank(1, 2)
    drawn = [draw.number for draw in other.claims(3)]
    waiting = [*holes([killed, other.sampler], plans()), *other.sampler.reserved.values()]
    assert sorted([*drawn, *(draw.number for draw in waiting)]) == list(range(2 * TURN))
    assert all(single()[draw.number] == what(draw) for draw in waiting)


def test_a_source_that_is_gone_is_named_if_items_wait_that_it_would_give() -> None:
    ranks = [Rank(rank, 2) for rank in range(2)]
    list(ranks[0].claims(TURN + 1))
    with pytest.raises(LookupError, match="b"):
        holes([each.sampler for each in ranks], plans()[:1])


def test_an_epoch_is_as_long_as_ranks_have_agreed_even_if_the_source_grows() -> None:
    known: dict[tuple[str, int], int] = {}

    def agreed(task: str, epoch: int, found: int) -> int:
        return known.setdefault((task, epoch), found)

    def drawn(rank: int) -> dict[int, Any]:
        sampler = TurnSampler([DrawPlan("g", Growing(20 + 5 * rank), 1.0, 3, True)], 5, rank, 2)
        begin(sampler)
        found: dict[int, Any] = {}
        while not sampler.ended:
            block = sampler.reserve(agreed)
            sampler.apply(block.reserved)
            sampler.ended = block.ended
            found |= {number: what(draw) for number, draw in sampler.reserved.items()}
        return found

    both = drawn(0) | drawn(1)
    assert sorted(both) == list(range(sum(known.values())))
    by_epoch = {epoch: [index for _, e, _, index in both.values() if e == epoch] for epoch in range(3)}
    assert all(sorted(by_epoch[epoch]) == list(range(known["g", epoch])) for epoch in range(3))


def test_what_was_inherited_begins_the_turns_anew() -> None:
    sampler = TurnSampler(plans(), 5, 1, 3)
    sampler.apply(Mixed({"a": 3.0, "b": 1.0}))
    sampler.apply(EpochBegan("a", 0, 37))
    mark, shares = plans()[0].source.mark(), {"a": 3.0, "b": 1.0}
    sampler.apply(Inherited([], {"a": (0, 30, 37, mark, 0)}, shares, {"a": 30, "b": 10}, {}, [], 40))
    block = sampler.reserve(as_found)
    assert [number for number, *_ in block.reserved.draws][:3] == [41, 44, 47]
    assert block.reserved.draws[0][1:4] == ("a", 0, 31)  # 40 is the first rank's

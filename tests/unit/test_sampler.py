"""What is drawn next: pure until applied, bound to its source, with an epoch's length fixed when it begins."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pipeline.errors import SourceError, SourceMismatch
from pipeline.records import AnyEvent, Claimed, Dropped, EpochBegan, Mixed, SourceMark
from pipeline.sampler import DrawPlan, Sampler
from pipeline.sampler import sampler as module
from pipeline.sampler.order import shuffled
from pipeline.sampler.sampler import Draw, check_marks


class Rows:
    """A source of a given length, which may change; None is endless."""

    def __init__(self, length: int | None, kind: str = "rows", changed: Sequence[int] = ()) -> None:
        self.count, self.kind, self.changed = length, kind, changed
        self.marks = 0

    def item(self, index: int) -> Any:
        return index

    def length(self) -> int | None:
        return self.count

    def mark(self) -> SourceMark:
        self.marks += 1
        length = -1 if self.count is None else self.count
        held = [index for index in (0, 1, 2, 4, 8, 16) if length < 0 or index < length]
        digests = {index: f"{self.kind}{index}{'!' if index in self.changed else ''}" for index in held}
        return SourceMark(self.kind, length, digests)


def sampler(*plans: DrawPlan, seed: int = 0) -> Sampler:
    made = Sampler(plans, seed)
    shares = made.shares_event()
    if shares is not None:
        made.apply(shares)
    return made


def plan(source: Rows, name: str = "a", *, share: float = 1, epochs: int | None = 1, shuffle: bool = True) -> DrawPlan:
    return DrawPlan(name, source, share, epochs, shuffle)


def take(made: Sampler, count: int, log: list[AnyEvent] | None = None) -> list[Draw]:
    """Draw and apply, as the producer does."""
    draws = []
    for _ in range(count):
        draw = made.draw()
        if draw is None:
            break
        draws.append(draw)
        claimed = Claimed(len(draws), draw.task, draw.epoch, draw.position, draw.index)
        events: list[AnyEvent] = [claimed] if draw.began is None else [draw.began, claimed]
        for event in events:
            made.apply(event)
        if log is not None:
            log += events
    return draws


def indices(draws: list[Draw]) -> list[int]:
    return [draw.index for draw in draws]


def test_a_draw_changes_nothing_until_it_is_applied() -> None:
    made = sampler(plan(Rows(10)), plan(Rows(5), "b"))
    first = made.draw()
    before = copy.deepcopy((made.cursors, made.mixture.drawn))
    assert first == made.draw() == made.draw()
    assert (made.cursors, made.mixture.drawn) == before
    assert not made.exhausted
    assert (made.cursors, made.mixture.drawn) == before
    assert first is not None
    assert first.began == EpochBegan("a", 0, 10, Rows(10).mark())
    assert (first.epoch, first.position) == (0, 0)


def test_an_epoch_gives_every_item_once_and_the_next_another_order() -> None:
    """CASES 33, 4: epochs differ, and each is whole."""
    draws = take(sampler(plan(Rows(20), epochs=3)), 100)
    assert len(draws) == 60
    orders = [indices(draws[20 * n : 20 * n + 20]) for n in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [draw.epoch for draw in draws] == [0] * 20 + [1] * 20 + [2] * 20
    assert [draw.began is not None for draw in draws] == ([True] + [False] * 19) * 3
    again = sampler(plan(Rows(20), epochs=3))
    assert take(again, 100) == draws
    assert again.draw() is None
    assert again.exhausted


def test_a_source_that_is_not_shuffled_keeps_its_order() -> None:
    assert indices(take(sampler(plan(Rows(5), epochs=2, shuffle=False)), 99)) == [0, 1, 2, 3, 4] * 2


def test_an_endless_source_is_drawn_by_position() -> None:
    made = sampler(plan(Rows(None)))
    draws = take(made, 1500)
    assert indices(draws) == list(range(1500))
    assert draws[0].began == EpochBegan("a", 0, -1, Rows(None).mark())
    assert all(draw.epoch == 0 for draw in draws)
    assert not made.exhausted


def test_without_a_limit_on_epochs_it_never_ends() -> None:
    draws = take(sampler(plan(Rows(3), epochs=None)), 100)
    assert len(draws) == 100
    assert draws[-1].epoch == 33


@pytest.mark.parametrize("epochs", [1, None])
def test_a_source_without_items_ends_at_once(epochs: int | None) -> None:
    made = sampler(plan(Rows(0), epochs=epochs), plan(Rows(2), "b"))
    assert [draw.task for draw in take(made, 10)] == ["b", "b"]
    assert made.exhausted
    assert sampler(plan(Rows(0), epochs=epochs)).exhausted


def test_growth_counts_from_the_next_epoch_and_shrinking_too() -> None:
    source = Rows(4)
    made = sampler(plan(source, epochs=3))
    take(made, 2)
    source.count = 6
    second = take(made, 2 + 6)
    assert sorted(indices(second[:2])) != []
    assert [draw.epoch for draw in second] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert sorted(indices(second[2:])) == [0, 1, 2, 3, 4, 5]
    assert second[2].began == EpochBegan("a", 1, 6, source.mark())
    source.count = 3
    assert sorted(indices(take(made, 10))) == [0, 1, 2]


def test_indices_are_computed_in_blocks_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    true = shuffled

    def counted(seed: int, epoch: int, positions: np.ndarray, length: int) -> np.ndarray:
        calls.append((epoch, int(positions[0])))
        return true(seed, epoch, positions, length)

    monkeypatch.setattr(module, "shuffled", counted)
    made = sampler(plan(Rows(1300), epochs=2), seed=5)
    draws = take(made, 2600)
    assert calls == [(0, 0), (0, 512), (0, 1024), (1, 0), (1, 512), (1, 1024)]
    assert indices(draws[:1300]) == true(5, 0, np.arange(1300), 1300).tolist()
    assert indices(draws[1300:]) == true(5, 1, np.arange(1300), 1300).tolist()


def test_a_source_that_grew_in_mid_epoch_does_not_mix_two_orders() -> None:
    """The blocks are remembered by length as well: the same block of a longer epoch is another one."""
    source = Rows(10)
    made = sampler(plan(source, epochs=None))
    take(made, 10)
    assert made.draw() is not None  # looked at, and not taken: epoch 1 would have 10 items
    source.count = 12
    assert sorted(indices(take(made, 12))) == list(range(12))


def test_tasks_are_mixed_by_share_and_the_end_of_one_leaves_the_others() -> None:
    made = sampler(plan(Rows(6), "a", share=3), plan(Rows(None), "b"), plan(Rows(2), "c", share=2))
    names = [draw.task for draw in take(made, 30)]
    assert [names[:6].count(name) for name in "abc"] == [3, 1, 2]
    assert [names.count(name) for name in "abc"] == [6, 22, 2]


def test_a_resumed_sampler_goes_on_exactly_where_the_events_end() -> None:
    """Concatenation: the draws before any cut and those after it are those of an unbroken run."""

    def plans() -> list[DrawPlan]:
        return [
            plan(Rows(7), "a", share=2.5, epochs=2),
            plan(Rows(3), "b", share=1, epochs=3),
            plan(Rows(0), "none", share=4),
            plan(Rows(11), "c", share=0.7, epochs=1),
            plan(Rows(40), "d", share=0.3, epochs=1),
        ]

    whole: list[AnyEvent] = []
    unbroken = take(sampler(*plans(), seed=9), 1000, whole)
    shares = sampler(*plans()).mixture.shares
    drawn = 0
    for cut in range(len(whole) + 1):
        if cut and type(whole[cut - 1]) is Claimed:
            drawn += 1
        resumed = Sampler(plans(), 9)
        for event in [Mixed(shares), *whole[:cut]]:
            resumed.apply(event)
        assert resumed.shares_event() is None
        rest = take(resumed, 1000)
        key = [(draw.task, draw.epoch, draw.position, draw.index) for draw in unbroken[drawn:]]
        assert [(draw.task, draw.epoch, draw.position, draw.index) for draw in rest] == key, cut


def test_claims_out_of_order_move_the_cursor_to_the_furthest() -> None:
    made = sampler(plan(Rows(10), shuffle=False))
    made.apply(EpochBegan("a", 0, 10))
    for position in (3, 1, 0):
        made.apply(Claimed(position, "a", 0, position, position))
    draw = made.draw()
    assert draw is not None
    assert draw.position == 4
    made.apply(Claimed(9, "a", 7, 9, 9))  # of an epoch that is not the cursor's
    assert made.draw() == draw


def test_a_task_that_this_run_does_not_have_keeps_its_place() -> None:
    made = sampler(plan(Rows(3), "new"))
    for event in (EpochBegan("gone", 2, 9), Claimed(1, "gone", 2, 4, 0), Dropped(1, "failed")):
        made.apply(event)
    assert (made.cursors["gone"].epoch, made.cursors["gone"].position) == (2, 5)
    assert [draw.task for draw in take(made, 9)] == ["new"] * 3


def test_a_task_begun_anew_is_drawn_again_and_does_not_have_to_catch_up() -> None:
    made = sampler(plan(Rows(4), "a"), plan(Rows(None), "b"))
    take(made, 100)
    assert made.cursors["a"].at_end
    made.apply(EpochBegan("a", 1, 6, SourceMark(), True))
    names = [draw.task for draw in take(made, 12)]
    assert names.count("a") == 6
    assert names[:4].count("a") == 2


def test_new_shares_are_an_event() -> None:
    made = sampler(plan(Rows(9), "a", share=2), plan(Rows(9), "b"))
    assert made.shares_event() is None
    fresh = Sampler([plan(Rows(9), "a", share=2), plan(Rows(9), "b"), plan(Rows(9), "c")], 0)
    fresh.apply(Mixed({"a": 2.0, "b": 1.0}))
    assert fresh.shares_event() == Mixed({"a": 2.0, "b": 1.0, "c": 1.0})


class TestMarks:
    @pytest.mark.parametrize(
        ("other", "agrees"),
        [
            (Rows(20), True),
            (Rows(90), True),
            (Rows(2), True),
            (Rows(20, changed=[0]), True),
            (Rows(20, changed=[1, 4]), True),
            (Rows(20, changed=[0, 1, 2]), False),
            (Rows(20, changed=[0, 1, 2, 4, 8, 16]), False),
            (Rows(20, kind="others"), False),
            (Rows(None), False),
            (Rows(0), True),
            (Rows(1, changed=[0]), False),
        ],
    )
    def test_most_common_digests_decide_and_not_the_length(self, other: Rows, agrees: bool) -> None:
        mark = Rows(20).mark()
        assert other.mark().agrees(mark) is agrees
        assert mark.agrees(other.mark()) is agrees

    def test_it_is_shown_with_its_length_and_a_digest(self) -> None:
        assert str(Rows(20).mark()) == "rows (20 items, first item's digest rows0)"
        assert str(Rows(None).mark()) == "rows (endless, first item's digest rows0)"
        assert "none" in str(SourceMark("empty", 0))

    def resumed(self, source: Rows) -> list[tuple[str, SourceMark, SourceMark]]:
        """Begin with 20 rows, then resume with ``source``."""
        made = sampler(plan(Rows(20), "math"))
        take(made, 5)
        return check_marks(made, {"math": plan(source, "math")})

    def test_the_same_source_passes_in_silence(self) -> None:
        assert self.resumed(Rows(20)) == []

    @pytest.mark.parametrize("source", [Rows(25), Rows(20, changed=[1])])
    def test_a_grown_or_corrected_source_is_reported(self, source: Rows) -> None:
        assert self.resumed(source) == [("math", Rows(20).mark(), source.mark())]

    def test_another_source_is_an_error_that_names_both(self) -> None:
        """CASES 16: never skip rows of another source in silence."""
        with pytest.raises(SourceMismatch, match=r"'math'.*rows \(20 items.*others \(3 items.*restart=\['math'\]"):
            self.resumed(Rows(3, kind="others"))

    def test_a_shorter_source_is_an_error_with_both_lengths(self) -> None:
        with pytest.raises(SourceError, match=r"had 20 items.*has 19 now"):
            self.resumed(Rows(19))

    def test_a_task_that_was_not_begun_is_bound_to_nothing(self) -> None:
        made = sampler(plan(Rows(20), "math"))
        assert check_marks(made, {"math": plan(Rows(3, kind="others"), "math")}) == []

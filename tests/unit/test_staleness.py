"""How old is too old, and how much may be begun: arithmetic, with the border cases of those who got it wrong."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.buffer import GroupBuffer
from pipeline.buffer.staleness import admissible, floor, overdue, staleness, surplus


def limit(**more: Any) -> int | None:
    given: dict[str, Any] = {
        "max_staleness": 2,
        "batch_groups": 4,
        "trained": 0,
        "version": 0,
        "capacity": None,
        **more,
    }
    return admissible(**given)


def test_staleness_counts_the_steps_trained_since_the_oldest_weights() -> None:
    """CASES 18: the first batch after a resume at version 7 is 0 steps stale, not 7."""
    assert staleness(1, 0) == 0
    assert staleness(8, 7) == 0
    assert staleness(8, 0) == 7
    assert staleness(5, 9) == 0, "weights published before their step was acked are not stale"


@pytest.mark.parametrize(("bound", "allowed"), [(3, [7, 8, 9, 10, 11]), (0, [10, 11]), (None, list(range(12)))])
def test_the_bound_is_inclusive_at_the_border(bound: int | None, allowed: list[int]) -> None:
    """CASES 23: after 10 steps, bound 3: versions 7 to 10 pass, 6 does not; 11 is newer and passes."""
    least = floor(11, bound)
    assert [version for version in range(12) if least is None or version >= least] == allowed
    assert [version for version in range(12) if bound is None or staleness(11, version) <= bound] == allowed


def test_what_may_be_begun_at_the_start_and_after_a_resume_is_the_same() -> None:
    """CASES 21: bound 2, batches of 4: 12 at version 0 and 12 again at version 10, never 52."""
    assert limit() == 12
    assert limit(trained=10, version=10) == 12


def test_each_step_makes_room_for_one_batch() -> None:
    """CASES 21: without a training step the 13th waits; what is trained leaves the count, so 4 more may begin."""
    outstanding = 12
    assert outstanding == limit(trained=0, version=0)
    assert limit(trained=1, version=1) == 12
    trained_of_the_12 = 4
    assert limit(trained=1, version=1) - (outstanding - trained_of_the_12) == 4  # type: ignore[operator]


def test_weights_that_lag_behind_leave_less_room_and_weights_ahead_leave_more() -> None:
    assert [limit(trained=trained, version=5) for trained in (5, 6, 7, 8, 20)] == [12, 8, 4, 0, 0]
    assert [limit(trained=5, version=version) for version in (5, 6, 7)] == [12, 16, 20]
    assert limit(max_staleness=0) == 4


def test_capacity_bounds_it_and_stands_alone_where_staleness_does_not() -> None:
    assert limit(capacity=10) == 10
    assert limit(capacity=100) == 12
    assert limit(max_staleness=None) == 8
    assert limit(max_staleness=None, capacity=5) == 5
    assert limit(max_staleness=None, trained=100, version=0) == 8


def test_before_anybody_asked_for_a_batch_nobody_knows_how_far_ahead_is_too_far() -> None:
    assert limit(batch_groups=0) == 0
    assert limit(batch_groups=0, max_staleness=None) is None
    assert limit(batch_groups=0, max_staleness=None, capacity=7) == 7


@pytest.mark.parametrize(
    ("groups", "ratio", "more"), [(4, 1.0, 0), (4, 1.5, 2), (4, 1.3, 2), (10, 1.1, 1), (64, 1.25, 16), (1, 1.01, 1)]
)
def test_how_many_more_may_be_begun_than_a_batch_needs(groups: int, ratio: float, more: int) -> None:
    assert surplus(groups, ratio) == more
    assert limit(batch_groups=groups, oversample=ratio) == 3 * groups + more
    assert limit(batch_groups=groups, oversample=ratio, max_staleness=None) == 2 * groups + more
    assert limit(batch_groups=groups, oversample=ratio, trained=9) == 0, "weights that lag too far let nothing start"
    assert limit(batch_groups=groups, oversample=ratio, capacity=2) == 2


@pytest.mark.parametrize(
    ("finished", "running", "waits"),
    [
        # The batch of step 9 takes 2; bound 2: version 6 may be in batch 9, version 7 up to 10, version 8 up to 11.
        ({}, {}, False),
        ({6: 9}, {}, False),  # there is nobody to wait for
        ({}, {6: 1}, True),
        ({}, {7: 2}, False),
        ({}, {7: 3}, True),
        ({7: 2}, {7: 2}, False),
        ({7: 3}, {7: 2}, True),
        ({7: 3}, {7: 1}, False),
        ({}, {8: 4}, False),
        ({}, {8: 5}, True),
        ({8: 2}, {8: 4}, False),
        ({}, {7: 2, 8: 2}, False),
        ({}, {7: 2, 8: 3}, True),
        ({6: 2}, {7: 2, 8: 2}, False),
        ({6: 2, 7: 1}, {7: 1, 8: 2}, False),
        ({6: 2, 7: 2}, {8: 3}, True),
        ({5: 9}, {5: 9, 7: 2}, False),  # what is too old already is nobody's concern
        ({}, {11: 10}, False),
    ],
)
def test_a_batch_waits_for_what_would_not_fit_into_those_that_are_left(
    finished: dict[int, int], running: dict[int, int], waits: bool
) -> None:
    assert overdue(9, 2, 2, finished=finished, running=running) == waits


def test_nothing_admitted_is_born_too_old() -> None:
    """However the weights lag: what may be outstanding is trained within the bound, if groups keep their order."""
    for bound in range(4):
        for lag in range(6):
            room = limit(max_staleness=bound, trained=10 + lag, version=10)
            assert room is not None
            last_step = 10 + lag + room // 4  # the step that the last of them is trained in
            assert room == 0 or staleness(last_step, 10) <= bound


def test_old_groups_are_found_and_the_rest_is_ordered_by_choice() -> None:
    """CASES 26: versions 3 to 8, 8 steps trained, bound 2: 3, 4, 5 go; of 6, 7, 8 four are not ready."""
    for choice, expected in (("fifo", [6, 7, 8]), ("stalest", [6, 7, 8]), ("freshest", [8, 7, 6])):
        buffer = GroupBuffer(order="finished", selector=choice)  # type: ignore[arg-type]
        for version in (3, 4, 5, 6, 7, 8):
            buffer.add(version, version)
        least = floor(9, 2)
        assert least == 6
        assert buffer.older_than(least) == [3, 4, 5]
        for uid in buffer.older_than(least):
            buffer.remove(uid)
        assert not buffer.ready(4)
        assert buffer.ready(3)
        assert buffer.take(4) == expected

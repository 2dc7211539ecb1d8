"""Ranges of integers against a set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.intervals import IntervalSet

NUMBERS = st.lists(st.integers(-5, 40) | st.integers(2**62, 2**62 + 5))
RANGES = st.lists(st.tuples(st.integers(-5, 30), st.integers(0, 8)).map(lambda each: (each[0], each[0] + each[1])))


def runs(values: set[int]) -> list[tuple[int, int]]:
    """The ranges of a set, the slow way."""
    found: list[tuple[int, int]] = []
    for value in sorted(values):
        if found and found[-1][1] == value - 1:
            found[-1] = (found[-1][0], value)
        else:
            found.append((value, value))
    return found


@given(RANGES, NUMBERS, RANGES)
def test_it_holds_what_a_set_holds(
    ranges: list[tuple[int, int]], numbers: list[int], more: list[tuple[int, int]]
) -> None:
    intervals = IntervalSet(ranges)
    plain = {value for first, last in ranges for value in range(first, last + 1)}
    assert (intervals.ranges(), len(intervals)) == (runs(plain), len(plain))
    for number in numbers:
        intervals.add(number)
        plain.add(number)
        assert intervals.ranges() == runs(plain)
        assert len(intervals) == len(plain)
    for first, last in more:
        intervals.add_range(first, last)
        plain |= set(range(first, last + 1))
        assert (intervals.ranges(), len(intervals)) == (runs(plain), len(plain))
    together = IntervalSet(ranges)
    together.update(numbers)
    one_by_one = IntervalSet(ranges)
    for number in numbers:
        one_by_one.add(number)
    assert (together.ranges(), len(together)) == (one_by_one.ranges(), len(one_by_one))
    for value in range(-7, 45):
        assert (value in intervals) == (value in plain)
    again = IntervalSet(intervals.ranges())
    assert (again.ranges(), len(again)) == (intervals.ranges(), len(intervals))


def test_millions_of_neighbours_are_one_range() -> None:
    intervals = IntervalSet([(0, 10**7)])
    intervals.add(10**7 + 1)
    assert intervals.ranges() == [(0, 10**7 + 1)]
    assert len(intervals) == 10**7 + 2
    assert IntervalSet().ranges() == []
    assert 0 not in IntervalSet()

"""How a batch is divided among tasks: against exact arithmetic done by hand, and what it promises."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.sampler.quotas import divide, due
from tests.properties.conftest import SOAK

SHARES = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.1, 0.2, 0.3, 1.0, 2.0, 3.0, 7.5]), min_size=1)


@pytest.mark.parametrize(
    ("total", "shares", "most", "expected"),
    [
        (8, {"a": 1, "b": 1}, {}, [4, 4]),
        (7, {"a": 1, "b": 1}, {}, [4, 3]),
        (7, {"b": 1, "a": 1}, {}, [4, 3]),
        (10, {"a": 6, "b": 3, "c": 1}, {}, [6, 3, 1]),
        (4, {"a": 1, "b": 2}, {}, [1, 3]),
        (5, {"a": 0.1, "b": 0.2, "c": 0.7}, {}, [1, 1, 3]),  # .5, 1, 3.5: a and c tie
        (1, {"a": 1, "b": 1}, {}, [1, 0]),
        (8, {"a": 1, "b": 1}, {"a": 2}, [2, 6]),
        (8, {"a": 1, "b": 1, "c": 2}, {"a": 0}, [0, 3, 5]),
        (8, {"a": 1, "b": 1, "c": 2}, {"c": 1}, [4, 3, 1]),
        (8, {"a": 1, "b": 1, "c": 2}, {"a": 1, "c": 1}, [1, 6, 1]),
        (8, {"a": 1, "b": 1}, {"a": 5, "b": 2}, [5, 2]),
        (8, {"a": 1, "b": 1}, {"a": 9, "b": 2}, [6, 2]),
        (0, {"a": 1, "b": 1}, {}, [0, 0]),
    ],
)
def test_by_hand(total: int, shares: dict[str, float], most: dict[str, int], expected: list[int]) -> None:
    divided = divide(total, shares, most)
    assert list(divided.values()) == expected
    assert list(divided) == list(shares)


@settings(max_examples=200 * SOAK)
@given(total=st.integers(0, 40), shares=SHARES)
def test_places_are_the_shares_to_the_largest_remainder(total: int, shares: dict[str, float]) -> None:
    divided = divide(total, shares, {})
    assert sum(divided.values()) == total
    exact = {name: Fraction(str(share)) for name, share in shares.items()}
    quotas = {name: total * share / sum(exact.values()) for name, share in exact.items()}
    up = [name for name in shares if divided[name] == int(quotas[name]) + 1]
    down = [name for name in shares if divided[name] == int(quotas[name])]
    assert len(up) + len(down) == len(shares)
    order = list(shares)
    rank = {name: (int(quotas[name]) - quotas[name], order.index(name)) for name in shares}
    assert all(rank[higher] < rank[lower] for higher in up for lower in down)


@settings(max_examples=200 * SOAK)
@given(total=st.integers(0, 40), shares=SHARES, data=st.data())
def test_what_a_task_cannot_give_the_others_give(total: int, shares: dict[str, float], data: st.DataObject) -> None:
    most = data.draw(st.dictionaries(st.sampled_from(sorted(shares)), st.integers(0, 12)))
    divided = divide(total, shares, most)
    assert all(0 <= places <= most.get(name, total) for name, places in divided.items())
    assert sum(divided.values()) == (total if set(most) < set(shares) else min(total, sum(most.values())))
    # Without those that have given all, the others divide what is left as if there had been no others.
    free = {name: share for name, share in shares.items() if divided[name] < most.get(name, total + 1)}
    alone = divide(sum(divided[name] for name in free), free, {name: most[name] for name in free if name in most})
    if all(divided[name] < divide(total, shares, {})[name] for name in shares if name not in free):
        assert alone == {name: divided[name] for name in free}


@settings(max_examples=100 * SOAK)
@given(places=st.lists(st.integers(1, 7), min_size=1, max_size=5), batches=st.integers(1, 5))
def test_draws_come_in_whole_batches(places: list[int], batches: int) -> None:
    sizes = {str(n): size for n, size in enumerate(places)}
    drawn = dict.fromkeys(sizes, 0)
    for number in range(batches * sum(places)):
        name = due(sizes, sizes, drawn)
        assert name is not None
        drawn[name] += 1
        done = (number + 1) // sum(places)
        if (number + 1) % sum(places) == 0:
            assert drawn == {name: done * size for name, size in sizes.items()}
    assert due([], sizes, drawn) is None

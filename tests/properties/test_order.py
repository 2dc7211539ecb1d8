"""The order of an epoch: a permutation, pure, and without a preference for any place."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.sampler.order import in_order, shuffled

SEEDS = st.integers(-(2**63), 2**63 - 1)


def epoch(seed: int, number: int, length: int) -> list[int]:
    return [int(index) for index in shuffled(seed, number, np.arange(length), length)]


def test_every_epoch_of_every_length_is_a_permutation() -> None:
    for length in range(1, 301):
        for seed, number in ((0, 0), (7, 3)):
            assert sorted(epoch(seed, number, length)) == list(range(length)), (length, seed, number)
    assert epoch(0, 0, 0) == []


@pytest.mark.parametrize("length", [2**16, 2**16 + 1, 999_983])
def test_a_large_epoch_is_a_permutation(length: int) -> None:
    order = shuffled(5, 1, np.arange(length), length)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(length))


@given(SEEDS, st.integers(0, 2**40), st.integers(1, 10**15), st.data())
@settings(max_examples=60)
def test_any_position_is_known_by_itself(seed: int, number: int, length: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    together = shuffled(seed, number, np.array(positions), length)
    alone = [int(shuffled(seed, number, np.array([position]), length)[0]) for position in positions]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)
    assert all(0 <= index < length for index in alone)


def test_the_positions_given_are_not_changed() -> None:
    positions = np.arange(100)
    shuffled(1, 1, positions, 100)
    in_order(1, 1, positions, 100)
    assert np.array_equal(positions, np.arange(100))


def test_epochs_and_seeds_give_orders_of_their_own() -> None:
    """CASES 33: E0, E1, E2 of seed 0 differ pairwise, and are the same after any restart."""
    orders = {(seed, number): tuple(epoch(seed, number, 20)) for seed in (0, 1, -1, 2**62) for number in range(4)}
    assert len(set(orders.values())) == len(orders)
    assert all(tuple(epoch(seed, number, 20)) == order for (seed, number), order in orders.items())
    assert tuple(range(20)) not in orders.values()


def test_the_order_never_changes_between_versions() -> None:
    """A run that is resumed by another version goes on in its order; these values are part of the format."""
    assert epoch(0, 0, 10) == [1, 6, 4, 2, 8, 0, 9, 3, 7, 5]
    assert epoch(-5, 3, 7) == [5, 4, 0, 6, 1, 3, 2]
    large = shuffled(2**62, 9, np.array([0, 1, 10**12]), 10**12 + 39)
    assert large.tolist() == [254494439771, 861127435033, 711955176224]


def chi_square(observed: list[int]) -> float:
    expected = sum(observed) / len(observed)
    return sum((count - expected) ** 2 for count in observed) / expected


@pytest.mark.parametrize("length", [2, 3, 5, 8, 17, 40])
@pytest.mark.parametrize("position", ["first", "last"])
def test_no_item_is_preferred_at_the_ends_of_an_epoch(length: int, position: str) -> None:
    place = 0 if position == "first" else length - 1
    draws = 200 * length
    counts = Counter(int(shuffled(seed, 0, np.array([place]), length)[0]) for seed in range(draws))
    limit = length - 1 + 5 * (2 * (length - 1)) ** 0.5  # five standard deviations
    assert chi_square([counts[index] for index in range(length)]) < limit


@pytest.mark.parametrize(("length", "most"), [(2, 1.2), (3, 1.5), (4, 1.8), (5, 2.5)])
def test_every_order_of_a_short_epoch_comes_and_none_much_more_often_than_others(length: int, most: float) -> None:
    """Each item is as likely at each place; whole orders of a few items are not exactly so, which harms nobody."""
    orders = list(permutations(range(length)))
    counts = Counter(tuple(epoch(seed, 0, length)) for seed in range(40 * len(orders)))
    observed = [counts[order] for order in orders]
    assert min(observed) > 40 / 3
    assert max(observed) < 40 * most


@pytest.mark.parametrize("length", [8, 50])
def test_neighbours_are_not_kept_together(length: int) -> None:
    """Whether position 1 follows position 0 in the source is chance: 1 in ``length``."""
    together = sum(order[1] - order[0] == 1 for order in (epoch(seed, 0, length) for seed in range(2000)))
    expected = 2000 * (length - 1) / (length * (length - 1))
    assert abs(together - expected) < 5 * expected**0.5


def test_a_source_that_is_not_shuffled_keeps_its_order() -> None:
    assert in_order(3, 2, np.arange(5), 5).tolist() == [0, 1, 2, 3, 4]

"""Sums over values that stay elsewhere are those of values that are in memory, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.buffer.transitions import elsewhere, unread_sums
from pipeline.buffer.transitions.sums import SumTree
from pipeline.buffer.transitions.unread_sums import UnreadSums


class Array:
    """Numbers that are in memory, and what is read of them at a time."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.most = values, 0

    def __len__(self) -> int:
        return len(self.values)

    def read(self, begin: int, count: int) -> np.ndarray:
        self.most = max(self.most, count)
        assert 0 <= begin <= begin + count <= len(self.values)
        return self.values[begin : begin + count]

    def at(self, places: np.ndarray) -> np.ndarray:
        self.most = max(self.most, len(places))
        assert not len(places) or (places.min() >= 0 and places.max() < len(self.values))
        found: np.ndarray = self.values[places][:, None]
        return found


def plain(values: np.ndarray) -> np.ndarray:
    return values


def both(capacity: int, size: int, begin: int, rng: np.random.Generator) -> tuple[SumTree, UnreadSums, Array]:
    values = rng.random(size) * (rng.random(size) < 0.7)
    tree, numbers = SumTree(capacity, fast=False), Array(values)
    room = min(capacity - begin, size)
    tree.fill(begin, begin + room, 3 * values[:room])
    tree.fill(0, size - room, 3 * values[room:])
    return tree, UnreadSums(capacity, numbers, begin, of=lambda each: 3 * each, name="values"), numbers


def check(tree: SumTree, unread: SumTree, rng: np.random.Generator) -> None:
    assert (unread.total, unread.least, unread.most) == (tree.total, tree.least, tree.most)
    for level, other in zip(tree._sums[1:], unread._sums[1:], strict=True):
        assert np.array_equal(level, other)
    assert np.array_equal(tree._bounds, unread._bounds)
    places = rng.integers(0, tree.capacity, 9)
    assert np.array_equal(unread.values[places], tree.values[places])
    assert np.array_equal(unread.values[2:7], tree.values[2:7])
    if tree.total > 0:
        masses = rng.random(40) * tree.total
        assert np.array_equal(unread.find(masses), tree.find(masses))


@pytest.mark.parametrize("capacity", [1, 2, 15, 16, 17, 255, 256, 257, 1000, 5000])
def test_they_are_those_of_a_tree_and_stay_so(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((unread_sums, "_AT_ONCE"), (elsewhere, "AT_ONCE")):
        monkeypatch.setattr(module, name, 32)
    rng = np.random.default_rng(capacity)
    for size in {0, 1, capacity // 3, capacity - 1, capacity}:
        for begin in {0, capacity // 2, capacity - 1}:
            tree, unread, numbers = both(capacity, size, begin, rng)
            assert numbers.most <= 32
            check(tree, unread, rng)
            for count in (1, 1, 3, 7):
                places, values = rng.integers(0, capacity, count), rng.random(count) * rng.integers(0, 2, count)
                tree.set(places, values)
                unread.set(places, values)
                check(tree, unread, rng)
            low, high = np.sort(rng.integers(0, capacity + 1, 2)).tolist()
            tree.fill(low, high, 0.25)
            unread.fill(low, high, 0.25)
            check(tree, unread, rng)


def test_few_values_are_read_for_a_draw_and_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((unread_sums, "_AT_ONCE"), (elsewhere, "AT_ONCE")):
        monkeypatch.setattr(module, name, 1 << 10)
    _, unread, numbers = both(10_000, 9_000, 700, np.random.default_rng(0))
    assert numbers.most <= 1 << 10
    numbers.most = 0
    unread.find(np.random.default_rng(1).random(8) * unread.total)
    unread.set(np.arange(5, 9), np.ones(4))
    assert numbers.most <= 16 * 8


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_what_cannot_be_is_refused_and_named(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((unread_sums, "_AT_ONCE"), (elsewhere, "AT_ONCE")):
        monkeypatch.setattr(module, name, 4)
    values = np.ones(10)
    values[6] = wrong
    with pytest.raises(ValueError, match=r"weights\[6\]"):
        UnreadSums(16, Array(values), 0, of=plain, name="weights")
    with pytest.raises(ValueError, match="the sum of all 10 is infinite"):
        UnreadSums(16, Array(np.full(10, 4e307)), 0, of=plain, name="weights")

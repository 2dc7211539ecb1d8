"""Priorities of a replay buffer: whose they are, what they sum up to, and the weights that make up for them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Anneal, ConfigError, Prioritized, ReplayBuffer, Slices, Starved
from pipeline.buffer.transitions.sums import SumTree
from tests.support.replay import as_likely, everything, filled, ids, prioritized, probabilities, rows, total


def test_a_priority_that_comes_too_late_is_not_given_to_the_row_in_its_place() -> None:
    buffer = filled(4, 4, select=Prioritized(alpha=1.0))
    drawn = next(batch for batch in (buffer.sample(1) for _ in range(100)) if batch["id"][0] == 0)
    buffer.extend(rows(1, 4))
    updated = buffer.update_priorities(drawn.keys, [100.0])
    assert (updated.applied.tolist(), updated.stale) == ([False], 1)
    assert probabilities(buffer) == [0.25] * 4
    updated = buffer.update_priorities([0, 4, 1], [100.0, 3.0, 1.0])
    assert updated.applied.tolist() == [False, True, True]
    assert probabilities(buffer) == [1 / 6, 1 / 6, 1 / 6, 3 / 6]
    assert buffer.statistics().stale_updates == 2


@pytest.mark.parametrize("large", [1e8, 1e17])
def test_sums_are_of_the_values_and_not_of_their_changes(large: float) -> None:
    tree = SumTree(3)
    for place, value in ((0, large), (1, 1.0), (0, 0.25)):
        tree.set(np.array([place]), np.array([value]))
    assert tree.total == 1.25


@pytest.mark.parametrize(("large", "kind"), [(1e8, np.float32), (1e17, np.float64)])
def test_a_large_priority_that_goes_leaves_nothing_of_it_behind(large: float, kind: Any) -> None:
    buffer = filled(2, 2, select=Prioritized(alpha=1.0))
    for key, value in ((0, large), (1, 1.0), (0, 0.25)):
        buffer.update_priorities([key], np.array([value], kind))
        buffer.sample(1)
    assert total(buffer) == 1.25
    assert set(buffer.sample(200).keys) == {0, 1}


@pytest.mark.parametrize("capacity", [1, 31, 33, 1000, 2048])
def test_sums_do_not_drift_in_200_000_updates(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    tree = SumTree(capacity)
    for size in [1] * 200 + [1998] * 100:
        tree.set(rng.integers(0, capacity, size), 10 ** rng.uniform(-6, 6, size))
        exact = math.fsum(tree.values)
        assert abs(tree.total - exact) / exact < 1e-12
        assert tree.least == tree.values[tree.values > 0].min()
        assert tree.most == tree.values.max()


def test_a_mass_on_a_border_belongs_to_the_next_place() -> None:
    tree = SumTree(3)
    tree.fill(0, 3, np.array([4.0, 3.0, 1.0]))
    assert tree.find(np.arange(8.0)).tolist() == [0, 0, 0, 0, 1, 1, 1, 2]
    assert tree.find(np.array([8.0, 100.0])).tolist() == [2, 2]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("count", [0, 2, 4])
def test_there_are_as_many_values_as_places(count: int, fast: bool) -> None:
    tree = SumTree(9, fast=fast)
    tree.fill(0, 9, 1.0)
    with pytest.raises(ValueError, match=r"places|shape"):
        tree.set(np.arange(3), np.full(count, 2.0))
    assert (tree.values == 1).all()


@pytest.mark.parametrize("values", [[0, 1, 0, 0, 2, 0], [0] * 40 + [5e-324] + [0] * 40, [0, 1e300, 5e-324, 0]])
def test_a_place_without_a_value_is_never_found(values: list[float]) -> None:
    tree = SumTree(len(values))
    tree.fill(0, len(values), np.array(values, np.float64))
    masses = np.concatenate([np.linspace(0, 1, 50) * tree.total, [tree.total, math.inf]])
    assert all(values[place] > 0 for place in tree.find(masses))


@pytest.mark.parametrize(
    ("priorities", "capacity", "beta", "expected"),
    [
        ([1, 2, 3], 8, 1.0, [1, 0.5, 1 / 3]),
        ([1, 2, 3], 8, 0.0, [1, 1, 1]),
        ([1, 2, 3, 4], 4, 1.0, [1, 0.5, 1 / 3, 0.25]),
        ([1, 2, 3, 4], 4, 0.4, [1, 0.757858, 0.644394, 0.574349]),
        ([0, 2, 4], 3, 1.0, [None, 1, 0.5]),
    ],
)
def test_weights_make_up_for_priorities(
    priorities: list[float], capacity: int, beta: float, expected: list[float | None]
) -> None:
    buffer = prioritized(priorities, capacity, beta=beta)
    batch = buffer.sample(500)
    assert set(batch.keys) == {key for key, weight in enumerate(expected) if weight is not None}
    assert batch.weights == pytest.approx([expected[key] for key in batch.keys], abs=1e-6)
    assert batch.weights.dtype == np.float32


@pytest.mark.parametrize(("scope", "expected"), [(None, 0.25), ("buffer", 0.25), ("batch", 1.0)])
def test_the_largest_weight_is_the_buffers_or_the_batchs(scope: str | None, expected: float) -> None:
    options: dict[str, Any] = {} if scope is None else {"weights": scope}
    buffer = prioritized([1, 2, 3, 4], **options)
    alone = next(batch for batch in (buffer.sample(1) for _ in range(100)) if batch.keys[0] == 3)
    assert alone.weights.tolist() == [expected]


@pytest.mark.parametrize(
    ("new", "expected"), [("current_max", 0.2), ("all_time_max", 1 / 1.04), (1.0, 1 / 1.04), (0.04, 0.5)]
)
def test_a_new_row_has_the_largest_priority_that_is_there_or_that_there_was(new: Any, expected: float) -> None:
    buffer = filled(4, select={"select": "prioritized", "alpha": 1.0, "new": new})
    buffer.update_priorities(np.arange(4), np.full(4, 0.01))
    buffer.append({"id": 4, "reward": 1.0, "truncated": False})
    assert probabilities(buffer)[-1] == pytest.approx(expected)


def test_the_largest_priority_is_no_whole_number_and_falls_with_the_rows() -> None:
    buffer = prioritized([0.7, 0.1], 8)
    buffer.extend(rows(1, 2))
    assert probabilities(buffer) == pytest.approx([0.7 / 1.5, 0.1 / 1.5, 0.7 / 1.5])
    buffer.update_priorities([0, 2], [0.2, 0.2])
    buffer.extend(rows(1, 3))
    assert probabilities(buffer)[-1] == pytest.approx(0.2 / 0.7)


def test_priorities_stay_with_their_rows_when_the_oldest_goes() -> None:
    buffer = prioritized([1, 2, 3])
    buffer.extend(rows(1, 3))
    buffer.update_priorities([3], [4.0])
    assert ids(buffer) == [1, 2, 3]
    assert probabilities(buffer) == pytest.approx([2 / 9, 3 / 9, 4 / 9])


def test_a_slice_has_the_weight_of_its_start() -> None:
    buffer = prioritized([1, 2, 4, 8, 8])
    batch = buffer.sample(2, slices=Slices(length=3))
    assert batch.weights.shape == (2,)
    assert batch.weights.tolist() == [1 / [1, 2, 4][key] for key in batch.keys]


def test_the_exponent_of_the_weights_goes_up_batch_by_batch() -> None:
    buffer = prioritized([1, 4], beta=Anneal(start=0.0, end=1.0, over=2))
    seen = []
    for _ in range(4):
        batch = buffer.sample(64)
        seen.append(float(batch.weights[batch.keys == 1][0]))
    assert seen == [1, 0.5, 0.25, 0.25]


def test_rows_are_drawn_in_proportion_to_their_priorities() -> None:
    given = np.arange(100) % 7
    buffer = prioritized(given, alpha=0.6)
    assert as_likely(buffer.sample(100_000).keys, given**0.6)
    starts = np.where(np.arange(100) > 96, 0, given**0.6)
    assert as_likely(buffer.sample(100_000, slices=Slices(length=4)).keys, starts[:97])


def test_few_valid_starts_among_many_rows_are_drawn_by_their_priorities() -> None:
    buffer = prioritized(np.arange(1, 501))
    buffer.clear()
    keys = buffer.extend(rows(500, ends=range(3, 500)))
    buffer.update_priorities(keys, np.arange(1, 501))
    drawn = buffer.sample(20_000, slices=Slices(length=3)).keys - keys[0]
    assert as_likely(drawn, [1, 2])


@pytest.mark.parametrize("how", [np.zeros(3), [0, 0, 0], torch.zeros(3)])
def test_with_every_priority_zero_nothing_can_be_drawn_until_one_is_set(how: Any) -> None:
    buffer = prioritized([1, 2, 3])
    buffer.update_priorities([0, 1, 2], how)
    before = everything(buffer)
    with pytest.raises(Starved, match="every priority is 0"):
        buffer.sample(2)
    assert everything(buffer) == before | {"random": buffer._rng.bit_generator.state}
    buffer.update_priorities([1], [1e-300])
    assert set(buffer.sample(10).keys) == {1}


@pytest.mark.parametrize("capacity", [100, 10_000])
def test_priorities_of_a_state_are_as_many_as_rows(capacity: int) -> None:
    how: dict[str, Any] = {"select": Prioritized(), "remove": "stalest"}
    state = filled(60, capacity, **how).state_dict()
    name = "selector.priorities.float64"
    state = state | {"values": state["values"] | {name: state["values"][name][:-2]}}
    with pytest.raises(ConfigError, match="no state of a replay buffer"):
        filled(0, capacity, **how).load_state_dict(state)


def test_alpha_zero_is_uniform_but_for_what_is_zero() -> None:
    buffer = prioritized([0, 1, 1000], alpha=0.0)
    assert probabilities(buffer) == [0, 0.5, 0.5]
    buffer = filled(2, select=Prioritized(alpha=0.0, new=0.0))
    assert buffer._drawer.mass(buffer.ring.keys()).tolist() == [0, 0]


def test_eps_keeps_a_row_of_priority_zero() -> None:
    assert probabilities(prioritized([0, 1], eps=0.5)) == [0.25, 0.75]


@pytest.mark.parametrize("new", [1, 3])
def test_options_may_be_whole_numbers(new: int) -> None:
    buffer = filled(2, select=Prioritized(alpha=1, eps=0, new=new))
    assert buffer._drawer.mass(buffer.ring.keys()).tolist() == [new, new]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_the_least_priority_is_drawn_and_the_largest_is_no_infinity(alpha: float) -> None:
    least, most = 5e-324, 1e150
    buffer = prioritized([least, least], alpha=alpha)
    assert set(buffer.sample(64).keys) == {0, 1}
    buffer.update_priorities([1], [most])
    batch = buffer.sample(64)
    assert math.isfinite(total(buffer))
    assert np.isfinite(batch.weights).all()
    assert ((batch.weights >= 0) & (batch.weights <= 1)).all()


def test_1e300_is_a_priority_where_its_power_can_be_summed() -> None:
    assert probabilities(prioritized([1e300, 1e300, 1.0])) == [0.5, 0.5, 5e-301]
    buffer = prioritized([1.0, 1.0], alpha=2.0)
    before = everything(buffer)
    with pytest.raises(ConfigError, match=r"priorities=1e\+300: to the power of alpha=2"):
        buffer.update_priorities([0, 1], [2.0, 1e300])
    assert everything(buffer) == before
    with pytest.raises(ConfigError, match=r"^new="):
        ReplayBuffer(4, select=Prioritized(alpha=1e6, new=1e12))


def test_priorities_may_be_what_a_loss_gives() -> None:
    buffer = prioritized([1, 1, 1, 1])
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True) * 1
    for given in (losses, losses.bfloat16(), losses.detach()[:, None], losses.detach().numpy(), losses.tolist()):
        buffer.update_priorities(buffer.ring.keys(), given)
        assert probabilities(buffer) == [0.1, 0.2, 0.3, 0.4]
    assert buffer.update_priorities(torch.tensor([0, 1]), torch.tensor([1.0, 2.0])).stale == 0
    assert buffer.update_priorities([], []).applied.tolist() == []


def test_of_a_key_that_is_named_twice_the_last_priority_counts() -> None:
    buffer = prioritized([1, 1])
    buffer.update_priorities([0, 1, 0], [5.0, 1.0, 3.0])
    assert probabilities(buffer) == [0.75, 0.25]


def test_the_largest_priority_that_there_ever_was_may_be_one_that_was_set() -> None:
    buffer = filled(4, 4, select=Prioritized(alpha=1.0, new="all_time_max"))
    buffer.update_priorities([0, 1], [7.0, 2.0])
    buffer.update_priorities([0], [0.5])
    buffer.extend(rows(1, 4))
    assert probabilities(buffer) == [2 / 11, 1 / 11, 1 / 11, 7 / 11]

"""Which rows a replay buffer draws: how often each, in which order, and from whose random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ConfigError, Ordered, ReplayBuffer, Slices, Starved, Uniform, WithoutReplacement
from tests.support.replay import as_likely, everything, filled, rows


def test_every_row_is_as_likely_also_after_the_ring_wrapped() -> None:
    buffer = filled(130, 100)
    assert as_likely(buffer.sample(100_000).keys - 30, np.ones(100))
    starts = np.ones(100)
    starts[-3:] = 0
    assert as_likely(buffer.sample(100_000, slices=Slices(length=4)).keys - 30, starts[:97])


def test_only_the_newest_rows_of_a_window_are_drawn_each_alike() -> None:
    buffer = filled(130, 100, select=Uniform(window=20))
    assert as_likely(buffer.sample(50_000).keys - 110, np.ones(20))
    assert as_likely(buffer.sample(50_000, slices=Slices(length=5)).keys - 110, np.ones(16))
    assert as_likely(filled(5, select=Uniform(window=20)).sample(10_000).keys, np.ones(5))


def test_every_order_of_an_epoch_is_as_likely() -> None:
    firsts, pairs = [], []
    for seed in range(2000):
        keys = filled(4, select="without_replacement", seed=seed).sample(4).keys
        assert sorted(keys) == [0, 1, 2, 3]
        firsts.append(keys[0])
        pairs.append(keys[0] * 4 + keys[3])
    assert as_likely(np.array(firsts), np.ones(4))
    assert as_likely(np.array(pairs), (1 - np.eye(4)).reshape(-1)[:15])


def test_epochs_have_orders_of_their_own_that_the_seed_decides() -> None:
    epochs = [[filled(20, 20, select="without_replacement", seed=seed).sample(20).keys.tolist()] for seed in (1, 1, 2)]
    assert epochs[0] == epochs[1] != epochs[2]
    buffer = filled(20, 20, select="without_replacement", seed=1)
    orders = [tuple(buffer.sample(20).keys) for _ in range(3)]
    assert len(set(orders)) == 3
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_batches_of_an_epoch_share_no_row() -> None:
    buffer = filled(12, 12, select="without_replacement")
    batches = [buffer.sample(3).keys for _ in range(8)]
    assert sorted(np.concatenate(batches[:4])) == sorted(np.concatenate(batches[4:])) == list(range(12))


@pytest.mark.parametrize(("last", "sizes"), [("keep", [3, 3, 3, 1, 3]), ("carry", [3] * 5), ("drop", [3] * 5)])
def test_what_is_left_at_the_end_of_an_epoch_is_kept_carried_or_dropped(last: Any, sizes: list[int]) -> None:
    buffer = filled(10, select=WithoutReplacement(last=last))
    batches = [buffer.sample(3).keys.tolist() for _ in range(5)]
    assert [len(batch) for batch in batches] == sizes
    first = [key for batch in batches[:4] for key in batch]
    assert len(set(first[:9])) == 9
    if last == "keep":
        assert sorted(first) == list(range(10))
    if last == "carry":
        assert sorted(first[:10]) == list(range(10))
    if last == "drop":
        assert set(first[9:]) & set(first[:9])


@pytest.mark.parametrize("last", ["carry", "drop"])
def test_more_than_there_are_cannot_be_had_without_replacement(last: Any) -> None:
    buffer = filled(10, 100, ends=[4], select=WithoutReplacement(last=last))
    with pytest.raises(ConfigError, match="count=101"):
        buffer.sample(101)
    before = everything(buffer)
    with pytest.raises(Starved, match="64 were asked for without replacement, and of the 10 rows"):
        buffer.sample(64)
    with pytest.raises(Starved, match="9 were asked for without replacement"):
        buffer.sample(9, slices=Slices(length=2))
    assert everything(buffer) == before
    assert len(buffer.sample(10)) == 10


def test_a_short_batch_is_had_where_it_is_asked_for() -> None:
    buffer = filled(10, 100, select=WithoutReplacement(last="keep"))
    assert sorted(buffer.sample(64).keys) == list(range(10))
    assert buffer.statistics().sampled == 10


def test_a_row_that_is_overwritten_in_an_epoch_is_left_out_and_counted() -> None:
    buffer = filled(10, select="without_replacement")
    first = buffer.sample(5).keys
    buffer.extend(rows(2, 10))
    second = buffer.sample(5 - sum(key < 2 and key not in first for key in range(2))).keys
    assert set(first) | set(second) | {0, 1} == set(range(10))
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("fifo", [0, 1, 2]),
        ("lifo", [7, 6, 5]),
        ("stalest", [6, 7, 0]),
        ("freshest", [3, 4, 5]),
    ],
)
def test_an_order_gives_its_first_rows_again_and_again(by: Any, expected: list[int]) -> None:
    buffer = ReplayBuffer(8, select=by, returns="numpy")
    for first, count, version in ((0, 3, 2), (3, 3, 5), (6, 2, 1)):
        buffer.extend(rows(count, first), version=version)
    for _ in range(2):
        assert buffer.sample(3).keys.tolist() == expected


@pytest.mark.parametrize(
    "values",
    [
        np.array([3, 1, 2, 1], np.uint8),
        np.array([2**62 + 2, 2**62, 2**62 + 1, 2**62]),
        np.array([0.3, -0.5, 0.0, -0.5], np.float16),
        np.array([2**63 + 2, 0, 1, 0], np.uint64),
        np.array([-1, -(2**63), -2, -(2**63)]),
    ],
)
def test_the_least_and_the_largest_of_a_column_are_exact(values: np.ndarray) -> None:
    for by, expected in (("min", [1, 3, 2, 0]), ("max", [0, 2, 1, 3])):
        buffer = ReplayBuffer(4, select=Ordered(by=by, field="x"), returns="numpy")  # type: ignore[arg-type]
        buffer.extend({"x": values})
        assert buffer.sample(4).keys.tolist() == expected


@pytest.mark.parametrize(
    ("field", "said"), [("other", "there is none"), ("wide", "one real number"), ("half", "one real number")]
)
def test_an_order_by_what_is_no_column_of_numbers_is_refused(field: str, said: str) -> None:
    buffer = ReplayBuffer(4, select=Ordered(by="max", field=field))
    buffer.extend({"wide": np.zeros((2, 2)), "half": torch.zeros(2, dtype=torch.bfloat16)})
    with pytest.raises(ConfigError, match=said):
        buffer.sample(1)


def test_keys_of_a_batch_are_the_callers() -> None:
    buffer = filled(6, select="lifo")
    for slices in (None, Slices(length=2)):
        batch = buffer.sample(3, slices=slices)
        expected = batch.keys.tolist()
        batch.keys[:] = -1
        assert buffer.sample(3, slices=slices).keys.tolist() == expected


def test_no_other_generator_changes_the_draws_and_they_change_none() -> None:
    alone = {seed: [filled(9, seed=seed).sample(4).keys.tolist()] for seed in (1, 2)}
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    mixed = {seed: filled(9, seed=seed) for seed in (1, 2)}
    assert {seed: [buffer.sample(4).keys.tolist()] for seed, buffer in mixed.items()} == alone
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    in_turns = {seed: filled(9, seed=seed) for seed in (1, 2)}
    orders: dict[int, list[Any]] = {1: [], 2: []}
    for _ in range(20):
        for seed, buffer in in_turns.items():
            orders[seed].append(buffer.sample(4).keys.tolist())
    for seed, order in orders.items():
        buffer = filled(9, seed=seed)
        assert [buffer.sample(4).keys.tolist() for _ in range(20)] == order
    assert orders[1] != orders[2]
    one, other = filled(9, seed=1), filled(9, seed=1)
    taken = [one.sample(3).keys.tolist() for _ in range(4)]
    np.random.default_rng(1).random(5)
    assert [other.sample(3).keys.tolist() for _ in range(4)] == taken


@pytest.mark.parametrize("count", [0, -1, 2.5, "3", None, True, 2**31])
def test_a_batch_has_a_whole_number_of_rows(count: Any) -> None:
    with pytest.raises(ConfigError, match="count="):
        filled(5).sample(count)


def test_numbers_of_numpy_are_numbers() -> None:
    batch = filled(5).sample(np.int64(3), n_step=np.int32(2), gamma=np.float32(0.5), stack=np.uint8(1))  # type: ignore[arg-type]
    assert len(batch) == 3

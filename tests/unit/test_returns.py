"""N-step returns: sums, bootstraps and discounts at every kind of end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from tasks import n_step


def at_end(kind: str, length: int) -> dict[str, list[bool]]:
    """Flags of one episode whose last row is ``kind``."""
    return {name: [False] * (length - 1) + [name == kind] if length else [] for name in ("terminated", "truncated")}


def plain(rewards: Any, terminated: Any, truncated: Any, gamma: float, n: int) -> tuple[list[Any], ...]:
    """The definition, row by row."""
    returns, bootstrap, discount = [], [], []
    for k in range(len(rewards)):
        total, j = 0.0, k
        for i in range(n):
            total, j = total + gamma**i * rewards[k + i], k + i
            if terminated[j] or truncated[j] or j + 1 == len(rewards):
                break
        returns.append(total)
        bootstrap.append(j)
        discount.append(0.0 if terminated[j] else gamma ** (j - k + 1))
    return returns, bootstrap, discount


def test_a_cut_sum_is_discounted_by_the_steps_really_summed() -> None:  # CASES 63
    got = n_step([1, 2, 4, 8], **at_end("truncated", 4), gamma=0.5, n=3)
    next_obs = np.array([1, 2, 3, 4])
    assert got.returns.tolist() == [3, 6, 8, 8]
    assert next_obs[got.bootstrap_index].tolist() == [3, 4, 4, 4]
    assert got.discount.tolist() == [0.125, 0.125, 0.25, 0.5]


def test_a_terminated_row_is_never_bootstrapped() -> None:  # CASES 63
    got = n_step([1, 2, 4, 8], **at_end("terminated", 4), gamma=0.5, n=3)
    assert got.returns.tolist() == [3, 6, 8, 8]
    assert got.discount.tolist() == [0.125, 0, 0, 0]


def test_rows_at_an_open_end_are_cut_like_truncated_ones() -> None:
    cut = n_step([1, 2, 4, 8], **at_end("truncated", 4), gamma=0.5, n=3)
    running = n_step([1, 2, 4, 8], **at_end("", 4), gamma=0.5, n=3)
    for left, right in zip(cut, running, strict=True):
        assert left.tolist() == right.tolist()


@pytest.mark.parametrize("kind", ["truncated", "terminated"])
def test_index_k_starts_at_the_same_state_and_no_sum_crosses_an_end(kind: str) -> None:  # CASES 67
    flags = {name: [name == kind, False, False, False] for name in ("terminated", "truncated")}
    got = n_step([5, 1, 1, 1], **flags, gamma=0.5, n=3)
    assert got.returns.tolist() == [5, 1.75, 1.5, 1]
    assert got.bootstrap_index.tolist() == [0, 3, 3, 3]
    assert got.discount.tolist() == [0.5 if kind == "truncated" else 0, 0.125, 0.25, 0.5]
    single = n_step([5, 1, 1, 1], **flags, gamma=0.5, n=1)
    assert len(single.returns) == len(got.returns)
    assert single.returns.tolist() == [5, 1, 1, 1]
    assert single.bootstrap_index.tolist() == [0, 1, 2, 3]


def test_a_row_both_terminated_and_truncated_counts_as_terminated() -> None:
    assert n_step([1.0], [True], [True], 0.9, 5).discount.tolist() == [0]


def test_an_episode_of_one_observation_has_no_rows() -> None:  # CASES 69
    got = n_step([], [], [], 0.9, 3)
    assert [len(column) for column in got] == [0, 0, 0]


def test_sums_are_in_double_precision_whatever_comes_in() -> None:
    rewards = np.array([1.0, 1e-9], dtype=np.float32)
    got = n_step(rewards, [False, True], [False, False], 1.0, 2)
    assert got.returns.dtype == np.float64
    assert got.returns[0] == 1.0 + float(rewards[1]) != 1.0
    assert n_step(np.array([200, 100], dtype=np.uint8), [0, 1], [0, 0], 1.0, 2).returns.tolist() == [300, 100]


@given(
    rows=st.lists(st.tuples(st.floats(-9, 9), st.booleans(), st.booleans()), max_size=12),
    gamma=st.floats(0, 1),
    n=st.integers(1, 15),
)
def test_it_equals_the_definition_row_by_row(rows: list[Any], gamma: float, n: int) -> None:
    rewards, terminated, truncated = ([row[i] for row in rows] for i in range(3))
    got = n_step(rewards, terminated, truncated, gamma, n)
    want = plain(rewards, terminated, truncated, gamma, n)
    np.testing.assert_allclose(got.returns, want[0], rtol=1e-12, atol=1e-12)
    assert got.bootstrap_index.tolist() == want[1]
    np.testing.assert_allclose(got.discount, want[2], rtol=1e-12, atol=0)


def test_a_large_n_costs_no_more_than_the_episode() -> None:
    assert n_step([1, 1], **at_end("terminated", 2), gamma=1.0, n=10**12).returns.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"gamma": 1.5}, "gamma"),
        ({"gamma": float("nan")}, "gamma"),
        ({"n": 0}, "n"),
        ({"n": 2.0}, "n"),
        ({"n": True}, "n"),
        ({"terminated": [False]}, "rewards"),
        ({"truncated": [[False, True]]}, "rewards"),
        ({"rewards": 1.0}, "rewards"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(change: dict[str, Any], option: str) -> None:
    arguments: dict[str, Any] = {"rewards": [1, 1], **at_end("terminated", 2), "gamma": 0.9, "n": 2}
    with pytest.raises(ConfigError) as caught:
        n_step(**{**arguments, **change})
    assert caught.value.option == option

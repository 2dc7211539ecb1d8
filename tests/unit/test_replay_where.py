"""Rows are drawn out of those that meet a condition, in the same proportions as otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import ConfigError, Ordered, ReplayBuffer, ReplayDataset, Slices, Starved, Uniform, WithoutReplacement
from tests.support.replay import as_likely, everything, filled, prioritized, rows
from tests.support.replaying import fill


def varied(count: int = 40, **options: Any) -> ReplayBuffer:
    """Rows with a task from 0 to 3, a version from 0 on, and an observation of two numbers."""
    buffer = ReplayBuffer(count, returns="numpy", **options)
    for first in range(0, count, 10):
        number = np.arange(first, first + 10)
        more = {"task": number % 4, "obs": {"x": np.stack([number, -number], 1)}, "big": number + 2**62}
        buffer.extend(rows(10, first, ends=[8, 19, 27]) | more, version=first // 10)
    return buffer


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"task": 3}, lambda n: n % 4 == 3),
        ({"task": ("==", 3)}, lambda n: n % 4 == 3),
        ({"task": ("!=", 3), "id": ("<=", 20)}, lambda n: (n % 4 != 3) & (n <= 20)),
        ({"id": [(">", 4), ("<", 12.5)]}, lambda n: (n > 4) & (n < 12.5)),
        ({"id": [">=", np.int64(35)]}, lambda n: n >= 35),
        ({"task": ("in", [1, 2])}, lambda n: (n % 4 == 1) | (n % 4 == 2)),
        ({"big": ("in", np.array([2**62 + 1, 2**62 + 7]))}, lambda n: (n == 1) | (n == 7)),
        ({"big": ("not in", [2**62 + 1, 2**62 + 7])}, lambda n: (n != 1) & (n != 7)),
        ({"big": 2**62 + 3}, lambda n: n == 3),
        ({"truncated": True}, lambda n: np.isin(n, [8, 19, 27])),
        ({"#version": ("<", 2)}, lambda n: n < 20),
        ({"#place": 0}, lambda n: np.isin(n, [0, 9, 20, 28])),
        ({"#episode": 1}, lambda n: (n >= 9) & (n < 20)),
        ((lambda task, number: (task == 1) & (number > 20), ("task", "id")), lambda n: (n % 4 == 1) & (n > 20)),
        ((lambda x: x[:, 1] < -30, ["obs.x"]), lambda n: n > 30),
        (lambda big: torch.from_numpy(big) > 2**62 + 30, lambda n: n > 30),
        ({}, lambda n: n >= 0),
    ],
)
@pytest.mark.parametrize("select", ["uniform", "prioritized"])
def test_what_meets_a_condition_is_drawn_in_proportion(where: Any, expected: Any, select: str) -> None:
    buffer = varied(select={"select": select, "alpha": 1.0} if select == "prioritized" else select)
    shares = expected(np.arange(40)).astype(float)
    if select == "prioritized":
        priorities = 1 + np.arange(40) % 7
        buffer.update_priorities(np.arange(40), priorities)
        shares *= priorities
    assert as_likely(buffer.sample(20_000, where=where).keys, shares)


@pytest.mark.parametrize("select", ["uniform", "prioritized", "without_replacement", "fifo", "stalest"])
def test_nothing_that_meets_it_is_nothing_to_draw(select: str) -> None:
    buffer = varied(select=select)
    with pytest.raises(Starved):
        buffer.sample(3, where={"task": 9})
    assert len(buffer.sample(3, where={"task": 2})) == 3


def test_a_row_of_priority_0_is_not_drawn_though_it_meets_it() -> None:
    buffer = prioritized([0, 1, 2, 3])
    assert as_likely(buffer.sample(10_000, where={"id": ("<", 3)}).keys, [0, 1, 2, 0])
    with pytest.raises(Starved, match="meets the condition"):
        buffer.sample(1, where={"id": 0})
    batch = buffer.sample(100, where={"id": ("<", 3)})
    assert set(batch.weights.tolist()) <= {float(np.float32((1 / p) ** 0.4)) for p in (1, 2)} | {1.0, 0.5}


def test_it_goes_together_with_sequences() -> None:
    buffer = varied()
    starts = np.array([n % 4 == 1 and n not in (25, 37) for n in range(40)], float)
    starts[[17]] = 0  # 17 18 19 end with the episode, 26 is too near its end
    where = {"task": 1}
    batch = buffer.sample(20_000, slices=Slices(length=4), where=where)
    assert as_likely(batch.keys, starts)
    assert (batch["task"] == [1, 2, 3, 0]).all()
    stacked = buffer.sample(200, stack=2, n_step=3, gamma=0.9, where=where)
    assert set(stacked.keys.tolist()) == set(range(1, 40, 4))
    assert stacked["obs"]["x"].shape == (200, 2, 2)
    assert stacked.steps.max() == 3


def test_it_goes_together_with_every_selection() -> None:
    where = {"task": ("in", [1, 2])}
    inside = [n for n in range(40) if n % 4 in (1, 2)]
    assert varied(select=Ordered(by="lifo")).sample(5, where=where).keys.tolist() == inside[::-1][:5]
    assert sorted(varied(select=WithoutReplacement()).sample(20, where=where).keys) == inside
    assert sorted(varied(select=Uniform(uses=1)).sample(20, where=where).keys) == inside
    assert set(varied(select=Uniform(window=12)).sample(100, where=where).keys) == set(inside[-6:])
    newest = varied(select=Uniform(window_trajectories=1)).sample(100, where=where).keys
    assert set(newest) == {n for n in inside if n >= 28}


def test_next_observations_that_are_shared_can_be_compared() -> None:
    buffer = ReplayBuffer(30, share_next_obs=True, returns="numpy")
    fill(buffer, 0, 30)
    batch = buffer.sample(200, where={"next_obs.n": [(">=", 7), ("<", 15)]})
    assert set(batch.keys.tolist()) == set(range(6, 14))


def test_a_change_of_a_column_counts_at_once() -> None:
    buffer = varied()
    assert set(buffer.sample(50, where={"task": 1}, slices=Slices(length=1)).keys.tolist()) <= set(range(1, 40, 4))
    buffer.write_back([0], {"task": [7]})
    assert set(buffer.sample(50, where={"task": 7}, slices=Slices(length=1)).keys.tolist()) == {0}


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("task == 3", "a mapping such as"),
        (3, "a mapping such as"),
        ({"other": 3}, "there is none"),
        ({"obs.x": 3}, "one real number"),
        ({"task": "3"}, "a number is needed"),
        ({"task": None}, "a number is needed"),
        ({"task": ("~", 3)}, "one of =="),
        ({"task": ("in", 3)}, "several numbers"),
        ({"task": ("in", "12")}, "several numbers"),
        ({"task": (1, 2)}, "one of =="),
        ({3: 3}, "the name of a column"),
        (lambda: True, "do not name columns"),
        (lambda task: task, "bool is needed"),
        (lambda task: True, "bool is needed"),
        (lambda other: other, "there is none"),
        ((lambda x: x, "task"), "a mapping such as"),
        ((lambda x: x, []), "a mapping such as"),
    ],
)
def test_what_is_no_condition_is_refused_before_anything_is_drawn(where: Any, said: str) -> None:
    buffer = varied()
    before = everything(buffer)
    with pytest.raises(ConfigError, match=said):
        buffer.sample(2, where=where)
    assert everything(buffer) == before


def test_what_numpy_cannot_compare_is_refused() -> None:
    buffer = ReplayBuffer(4)
    buffer.extend({"half": torch.zeros(4, dtype=torch.bfloat16), "c": np.zeros(4, complex).astype(np.complex64)})
    for name in ("half", "c"):
        with pytest.raises(ConfigError, match="is needed"):
            buffer.sample(1, where={name: 0})


def test_a_function_cannot_change_rows() -> None:
    buffer = filled(5)

    def spoils(reward: np.ndarray) -> Any:
        reward[:] = 9
        return reward > 0

    assert (buffer.sample(5, where=spoils)["reward"] == 1).all()


@settings(max_examples=100)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    st.lists(st.tuples(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), st.integers(-3, 3)), max_size=3),
    st.integers(1, 8),
)
def test_it_is_what_a_list_would_be_filtered_by(values: list[int], tests: list[Any], capacity: int) -> None:
    buffer = ReplayBuffer(capacity, select="fifo", returns="numpy")
    buffer.extend({"x": np.array(values)})
    met = [v for v in values[-capacity:] if all(eval(f"{v} {how} {than}") for how, than in tests)]
    if met:
        assert buffer.sample(len(met), where={"x": tests})["x"].tolist() == met
    with pytest.raises(Starved):
        buffer.sample(len(met) + 1, where={"x": tests})


def test_the_draws_go_on_after_a_resume(tmp_path: Path) -> None:
    def draws(buffer: ReplayBuffer) -> list[Any]:
        return [buffer.sample(4, where={"task": ("<", 2)}, n_step=2, gamma=0.9).keys.tolist() for _ in range(9)]

    with varied(directory=tmp_path, seed=3) as buffer:
        draws(buffer)
        buffer.save(1, wait=True)
        expected = draws(buffer)
    with ReplayBuffer(40, directory=tmp_path, seed=3, returns="numpy") as again:
        again.resume(continue_episodes=True)
        assert draws(again) == expected


async def test_a_dataset_and_tasks_take_it() -> None:
    buffer = varied()
    batch = next(iter(ReplayDataset(buffer, 50, where={"task": 2})))
    assert (batch["task"] == 2).all()
    assert ((await buffer.aio.sample(50, where={"task": 3}))["task"] == 3).all()

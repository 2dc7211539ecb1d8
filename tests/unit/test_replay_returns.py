"""n-step returns, discounts and frames out of a replay buffer, at the ends of episodes and of the buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ConfigError, ReplayBuffer, Slices


def episodes(rewards: list[float], terminated: list[int], truncated: list[int], **options: Any) -> ReplayBuffer:
    """Rows whose observations are their numbers, which end where it is said."""
    buffer = ReplayBuffer(16, select="fifo", returns="numpy", **options)
    numbers = np.arange(len(rewards))
    buffer.extend(
        {
            "obs": numbers.astype(np.float32),
            "next_obs": (numbers + 1).astype(np.float32),
            "reward": np.array(rewards, np.float32),
            "terminated": np.isin(numbers, terminated),
            "truncated": np.isin(numbers, truncated),
        }
    )
    return buffer


@pytest.mark.parametrize(
    ("terminated", "truncated", "last"),
    [
        ([], [3], [0.125, 0.125, 0.25, 0.5]),
        ([], [], [0.125, 0.125, 0.25, 0.5]),
        ([3], [], [0.125, 0, 0, 0]),
        ([3], [3], [0.125, 0, 0, 0]),
    ],
    ids=["truncated", "open", "terminated", "both"],
)
def test_a_return_that_is_cut_is_discounted_by_the_rewards_in_it(
    terminated: list[int], truncated: list[int], last: list[float]
) -> None:
    batch = episodes([1, 2, 4, 8], terminated, truncated).sample(4, n_step=3, gamma=0.5)
    assert batch["reward"].tolist() == [3, 6, 8, 8]
    assert batch["next_obs"].tolist() == [3, 4, 4, 4]
    assert batch.discount.tolist() == last
    assert batch.steps.tolist() == [3, 3, 2, 1]
    assert batch["terminated"].tolist() == [value == 0 for value in last]
    assert batch["truncated"].tolist() == [False, *[bool(truncated)] * 3]


def test_returns_do_not_go_on_in_the_next_episode_and_row_k_is_row_k_in_both_views() -> None:
    buffer = episodes([5, 1, 1, 1], [], [0, 3])
    assert buffer.sample(4, n_step=3, gamma=0.5)["reward"].tolist() == [5, 1.75, 1.5, 1]
    one, three = buffer.sample(4), buffer.sample(4, n_step=3, gamma=0.5)
    assert one.keys.tolist() == three.keys.tolist()
    assert one["obs"].tolist() == three["obs"].tolist()


@pytest.mark.parametrize(("gamma", "rewards", "discounts"), [(0.0, [1, 2, 4], [0, 0, 0]), (1.0, [7, 6, 4], [1, 1, 1])])
def test_gamma_may_be_0_and_1(gamma: float, rewards: list[float], discounts: list[float]) -> None:
    batch = episodes([1, 2, 4], [], []).sample(3, n_step=5, gamma=gamma)
    assert batch["reward"].tolist() == rewards
    assert batch.discount.tolist() == discounts


def test_terminated_and_truncated_are_kept_apart() -> None:
    batch = episodes([1] * 4, [1, 3], [2, 3]).sample(4, n_step=1, gamma=0.9)
    assert batch["terminated"].tolist() == [False, True, False, True]
    assert batch["truncated"].tolist() == [False, False, True, True]
    assert batch.discount.tolist() == pytest.approx([0.9, 0, 0.9, 0])


@pytest.mark.parametrize(("truncated", "discount"), [(False, 0.0), (True, 0.5)])
def test_done_alone_is_terminated_unless_it_was_truncated(truncated: bool, discount: float) -> None:
    for one_by_one in (False, True):
        buffer = ReplayBuffer(4, select="fifo")
        if one_by_one:
            buffer.append({"reward": 1.0, "done": True, "truncated": truncated})
        else:
            buffer.extend({"reward": [1.0], "done": [True], "truncated": [truncated]})
        assert buffer.sample(1, gamma=0.5).discount.tolist() == [discount]


def test_ends_do_not_make_a_terminated_row_bootstrap() -> None:
    buffer = ReplayBuffer(4, select="fifo")
    columns = {"reward": np.ones(3), "terminated": np.array([False, True, False])}
    with pytest.raises(ConfigError, match="terminated with row 1"):
        buffer.extend(columns, ends=np.array([True, False, False]))
    buffer.extend(columns, ends=np.array([True, True, False]))
    assert buffer.sample(3, n_step=2, gamma=0.5).discount.tolist() == [0.5, 0, 0.5]


def test_an_episode_that_was_left_bootstraps() -> None:
    buffer = episodes([1, 1], [], [])
    buffer.end_episode()
    buffer.extend({"obs": [9], "next_obs": [9], "reward": [9], "terminated": [False], "truncated": [False]})
    batch = buffer.sample(3, n_step=3, gamma=0.5)
    assert batch["reward"].tolist() == [1.5, 1, 9]
    assert batch.discount.tolist() == [0.25, 0.5, 0.5]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("given", "returned"),
    [("float16", "float16"), ("float32", "float32"), ("float64", "float64"), ("int8", "float64"), ("bool", "float64")],
)
def test_the_dtype_of_returns_does_not_depend_on_n(n: int, given: str, returned: str) -> None:
    buffer = ReplayBuffer(4, select="fifo", returns="numpy")
    buffer.extend({"reward": np.ones(4, given)})
    assert buffer.sample(4, n_step=n, gamma=0.5)["reward"].dtype == returned


@pytest.mark.parametrize(
    "reward", [torch.ones(2, dtype=torch.bfloat16), np.ones(2, np.complex64), np.ones((2, 1)), None]
)
def test_what_cannot_be_summed_is_refused(reward: Any) -> None:
    buffer = ReplayBuffer(4)
    buffer.extend({"x": np.ones(2)} | ({} if reward is None else {"reward": reward}))
    with pytest.raises(ConfigError, match="reward"):
        buffer.sample(1, n_step=2, gamma=0.5)


def test_a_reward_with_an_axis_of_one_is_told_how_to_be_added() -> None:
    buffer = ReplayBuffer(4)
    buffer.extend({"reward": np.ones((2, 1), np.float32)})
    with pytest.raises(ConfigError, match=r"^column reward: float32\[1\]: .*; add it as \[n\], not \[n, 1\]"):
        buffer.sample(1, n_step=2, gamma=0.5)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"ends": np.zeros(3)}, r"ends=float64\[3\]: \[3\] bool is needed"),
        ({"ends": np.zeros((3, 1), bool)}, r"ends=bool\[3, 1\]: \[3\] bool is needed"),
        ({"env": np.zeros(2, int)}, r"env=int64\[2\]: .* or \[3\] of them"),
        ({"env": np.full(3, -1)}, r"env=int64\[3\]: whole numbers"),
    ],
)
def test_arrays_are_told_by_dtype_and_shape(more: dict[str, Any], match: str) -> None:
    buffer = ReplayBuffer(4)
    with pytest.raises(ConfigError, match=match):
        buffer.extend({"reward": np.ones(3)}, **more)
    assert not len(buffer)


def test_frames_begin_with_the_first_observation_and_end_with_the_newest() -> None:
    buffer = episodes([1] * 5, [], [2])
    batch = buffer.sample(5, stack=3)
    assert batch["obs"].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [3, 3, 3], [3, 3, 4]]
    assert batch["next_obs"].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [3, 3, 4], [3, 4, 5]]


def test_next_frames_of_a_row_are_the_frames_of_the_row_after_it() -> None:
    buffer = ReplayBuffer(32, select="fifo", returns="numpy")
    obs = np.random.default_rng(0).integers(0, 255, (21, 2, 8, 8)).astype(np.uint8)
    for at in range(20):
        for env in (0, 1):
            camera, touch = obs[at, env], {"camera": obs[at + 1, env], "touch": np.int8(at + 1)}
            buffer.append({"obs": {"camera": camera, "touch": np.int8(at)}, "next_obs": touch, "action": 0}, env=env)
    batch = buffer.sample(26, stack=4)
    assert batch.keys.tolist() == list(range(14, 40))
    for name in ("camera", "touch"):
        assert (batch["next_obs"][name][:-2] == batch["obs"][name][2:]).all()


def test_frames_with_returns_are_of_the_last_row_in_them() -> None:
    batch = episodes([1] * 4, [], [3]).sample(4, n_step=2, gamma=1.0, stack=3)
    assert batch["obs"].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]]
    assert batch["next_obs"].tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [2, 3, 4]]


def test_next_observations_of_another_shape_are_repeated_themselves() -> None:
    buffer = ReplayBuffer(4, select="fifo", returns="numpy")
    buffer.extend({"obs": np.zeros(2), "next_obs": np.arange(1, 5).reshape(2, 2)})
    assert buffer.sample(1, stack=2)["next_obs"].tolist() == [[[1, 2], [1, 2]]]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"n_step": 3}, "gamma=None"),
        ({"n_step": 0, "gamma": 0.5}, "n_step=0"),
        ({"n_step": 2.0, "gamma": 0.5}, r"n_step=2\.0"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"gamma": float("nan")}, "gamma=nan"),
        ({"gamma": "0.9"}, "gamma='0.9'"),
        ({"stack": 0}, "stack=0"),
        ({"stack": 17}, "stack=17: capacity=16"),
        ({"n_step": 17, "gamma": 1.0}, "n_step=17: capacity=16"),
        ({"slices": {"length": 17}}, "length=17: a slice spans 17 rows, and capacity=16"),
        ({"slices": {"length": 3}, "n_step": 4, "gamma": 0.5}, "slices: n_step"),
        ({"slices": {"length": 9, "burn_in": 4, "bootstrap": 4}}, "length=9: a slice spans 17 rows, and capacity=16"),
        ({"slices": {"length": 0}}, "length=0"),
        ({"slices": {}}, "length= is needed"),
        ({"slices": 3}, "a mapping is needed, not 3"),
        ({"slices": {"length": 2, "start": "last"}}, "'any', 'first' are allowed"),
        ({"columns": ["nothing"]}, "column 'nothing'"),
    ],
)
def test_what_can_never_be_had_is_refused_by_name(asked: dict[str, Any], said: str) -> None:
    buffer = episodes([1.0] * 4, [], [])
    with pytest.raises(ConfigError, match=said):
        buffer.sample(2, **asked)


def test_a_sequence_of_one_row_more_than_the_buffer_holds_is_refused() -> None:
    buffer = ReplayBuffer(10, returns="numpy")
    buffer.extend({"obs": np.arange(10)})
    with pytest.raises(ConfigError, match="length=11: a slice spans 11 rows, and capacity=10"):
        buffer.sample(1, slices=Slices(length=11))
    assert buffer.sample(1, slices=Slices(length=10))["obs"].tolist() == [list(range(10))]


def test_what_fills_the_buffer_to_the_last_row_is_allowed() -> None:
    buffer = episodes([1.0] * 16, [], [])
    assert buffer.sample(1, slices=Slices(length=16))["obs"].shape == (1, 16)
    assert buffer.sample(1, n_step=16, gamma=1.0)["reward"].tolist() == [16]
    assert buffer.sample(1, stack=16).keys.tolist() == [0]


def test_some_columns_are_named_or_named_by_their_group() -> None:
    buffer = ReplayBuffer(4, returns="numpy")
    buffer.extend({"obs": {"a": np.ones(2), "b": np.ones(2)}, "action": np.ones(2)})
    for columns, expected in ((["obs"], {"obs"}), (["obs.a", "action"], {"obs", "action"}), ("action", {"action"})):
        assert set(buffer.sample(1, columns=columns)) == expected
        assert set(buffer.sample(1, columns=columns, slices=Slices(length=1))) == expected

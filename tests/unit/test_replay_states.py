"""What a state dict holds that cannot be is refused, with nothing changed: it would be found when a batch is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import (
    ConfigError,
    MixedReplay,
    Ordered,
    Prioritized,
    ReplayBuffer,
    ReplayDataset,
    StalenessWeighted,
    TrajectoryBuffer,
    Uniform,
    WithoutReplacement,
)
from pipeline.errors import NewerFormat

State = dict[str, Any]
CAPACITY = 60


def buffer_of(**options: Any) -> ReplayBuffer:
    """A buffer of two environments, whose episodes have five rows, that has gone round once."""
    buffer = ReplayBuffer(CAPACITY, **options)
    for at in range(40):
        obs = np.stack([np.full(3, 2 * at, np.float32), np.full(3, 2 * at + 1, np.float32)])
        ends = np.array([at % 5 == 4, at % 5 == 2])
        buffer.extend({"obs": obs, "next_obs": obs + 2, "reward": np.arange(2.0), "terminated": ends}, envs=2)
    return buffer


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: plain(each) for name, each in state.items()}
    return (state.dtype.str, state.shape, state.tobytes()) if isinstance(state, np.ndarray) else state


def put(state: State, path: str, value: Any) -> State:
    """A copy with another value at a path; a function is given what is there."""
    state = copy.deepcopy(state)
    *outer, name = path.split("/")
    place: Any = state
    for part in outer:
        place = place[part]
    place[name] = value(place[name]) if callable(value) else value
    return state


def at(index: int, value: Any, dtype: Any = None) -> Callable[[np.ndarray], np.ndarray]:
    def changed(array: np.ndarray) -> np.ndarray:
        array = array.astype(dtype or array.dtype)
        array[index] = value
        return array

    return changed


def refused(options: dict[str, Any], path: str, value: Any) -> None:
    good = buffer_of(**options).state_dict()
    other = ReplayBuffer(CAPACITY, **options)
    other.extend({name: good["rows"][name][:7] for name in ("obs", "reward", "terminated")} | next_obs(options))
    before = plain(other.state_dict())
    with pytest.raises(ConfigError, match="no state of a replay buffer"):
        other.load_state_dict(put(good, path, value), continue_episodes=True)
    assert plain(other.state_dict()) == before
    other.load_state_dict(good, continue_episodes=True)
    assert plain(other.state_dict()) == plain(good)


def next_obs(options: dict[str, Any]) -> State:
    return {"next_obs": np.zeros((7, 3), np.float32)}


PRIORITIES = "values/selector.priorities.float64"
USED = "values/selector.used.uint32"
PRIORITIZED: dict[str, Any] = {"select": "prioritized"}


@pytest.mark.parametrize("remove", ["fifo", "lowest_priority"])
@pytest.mark.parametrize("wrong", [-1.0, -np.inf, np.nan, np.inf])
def test_a_priority_is_a_finite_number_that_is_not_negative(wrong: float, remove: str) -> None:
    refused(PRIORITIZED | {"remove": remove}, PRIORITIES, at(3, wrong))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (PRIORITIES, lambda array: np.full(len(array), 1e307)),
        (PRIORITIES, lambda array: array[1:]),
        (PRIORITIES, lambda array: np.append(array, 1.0)),
        (PRIORITIES, lambda array: array.reshape(-1, 2)),
        (PRIORITIES, lambda array: array.astype(complex)),
        (PRIORITIES, lambda array: array.tolist()),
        ("state/selector/ever", np.nan),
        ("state/selector/ever", np.inf),
        ("state/selector/ever", -1.0),
        ("state/selector/ever", "much"),
        ("state/selector/alpha", -0.5),
        ("state/selector/alpha", np.nan),
        ("state/selector/batches", -1),
        ("state/selector/batches", 2**63),
        ("state/selector/batches", 1.5),
    ],
)
def test_what_priorities_hang_on_can_be(path: str, value: Any) -> None:
    refused(PRIORITIZED, path, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("state/added", -1),
        ("state/added", 2**63),
        ("state/size", 61),
        ("state/size", -1),
        ("state/capacity", 59),
        ("state/next_episode", -1),
        ("state/next_episode", 5),
        ("state/stale_updates", -1),
        ("state/processes", -1),
        ("state/dropped", {"open": -3}),
        ("state/dropped", {"open": 61}),
        ("state/cut_keys", [80]),
        ("state/cut_keys", [-1]),
        ("state/cut_keys", [60]),
        ("state/truncated_keys", [80]),
        ("state/truncated_keys", [60]),
        ("state/awaiting_reset", [-1]),
        ("state/awaiting_reset", [1 << 20]),
        ("state/limiter/added", -1),
        ("state/limiter/sampled", 2**64),
        ("state/open_episodes", lambda given: [[0, 80, *given[0][2:]]]),
        ("state/open_episodes", lambda given: [[0, -1, *given[0][2:]]]),
        ("state/open_episodes", lambda given: [given[0], given[0]]),
        ("state/open_episodes", lambda given: [[0, *given[0][1:]], [1, *given[0][1:]]]),
        ("state/open_episodes", lambda given: [[*given[0][:2], 10**9, 0]]),
        ("state/open_episodes", lambda given: [[*given[0][:3], -1]]),
        ("state/open_episodes", lambda given: [[given[0][0], given[0][1] - 2, *given[0][2:]]]),
        ("state/generator/state", "-0x1"),
        ("state/generator/inc", "0x2"),
        ("state/generator/inc", hex(2**128 + 1)),
        ("state/generator/uinteger", -1),
        ("state/generator/has_uint32", 7),
        ("state/columns", lambda columns: columns + columns[:1]),
        ("state/columns", None),
        ("rows/#episode", at(0, -1)),
        ("rows/#episode", at(0, 10**9)),
        ("rows/#episode", at(30, 0)),
        ("rows/#place", at(30, -1)),
        ("rows/#place", at(30, 2)),
        ("rows/#behind", at(30, -1)),
        ("rows/#behind", at(30, 1)),
        ("rows/#behind", at(30, 4)),
        ("rows/#end", at(30, 9)),
        ("rows/#end", at(30, 1)),
        ("rows/#version", at(30, -1)),
        ("rows/obs", lambda array: array[:1]),
        ("rows/obs", lambda array: array[:, :1]),
        ("rows/obs", lambda array: array.astype(np.float64)),
        ("rows/obs", lambda array: array.tolist()),
        ("rows/unknown", np.zeros(60)),
    ],
)
def test_counts_and_keys_and_rows_fit_together(path: str, value: Any) -> None:
    if path == "rows/unknown":
        good = buffer_of().state_dict()
        good["rows"]["unknown"] = value
        with pytest.raises(ConfigError, match="no state of a replay buffer"):
            buffer_of().load_state_dict(good)
        return
    refused({}, path, value)


@pytest.mark.parametrize("name", ["obs", "#end"])
def test_no_column_is_missing(name: str) -> None:
    good = buffer_of().state_dict()
    del good["rows"][name]
    with pytest.raises(ConfigError, match="no state of a replay buffer"):
        buffer_of().load_state_dict(good)


@pytest.mark.parametrize(
    ("select", "path", "value"),
    [
        (WithoutReplacement(), "state/selector/epoch", -2),
        (WithoutReplacement(), "state/selector/cursor", -1),
        (WithoutReplacement(), "state/selector/cursor", 61),
        (WithoutReplacement(), "state/selector/rows", 81),
        (WithoutReplacement(), "state/selector/rows", -1),
        (WithoutReplacement(), "state/selector/base", 80),
        (WithoutReplacement(), "state/selector/skipped", -1),
        (WithoutReplacement(), "state/selector/seed", -1),
        (WithoutReplacement(uses=2), "values/selector.order.int64", at(3, 80)),
        (WithoutReplacement(uses=2), "values/selector.order.int64", at(3, -1)),
        (WithoutReplacement(uses=2), "values/selector.order.int64", lambda array: array * 0 + 30),
        (WithoutReplacement(uses=2), "values/selector.order.int64", at(3, 30, np.float64)),
        (WithoutReplacement(uses=2), "state/selector/cursor", 61),
        (WithoutReplacement(uses=2), USED, at(3, -1, np.int64)),
        (Uniform(uses=2), USED, at(3, -1, np.int64)),
        (Uniform(uses=2), USED, at(3, 2**32, np.int64)),
        (Uniform(uses=2), USED, at(3, 1.5, np.float64)),
        (Uniform(uses=2), USED, lambda array: array[1:]),
        (Ordered(by="fifo", uses=2), USED, at(3, -1, np.int64)),
        (StalenessWeighted(half_life=2), "state/selector/reference", -1),
        (StalenessWeighted(half_life=2), "state/selector/reference", 2**63),
        (Uniform(window_trajectories=3), "state/selector/begun", [[0, 0], [0, 0]]),
        (Uniform(window_trajectories=3), "state/selector/begun", [[10**9, 0]]),
        (Uniform(window_trajectories=3), "state/selector/begun", [[9, 20]]),
        (Uniform(window_trajectories=3), "state/selector/begun", [[9, -1]]),
        (Uniform(window_trajectories=3), "state/selector/begun", [[9]]),
    ],
)
def test_what_the_next_draws_hang_on_can_be(select: Any, path: str, value: Any) -> None:
    def drawn(**options: Any) -> ReplayBuffer:
        buffer = buffer_of(**options)
        buffer.sample(5)
        return buffer

    good = drawn(select=select).state_dict()
    other = ReplayBuffer(CAPACITY, select=select)
    before = plain(other.state_dict())
    with pytest.raises(ConfigError, match="no state of a replay buffer"):
        other.load_state_dict(put(good, path, value))
    assert plain(other.state_dict()) == before
    other.load_state_dict(good, continue_episodes=True)
    assert plain(other.state_dict()) == plain(good)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("state/pool", [0, 0, 0]),
        ("state/pool", lambda given: [7, *given[1:]]),
        ("state/pool", lambda given: [given[0], 3, *given[2:]]),
        ("state/pool", lambda given: [*given[:2], -1, given[3]]),
        ("values/pool.keys.int64", at(3, -1)),
        ("values/pool.serials.int64", at(3, 80)),
        ("values/pool.serials.int64", at(3, -1)),
        ("values/pool.serials.int64", at(3, 0)),
        ("values/pool.at.int64", at(3, 5)),
        ("values/pool.at.int64", at(3, -2)),
        ("rows/#behind", at(3, 1)),
        ("state/cut_keys", [10**6]),
    ],
)
def test_rows_in_any_order_lie_each_in_one_place(path: str, value: Any) -> None:
    refused({"remove": "lifo"}, path, value)


@pytest.mark.parametrize(
    "value", [at(0, -1), at(0, 80), lambda keys: keys * 0 + keys[0], lambda keys: keys.astype(np.float64)]
)
def test_next_observations_that_are_kept_aside_are_each_of_one_row(value: Any) -> None:
    refused({"share_next_obs": True}, "values/next_obs.keys.int64", value)


@pytest.mark.parametrize("capacity", [59, 30, 17, 7])
def test_next_observations_follow_into_a_smaller_buffer(capacity: int) -> None:
    """Those that were kept aside for rows which do not come back are not those of rows that lie where these lay."""
    buffer = ReplayBuffer(50, share_next_obs=True)
    for key in range(75):
        obs = np.full(3, key, np.float32)
        buffer.add(obs, 0, float(key), obs + 1, key % 5 == 4, False)
    smaller = ReplayBuffer(capacity, share_next_obs=True)
    smaller.load_state_dict(buffer.state_dict())
    batch = smaller.sample(400)
    assert set(batch["obs"][:, 0].tolist()) == set(range(75 - min(50, capacity), 75))
    assert batch["next_obs"].equal(batch["obs"] + 1)


def test_priorities_fit_a_larger_buffer_too() -> None:
    small, large = ReplayBuffer(4, select=Prioritized(alpha=1.0)), ReplayBuffer(4000, select=Prioritized(alpha=1.0))
    small.extend({"x": np.arange(4.0)})
    small.update_priorities(np.arange(4), np.full(4, 1e307))
    large.load_state_dict(small.state_dict())
    large.extend({"x": np.arange(3900.0)})
    assert np.isfinite(large.sample(64).weights.numpy()).all()


def test_a_state_of_a_newer_version_is_named_so() -> None:
    buffer, of_trajectories = buffer_of(), trajectories()
    with pytest.raises(NewerFormat, match="format 99"):
        buffer.load_state_dict(put(buffer.state_dict(), "state/format_version", 99))
    with pytest.raises(NewerFormat, match="format 99"):
        of_trajectories.load_state_dict(put(of_trajectories.state_dict(), "state/format_version", 99))


def test_rows_that_processes_share_stay_where_a_state_is_refused() -> None:
    with ReplayBuffer(CAPACITY, select="prioritized", storage="shared") as buffer:
        buffer.extend({"x": np.arange(9.0)})
        state = buffer.state_dict()
        with pytest.raises(ConfigError, match="no state of a replay buffer"):
            buffer.load_state_dict(put(state, PRIORITIES, at(3, np.nan)))
        assert plain(buffer.state_dict()) == plain(state)


# -- what is made of buffers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("batches", -1),
        ("drawn/a", -1),
        ("drawn/a", 1.5),
        ("generator/inc", "0x2"),
        ("read_only/a/state/limiter/sampled", -1),
        ("read_only/a/" + PRIORITIES, at(3, np.nan)),
        ("read_only/a/state/selector/ever", np.inf),
    ],
)
def test_a_mixture_refuses_what_its_sources_would(path: str, value: Any) -> None:
    mixed = MixedReplay({"a": (buffer_of(select="prioritized"), 1), "b": (buffer_of(), 1)}, read_only=["a"])
    mixed.sample(8)
    good = mixed.state_dict()
    with pytest.raises(ConfigError):
        mixed.load_state_dict(put(good, path, value))
    assert plain(mixed.state_dict()) == plain(good)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ended", 3),
        ("ahead", 3),
        ("ahead/0/keys", at(0, -1)),
        ("ahead/0/keys", lambda keys: keys[1:]),
        ("ahead/0/arrays/obs", lambda array: array[1:]),
        ("ahead/0/arrays/obs", lambda array: array.astype(int)),
        ("ahead/0/_weights", at(0, np.nan)),
        ("ahead/0/_weights", at(0, -1.0)),
        ("ahead/0/marks/#version", lambda marks: marks[1:]),
        ("ahead/0/burn_in", -1),
    ],
)
def test_batches_that_were_drawn_ahead_are_whole(path: str, value: Any) -> None:
    dataset = ReplayDataset(buffer_of(select="prioritized"), 4, prefetch=2)
    next(iter(dataset))
    good = dataset.state_dict()
    if path.startswith("ahead/0/"):
        changed = put(good["ahead"][0], path.removeprefix("ahead/0/"), value)
        wrong = good | {"ahead": [changed, *good["ahead"][1:]]}
    else:
        wrong = put(good, path, value)
    with pytest.raises(ConfigError, match="no state of a dataset"):
        dataset.load_state_dict(wrong)
    assert [plain(each) for each in dataset.state_dict()["ahead"]] == [plain(each) for each in good["ahead"]]


def trajectories() -> TrajectoryBuffer:
    buffer = TrajectoryBuffer()
    buffer.add_trajectories([{"x": torch.ones(2, 2)}, {"x": torch.ones(5, 1)}])
    return buffer


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("values/steps.int64", lambda array: array * 1.0),
        ("values/envs.int64", at(0, -2)),
        ("values/model_weights_id.int64", at(0, 7)),
        ("values/max_episode_length.int64", lambda array: array * 1.5),
        ("state/trajectory_counter", 1),
        ("state/total_samples", -1),
        ("state/generator/inc", "0x2"),
    ],
)
def test_what_is_known_of_trajectories_can_be(path: str, value: Any) -> None:
    buffer = trajectories()
    good = buffer.state_dict()
    with pytest.raises(ConfigError, match="no state of a buffer of trajectories"):
        buffer.load_state_dict(put(good, path, value))
    assert plain(buffer.state_dict()) == plain(good)

"""``share_next_obs``: next observations that are taken from the successor, or kept aside, and never silently wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Column, ReplayBuffer, Schema, Starved, TransitionBatch
from pipeline.errors import ConfigError


def make(capacity: int = 100, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, **{"select": "fifo", "returns": "numpy", "share_next_obs": True, **options})


def step(buffer: ReplayBuffer, obs: float, next_obs: float, end: str = "", env: int = 0) -> None:
    row = {"obs": float(obs), "next_obs": float(next_obs), "reward": 1.0}
    buffer.append({**row, "terminated": end == "terminated", "truncated": end == "truncated"}, env=env)


def aside(buffer: ReplayBuffer) -> dict[int, float]:
    assert buffer.next_obs is not None
    keys, arrays = buffer.next_obs.state()
    assert buffer.next_obs.kept == len(keys)
    return dict(zip(keys.tolist(), arrays["next_obs"].tolist(), strict=True))


# --- what is kept aside


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_the_last_row_of_an_episode_keeps_its_own_next_observation(end: str) -> None:  # CASES 60
    buffer = make()
    for _ in range(2):
        for at in range(3):
            step(buffer, at, at + 1, end if at == 2 else "")
    batch = buffer.sample(6, n_step=1, gamma=0.5)
    assert batch["next_obs"].tolist() == [1, 2, 3, 1, 2, 3]  # the third step's is 3, and not 0
    assert batch["truncated"].tolist() == [False, False, end == "truncated"] * 2
    assert batch.discount.tolist() == [0.5, 0.5, 0.5 if end == "truncated" else 0.0] * 2
    assert aside(buffer) == {2: 3.0, 5: 3.0}


def test_the_newest_row_keeps_its_own_until_its_successor_comes() -> None:
    buffer = make()
    step(buffer, 0, 1)
    assert aside(buffer) == {0: 1.0}
    step(buffer, 10, 11, env=1)
    assert aside(buffer) == {0: 1.0, 1: 11.0}
    step(buffer, 1, 2)
    assert aside(buffer) == {1: 11.0, 2: 2.0}
    buffer.end_episode(0)
    step(buffer, 2, 3)
    assert aside(buffer) == {1: 11.0, 2: 2.0, 3: 3.0}
    assert buffer.sample(4)["next_obs"].tolist() == [1, 11, 2, 3]


def test_what_is_kept_aside_goes_with_its_row() -> None:
    buffer = make(4)
    for at in range(12):
        step(buffer, at, at + 1, "terminated" if at % 2 else "")
        assert buffer.sample(len(buffer))["next_obs"].tolist() == list(range(max(1, at - 2), at + 2))
    assert set(aside(buffer)) == {9, 11}
    buffer.clear()
    assert buffer.schema is None
    step(buffer, 0, 1)
    assert buffer.sample(1)["next_obs"].tolist() == [1]


@pytest.mark.parametrize(("given", "shown"), [(0.0, -0.0), (1.5, 2.0), (float("nan"), 1.0)])
def test_a_next_observation_that_is_not_the_successors_is_kept(given: float, shown: float) -> None:
    buffer = make()
    step(buffer, 5, given)
    step(buffer, shown, 7)
    block = {"obs": [7.0, shown], "next_obs": [given, 8.0], "reward": [1.0, 1.0]}
    buffer.extend({**block, "terminated": [False] * 2, "truncated": [False] * 2})
    assert set(aside(buffer)) == {0, 2, 3}
    np.testing.assert_array_equal(buffer.sample(4)["next_obs"], np.array([given, 7, given, 8]))
    assert np.signbit(buffer.sample(4)["next_obs"]).tolist() == [bool(np.signbit(x)) for x in (given, 7, given, 8)]


def test_a_nan_that_is_the_successors_is_shared() -> None:
    buffer = make()
    step(buffer, 5, float("nan"))
    step(buffer, float("nan"), 7)
    assert aside(buffer) == {1: 7.0}
    np.testing.assert_array_equal(buffer.sample(2)["next_obs"], [np.nan, 7])


def test_a_large_payload_is_held_once() -> None:
    frames = np.random.default_rng(0).integers(0, 255, (65, 84, 84), np.uint8)
    rows = {"obs": frames[:-1], "next_obs": frames[1:], "terminated": np.zeros(64, bool)}
    buffer, plain = make(64), make(64, share_next_obs=False)
    for each in (buffer, plain):
        each.extend(rows)
    assert plain.statistics().row_bytes - buffer.statistics().row_bytes == 84 * 84
    assert buffer.next_obs is not None
    assert buffer.next_obs.kept == 1
    assert buffer.next_obs.nbytes <= 8 * (84 * 84 + 8)
    np.testing.assert_array_equal(buffer.sample(64)["next_obs"], frames[1:])


def test_what_is_kept_aside_does_not_grow_with_what_was_added() -> None:
    buffer = make(50)
    for at in range(2000):
        step(buffer, at, at + 1 + (at % 3 == 0), "truncated" if at % 7 == 0 else "", env=at % 5)
    assert buffer.next_obs is not None
    assert buffer.next_obs.nbytes <= 64 * (8 + 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_that_numpy_does_not_know_are_shared_too(dtype: torch.dtype) -> None:
    obs = torch.arange(5).to(dtype)
    buffer = make(returns="torch")
    buffer.extend({"obs": obs[:-1], "next_obs": obs[1:]})
    batch = buffer.sample(4)
    assert torch.equal(batch["next_obs"], obs[1:])
    with_slices = buffer.sample(1, slices={"length": 4})
    assert with_slices["next_obs"].dtype == dtype


# --- the same samples with and without


class Stream:
    """Random rows of several environments, some of which leave gaps between the next observation and the next."""

    def __init__(self, seed: int, envs: int, gaps: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.shown = [self.observe() for _ in range(envs)]
        self.gaps = gaps

    def observe(self) -> dict[str, Any]:
        picture = self.rng.integers(0, 255, (32, 40)).astype(np.uint8)
        return {"a": self.rng.random(3).astype(np.float32), "picture": picture}

    def row(self, env: int) -> dict[str, Any]:
        obs, following = self.shown[env], self.observe()
        kind = int(self.rng.integers(12))
        leave = kind < 2 or self.rng.random() < self.gaps
        self.shown[env] = self.observe() if leave else following
        return {
            "obs": obs,
            "next_obs": following,
            "action": 0.0,
            "reward": np.float32(self.rng.random()),
            "terminated": kind == 0,
            "truncated": kind == 1,
        }


def joined(rows: list[Any]) -> Any:
    if isinstance(rows[0], dict):
        return {name: joined([row[name] for row in rows]) for name in rows[0]}
    return np.stack(rows)


def change(buffers: list[ReplayBuffer], stream: Stream, rng: np.random.Generator) -> None:
    """Do one random thing to each of the buffers."""
    envs, kind = len(stream.shown), rng.choice(6, p=[0.3, 0.25, 0.2, 0.2, 0.04, 0.01])
    if kind == 0:
        env = int(rng.integers(envs))
        row = stream.row(env)
        for buffer in buffers:
            buffer.append(row, env=env)
    elif kind == 1:
        rows = [stream.row(env) for _ in range(rng.integers(1, 12)) for env in range(envs)]
        for buffer in buffers:
            buffer.extend(joined(rows), envs=envs)
    elif kind == 2:
        whose = rng.integers(0, envs, rng.integers(1, 40))
        rows = [stream.row(env) for env in whose.tolist()]
        for buffer in buffers:
            buffer.extend(joined(rows), env=whose)
    elif kind == 3:
        row = joined([stream.row(env) for env in range(envs)])
        names = ("reward", "next_obs", "terminated", "truncated")
        for buffer in buffers:
            buffer.add(row["obs"], np.zeros(envs), *(row[name] for name in names), autoreset="disabled")
    elif kind == 4:
        for buffer in buffers:
            buffer.end_episode(0)
        stream.shown[0] = stream.observe()
    else:
        for buffer in buffers:
            buffer.clear()


SAMPLES: list[dict[str, Any]] = [
    {},
    {"n_step": 3, "gamma": 0.9},
    {"stack": 3},
    {"stack": 2, "n_step": 4, "gamma": 0.5},
    {"slices": {"length": 3}},
    {"slices": {"length": 2, "burn_in": 1, "bootstrap": 2, "dilation": 2, "pad": True}},
    {"columns": ["next_obs.a", "reward"]},
    {"columns": ["obs.picture"], "n_step": 2, "gamma": 1.0},
    {"columns": ["next_obs.picture"], "stack": 2},
]


def same(one: TransitionBatch, other: TransitionBatch) -> None:
    assert one._arrays.keys() == other._arrays.keys()
    assert one.columns == other.columns or set(one.columns) == set(other.columns)
    for name, array in one._arrays.items():
        assert array.dtype == other._arrays[name].dtype
        np.testing.assert_array_equal(array, other._arrays[name], err_msg=name)
    for name in ("keys", "weights", "mask", "discount", "steps", "versions", "episodes", "places"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def compare(buffers: list[ReplayBuffer]) -> None:
    for wanted in SAMPLES:
        found: list[Any] = []
        for buffer in buffers:
            try:
                found.append(buffer.sample(16, **wanted))
            except (Starved, ConfigError) as error:
                found.append(str(error))
        if isinstance(found[0], str):
            assert found[0] == found[1]
        else:
            same(found[0], found[1])


@pytest.mark.parametrize("gaps", [0.0, 0.2])
@pytest.mark.parametrize(("envs", "capacity"), [(1, 1), (1, 7), (2, 2), (3, 40), (4, 500)])
@pytest.mark.parametrize("select", ["uniform", "prioritized", "without_replacement"])
def test_every_sample_is_the_same_with_and_without(select: str, envs: int, capacity: int, gaps: float) -> None:
    for seed in range(3):
        stream, rng = Stream(seed, envs, gaps), np.random.default_rng(seed)
        options: dict[str, Any] = {"select": select, "seed": seed, "returns": "numpy"}
        buffers = [ReplayBuffer(capacity, share_next_obs=share, **options) for share in (False, True)]
        for _ in range(25):
            change(buffers, stream, rng)
            compare(buffers)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_aside_is_state_that_can_be_loaded(seed: int) -> None:
    stream, rng = Stream(seed, 3, 0.1), np.random.default_rng(seed)
    buffer, twin = make(50, select="uniform"), make(50, select="uniform")
    while len(buffer) < 50:
        change([buffer], stream, rng)
    assert buffer.next_obs is not None
    assert twin.next_obs is not None
    keys, arrays = buffer.next_obs.state()
    # What a save of the ring brings back is its own part; here it is the same ring.
    twin.ring.storage, twin.ring.added, twin.ring.size = buffer.ring.storage, buffer.ring.added, buffer.ring.size
    twin.next_obs.load(keys, arrays)
    assert twin.schema == buffer.schema
    again = twin.next_obs.state()
    np.testing.assert_array_equal(again[0], keys)
    assert again[1].keys() == arrays.keys()
    names = buffer.next_obs.names()
    everything = buffer.ring.keys()
    left, right = buffer.next_obs.gather(everything, names), twin.next_obs.gather(everything, names)
    for name in names:
        np.testing.assert_array_equal(left[name], right[name])


def test_the_state_of_an_empty_buffer_can_be_loaded() -> None:
    buffer, twin = make(), make()
    assert buffer.next_obs is not None
    assert twin.next_obs is not None
    twin.next_obs.load(*buffer.next_obs.state())
    step(twin, 0, 1)
    assert twin.sample(1)["next_obs"].tolist() == [1]


@pytest.mark.parametrize("share", [False, True])
def test_the_stack_of_a_next_observation_is_the_stack_of_the_successor(share: bool) -> None:
    buffer = make(share_next_obs=share)
    for length in (4, 1, 6):
        for at in range(length):
            step(buffer, 10 * length + at, 10 * length + at + 1, "truncated" if at == length - 1 else "")
    batch = buffer.sample(11, stack=3)
    assert batch["obs"][:4].tolist() == [[40, 40, 40], [40, 40, 41], [40, 41, 42], [41, 42, 43]]
    assert batch["next_obs"][:5].tolist() == [[40, 40, 41], [40, 41, 42], [41, 42, 43], [42, 43, 44], [10, 10, 11]]
    following = batch.episodes[1:] == batch.episodes[:-1]
    np.testing.assert_array_equal(batch["next_obs"][:-1][following], batch["obs"][1:][following])


# --- what is refused


def test_columns_that_are_not_alike_are_refused_before_anything_is_changed() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"obs": np.zeros((2, 3)), "reward": np.zeros(2)}, "there is no column next_obs"),
        ({"obs": np.zeros((2, 3)), "next_obs": np.zeros((2, 4))}, r"next_obs: float64\[4\] is to be like obs"),
        ({"obs": np.zeros(2), "next_obs": np.zeros(2, np.float32)}, r"float32\[\] is to be like obs: float64"),
        ({"state": np.zeros(2), "next_obs": np.zeros(2)}, "like obs, which is not there"),
    ]
    for rows, match in cases:
        buffer = make()
        with pytest.raises(ConfigError, match=match):
            buffer.extend(rows)
        assert buffer.schema is None
        assert len(buffer) == 0
        with pytest.raises(ConfigError, match=match):
            buffer.append({name: array[0] for name, array in rows.items()})
    with pytest.raises(ConfigError, match="share_next_obs"):
        make(schema=Schema((Column("obs", "float32"),)))
    with pytest.raises(ConfigError, match="share_next_obs"):
        make(share_next_obs="yes")


def test_the_columns_of_a_row_are_those_that_are_given() -> None:
    schema = Schema((Column("next_obs", "float32"), Column("obs", "float32")))
    buffer = make(schema=schema)
    assert buffer.schema == schema
    with pytest.raises(ConfigError, match="next_obs missing"):
        buffer.append({"obs": 1.0})
    buffer.append({"obs": 1.0, "next_obs": 2.0})
    assert buffer.sample(1).columns == ("obs", "next_obs")
    assert buffer.sample(1, columns=["next_obs"]).columns == ("next_obs",)
    with pytest.raises(ConfigError, match="there are next_obs, obs"):
        buffer.sample(1, columns=["reward"])


def test_a_column_of_complex_numbers_comes_out_as_a_tensor() -> None:
    buffer = make(returns="torch")
    numbers = (np.arange(3) + 1j).astype(np.complex64)
    buffer.extend({"obs": numbers, "next_obs": numbers, "small": np.ones(3, np.float32)})
    assert buffer.sample(3)["obs"].tolist() == buffer.sample(3)["next_obs"].tolist() == numbers.tolist()


def test_a_row_that_comes_a_whole_buffer_after_its_predecessor_has_a_place_of_its_own() -> None:
    buffer = make(3)
    for number in range(12):
        turn, env = divmod(number, 3)
        step(buffer, 10 * env + turn, 10 * env + turn + 1, env=env)
        for key, value in aside(buffer).items():
            assert value == 10 * (key % 3) + key // 3 + 1
    assert buffer.sample(3)["next_obs"].tolist() == [4, 14, 24]

"""``ReplayBuffer.add``: the rows that come of an environment's steps, single and vector, in each autoreset mode."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from pipeline import Column, Limiter, ReplayBuffer, Schema
from pipeline.errors import ConfigError, TimedOut
from tasks.gym import VectorRows

MODES = list(AutoresetMode)
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
ENDS = ["terminated", "truncated", "both"]
Reply = tuple[Any, Any, Any, Any, dict[str, Any]]


def objects(values: list[Any]) -> np.ndarray:
    """An array of objects, as Gymnasium's own vector environments put final observations into."""
    array = np.full(len(values), None, object)
    for index, value in enumerate(values):
        array[index] = value
    return array


class Fake:
    """N hand-made environments that show 0, 1, ... up to their length, and end there; reward 1."""

    def __init__(
        self, lengths: list[int], mode: AutoresetMode, end: str = "terminated", leafwise: bool = False
    ) -> None:
        self.lengths, self.mode, self.end, self.leafwise = np.array(lengths), mode, end, leafwise
        self.at = np.zeros(len(lengths), np.int64)
        self.over = np.zeros(len(lengths), bool)

    def reset(self, mask: np.ndarray | None = None) -> np.ndarray:
        self.at[... if mask is None else mask] = 0
        self.over[... if mask is None else mask] = False
        return self.obs()

    def obs(self) -> np.ndarray:
        return self.at.astype(np.float32)[:, None]

    def step(self) -> Reply:
        resetting = self.over & (self.mode is NEXT_STEP)
        self.at = np.where(resetting, 0, self.at + 1)
        ended = ~resetting & (self.at == self.lengths)
        reward = np.where(resetting, 0.0, 1.0)
        info: dict[str, Any] = {}
        if self.mode is SAME_STEP and ended.any():
            final = self.obs()
            if not self.leafwise:
                final = objects([row if over else None for row, over in zip(final, ended, strict=True)])
            info = {"final_obs": final, "_final_obs": ended}
            self.at[ended] = 0
        self.over = ended
        none = np.zeros_like(ended)
        flags = ended if self.end != "truncated" else none, ended if self.end != "terminated" else none
        return self.obs(), reward, *flags, info


DONE: dict[str, Any] = {"autoreset": "disabled"}


def given(reply: Reply) -> Reply:
    """What `step` returned in the order of `add`."""
    next_obs, reward, *rest = reply
    return reward, next_obs, *rest


def stored(buffer: ReplayBuffer) -> Any:
    """Every row, oldest first."""
    return buffer.sample(len(buffer))


def make(capacity: int = 1000, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, select="fifo", returns="numpy", **options)


def drive(fake: Fake, buffer: ReplayBuffer, calls: int) -> list[int]:
    """Step, adding what comes; return how many rows each call gave."""
    obs, counts = fake.reset(), []
    for call in range(calls):
        reply = fake.step()
        counts.append(len(buffer.add(obs, np.full(len(obs), call), *given(reply), autoreset=fake.mode)))
        obs = reply[0]
        if fake.mode is DISABLED and fake.over.any():
            obs = fake.reset(fake.over.copy())
    return counts


# --- what is stored in each mode


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("leafwise", [False, True])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(
    ("mode", "counts"),
    [(NEXT_STEP, [1, 1, 1, 0, 1, 1, 1, 0, 1]), (SAME_STEP, [1] * 9), (DISABLED, [1] * 9)],
)
def test_each_mode_stores_the_transitions_that_happened(  # CASES 59, 60
    mode: AutoresetMode, counts: list[int], end: str, leafwise: bool, share: bool
) -> None:
    buffer = make(share_next_obs=share)
    assert drive(Fake([3], mode, end, leafwise), buffer, 9) == counts
    batch = stored(buffer)
    number = sum(counts)
    assert len(batch) == number == (7 if mode is NEXT_STEP else 9)
    assert batch["obs"][:, 0].tolist() == ([0, 1, 2] * 3)[:number]
    assert batch["next_obs"][:, 0].tolist() == ([1, 2, 3] * 3)[:number]  # 3 and not 0 at the end
    ends = ([False, False, True] * 3)[:number]
    assert batch["terminated"].tolist() == (ends if end != "truncated" else [False] * number)
    assert batch["truncated"].tolist() == (ends if end != "terminated" else [False] * number)
    assert batch["reward"].tolist() == [1.0] * number
    goes_on = [0.5 if end == "truncated" or not each else 0.0 for each in ends]
    assert buffer.sample(number, gamma=0.5).discount.tolist() == goes_on
    assert batch.episodes.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2][:number]
    assert batch.places.tolist() == ([0, 1, 2] * 3)[:number]


@pytest.mark.parametrize("mode", MODES)
def test_environments_of_several_lengths_keep_to_themselves(mode: AutoresetMode) -> None:
    buffer, lengths = make(), [1, 2, 3, 5]
    drive(Fake(lengths, mode), buffer, 40)
    batch = stored(buffer)
    for episode in np.unique(batch.episodes):
        mine = batch.episodes == episode
        assert batch["obs"][mine, 0].tolist() == list(range(mine.sum()))
        assert batch["next_obs"][mine, 0].tolist() == list(range(1, mine.sum() + 1))
        assert batch["terminated"][mine][:-1].sum() == 0
        if batch["terminated"][mine][-1]:
            assert mine.sum() in lengths


def test_n_step_returns_of_an_episode_end_where_it_does() -> None:  # CASES 67
    buffer = make()
    buffer.add(0.0, 0, 5.0, 1.0, False, True)
    for at in range(3):
        buffer.add(float(at), 0, 1.0, float(at + 1), at == 2, False)
    batch = buffer.sample(4, n_step=3, gamma=0.5)
    assert batch["reward"].tolist() == [5.0, 1.75, 1.5, 1.0]
    assert batch["obs"].tolist() == buffer.sample(4)["obs"].tolist()  # row k begins in the same state in both views
    assert batch.discount.tolist() == [0.5, 0.0, 0.0, 0.0]  # CASES 62: 0 only where it terminated


@pytest.mark.parametrize("mode", MODES)
def test_environments_do_not_mix_in_n_step_returns(mode: AutoresetMode) -> None:  # CASES 57
    buffer = make()
    for at in range(3):
        obs = np.full((2, 1), at, np.float32)
        none = np.zeros(2, bool)
        buffer.add(obs, [0, 0], np.array([1.0, 10.0]), obs + 1, none, none, autoreset=mode)
    assert buffer.sample(2, n_step=2, gamma=0.5)["reward"].tolist() == [1.5, 15.0]


def test_an_episode_is_as_long_as_it_has_actions() -> None:  # CASES 69
    buffer = make()
    obs = [1.0, 2.0, 3.0]
    for before, after in itertools.pairwise(obs):
        buffer.add(before, 0, 1.0, after, False, after == 3.0)
    assert len(buffer) == 2


# --- real vector environments, against tasks.gym.VectorRows


class Random(gymnasium.Env[Any, Any]):
    """Episodes of random lengths and ends, with random observations, nested if asked."""

    def __init__(self, seed: int, nested: bool) -> None:
        box = spaces.Box(-1, 1, (3,), np.float32)
        parts = spaces.Dict({"a": box, "deep": spaces.Tuple((box, spaces.Discrete(7)))})
        self.observation_space = parts if nested else box
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.rng = np.random.default_rng(seed)
        self.observation_space.seed(seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.left = int(self.rng.integers(1, 6))
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        over, kind = self.left == 0, int(self.rng.integers(3))
        reward = float(self.rng.random())
        return self.observation_space.sample(), reward, over and kind != 0, over and kind != 1, {}


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_real_vector_environments_give_what_vector_rows_gives(
    mode: AutoresetMode, nested: bool, seed: int, share: bool
) -> None:
    size = 4
    envs = SyncVectorEnv([functools.partial(Random, 10 * seed + i, nested) for i in range(size)], autoreset_mode=mode)
    rng = np.random.default_rng(seed)
    rows = VectorRows.of(envs)
    buffer, want = make(share_next_obs=share), []
    obs, _ = envs.reset()
    rows.start(obs)
    for _ in range(60):
        action = rng.random((size, 2)).astype(np.float32)
        reply = envs.step(action)
        got = buffer.add(obs, action, *given(reply), autoreset=mode)
        made = rows.step(action, *reply)
        assert len(got) == len(made)
        want.append(made)
        obs = reply[0]
        if rows.waiting.any():
            obs, _ = envs.reset(options={"reset_mask": rows.waiting})
            rows.reset(rows.waiting, obs)
    batch = stored(buffer)
    assert {each.name for each in batch._layout.schema.columns} | {"discount"} == set(want[0].tensors)
    for name in set(want[0].tensors) - {"discount"}:
        column = np.concatenate([part[name] for part in want])
        assert batch._arrays[name].dtype == column.dtype, name
        np.testing.assert_array_equal(batch._arrays[name], column, err_msg=name)
    # The episodes are the same ones, though they are numbered over all environments here.
    pairs = np.stack([np.concatenate([part.env for part in want]), np.concatenate([part.episode for part in want])])
    _, theirs = np.unique(pairs, axis=1, return_inverse=True)
    both = np.unique(np.stack([theirs.reshape(-1), batch.episodes]), axis=1)
    assert both.shape[1] == len(np.unique(theirs)) == len(np.unique(batch.episodes))
    envs.close()


def test_a_cartpole_is_added_as_it_is_stepped() -> None:
    env = gymnasium.make("CartPole-v1")
    buffer = make()
    steps = 0
    for _ in range(3):
        (obs, _), over = env.reset(seed=1), False
        while not over:
            next_obs, reward, terminated, truncated, info = env.step(1)
            keys = buffer.add(obs, 1, reward, next_obs, terminated, truncated, info)
            assert keys == range(steps, steps + 1)
            obs, over, steps = next_obs, terminated or truncated, steps + 1
    batch = stored(buffer)
    assert batch["reward"].dtype == np.float32
    assert batch["action"].dtype == np.int64
    assert batch["obs"].dtype == np.float32
    assert batch["terminated"].sum() == 3
    following = batch.episodes[1:] == batch.episodes[:-1]
    np.testing.assert_array_equal(batch["next_obs"][:-1][following], batch["obs"][1:][following])


@pytest.mark.parametrize("kind", ["sync", "async", "vector_entry_point"])
def test_gymnasiums_own_vector_environments_are_taken(kind: str) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode=kind)
    mode = envs.metadata["autoreset_mode"]
    rows, buffer, want = VectorRows.of(envs), make(), []
    obs, _ = envs.reset(seed=1)
    rows.start(obs)
    obs = np.copy(obs)
    for call in range(60):
        action = np.arange(call, call + 3) % 2
        reply = envs.step(action)
        buffer.add(obs, action, *given(reply), autoreset=mode)
        want.append(rows.step(action, *reply))
        obs = np.copy(reply[0])
    batch = stored(buffer)
    for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated"):
        np.testing.assert_array_equal(batch[name], np.concatenate([part[name] for part in want]), err_msg=name)
    assert batch["terminated"].sum() >= 3
    envs.close()


# --- single environments that reset themselves


def test_a_single_environment_that_resets_itself_at_the_next_step_gives_no_row_of_that() -> None:
    buffer = make()
    obs = 0.0
    for next_obs, over in [(1.0, False), (2.0, True), (0.0, False), (1.0, False)]:
        buffer.add(obs, 0, 1.0, next_obs, over, False, autoreset="NextStep")
        obs = next_obs
    assert stored(buffer)["obs"].tolist() == [0.0, 1.0, 0.0]
    assert stored(buffer)["next_obs"].tolist() == [1.0, 2.0, 1.0]


def test_a_single_environment_that_resets_itself_in_the_same_step_gives_its_final_observation() -> None:
    buffer = make()
    buffer.add(0.0, 0, 1.0, 1.0, False, False, {}, autoreset="same_step")
    buffer.add(1.0, 0, 1.0, 0.0, False, True, {"final_obs": 2.0}, autoreset="same_step")
    buffer.add(0.0, 0, 1.0, 1.0, False, False, {}, autoreset="same_step")
    assert stored(buffer)["next_obs"].tolist() == [1.0, 2.0, 1.0]


# --- resets by hand


def test_a_reset_by_hand_is_told_by_end_episode() -> None:
    fake, buffer = Fake([2, 9], NEXT_STEP), make()
    drive(fake, buffer, 2)
    assert buffer.stepping.state() == [0]
    buffer.end_episode(0)
    assert buffer.stepping.state() == []
    before = len(buffer)
    drive(fake, buffer, 1)
    assert len(buffer) == before + 2
    drive(Fake([1, 1], NEXT_STEP), buffer, 1)
    buffer.end_episode()
    assert buffer.stepping.state() == []


@pytest.mark.parametrize("mode", MODES)
def test_lengths_begin_anew_after_a_reset_in_the_middle(mode: AutoresetMode) -> None:  # CASES 147
    fake, buffer = Fake([4], mode), make()
    drive(fake, buffer, 2)
    buffer.end_episode(0)
    drive(fake, buffer, 4)
    batch = stored(buffer)
    assert batch.episodes.tolist() == [0, 0, 1, 1, 1, 1]
    assert batch.places.tolist() == [0, 1, 0, 1, 2, 3]
    assert batch["terminated"].tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_that_was_left_is_not_glued_to_the_next(mode: AutoresetMode) -> None:  # CASES 55
    buffer = make(20)
    for length in (4, 4, 9):
        fake = Fake([length], mode)
        drive(fake, buffer, min(length, 4) if length == 4 else 2)
        buffer.end_episode()
    drive(Fake([4], mode), buffer, 4)
    batch = stored(buffer)
    assert np.unique(batch.episodes, return_counts=True)[1].tolist() == [4, 4, 2, 4]
    small = make(6)
    drive(Fake([4, 9], mode), small, 100)
    assert len(small) == 6


def test_which_environments_await_their_reset_is_state_that_can_be_loaded() -> None:
    fake, buffer, twin = Fake([2, 3, 2], NEXT_STEP), make(), make()
    drive(fake, buffer, 2)
    twin.stepping.load(buffer.stepping.state())
    assert twin.stepping.state() == buffer.stepping.state() == [0, 2]
    obs = fake.obs()
    reply = fake.step()
    assert [len(each.add(obs, np.zeros(3), *given(reply), autoreset="next_step")) for each in (buffer, twin)] == [1, 1]


# --- names, dtypes, copies


def test_nested_observations_are_columns_by_leaf() -> None:
    buffer = make()
    obs = {"a": np.zeros(2, np.float32), "b": (np.uint8(1), {"c": 2})}
    buffer.add(obs, {"arm": [1.0, 2.0], "grip": True}, 1, obs, np.False_, False, extras={"log_prob": -1.0})
    batch = stored(buffer)
    names = {"obs.a", "obs.b.0", "obs.b.1.c", "next_obs.a", "next_obs.b.0", "next_obs.b.1.c"}
    names |= {"action.arm", "action.grip", "reward", "terminated", "truncated", "log_prob"}
    assert set(batch._arrays) == names
    assert batch["obs"]["b"]["1"]["c"].tolist() == [2]


def test_columns_are_named_as_the_fields_say() -> None:
    fields = {"obs": "state", "next_obs": "after", "reward": "r", "terminated": "dead", "truncated": "cut"}
    buffer = make(fields=fields)
    drive(Fake([2], SAME_STEP), buffer, 4)
    assert set(stored(buffer).columns) == {"state", "after", "r", "dead", "cut", "action"}
    assert stored(buffer)["after"][:, 0].tolist() == [1, 2, 1, 2]


def test_the_reward_is_float32_unless_the_schema_says_otherwise() -> None:
    buffer = make()
    buffer.add(0.0, 0, 1, 0.0, False, False)
    buffer.add(0.0, 0, np.float64(0.1), 0.0, False, False)
    assert stored(buffer)["reward"].tolist() == [1.0, float(np.float32(0.1))]
    names = ("obs", "next_obs", "reward")
    columns = [*(Column(name, "float64") for name in names), Column("action", "int64")]
    columns += [Column("terminated", "bool"), Column("truncated", "bool")]
    buffer = make(schema=Schema(tuple(sorted(columns, key=lambda each: each.name))))
    buffer.add(0.0, 0, 0.1, 0.0, False, False)
    assert stored(buffer)["reward"].tolist() == [0.1]


def test_what_is_given_may_be_used_again_by_the_caller() -> None:  # CASES 122
    buffer, shown = make(), np.zeros((1, 1), np.float32)
    for value in (1, 2, 3):
        shown[:] = value
        none = np.zeros(1, bool)
        buffer.add(shown, shown, np.ones(1), shown, none, none, autoreset="disabled")
    single, again = make(), [0.0]
    for number in (1.0, 2.0, 3.0):
        again.clear()
        again.append(number)
        single.add(again, again, 1.0, again, False, False, {"seen": again})
    assert stored(single)["obs"][:, 0].tolist() == stored(buffer)["obs"][:, 0].tolist() == [1, 2, 3]
    stored(buffer)["obs"][:] = 9
    assert stored(buffer)["obs"][:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_tensors_are_taken_as_they_are(mode: AutoresetMode, dtype: torch.dtype) -> None:
    fake, buffer = Fake([2, 3], mode), ReplayBuffer(100, select="fifo")
    obs: Any = torch.from_numpy(fake.reset()).to(dtype)
    for _ in range(6):
        next_obs, reward, terminated, truncated, info = fake.step()
        if "final_obs" in info:
            own = [None if row is None else torch.from_numpy(row).to(dtype) for row in info["final_obs"]]
            info["final_obs"] = objects(own)
        shown = torch.from_numpy(next_obs).to(dtype)
        flags = torch.from_numpy(terminated), torch.from_numpy(truncated)
        buffer.add(obs, torch.zeros(2), torch.from_numpy(reward), shown, *flags, info, autoreset=mode)
        obs = shown
        if mode is DISABLED and fake.over.any():
            obs = torch.from_numpy(fake.reset(fake.over.copy())).to(dtype)
    batch = stored(buffer)
    assert batch["obs"].dtype == batch["next_obs"].dtype == dtype
    assert torch.equal(batch["next_obs"], batch["obs"] + 1)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, np.ndarray.tolist])
def test_rewards_and_flags_may_have_an_axis_of_one(kind: Any) -> None:
    buffer = make()
    for _ in range(2):
        ends = kind(np.array([[True], [False]])), kind(np.array([[False], [True]]))
        buffer.add(np.zeros((2, 3)), np.zeros((2, 1)), kind(np.array([[0.5], [3.0]])), np.ones((2, 3)), *ends, **DONE)
    batch = stored(buffer)
    assert batch["reward"].tolist() == [0.5, 3.0, 0.5, 3.0]
    assert batch["reward"].dtype == np.float32
    assert batch["terminated"].tolist() == [True, False, True, False]
    assert batch["truncated"].tolist() == [False, True, False, True]
    assert batch["action"].shape == (4, 1)
    assert buffer.sample(4, n_step=2, gamma=0.5)["reward"].tolist() == [0.5, 3.0, 0.5, 3.0]


@pytest.mark.parametrize("first", ["numpy", "torch"])
def test_rewards_and_flags_of_a_dtype_that_only_torch_has_keep_their_values(first: str) -> None:
    obs, few = np.zeros((2, 3)), torch.tensor([0.5, -0.0], dtype=torch.bfloat16)
    vector, single = make(), make()
    rewards: list[Any] = [few.float().numpy(), few] if first == "numpy" else [few, few[:, None]]
    for reward in rewards:
        vector.add(obs, obs, reward, obs, few, few, **DONE)
        single.add(obs[0], 0, reward.reshape(-1)[0], obs[0], few[1], few[1])
    assert stored(vector)["reward"].tolist() == [0.5, 0.0, 0.5, 0.0]
    assert stored(vector)["terminated"].tolist() == [True, False, True, False]
    assert stored(single)["reward"].tolist() == [0.5, 0.5]
    assert not stored(single)["terminated"].any()


def test_a_reward_column_that_only_torch_has_takes_its_own_tensors() -> None:
    columns = [Column("obs", "float64"), Column("next_obs", "float64"), Column("action", "int64")]
    columns += [Column("reward", "bfloat16"), Column("terminated", "bool"), Column("truncated", "bool")]
    buffer = ReplayBuffer(9, select="fifo", schema=Schema(tuple(columns)))
    reward, none = torch.tensor([[0.5], [3.0]], dtype=torch.bfloat16), np.zeros(2, bool)
    buffer.add(np.zeros(2), np.zeros(2, int), reward, np.zeros(2), none, none, **DONE)
    assert torch.equal(stored(buffer)["reward"], reward[:, 0])


# --- what is refused, before anything is changed


def unchanged(
    buffer: ReplayBuffer, act: Callable[[], object], match: str, error: type[Exception] = ConfigError
) -> None:
    before = (len(buffer), buffer.ring.added, buffer.stepping.state(), buffer.ring.storage.schema)
    with pytest.raises(error, match=match):
        act()
    assert before == (len(buffer), buffer.ring.added, buffer.stepping.state(), buffer.ring.storage.schema)


def step(number: int = 2, end: bool = True) -> tuple[Any, Any, Any, Any, Any, Any]:
    obs = np.zeros((number, 1), np.float32)
    return obs, np.zeros(number), np.ones(number), obs, np.full(number, end), np.zeros(number, bool)


@pytest.mark.parametrize("info", [None, {}, {"final_obs": None}, {"final_obs": np.array([None, None])}])
def test_same_step_without_a_final_observation_is_refused(info: Any) -> None:
    buffer = make()
    unchanged(buffer, lambda: buffer.add(*step(), info=info, autoreset="same_step"), "no final_obs for environment 0")
    assert len(buffer.add(*step(end=False), info=info, autoreset="same_step")) == 2
    unchanged(buffer, lambda: buffer.add(0.0, 0, 1, 0.0, True, False, None, autoreset="same_step"), "no final_obs")


@pytest.mark.parametrize(
    ("final", "match"),
    [
        ({"final_obs": {"a": np.zeros((2, 1))}}, r"has \['next_obs.a'\]"),
        ({"final_obs": np.zeros((2, 3), np.float32)}, r"shape \[3\]"),
        ({"final_obs": np.zeros((2, 1)), "_final_obs": np.array([True, False])}, "environment 1"),
    ],
)
def test_final_observations_of_another_kind_are_refused(final: Any, match: str) -> None:
    buffer = make()
    unchanged(buffer, lambda: buffer.add(*step(), info=final, autoreset="same_step"), match)


def test_a_final_observation_that_its_environment_wrote_to_is_told() -> None:
    class Reusing(Random):
        def reset(self, **options: Any) -> Any:
            super().reset(**options)
            self.array = np.zeros(3, np.float32)
            return self.array, {}

        def step(self, action: Any) -> Any:
            _, *rest = super().step(action)
            self.array += 1
            return self.array, *rest

    class Overwriting(Reusing):
        def reset(self, **options: Any) -> Any:
            kept = getattr(self, "array", np.zeros(3, np.float32))
            super().reset(**options)
            self.array = kept
            self.array[:] = 0
            return self.array, {}

    def run(kind: type[Random]) -> None:
        envs = SyncVectorEnv([lambda: kind(0, False)], autoreset_mode=SAME_STEP)
        buffer, (obs, _) = make(), envs.reset()
        for _ in range(20):
            action = np.zeros((1, 2), np.float32)
            reply = envs.step(action)
            buffer.add(obs, action, *given(reply), autoreset=SAME_STEP)
            obs = reply[0]

    run(Reusing)
    with pytest.raises(ConfigError, match="written to after it had been given"):
        run(Overwriting)


@pytest.mark.parametrize("mode", [None, "sometimes", 3])
def test_a_vector_environment_needs_its_mode(mode: Any) -> None:
    buffer = make()
    unchanged(buffer, lambda: buffer.add(*step(), autoreset=mode), "autoreset=.*next_step, same_step, disabled")


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        (0, np.zeros((3, 1), np.float32), "column obs: shape .* must be 2 long"),
        (1, 1.0, "column action"),
        (2, np.ones((2, 2)), r"reward=\[2, 2\]"),
        (3, np.zeros((2, 2), np.float32), "column next_obs: shape"),
        (4, True, "column terminated: shape"),
        (4, np.zeros((2, 3), bool), r"column terminated: shape \[2, 3\]; \[2\] bool is needed"),
        (5, np.zeros((2, 2), bool), r"column truncated: shape \[2, 2\]; \[2\] bool is needed"),
        (0, "text", "column obs"),
    ],
)
def test_what_does_not_fit_together_is_refused(place: int, value: Any, match: str) -> None:
    buffer = make()
    buffer.add(*step(end=False), autoreset="next_step")
    values = list(step())
    values[place] = value
    obs, action, reward, next_obs, terminated, truncated = values
    unchanged(
        buffer,
        lambda: buffer.add(obs, action, reward, next_obs, terminated, truncated, autoreset="next_step"),
        match,
    )


def test_names_that_are_taken_and_wrong_environments_are_refused() -> None:
    buffer = make()
    values = step()
    unchanged(buffer, lambda: buffer.add(*values, extras={"reward": 1}, autoreset="disabled"), "this name is taken")
    unchanged(buffer, lambda: buffer.add(*values, env=-1, autoreset="disabled"), "env=-1")
    twice = {"a": {"b": 0.0}, "a.b": 1.0}
    unchanged(buffer, lambda: buffer.add(twice, 0, 1, twice, False, False), "would be called so")
    unchanged(buffer, lambda: buffer.add(0.0, 0, 1j, 0.0, False, False), "column reward")
    unchanged(buffer, lambda: buffer.add(0.0, 0, 1e300, 0.0, False, False), "too large for float32")
    unchanged(buffer, lambda: buffer.add(0.0, 0, 1.0, 0.0, [False], False), "a single environment's")


def test_a_step_that_the_limiter_holds_back_changes_nothing() -> None:
    buffer = make(limiter=Limiter(min_size=2, ratio=1.0))
    for _ in range(2):
        buffer.add(*step(1, end=False), autoreset="next_step")
    buffer.add(*step(1, end=False), autoreset="next_step")
    unchanged(buffer, lambda: buffer.add(*step(1), autoreset="next_step"), "wants samples first", TimedOut)


@pytest.mark.parametrize("env", [6, 7, 8])
def test_the_last_environment_that_is_known_can_be_reset_by_hand(env: int) -> None:
    buffer = make()
    drive(Fake([1] * (env + 1), NEXT_STEP), buffer, 1)
    buffer.end_episode(env)
    assert buffer.stepping.state() == list(range(env))

"""Gymnasium: episodes of one environment, and the rows and episodes of vector environments in every mode."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from pipeline.errors import ConfigError, RolloutInvalid, UsageError
from pipeline.records import Rollout
from tasks import EnvSeeds, n_step
from tasks.gym import (
    Cut,
    Ended,
    Episode,
    Rows,
    VectorRows,
    episode,
    gym_env,
    make_env,
    random_actions,
    shared_next_obs,
    vector_episodes,
)

MODES = list(AutoresetMode)
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
ENDS = ["terminated", "truncated", "both"]
ROOT = Path(__file__).parents[2]


class Count(gymnasium.Env[Any, Any]):
    """Shows 0, 1, ... ``length`` and ends there; each transition is worth ``reward``."""

    def __init__(
        self,
        length: int = 3,
        end: str = "terminated",
        reward: float = 1.0,
        reuse: bool = False,
        show: Callable[[np.ndarray], Any] | None = None,
        space: spaces.Space[Any] | None = None,
    ) -> None:
        self.observation_space = space or spaces.Box(0, 100, (1,), np.float32)
        self.action_space = spaces.Discrete(5)
        self.settings = (length, end, reward, reuse)
        self.show = show or (lambda array: array)
        self.array = np.zeros(1, np.float32)
        self.closed = 0
        self.actions: list[Any] = []

    def observe(self, value: float) -> Any:
        if not self.settings[3]:
            self.array = np.zeros(1, np.float32)
        self.array[:] = value
        return self.show(self.array)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return self.observe(0), {"at": 0}

    def step(self, action: Any) -> Any:
        length, end, reward, _ = self.settings
        self.actions.append(action)
        self.at += 1
        over = self.at == length
        flags = (over and end in ("terminated", "both"), over and end in ("truncated", "both"))
        return self.observe(self.at), reward, *flags, {"at": self.at, "deep": {"at": [self.at]}}

    def close(self) -> None:
        self.closed += 1


def drive(envs: Any, rows: VectorRows, calls: int, policy: Callable[[Any], Any] | None = None) -> Iterator[Rows]:
    """Step ``envs`` that have been reset and started, resetting what the mode leaves to the caller."""
    for call in range(calls):
        action = np.full(envs.num_envs, call % 5) if policy is None else policy(call)
        got = rows.step(action, *envs.step(action))
        yield got
        if rows.waiting.any():
            obs, _ = envs.reset(options={"reset_mask": rows.waiting})
            rows.reset(rows.waiting, obs)


def run(
    mode: Any, lengths: Sequence[int] = (3,), calls: int = 9, **settings: Any
) -> tuple[list[Rows], VectorRows, Any]:
    """Drive counting environments of the given lengths; return the rows of each call."""
    options = {name: settings.pop(name) for name in ("shared_obs", "episodes") if name in settings}
    made = [lambda length=length: Count(length, **settings) for length in lengths]
    envs = SyncVectorEnv(made, autoreset_mode=mode)
    rows = VectorRows.of(envs, **options)
    rows.start(envs.reset()[0])
    return list(drive(envs, rows, calls)), rows, envs


async def first(stream: AsyncIterator[Episode], count: int) -> AsyncIterator[Episode]:
    """The first ``count`` episodes of ``stream``."""
    for _ in range(count):
        yield await anext(stream)


def column(rows: Sequence[Rows], name: str) -> list[Any]:
    joined: list[Any] = np.concatenate([part.tensors[name].reshape(-1) for part in rows]).tolist()
    return joined


def recorded(actions: Any, obs: Any) -> Any:
    """The policy that repeats ``actions`` in a counting environment."""
    return actions[int(obs[0])]


def same(left: Episode, right: Episode) -> None:
    assert left.tensors.keys() == right.tensors.keys()
    for name, tensor in left.tensors.items():
        assert tensor.dtype == right.tensors[name].dtype, name
        np.testing.assert_array_equal(tensor, right.tensors[name], err_msg=name)
    assert (left.total, left.info) == (right.total, right.info)


# --- rows of a vector environment


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("mode", "stored", "empty"), [(NEXT_STEP, 7, [4, 8]), (SAME_STEP, 9, []), (DISABLED, 9, [])])
def test_each_mode_stores_the_transitions_that_happened(  # CASES 59
    mode: AutoresetMode, end: str, stored: int, empty: list[int]
) -> None:
    rows, _, _ = run(mode, end=end)
    assert sum(map(len, rows)) == stored
    assert [call for call, part in enumerate(rows, 1) if not len(part)] == empty
    pairs = list(zip(column(rows, "obs"), column(rows, "next_obs"), strict=True))
    assert pairs == [(0, 1), (1, 2), (2, 3)] * (stored // 3) + [(0, 1)] * (stored % 3)
    assert column(rows, "reward") == [1.0] * stored
    over = [index % 3 == 2 for index in range(stored)]
    none = [False] * stored
    assert column(rows, "terminated") == (none if end == "truncated" else over)
    assert column(rows, "truncated") == (none if end == "terminated" else over)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_discount_is_0_only_where_terminated(mode: AutoresetMode, end: str) -> None:  # CASES 62
    rows, _, _ = run(mode, end=end)
    discount = np.array(column(rows, "discount"))
    assert (discount == np.where(column(rows, "terminated"), 0, 1)).all()
    assert (discount == 0).any() == (end != "truncated")
    assert rows[0]["discount"].dtype == np.float32


@pytest.mark.parametrize("mode", MODES)
def test_rows_name_their_environment_and_episode(mode: AutoresetMode) -> None:
    rows, _, _ = run(mode, lengths=(2, 3), calls=12)
    for env, length in enumerate((2, 3)):
        mine = [
            (int(part.episode[i]), float(part["obs"][i, 0])) for part in rows for i in np.flatnonzero(part.env == env)
        ]
        assert mine == [(index // length, index % length) for index in range(len(mine))]
    assert rows[0]["action"].dtype == np.int64
    assert rows[0]["obs"].dtype == rows[0]["next_obs"].dtype == rows[0]["reward"].dtype == np.float32


@pytest.mark.parametrize(("mode", "calls"), [(NEXT_STEP, [4, 9]), (SAME_STEP, [4, 8]), (DISABLED, [4, 8])])
def test_returns_and_lengths_are_reported_at_the_call_of_the_end(  # CASES 147
    mode: AutoresetMode, calls: list[int]
) -> None:
    rows, _, _ = run(mode, lengths=(4,))
    reports = {call: part.ended for call, part in enumerate(rows, 1) if part.ended}
    assert list(reports) == calls
    assert [reports[call] for call in calls] == [
        (Ended(0, number, 4.0, 4, terminated=True, truncated=False),) for number in range(2)
    ]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_reset_in_mid_episode_clears_the_counters(mode: AutoresetMode, whole: bool) -> None:  # CASES 147
    made = [lambda: Count(4), lambda: Count(9)]
    envs = SyncVectorEnv(made, autoreset_mode=mode)
    rows = VectorRows.of(envs, episodes=True)
    rows.start(envs.reset()[0])
    list(drive(envs, rows, 2))
    if whole:
        rows.start(envs.reset()[0])
    else:
        mask = np.array([True, False])
        rows.reset(mask, envs.reset(options={"reset_mask": mask})[0])
    after = list(drive(envs, rows, 9))
    ended = [report for part in after for report in part.ended]
    assert [report[1:4] for report in ended if report.env == 0] == [(1, 4.0, 4), (2, 4.0, 4)]
    other = (1, 9.0, 9) if whole else (0, 9.0, 9)
    assert [report[1:4] for report in ended if report.env == 1] == [other]
    assert [tuple(after[0]["obs"][:, 0]), tuple(after[0].episode)] == ([(0, 0), (1, 1)] if whole else [(0, 2), (1, 0)])
    for built in rows.finished():
        assert built.obs[:, 0].tolist() == list(range(built.length))


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_right_after_an_end_begins_one_episode(mode: AutoresetMode) -> None:
    _, rows, envs = run(mode, calls=3)
    if mode is not DISABLED:
        rows.start(envs.reset()[0])
    part = next(drive(envs, rows, 1))
    assert (len(part), part["obs"][0, 0], part["next_obs"][0, 0]) == (1, 0, 1)
    assert part.episode[0] == (2 if mode is SAME_STEP else 1)


@pytest.mark.parametrize("mode", MODES)
def test_the_next_obs_of_a_truncated_row_is_right_in_shared_storage(mode: AutoresetMode) -> None:  # CASES 60
    rows, _, _ = run(mode, end="truncated", shared_obs=True)
    plain, _, _ = run(mode, end="truncated")
    assert all("next_obs" not in part.tensors for part in rows)
    assert rows[2].final_obs["obs"].tolist() == [[3]]
    assert rows[2]["discount"].tolist() == [1]
    obs = np.concatenate([part["obs"] for part in rows])
    ends = np.array(column(rows, "terminated")) | np.array(column(rows, "truncated"))
    finals = np.concatenate([part.final_obs["obs"] for part in rows])
    if not ends[-1]:
        finals = np.concatenate([finals, [[1]]])  # what the environment shows now
    assert shared_next_obs(obs, ends, finals)[:, 0].tolist() == column(plain, "next_obs")


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_in_mid_episode_leaks_nothing_into_shared_storage(mode: AutoresetMode) -> None:  # CASES 60
    _, rows, envs = run(mode, lengths=(5, 2), calls=2, shared_obs=True)
    mask = np.array([True, False])
    assert rows.reset(mask, envs.reset(options={"reset_mask": mask})[0]) == [
        Cut(0, 0, 2.0, 2, {"obs": np.array([2.0])})
    ]
    part = next(drive(envs, rows, 1))
    assert (part.env[0], part.episode[0], part["obs"][0, 0]) == (0, 1, 0)
    (mine,) = (cut for cut in rows.start(envs.reset()[0]) if cut.env == 0)
    assert (mine.episode, mine.length, mine.final_obs["obs"].tolist()) == (1, 1, [1])
    assert rows.start(envs.reset()[0]) == []
    obs = np.array([0, 1, 0])  # environment 0's rows, its two cut episodes marked as ends
    assert shared_next_obs(obs, [False, True, True], np.array([2, 1])).tolist() == [1, 2, 1]


def test_shared_storage_without_its_final_observations_is_refused() -> None:
    obs = np.arange(4)
    assert shared_next_obs(obs, [False, True, False, True], np.array([8, 9])).tolist() == [1, 8, 3, 9]
    assert shared_next_obs(obs[:0], [], obs[:0]).tolist() == []
    for ends, finals in [([0, 1, 0, 0], [8]), ([0, 1, 0, 1], [9]), ([0, 1, 1], [8, 9]), ([0, 0, 0, 1], [7, 8, 9])]:
        with pytest.raises(ConfigError, match="one is needed for each end"):
            shared_next_obs(obs, ends, np.array(finals))


# --- whole episodes of a vector environment


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mode", MODES)
async def test_a_vector_environments_episodes_are_those_of_single_ones(mode: AutoresetMode, end: str) -> None:
    lengths = (1, 3, 4)
    _, rows, _ = run(mode, lengths=lengths, calls=30, end=end, episodes=True)
    episodes = rows.finished()
    assert rows.finished() == []
    for env, length in enumerate(lengths):
        mine = [built for built in episodes if built.env == env]
        assert [built.number for built in mine] == list(range(len(mine)))
        assert len(mine) == 30 // (length + (mode is NEXT_STEP))
        for built in mine:
            want = await episode(Count(length, end), functools.partial(recorded, built.action), seed=None)
            same(built, want)
            assert built.final_obs.tolist() == [length]
            assert built.info == {"at": length, "deep": {"at": [length]}}


@pytest.mark.parametrize("mode", MODES)
def test_rows_and_episodes_tell_the_same(mode: AutoresetMode) -> None:
    parts, rows, _ = run(mode, lengths=(2, 5, 3), calls=23, episodes=True)
    for built in rows.finished():
        mine = [(part, np.flatnonzero((part.env == built.env) & (part.episode == built.number))) for part in parts]
        for name in ("obs", "action", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(np.concatenate([p[name][i] for p, i in mine]), built[name])
        following = np.concatenate([part["next_obs"][i] for part, i in mine])
        np.testing.assert_array_equal(following, built.observations()[1:])
    totals = [(report.total, report.length) for part in parts for report in part.ended]
    assert totals


@pytest.mark.parametrize("mode", MODES)
def test_environments_never_mix_in_n_step_sums(mode: AutoresetMode) -> None:  # CASES 57
    envs = SyncVectorEnv([lambda: Count(3, reward=1), lambda: Count(3, reward=10)], autoreset_mode=mode)
    rows = VectorRows.of(envs, episodes=True)
    rows.start(envs.reset()[0])
    list(drive(envs, rows, 3))
    sums = {b.env: n_step(b.reward, b.terminated, b.truncated, 0.5, 2).returns.tolist() for b in rows.finished()}
    assert sums == {0: [1.5, 1.5, 1.0], 1: [15.0, 15.0, 10.0]}


def test_calls_are_kept_no_longer_than_the_oldest_open_episode() -> None:
    for mode in MODES:
        _, rows, _ = run(mode, lengths=(2, 3), calls=60, episodes=True)
        assert len(rows._calls) <= 5
        _, rows, _ = run(mode, lengths=(2, 3), calls=60)
        assert len(rows._calls) == 0


def test_episodes_are_only_kept_when_asked_for() -> None:
    _, rows, _ = run(NEXT_STEP)
    with pytest.raises(UsageError, match="episodes=True"):
        rows.finished()


@pytest.mark.parametrize("limit", [500, 20])
@pytest.mark.parametrize("mode", MODES)
async def test_cartpole_is_the_same_alone_and_in_a_vector(mode: AutoresetMode, limit: int) -> None:
    def make() -> gymnasium.Env[Any, Any]:
        return gymnasium.make("CartPole-v1", max_episode_steps=limit)

    def policy(obs: Any) -> Any:
        action = (obs[..., 2] + 0.3 * obs[..., 3] > 0).astype(np.int64)
        return action, {"logprob": obs[..., 0].astype(np.float16)}

    envs = SyncVectorEnv([make] * 3, autoreset_mode=mode)
    found: list[Episode] = []
    async with contextlib.aclosing(vector_episodes(envs, policy, seed=42)) as stream:
        async for built in stream:
            found.append(built)
            if all(sum(b.env == env for b in found) >= 3 for env in range(3)):
                break
    for env, seed in enumerate(EnvSeeds(42).take(3)):
        single = make()
        for number, built in enumerate([b for b in found if b.env == env]):
            same(built, await episode(single, policy, seed=seed if number == 0 else None))
            assert built.number == number
            assert built.obs.shape == (built.length, 4)
            assert built["logprob"].dtype == np.float16
            if limit == 20:
                assert (built.length, built.truncated[-1], built.terminated[-1]) == (20, True, False)
        single.close()
    envs.close()


@pytest.mark.parametrize("seed", [None, 5, [7, 8]])
async def test_a_vector_takes_no_seed_one_seed_or_one_for_each(seed: Any) -> None:
    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=SAME_STEP)
    firsts: dict[int, Any] = {}
    async with contextlib.aclosing(
        vector_episodes(envs, random_actions(envs.action_space, 1), seed=seed, yield_every=3)
    ) as stream:
        async for built in stream:
            firsts.setdefault(built.env, built.obs[0])
            if len(firsts) == 2:
                break
    if seed is not None:
        for env, own in enumerate(EnvSeeds(seed).take(2) if isinstance(seed, int) else seed):
            want, _ = gymnasium.make("CartPole-v1").reset(seed=own)
            np.testing.assert_array_equal(firsts[env], want)
    envs.close()


async def test_a_vector_without_environments_of_its_own_takes_one_seed() -> None:
    envs = gymnasium.make_vec("CartPole-v1", 3, "vector_entry_point", max_episode_steps=9)
    runs = []
    for _ in range(2):
        async with contextlib.aclosing(vector_episodes(envs, lambda obs: np.zeros(3, np.int64), seed=4)) as stream:
            runs.append([built async for built in first(stream, 6)])
    for once, again in zip(*runs, strict=True):
        same(once, again)
    assert all(built.length <= 9 for built in runs[0])
    envs.close()


@pytest.mark.parametrize("mode", MODES)
async def test_totals_are_right_under_gymnasiums_statistics_wrapper(mode: AutoresetMode) -> None:  # CASES 147
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(
        SyncVectorEnv([lambda: Count(2), lambda: Count(5)], autoreset_mode=mode)
    )
    async with contextlib.aclosing(vector_episodes(envs, lambda obs: np.zeros(2, np.int64), seed=4)) as stream:
        async for built in first(stream, 9):
            assert built.total == built.length == (5 if built.env else 2)
            if mode is NEXT_STEP:  # Gymnasium 1.4's own are wrong after a masked reset, and elsewhere in SAME_STEP
                assert built.info["episode"]["r"] == built.info["episode"]["l"] == built.length


# --- what is shown is copied


@pytest.mark.parametrize("end", ENDS)
async def test_an_array_that_is_mutated_in_place_is_stored_as_it_was(end: str) -> None:  # CASES 122
    action = np.zeros((), np.int64)
    extra = {"value": np.zeros(2)}
    info: dict[str, Any] = {"steps": []}

    def policy(obs: Any) -> Any:
        action[...] += 1
        extra["value"][:] = obs
        return action, extra

    class Reusing(Count):
        def step(self, action: Any) -> Any:
            obs, *rest, _ = super().step(action)
            info["steps"].append(self.at)
            return obs, *rest, info

    built = await episode(Reusing(3, end, reuse=True), policy, seed=0)
    info["steps"].clear()
    assert built.observations()[:, 0].tolist() == [0, 1, 2, 3]
    assert built.action.tolist() == [1, 2, 3]
    assert built["value"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert built.info == {"steps": [1, 2, 3]}


@pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED])
def test_a_vector_that_reuses_its_arrays_is_stored_as_it_was(mode: AutoresetMode) -> None:  # CASES 122
    envs = SyncVectorEnv([lambda: Count(reuse=True)] * 2, copy=False, autoreset_mode=mode)
    rows = VectorRows.of(envs, episodes=True)
    rows.start(envs.reset()[0])
    parts = list(drive(envs, rows, 9))
    wanted = run(mode, lengths=(3, 3))[0]
    for name in ("obs", "next_obs", "action"):
        assert column(parts, name) == column(wanted, name)
    assert {tuple(built.observations()[:, 0]) for built in rows.finished()} == {(0, 1, 2, 3)}


def test_a_final_obs_that_its_own_reset_overwrote_is_noticed() -> None:  # CASES 122
    with pytest.raises(RolloutInvalid, match="environment 0 was written to"):
        run(SAME_STEP, reuse=True)
    parts, _, _ = run(SAME_STEP, reuse=True, show=np.copy)
    assert column(parts, "next_obs") == [1, 2, 3] * 3


def test_what_is_given_out_is_the_callers() -> None:
    envs = SyncVectorEnv([Count, Count], autoreset_mode=NEXT_STEP)
    rows = VectorRows.of(envs, episodes=True)
    rows.start(envs.reset()[0])
    for part in drive(envs, rows, 3):
        for array in part.tensors.values():
            array[...] = 0
    assert [built.observations()[:, 0].tolist() for built in rows.finished()] == [[0, 1, 2, 3]] * 2


# --- nested spaces

DICT = spaces.Dict({"camera": spaces.Box(0, 255, (2, 2), np.uint8), "robot": spaces.Dict({"on": spaces.Discrete(9)})})
TUPLE = spaces.Tuple((spaces.Box(0, 100, (1,), np.float32), spaces.MultiBinary(2)))


def show_dict(array: np.ndarray) -> Any:
    return {"camera": np.full((2, 2), array[0], np.uint8), "robot": {"on": int(array[0])}}


def show_tuple(array: np.ndarray) -> Any:
    return array.copy(), np.array([array[0] % 2, 1], np.int8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("space", "show", "leaves"),
    [(DICT, show_dict, ["obs.camera", "obs.robot.on"]), (TUPLE, show_tuple, ["obs.0", "obs.1"])],
)
async def test_nested_observations_are_stored_by_leaf(mode: AutoresetMode, space: Any, show: Any, leaves: Any) -> None:
    settings = {"space": space, "show": show, "end": "truncated"}
    alone = await episode(Count(3, **settings), lambda obs: 0, seed=1)
    assert [name for name in alone.tensors if name.startswith("obs")] == leaves
    parts, rows, _ = run(mode, lengths=(3, 2), episodes=True, **settings)
    built = next(b for b in rows.finished() if b.env == 0)
    for name in leaves:
        np.testing.assert_array_equal(built[name], alone[name])
        np.testing.assert_array_equal(built.observations(name), alone.observations(name))
        assert built.observations(name).shape[0] == 4
        following = np.concatenate([p["next_" + name][p.env == 0] for p in parts])[:3]
        np.testing.assert_array_equal(following, alone.observations(name)[1:])
    with pytest.raises(KeyError, match=leaves[0]):
        _ = built.obs


async def test_nested_actions_are_stored_by_leaf_and_given_as_they_are() -> None:
    env = Count(2)
    built = await episode(env, lambda obs: ({"arm": np.ones(2), "grip": 1}, {}), seed=1)
    assert built["action.arm"].tolist() == [[1, 1], [1, 1]]
    assert built["action.grip"].tolist() == [1, 1]
    assert env.actions[0]["grip"] == 1


@pytest.mark.parametrize(
    ("show", "message"),
    [
        (lambda array: "text", r"obs is a str \(dtype <U4\)"),
        (lambda array: {"a": None}, r"obs\.a is a NoneType"),
        (lambda array: [[1, 2], [3]], "obs is a list that makes no array"),
        (lambda array: np.zeros(int(array[0]) + 1), "obs has several shapes"),
        (lambda array: tuple([1.0] * (int(array[0]) + 1)), "names changed"),
        (lambda array: torch.zeros(1, dtype=torch.bfloat16), "obs is a Tensor that makes no array"),
        (lambda array: {"a.b": 1, "a": {"b": 2}}, "two parts of obs"),
    ],
)
async def test_an_observation_that_no_array_can_hold_is_a_clear_error(show: Any, message: str) -> None:
    with pytest.raises(RolloutInvalid, match=message):
        await episode(Count(show=show), lambda obs: 0, seed=1)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(3)),
        spaces.Dict({"graph": spaces.Graph(spaces.Discrete(3), None)}),
        spaces.Tuple((spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))),)),
    ],
)
def test_a_vector_of_spaces_that_cannot_be_batched_is_refused_when_built(space: Any) -> None:
    envs = SyncVectorEnv([lambda: Count(space=space)])
    with pytest.raises(ConfigError, match=r"observation.* space is a"):
        VectorRows.of(envs)


# --- extras, policies, limits


async def test_extras_are_stacked_beside_the_actions() -> None:
    def policy(obs: Any) -> Any:
        grad = torch.tensor(float(obs[0]), requires_grad=True)
        return 1, {"logprob": grad * 2, "hidden": {"h": np.ones(3, np.float16)}}

    built = await episode(Count(), policy, seed=1)
    assert built["logprob"].tolist() == [0, 2, 4]
    assert built["hidden.h"].shape == (3, 3)
    assert built["hidden.h"].dtype == np.float16


@pytest.mark.parametrize("name", ["obs", "reward", "final_obs", "next_obs.x", "discount"])
async def test_an_extra_cannot_take_a_name_that_is_used(name: str) -> None:
    with pytest.raises(RolloutInvalid, match="this name is taken"):
        await episode(Count(), lambda obs: (1, {name: 1.0}), seed=1)


@pytest.mark.parametrize("mode", MODES)
def test_extras_of_a_vector_follow_their_rows(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([lambda: Count(2), lambda: Count(3)], autoreset_mode=mode)
    rows = VectorRows.of(envs, episodes=True)
    obs, _ = envs.reset()
    rows.start(obs)
    for _ in range(9):
        seen, action = obs[:, 0] * 10, np.zeros(2, np.int64)
        obs, reward, terminated, truncated, info = envs.step(action)
        part = rows.step(action, obs, reward, terminated, truncated, info, extras={"seen": seen})
        assert part["seen"].tolist() == (part["obs"][:, 0] * 10).tolist()
        if rows.waiting.any():
            obs, _ = envs.reset(options={"reset_mask": rows.waiting})
            rows.reset(rows.waiting, obs)
    for built in rows.finished():
        assert built["seen"].tolist() == (built.obs[:, 0] * 10).tolist()


async def test_a_policy_may_be_asynchronous() -> None:
    async def policy(obs: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return 2, {"seen": obs[0]}

    built = await episode(Count(), policy, seed=1)
    assert built.action.tolist() == [2, 2, 2]
    assert built["seen"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("limit", "length", "cut"), [(2, 2, True), (3, 3, False), (9, 3, False), (1, 1, True)])
async def test_max_steps_truncates_and_keeps_the_final_observation(limit: int, length: int, cut: bool) -> None:
    built = await episode(Count(), lambda obs: 0, seed=1, max_steps=limit)
    assert built.length == length
    assert built.final_obs.tolist() == [length]
    assert built.truncated.tolist() == [False] * (length - 1) + [cut or limit == 3]
    assert built.terminated.tolist() == [False] * (length - 1) + [length == 3]
    for option in ("max_steps", "yield_every"):
        with pytest.raises(ConfigError, match=f"{option}=0"):
            await episode(Count(), lambda obs: 0, seed=1, **{option: 0})


@pytest.mark.parametrize(("yield_every", "turns"), [(1, 100), (10, 10), (32, 4), (1000, 1)])
async def test_other_tasks_get_a_turn_every_so_many_transitions(yield_every: int, turns: int) -> None:
    counted = 0
    over = False

    async def count() -> None:
        nonlocal counted
        while not over:
            counted += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        await episode(Count(100), lambda obs: 0, seed=1, yield_every=yield_every)
        over = True
    assert turns - 1 <= counted <= turns + 2


async def test_an_episode_becomes_a_rollout() -> None:
    built = await episode(Count(4, reward=0.1), lambda obs: (3, {"logprob": -0.5}), seed=1)
    rollout = built.rollout()
    assert isinstance(rollout, Rollout)
    assert (rollout.reward, rollout.tokens) == (0.1 + 0.1 + 0.1 + 0.1, 4)
    assert rollout.info == {"at": 4, "deep": {"at": [4]}}
    assert rollout["obs"].shape == (4, 1)
    assert {name: rollout[name].dtype.name for name in rollout.traces[0].tensors} == {
        "obs": "float32",
        "action": "int64",
        "logprob": "float64",
        "reward": "float32",
        "terminated": "bool",
        "truncated": "bool",
        "final_obs": "float32",
    }
    named = built.rollout(info={"mine": 1}, agent="left", policy="p1")
    assert (named.info, named.traces[0].agent, named.traces[0].policy) == ({"mine": 1}, "left", "p1")


async def test_an_info_of_any_kind_never_breaks_an_episode() -> None:  # CASES 120
    class Odd(Count):
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            deep: Any = []
            for _ in range(5000):
                deep = [deep]
            odd = {
                "deep": deep,
                "object": object(),
                "array": np.ones(3),
                "number": np.float32(1.5),
                7: {"ok": (1, "a")},
            }
            return *rest, odd

    built = await episode(Odd(), lambda obs: 0, seed=1)
    assert built.info.keys() == {"deep", "number", "7"}
    assert (built.info["number"], built.info["7"]) == (1.5, {"ok": [1, "a"]})
    assert type(built.info["number"]) is float


@pytest.mark.parametrize(("observations", "transitions"), [(1, 0), (2, 1), (3, 2)])
def test_an_episode_has_one_transition_less_than_observations(observations: int, transitions: int) -> None:  # CASES 69
    from tasks.gym.episodes import build_episode

    leaves = [{"obs": np.array([value], np.uint8), "action": np.array(1)} for value in range(transitions)]
    built = build_episode(
        leaves, [1.0] * transitions, {"obs": np.array([transitions], np.uint8)}, terminated=True, truncated=False
    )
    assert built.length == built.rollout().tokens == transitions
    assert built.observations().shape == (observations, 1)
    assert built.observations().dtype == np.uint8
    assert built.total == transitions
    assert built.terminated.tolist() == ([False] * (transitions - 1) + [True])[:transitions]
    sums = n_step(built.reward, built.terminated, built.truncated, 0.9, 3)
    assert len(sums.returns) == transitions


# --- seeds and resources


async def test_a_seed_decides_the_start_and_every_random_action() -> None:  # CASES 36
    async def play(seed: int) -> Episode:
        async with gym_env("CartPole-v1") as env:
            env.action_space.seed(int(np.random.SeedSequence().entropy % 1000))  # type: ignore[operator]
            return await episode(env, lambda obs: env.action_space.sample(), seed=seed)

    seeds = EnvSeeds(42).take(4)
    first = [await play(seed) for seed in seeds]
    for once, again in zip(first, [await play(seed) for seed in seeds], strict=True):
        same(once, again)
    assert len({once.obs[0].tobytes() for once in first}) == 4


def test_random_actions_repeat_exactly_and_touch_no_other_generator() -> None:  # CASES 36
    space = spaces.Box(-1, 1, (3,))
    space.seed(1)
    one, two, other = (random_actions(space, seed) for seed in (42, 42, 43))
    left, right = ([np.asarray(policy(None)) for _ in range(10)] for policy in (one, two))
    np.testing.assert_array_equal(left, right)
    assert not np.array_equal(left[0], other(None))
    mine = space.sample()
    space.seed(1)
    np.testing.assert_array_equal(mine, space.sample())


async def test_an_environment_is_closed_whatever_happens() -> None:
    made: list[Count] = []

    def make(length: int) -> Count:
        made.append(Count(length))
        return made[-1]

    with pytest.raises(ZeroDivisionError):
        async with gym_env(make, length=2):
            raise ZeroDivisionError
    factory = make_env(make, length=3)
    async with factory() as one, factory() as two:
        assert one is not two
        assert [env.closed for env in made] == [1, 0, 0]
        assert (await episode(two, lambda obs: 0, seed=1)).length == 3
    assert [env.closed for env in made] == [1, 1, 1]
    async with make_env("CartPole-v1", max_episode_steps=7)() as env:
        assert env.spec is not None
        assert env.spec.max_episode_steps == 7


# --- modes


@pytest.mark.parametrize("mode", ["NEXT_STEP", "NextStep", "next-step", "AutoresetMode.NEXT_STEP", NEXT_STEP])
def test_a_mode_is_taken_by_any_of_its_names(mode: Any) -> None:
    assert VectorRows(2, mode)._mode is NEXT_STEP


@pytest.mark.parametrize("mode", [None, "", "SOME_STEP", True, 3])
def test_an_unknown_mode_is_an_error_that_names_the_three(mode: Any) -> None:
    with pytest.raises(ConfigError, match="next_step, same_step, disabled") as caught:
        VectorRows(2, mode)
    assert caught.value.option == "autoreset_mode"


def test_the_mode_is_read_from_the_environment_and_must_not_contradict_it() -> None:
    envs = SyncVectorEnv([Count], autoreset_mode=DISABLED)
    assert VectorRows.of(envs)._mode is DISABLED
    assert VectorRows.of(gymnasium.wrappers.vector.RecordEpisodeStatistics(envs))._mode is DISABLED
    with pytest.raises(ConfigError, match=r"SAME_STEP.*says that it is AutoresetMode\.DISABLED"):
        VectorRows.of(envs, SAME_STEP)
    del envs.metadata["autoreset_mode"]
    assert VectorRows.of(envs, "DISABLED")._mode is DISABLED
    with pytest.raises(ConfigError, match="next_step, same_step, disabled"):
        VectorRows.of(envs)


def call(size: int = 2, **change: Any) -> dict[str, Any]:
    zeros = {"action": np.zeros(size), "obs": np.zeros((size, 1)), "reward": np.zeros(size)}
    return {**zeros, "terminated": np.zeros(size, bool), "truncated": np.zeros(size, bool), **change}


def test_verbs_at_the_wrong_time_are_refused() -> None:
    rows = VectorRows(2, DISABLED)
    with pytest.raises(UsageError, match="step before start"):
        rows.step(**call())
    with pytest.raises(UsageError, match="reset before start"):
        rows.reset([True, True], np.zeros((2, 1)))
    rows.start(np.zeros((2, 1)))
    rows.step(**call(terminated=[False, True]))
    assert rows.waiting.tolist() == [False, True]
    with pytest.raises(UsageError, match=r"environments \[1\] have ended"):
        rows.step(**call())
    rows.reset([False, True], np.ones((2, 1)))
    part = rows.step(**call())
    assert (part["obs"][:, 0].tolist(), part.episode.tolist()) == ([0, 1], [0, 1])


@pytest.mark.parametrize("info", [None, {}, {"final_obs": np.array([None, None])}, [{}, {}]])
def test_a_same_step_end_without_its_final_obs_is_an_error(info: Any) -> None:
    rows = VectorRows(2, SAME_STEP)
    rows.start(np.zeros((2, 1)))
    with pytest.raises(ConfigError, match="no final_obs for environment 1"):
        rows.step(**call(truncated=[False, True]), info=info)


@pytest.mark.parametrize(
    "info",
    [
        {"final_obs": np.array([[0.0], [7.0]])},
        {"final_obs": np.array([[0.0], [7.0]]), "_final_obs": np.array([False, True])},
        [{}, {"final_obs": np.array([7.0]), "final_info": {"ok": True}}],
    ],
)
def test_final_observations_are_found_however_they_are_batched(info: Any) -> None:
    rows = VectorRows(2, SAME_STEP, episodes=True)
    rows.start(np.zeros((2, 1)))
    assert rows.step(**call(truncated=[False, True]), info=info)["next_obs"].tolist() == [[0], [7]]
    (built,) = rows.finished()
    assert built.final_obs.tolist() == [7]
    assert built.info == ({"ok": True} if isinstance(info, list) else {})


def test_nested_final_observations_may_be_batched_by_leaf() -> None:
    rows = VectorRows(2, SAME_STEP)
    rows.start({"a": np.zeros(2), "b": (np.zeros((2, 1)),)})
    finals = {"a": np.array([0, 7.0]), "b": (np.array([[0], [8.0]]),)}
    given = call(obs={"a": np.zeros(2), "b": (np.zeros((2, 1)),)}, terminated=[False, True])
    part = rows.step(**given, info={"final_obs": finals})
    assert part["next_obs.a"].tolist() == [0, 7]
    assert part["next_obs.b.0"].tolist() == [[0], [8]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": np.zeros(3)}, r"action has shape \(3,\)"),
        ({"action": (1, 2)}, r"action\.0 has shape \(\)"),
        ({"obs": np.zeros((3, 1))}, r"obs has shape \(3, 1\)"),
        ({"obs": {"x": np.zeros((2, 1))}}, "obs had the parts"),
        ({"reward": 1.0}, "reward has shape"),
        ({"terminated": False}, "terminated has shape"),
        ({"extras": {"value": 1.0}}, "value has shape"),
        ({"truncated": [1, 0], "info": {"final_obs": np.array([[1, 2], [3, 4]])}}, "not like its observations"),
    ],
)
def test_what_has_not_one_row_for_each_environment_is_named(change: Any, message: str) -> None:
    rows = VectorRows(2, SAME_STEP)
    rows.start(np.zeros((2, 1)))
    with pytest.raises(RolloutInvalid, match=message):
        rows.step(**{**call(), **change})
    with pytest.raises(ConfigError, match="env_mask"):
        rows.reset([True], np.zeros((2, 1)))
    with pytest.raises(ConfigError, match="num_envs=0"):
        VectorRows(0, SAME_STEP)


# --- imports


def python(code: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_gymnasium_is_imported_by_its_module_only_and_missing_it_says_what_to_install() -> None:
    assert python("import sys, tasks; print('gymnasium' in sys.modules)") == "False\n"
    code = "import sys; sys.modules['gymnasium'] = None; import tasks; import tasks.gym"
    assert "ImportError: tasks.gym needs Gymnasium: pip install 'forebay[gym]'" in python(code)


def test_nothing_in_tasks_stands_in_for_gymnasium() -> None:
    for folder in (ROOT / "tasks", ROOT / "tasks" / "gym"):
        assert python("import gymnasium; print(gymnasium.make('CartPole-v1').spec.id)", folder) == "CartPole-v1\n"

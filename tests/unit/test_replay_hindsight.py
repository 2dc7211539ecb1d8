"""Hindsight: a share of the drawn rows with goals that their own episode reached later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Column, Hindsight, ReplayBuffer, Schema, Slices
from pipeline.config import Options
from pipeline.errors import ConfigError

STRATEGIES = ["future", "final", "episode"]
FAR = -1.0  # a goal that nothing reaches


def reward(achieved: np.ndarray, goal: np.ndarray) -> np.ndarray:
    return np.where((achieved == goal).all(axis=-1), 0.0, -1.0)


def make(capacity: int = 10_000, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, **{"returns": "numpy", **options})


def rows(episode: int, begin: int, end: int, last: bool) -> dict[str, Any]:
    """Rows of an episode that achieves ``100 * episode + place + 1`` after each place."""
    place = np.arange(begin, end)

    def obs(at: np.ndarray) -> dict[str, np.ndarray]:
        state = (100.0 * episode + at).astype(np.float32)[:, None]
        return {"observation": state, "achieved_goal": state, "desired_goal": np.full_like(state, FAR)}

    ends = (place == end - 1) & last
    flags = {"terminated": np.zeros(len(place), bool), "truncated": ends}
    return {"obs": obs(place), "next_obs": obs(place + 1), "reward": np.full(len(place), -1, np.float32), **flags}


def filled(lengths: list[int], envs: int = 1, capacity: int = 10_000, **options: Any) -> ReplayBuffer:
    """Episodes of these lengths, row by row in turn over environments, so that they lie in a mixture."""
    buffer = make(capacity, **options)
    todo = [(number, length) for number, length in enumerate(lengths, 1)]
    at: list[list[int]] = [[] for _ in range(envs)]
    while todo or any(at):
        for env, now in enumerate(at):
            if not now and todo:
                number, length = todo.pop(0)
                now[:] = [number, 0, length]
            if now:
                number, place, length = now
                buffer.extend(rows(number, place, place + 1, place == length - 1), env=env)
                now[1] += 1
                if now[1] == length:
                    now.clear()
    return buffer


def check(buffer: ReplayBuffer, batch: Any, her: Hindsight, spans: dict[int, tuple[int, int]]) -> None:
    """Compare a batch with what its rows say of themselves: number of the episode and place."""
    chosen = batch.relabelled
    state = batch["obs"]["observation"][:, 0]
    episode, place = state // 100, state % 100
    goal = batch["obs"]["desired_goal"][:, 0]
    np.testing.assert_array_equal(goal, batch["next_obs"]["desired_goal"][:, 0])
    assert (goal[~chosen] == FAR).all()
    assert (batch["reward"][~chosen] == -1).all()
    np.testing.assert_array_equal(goal[chosen] // 100, episode[chosen])  # never of another episode
    reached = goal % 100 - 1  # the place of the row that achieved it
    for index in np.flatnonzero(chosen):
        oldest, last = spans[int(episode[index])]
        least = {"future": place[index], "final": last, "episode": oldest}[her.strategy]
        assert least <= reached[index] <= last
    achieved = batch["next_obs"]["achieved_goal"]
    np.testing.assert_array_equal(batch["reward"][chosen], np.where(achieved[chosen, 0] == goal[chosen], 0, -1))


def spans(buffer: ReplayBuffer) -> dict[int, tuple[int, int]]:
    """First and last place that are there, by episode."""
    found: dict[int, tuple[int, int]] = {}
    storage = buffer.ring.storage
    for state in storage.view("obs.observation")[buffer.ring.slots(buffer.ring.keys())][:, 0].tolist():
        episode, place = divmod(int(state), 100)
        low, high = found.get(episode, (place, place))
        found[episode] = (min(low, place), max(high, place))
    return found


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("envs", "capacity"), [(1, 1000), (1, 37), (3, 1000), (3, 41)])
def test_goals_come_from_the_same_episode(strategy: Any, envs: int, capacity: int, share: bool) -> None:
    lengths = [5, 1, 9, 3, 30, 2, 8, 8, 1, 4]
    buffer = filled(lengths, envs, capacity, share_next_obs=share, seed=3)
    her = Hindsight(reward=reward, strategy=strategy)
    for _ in range(20):
        batch = buffer.sample(50, hindsight=her)
        assert batch.relabelled.sum() == 40
        check(buffer, batch, her, spans(buffer))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_row_that_may_be_chosen_is_chosen_alike(strategy: Any) -> None:
    buffer = filled([4], select="fifo")
    her = Hindsight(reward=reward, strategy=strategy, ratio=1.0)
    counts = np.zeros((4, 4), int)
    for _ in range(2000):
        goal = buffer.sample(4, hindsight=her)["obs"]["desired_goal"][:, 0]
        counts[np.arange(4), (goal % 100 - 1).astype(int)] += 1
    if strategy == "final":
        want = np.repeat([[0, 0, 0, 2000]], 4, axis=0)
    elif strategy == "episode":
        want = np.full((4, 4), 500)
    else:
        want = np.array([[500] * 4, [0, 667, 667, 667], [0, 0, 1000, 1000], [0, 0, 0, 2000]])
    assert ((counts == 0) == (want == 0)).all()
    assert (np.abs(counts - want) < 110).all()  # five standard deviations


def test_an_open_episode_ends_at_its_newest_row() -> None:
    buffer = make()
    buffer.extend(rows(1, 0, 3, last=False))
    her = Hindsight(reward=reward, strategy="final", ratio=1.0)
    assert set(buffer.sample(9, hindsight=her)["obs"]["desired_goal"][:, 0]) == {103}
    buffer.extend(rows(1, 3, 5, last=True))
    assert set(buffer.sample(9, hindsight=her)["obs"]["desired_goal"][:, 0]) == {105}


@pytest.mark.parametrize(("ratio", "number"), [(0, 0), (0.5, 5), (0.77, 8), (1, 10)])
def test_the_share_is_of_whole_rows(ratio: float, number: int) -> None:
    buffer = filled([5, 5], seed=1)
    her = Hindsight(reward=reward, ratio=ratio)
    chosen = [buffer.sample(10, hindsight=her).relabelled for _ in range(50)]
    assert {int(each.sum()) for each in chosen} == {number}
    assert (np.any(chosen, axis=0) == (number > 0)).all()  # and not always the same ones


def test_what_is_stored_stays_as_it_was_and_the_same_seed_gives_the_same() -> None:
    one, other = filled([5, 9], seed=4), filled([5, 9], seed=4)
    her = Hindsight(reward=reward, ratio=1.0)
    for _ in range(5):
        batch, twin = one.sample(32, hindsight=her), other.sample(32, hindsight={"reward": reward, "ratio": 1.0})
        np.testing.assert_array_equal(batch.keys, twin.keys)
        np.testing.assert_array_equal(batch["obs"]["desired_goal"], twin["obs"]["desired_goal"])
        batch["obs"]["desired_goal"][:] = 7
    assert (one.sample(32)["obs"]["desired_goal"] == FAR).all()
    assert one.sample(32).relabelled is None


def test_ends_are_recomputed_where_that_is_asked() -> None:
    buffer = filled([6], select="fifo")
    her = Hindsight(reward=reward, ratio=1.0, strategy="final", terminated=lambda own, goal: (own == goal)[:, 0])
    batch = buffer.sample(6, hindsight=her, gamma=0.5)
    assert batch["terminated"].tolist() == [False] * 5 + [True]
    assert batch["truncated"].tolist() == [False] * 5 + [True]
    assert batch.discount.tolist() == [0.5] * 5 + [0.0]
    assert batch["reward"].tolist() == [-1.0] * 5 + [0.0]
    plain = buffer.sample(6, hindsight=Hindsight(reward=reward, ratio=1.0), gamma=0.5)
    assert not plain["terminated"].any()
    assert plain.discount.tolist() == [0.5] * 6


def test_columns_may_have_other_names_and_be_left_out() -> None:
    buffer = make(select="fifo")
    place = np.arange(4)
    ends = place == 3
    buffer.extend({"goal": np.zeros(4, int), "reached": place + 1, "reward": np.zeros(4), "done": ends, "x": place})
    given = {"reward": lambda own, goal: own == goal, "goal": "goal", "achieved": "reached", "strategy": "final"}
    batch = buffer.sample(4, hindsight={**given, "ratio": 1.0, "terminated": lambda own, goal: own == goal})
    assert batch["goal"].tolist() == [4] * 4
    assert batch["reward"].tolist() == [0, 0, 0, 1]
    assert batch["done"].tolist() == [False, False, False, True]
    few = buffer.sample(4, columns=["x", "goal"], hindsight={**given, "ratio": 1.0})
    assert few.columns == ("goal", "x")
    assert few["goal"].tolist() == [4] * 4


def test_tensors_come_out_and_the_mask_goes_along() -> None:
    buffer = filled([5], returns="torch")
    batch = buffer.sample(10, hindsight=Hindsight(reward=reward))
    assert batch["obs"]["desired_goal"].shape == (10, 1)
    assert batch.numpy().relabelled.sum() == 8


# --- what is refused


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"ratio": 1.5}, "ratio=1.5: a number from 0 to 1"),
        ({"ratio": float("nan")}, "ratio=nan"),
        ({"reward": None}, "reward=None: a function"),
        ({"terminated": 3}, "terminated=3: a function"),
        ({"strategy": "past"}, "'future', 'final', 'episode'"),
        ({"goals": "x"}, "no option 'goals'"),
        ({"goal": "elsewhere"}, "column 'elsewhere': there is none"),
        ({"achieved": "elsewhere"}, "column 'elsewhere': there is none"),
        ({"goal": ("obs.desired_goal", "reward")}, "cannot be a goal: reward"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_drawn(given: dict[str, Any], match: str) -> None:
    buffer = filled([5], select="without_replacement")
    with pytest.raises(ConfigError, match=match):
        buffer.sample(5, hindsight={"reward": reward, **given})
    assert sorted(buffer.sample(5).keys.tolist()) == list(range(5))
    assert issubclass(Hindsight, Options)


@pytest.mark.parametrize("also", [{"n_step": 2, "gamma": 0.9}, {"stack": 2}, {"slices": Slices(length=2)}])
def test_rows_that_go_on_with_old_goals_are_refused(also: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="relabel single rows"):
        filled([5]).sample(5, hindsight=Hindsight(reward=reward), **also)


def test_there_is_no_default_where_the_columns_are_not() -> None:
    buffer = make()
    buffer.extend({"obs": np.zeros(3), "reward": np.zeros(3)})
    with pytest.raises(ConfigError, match=r"column 'next_obs.achieved_goal'"):
        buffer.sample(2, hindsight=Hindsight(reward=reward))
    columns = [Column("a", "bfloat16"), Column("b", "bfloat16"), Column("reward", "float32")]
    buffer = make(schema=Schema(tuple(columns)))
    number = torch.zeros((), dtype=torch.bfloat16)
    buffer.append({"a": number, "b": number, "reward": 0.0})
    with pytest.raises(ConfigError, match="that numpy knows"):
        buffer.sample(1, hindsight=Hindsight(reward=reward, goal="a", achieved="b"))


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (lambda own, goal: 1.0, r"shape \[\]"),
        (lambda own, goal: own.repeat(2, axis=0)[:, 0], "finite numbers are needed"),
        (lambda own, goal: own[:, 0] * np.nan, "returned nan; .* finite numbers are needed"),
        (lambda own, goal: np.full(len(own), 1e300), "cannot hold"),
    ],
)
def test_a_function_that_returns_something_else_is_told(returned: Any, match: str) -> None:
    buffer = filled([5])
    with pytest.raises(ConfigError, match=match):
        buffer.sample(5, hindsight=Hindsight(reward=returned))


def test_rewards_of_a_dtype_that_only_torch_has_keep_their_values() -> None:
    her = Hindsight(reward=lambda own, goal: torch.full((len(own), 1), 0.5, dtype=torch.bfloat16), ratio=1.0)
    assert (filled([5]).sample(5, hindsight=her)["reward"] == 0.5).all()

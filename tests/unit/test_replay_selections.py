"""Rows that are drawn a bounded number of times, rarer as they age, or out of the newest episodes alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import (
    ConfigError,
    Ordered,
    ReplayBuffer,
    Slices,
    StalenessWeighted,
    Starved,
    Uniform,
    WithoutReplacement,
)
from tests.support.replay import as_likely, everything, filled, probabilities, rows

CONSUMING = [
    Uniform(uses=3),
    Uniform(uses=3, window=30),
    Uniform(uses=3, window_trajectories=30),
    WithoutReplacement(uses=3),
    Ordered(uses=3),
    Ordered(by="lifo", uses=3),
]


# -- uses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", CONSUMING)
def test_every_row_is_drawn_as_often_as_it_may_and_no_oftener(select: Any) -> None:
    buffer = filled(25, 30, ends=[7, 8, 19], select=select)
    drawn = Counter(key for _ in range(15) for key in buffer.sample(5).keys.tolist())
    assert drawn == dict.fromkeys(range(25), 3)
    with pytest.raises(Starved, match=r"fewer can be drawn|0 uses left|3 times|0 are there"):
        buffer.sample(1)
    buffer.extend(rows(5, 25))
    assert Counter(buffer.sample(5).keys.tolist() + buffer.sample(5).keys.tolist()).keys() <= set(range(25, 30))


@pytest.mark.parametrize("select", CONSUMING)
def test_a_new_row_in_the_place_of_one_that_was_drawn_has_all_its_uses(select: Any) -> None:
    buffer = filled(10, select=select)
    for _ in range(3):
        buffer.sample(10)
    buffer.extend(rows(4, 10))
    drawn = Counter(key for _ in range(3) for key in buffer.sample(4).keys.tolist())
    assert drawn == dict.fromkeys(range(10, 14), 3)


def test_within_a_batch_rows_are_as_likely_as_one_after_the_other() -> None:
    pairs = []
    for seed in range(4000):
        first, second, third = filled(2, 2, select=Uniform(uses=2), seed=seed).sample(3).keys
        pairs.append(4 * first + 2 * second + third)
    # aab cannot go on with a: of the first two alike, the third is the other one.
    assert as_likely(np.array(pairs), [0, 2, 1, 1, 1, 1, 2])


def test_rows_with_uses_left_are_each_as_likely() -> None:
    firsts = []
    for seed in range(3000):
        buffer = filled(6, 6, select=Uniform(uses=1), seed=seed)
        used = buffer.sample(2).keys
        key = buffer.sample(1).keys[0]
        assert key not in used
        firsts.append(key)
    assert as_likely(np.array(firsts), np.ones(6))


def test_what_is_too_much_is_refused_and_counts_as_nothing() -> None:
    for select in CONSUMING:
        buffer = filled(10, select=select)
        for _ in range(3):
            buffer.sample(8)
        before = everything(buffer)["drawer"]
        with pytest.raises(Starved):
            buffer.sample(10)
        after = everything(buffer)["drawer"]
        assert before == after


def test_of_slices_the_first_row_is_what_is_drawn() -> None:
    buffer = filled(10, select=Uniform(uses=2))
    drawn = np.concatenate([buffer.sample(4, slices=Slices(length=3)).keys for _ in range(4)])
    assert Counter(drawn.tolist()) == dict.fromkeys(range(8), 2)
    with pytest.raises(Starved, match="1 rows were asked for, and those that could be drawn have 0 uses left"):
        buffer.sample(1, slices=Slices(length=3))
    assert set(buffer.sample(4).keys.tolist()) == {8, 9}


def test_a_row_that_is_carried_over_an_epoch_is_counted_once_for_each_batch() -> None:
    buffer = filled(5, select=WithoutReplacement(uses=2))
    drawn = [key for _ in range(2) for key in buffer.sample(4).keys.tolist()]
    assert max(Counter(drawn).values()) == 2
    with pytest.raises(Starved):
        buffer.sample(4)
    assert Counter(drawn + buffer.sample(2).keys.tolist()) == dict.fromkeys(range(5), 2)


@pytest.mark.parametrize("select", CONSUMING)
@pytest.mark.parametrize("added", [7, 45])
def test_how_often_rows_were_drawn_is_saved(tmp_path: Path, select: Any, added: int) -> None:
    def rest(buffer: ReplayBuffer) -> list[list[int]]:
        found = [buffer.sample(size).keys.tolist() for size in (2, 3, 1)]
        buffer.extend(rows(3, added))
        return [*found, *(buffer.sample(2).keys.tolist() for _ in range(3))]

    options: dict[str, Any] = {"select": select, "directory": tmp_path, "seed": 2, "returns": "numpy"}
    with ReplayBuffer(30, **options) as buffer:
        buffer.extend(rows(added, ends=[4, 9, 16, 28]))
        drawn = [buffer.sample(4).keys.tolist() for _ in range(2)]
        buffer.save(1, wait=True)
        state = buffer.state_dict()
        expected = rest(buffer)
    with ReplayBuffer(30, **options) as again:
        again.resume(continue_episodes=True)
        assert rest(again) == expected
    other = ReplayBuffer(30, **(options | {"directory": None}))
    other.load_state_dict(state, continue_episodes=True)
    assert rest(other) == expected
    assert max(Counter(key for keys in drawn + expected for key in keys).values()) <= 3


@pytest.mark.parametrize("uses", [0, -1, 2**32, 1.5])
def test_uses_are_a_whole_number(uses: Any) -> None:
    for kind in (Uniform, WithoutReplacement, Ordered):
        with pytest.raises(ConfigError, match="uses"):
            kind(uses=uses)


# -- newest episodes -------------------------------------------------------------------------------------------


class Rows:
    """Rows of three environments, as a list."""

    def __init__(self, capacity: int, episodes: int) -> None:
        self.buffer = ReplayBuffer(capacity, select=Uniform(window_trajectories=episodes), returns="numpy")
        self.capacity, self.episodes = capacity, episodes
        self.begun: list[int] = []  # by row: the key of the first row of its episode
        self.open: dict[int, int] = {}

    def add(self, given: list[tuple[int, bool]]) -> None:
        envs, ends = [env for env, _ in given], [end for _, end in given]
        self.buffer.extend({"x": np.zeros(len(given))}, env=np.array(envs, np.int64), ends=np.array(ends, bool))
        for env, end in given:
            self.begun.append(self.open.setdefault(env, len(self.begun)))
            if end:
                del self.open[env]

    def check(self) -> None:
        there = self.begun[-self.capacity :]
        inside = sorted(set(there))[-self.episodes :]
        expected = np.array([begun in inside for begun in there], float)
        assert probabilities(self.buffer) == (expected / expected.sum()).tolist()
        keys = self.buffer.sample(50).keys - self.buffer.ring.oldest
        assert expected[keys].all()


GIVEN = st.lists(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8), min_size=1, max_size=6)


@settings(max_examples=150)
@given(GIVEN, st.integers(1, 12), st.integers(1, 4), st.integers(0, 5))
def test_only_rows_of_the_newest_episodes_are_drawn(
    given: list[list[tuple[int, bool]]], capacity: int, episodes: int, cut: int
) -> None:
    both = Rows(capacity, episodes)
    for at, block in enumerate(given):
        both.add(block)
        both.check()
        if at == cut:
            state = both.buffer.state_dict()
            both.buffer = ReplayBuffer(capacity, select=Uniform(window_trajectories=episodes), returns="numpy")
            both.buffer.load_state_dict(state, continue_episodes=True)
            both.check()


def test_where_an_episode_began_is_saved_though_its_rows_have_gone() -> None:
    both = Rows(4, 3)
    both.add([(1, False), (0, False)])
    both.add([(1, False), (1, False), (1, False), (1, True)])
    state = both.buffer.state_dict()
    both.buffer = ReplayBuffer(4, select=Uniform(window_trajectories=3), returns="numpy")
    both.buffer.load_state_dict(state, continue_episodes=True)
    both.add([(0, True), (0, False), (1, False)])
    both.check()


def test_rows_of_the_newest_episodes_are_each_as_likely() -> None:
    buffer = filled(100, 100, ends=[9, 39, 79], select=Uniform(window_trajectories=2))
    assert as_likely(buffer.sample(50_000).keys - 40, np.ones(60))
    starts = np.ones(60)
    starts[37:40] = starts[-3:] = 0
    assert as_likely(buffer.sample(50_000, slices=Slices(length=4)).keys - 40, starts)


def test_one_window_is_enough() -> None:
    with pytest.raises(ConfigError, match="choose one"):
        Uniform(window=3, window_trajectories=2)
    with pytest.raises(ConfigError, match="window_trajectories=0"):
        Uniform(window_trajectories=0)


# -- staleness -------------------------------------------------------------------------------------------------


def versioned(versions: list[int], half_life: float, capacity: int = 0, **options: Any) -> ReplayBuffer:
    select = StalenessWeighted(half_life=half_life)
    buffer = ReplayBuffer(capacity or len(versions), select=select, returns="numpy", **options)
    for at, version in enumerate(versions):
        buffer.extend(rows(1, at), version=version)
    return buffer


def test_a_half_life_halves_the_probability() -> None:
    versions = [0, 1, 2, 3, 4, 4, 8, 6]
    buffer = versioned(versions, 2.0)
    expected = [2 ** ((version - 8) / 2) for version in versions]
    assert np.allclose(probabilities(buffer), np.array(expected) / sum(expected))
    assert as_likely(buffer.sample(100_000).keys, expected)
    expected[-1] = 0
    assert as_likely(buffer.sample(100_000, slices=Slices(length=2)).keys, expected)


def test_rows_that_took_the_place_of_others_have_their_own_age() -> None:
    buffer = versioned([0, 1, 2, 3, 4, 5], 1.0, capacity=4)
    assert as_likely(buffer.sample(50_000).keys - 2, [1, 2, 4, 8])
    buffer.clear()
    buffer.extend(rows(2), version=1)
    buffer.extend(rows(1), version=0)
    assert as_likely(buffer.sample(50_000).keys - 6, [2, 2, 1])


@pytest.mark.parametrize("first", [0, 2**30])
def test_versions_may_be_far_apart(first: int) -> None:
    buffer = versioned([first, first + 10_000, 0, first + 20_000, first + 20_001], 1.0)
    assert np.allclose(probabilities(buffer), [0, 0, 0, 1 / 3, 2 / 3])
    assert set(buffer.sample(100).keys.tolist()) == {3, 4}


def test_ages_come_back(tmp_path: Path) -> None:
    with versioned([3, 900, 901, 905], 1.0, directory=tmp_path) as buffer:
        buffer.save(1, wait=True)
        expected = [buffer.sample(5).keys.tolist() for _ in range(20)]
    with ReplayBuffer(4, directory=tmp_path, select=StalenessWeighted(half_life=1.0), returns="numpy") as again:
        again.resume()
        assert [again.sample(5).keys.tolist() for _ in range(20)] == expected


def test_rows_that_were_there_before_the_versions_leapt_are_all_as_stale_as_they_are() -> None:
    buffer = versioned([0, 1], 1.0, capacity=8)
    assert probabilities(buffer) == [1 / 3, 2 / 3]
    buffer.extend(rows(2, 2), version=1000)
    assert probabilities(buffer) == pytest.approx([0.0, 0.0, 0.5, 0.5], abs=1e-100)


@pytest.mark.parametrize("half_life", [0, -1.0, float("nan"), float("inf"), "x"])
def test_a_half_life_is_a_number_above_0(half_life: Any) -> None:
    with pytest.raises(ConfigError, match="half_life"):
        StalenessWeighted(half_life=half_life)


def test_selections_come_back_from_plain_values() -> None:
    for select in (StalenessWeighted(half_life=3.0), Uniform(window_trajectories=2, uses=4), Ordered(uses=1)):
        assert ReplayBuffer(4, select=select.to_dict()).options.select == select


def test_staleness_counts_anew_after_a_clear() -> None:
    buffer = ReplayBuffer(8, select=StalenessWeighted(half_life=1.0))
    buffer.extend({"x": np.zeros(2)}, version=10_000)
    buffer.sample(1)
    buffer.clear()
    for version in (0, 3):
        buffer.append({"x": 0.0}, version=version)
    older, newer = buffer.drawer.mass(buffer.ring.keys())
    assert newer == 8 * older

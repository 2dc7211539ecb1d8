"""How long episodes are is known of those that are there, whatever others did meanwhile; and nothing else is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.buffer.transitions.episodes import Episodes
from pipeline.buffer.transitions.layout import EPISODE, PLACE
from pipeline.config import Uniform

CAPACITY = 40


def rows(count: int, ended: Any = False) -> dict[str, Any]:
    return {"x": np.arange(count), "terminated": np.broadcast_to(ended, count).astype(bool)}


def check(buffer: ReplayBuffer, lengths: dict[int, int]) -> None:
    """Compare with ``lengths``, which the marks of new rows told, and forget what has gone."""
    ring = buffer.ring
    keys = ring.keys()
    episodes, places = ring.mark(EPISODE, keys), ring.mark(PLACE, keys)
    for episode, place in zip(episodes.tolist(), places.tolist(), strict=True):
        lengths[episode] = max(lengths.get(episode, 0), place + 1)
    expected = [lengths[episode] - place for episode, place in zip(episodes.tolist(), places.tolist(), strict=True)]
    assert ring.following(keys).tolist() == expected


@pytest.mark.parametrize("storage", ["memory", "shared"])
@pytest.mark.parametrize("seed", range(3))
def test_environments_that_rest_or_never_end_beside_many_short_episodes(storage: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    buffer, lengths = ReplayBuffer(CAPACITY, storage=storage), dict[int, int]()
    for env in range(4):
        buffer.extend(rows(3), env=env)
    for turn in range(1500):
        short = int(rng.integers(1, 9))
        buffer.extend(rows(short, True), env=9)
        if turn % 7 == 0:  # never ends
            buffer.append({"x": 1, "terminated": False}, env=0)
        if turn % 400 == 399:  # goes on after a long rest
            buffer.extend(rows(2, [False, turn > 1000]), env=1)
        if turn % 11 == 0:
            buffer.extend(rows(6, rng.random(6) < 0.3), env=np.array([3, 9, 0, 9, 3, 0]))
        if turn % 5 == 0:
            check(buffer, lengths)
    check(buffer, lengths)
    assert buffer.ring.episodes.next > 6000
    held = buffer.ring.episodes._lengths
    assert len(held._length) < 5000
    assert held._behind <= 5


@pytest.mark.parametrize("short", [1, 8, 50])
def test_an_episode_that_rests_does_not_make_others_slow(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    trim = Episodes.trim

    def counted(*given: Any) -> None:
        nonlocal looks
        looks += 1
        trim(*given)

    monkeypatch.setattr(Episodes, "trim", counted)
    buffer = ReplayBuffer(1000)
    buffer.append({"x": 0, "terminated": False}, env=0)
    for _ in range(40_000 // short):
        buffer.extend(rows(short, True), env=1)
    assert 0 < looks <= 40
    assert len(buffer.ring.episodes.lengths._length) < 8000
    buffer.append({"x": 0, "terminated": False}, env=0)
    assert buffer.sample(1000).episodes.max() >= 40_000 - 1000
    assert buffer.ring.following(buffer.ring.keys()).tolist() == [1] * 1000


@pytest.mark.parametrize("remove", ["lifo", "stalest"])
def test_nor_where_rows_have_no_neighbours(remove: str) -> None:
    buffer = ReplayBuffer(50, remove=remove)
    buffer.append({"x": 0, "terminated": False}, env=0)
    for _ in range(4000):
        buffer.extend(rows(3, True), env=1)
    assert len(buffer.ring.episodes.lengths._length) < 5000
    buffer.append({"x": 0, "terminated": True}, env=0)
    assert buffer.ring.episodes.open().tolist() == []


@pytest.mark.parametrize("capacity", [CAPACITY, 7])
def test_an_episode_goes_on_after_a_resume_though_its_rows_have_gone(capacity: int) -> None:
    buffer, lengths = ReplayBuffer(CAPACITY), dict[int, int]()
    buffer.extend(rows(5), env=0)
    buffer.extend(rows(200, True), env=1)
    buffer.extend(rows(4), env=0)
    buffer.extend(rows(3000, True), env=1)
    again = ReplayBuffer(capacity)
    again.load_state_dict(buffer.state_dict(), continue_episodes=True)
    for each in (buffer, again):
        check(each, {})
        each.extend(rows(2), env=0)
        check(each, lengths)
        newest = each.ring.keys()[-1:]
        assert (each.ring.mark(EPISODE, newest).item(), each.ring.mark(PLACE, newest).item()) == (0, 10)
        each.extend(rows(30, True), env=1)
        check(each, lengths)


def test_a_window_of_episodes_beside_one_that_never_ends() -> None:
    buffer, begun = ReplayBuffer(CAPACITY, select=Uniform(window_trajectories=5)), dict[int, int]()
    buffer.extend(rows(3), env=0)
    for turn in range(2000):
        buffer.extend(rows(2, [False, True]), env=1)
        if turn % 6 == 0:
            buffer.append({"x": 1, "terminated": False}, env=0)
        keys = buffer.ring.keys()
        episodes = buffer.ring.mark(EPISODE, keys)
        for key, episode in zip(keys.tolist(), episodes.tolist(), strict=True):
            begun.setdefault(episode, key)
        if turn % 17 == 0:
            newest = sorted(set(episodes.tolist()), key=begun.__getitem__)[-5:]
            assert set(buffer.sample(300).keys.tolist()) == set(keys[np.isin(episodes, newest)].tolist())

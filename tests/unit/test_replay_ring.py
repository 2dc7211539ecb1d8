"""A replay buffer's ring: what is held, where it lies, and which rows follow each other when it wraps around."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer, Slices, Starved
from tests.support.replay import as_likely, everything, filled, ids, rows, total

SELECTIONS = ["uniform", {"select": "prioritized", "alpha": 1.0}, "without_replacement", "fifo"]


@pytest.mark.parametrize("select", SELECTIONS)
def test_slices_wrap_around_and_leave_the_rest_of_an_overwritten_episode_out(select: Any) -> None:
    buffer = filled(18, 10, ends=[8, 17], select=select)
    episode, place = (buffer.ring.storage.view(mark) for mark in ("#episode", "#place"))
    assert (episode - episode[8]).tolist() == [1] * 8 + [0, 1]
    assert place.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8, 0]
    drawn = set()
    for _ in range(100):
        batch = buffer.sample(6, slices=Slices(length=4))
        assert (batch["id"] == batch.keys[:, None] + np.arange(4)).all()
        drawn |= set(batch.keys.tolist())
    assert drawn == set(range(9, 15))
    assert {key % 10 for key in drawn} == {9, 0, 1, 2, 3, 4}


@pytest.mark.parametrize("select", SELECTIONS)
def test_padded_slices_give_the_rest_of_an_overwritten_episode_with_a_mask(select: Any) -> None:
    buffer = filled(18, 10, ends=[8, 17], select=select)
    seen: dict[int, Any] = {}
    for _ in range(100):
        batch = buffer.sample(10, slices=Slices(length=4, pad=True))
        seen |= {
            int(key): (own.sum(), list(each))
            for key, own, each in zip(batch.keys, batch.mask, batch["id"], strict=True)
        }
    assert sorted(seen) == list(range(8, 18))
    assert seen[8] == (1, [8, 8, 8, 8])
    assert seen[16] == (2, [16, 17, 17, 17])


def test_every_valid_start_is_drawn_by_its_own_priority() -> None:
    buffer = filled(12, 20, ends=[3, 5, 10], select={"select": "prioritized", "alpha": 1.0})
    slices = Slices(length=3)
    buffer.update_priorities(np.arange(12), np.ones(12))
    drawn = buffer.sample(20_000, slices=slices).keys
    assert as_likely(drawn, [1, 1, 0, 0, 0, 0, 1, 1, 1])
    before = buffer._drawer.arrays()["priorities"].tolist()
    for _ in range(1000):
        buffer.sample(1, slices=slices)
    assert buffer._drawer.arrays()["priorities"].tolist() == before
    assert total(buffer) == 12
    buffer.update_priorities([0, 1, 6, 7], np.zeros(4))
    assert set(buffer.sample(1000, slices=slices).keys) == {8}
    buffer.update_priorities([8], [0.0])
    with pytest.raises(Starved, match="begins a sequence"):
        buffer.sample(1, slices=slices)


@pytest.mark.parametrize(
    ("rows_in_it", "length", "expected"), [(5, 2, [1, 1, 1, 1]), (4, 4, [1]), (3, 1, [1, 1, 1]), (1, 1, [1])]
)
def test_every_slice_of_an_episode_is_as_likely_the_last_one_too(
    rows_in_it: int, length: int, expected: list[int]
) -> None:
    buffer = filled(rows_in_it, ends=[rows_in_it - 1])
    batch = buffer.sample(100_000, slices=Slices(length=length))
    assert as_likely(batch.keys, expected)
    assert batch["id"].max() == rows_in_it - 1


@pytest.mark.parametrize("select", [*SELECTIONS, "lifo", {"select": "staleness", "half_life": 1.0}])
def test_a_buffer_is_full_when_it_is_full_and_not_a_row_before(select: Any) -> None:
    buffer = ReplayBuffer(4, select=select, returns="numpy")
    for number in range(3):
        buffer.append({"id": number})
    assert len(buffer) == 3
    assert {number for _ in range(333) for number in buffer.sample(3)["id"]} == {0, 1, 2}
    buffer.clear()
    for first in (0, 3):
        buffer.extend({"id": np.arange(first, first + 3)})
    assert ids(buffer) == [2, 3, 4, 5]
    assert {number for _ in range(333) for number in buffer.sample(4)["id"]} == {2, 3, 4, 5}


def test_a_block_wraps_around() -> None:
    buffer = ReplayBuffer(4, returns="numpy")
    for first in (0, 3):
        buffer.extend({"id": np.arange(first, first + 3)})
    assert buffer.ring.storage.view("id").tolist() == [4, 5, 2, 3]


def test_of_a_block_larger_than_the_buffer_the_newest_rows_stay() -> None:
    buffer = filled(10, 4)
    assert ids(buffer) == [6, 7, 8, 9]
    assert buffer.ring.storage.view("id").tolist() == [8, 9, 6, 7]
    assert buffer.statistics().added == 10
    before = everything(buffer)
    assert buffer.extend(rows(0)) == range(10, 10)
    assert everything(buffer) == before
    buffer.append({"id": 10, "reward": 1.0, "truncated": False})
    assert buffer.ring.storage.view("id").tolist() == [8, 9, 10, 7], "it goes to slot 2"


def test_an_empty_first_block_decides_nothing() -> None:
    buffer = ReplayBuffer(4)
    assert buffer.extend({"id": []}) == range(0, 0)
    assert buffer.ring.storage.schema is None
    buffer.extend({"other": np.zeros(2, np.float32)})
    assert len(buffer) == 2


def test_an_episode_longer_than_the_buffer_overflows_it_row_by_row() -> None:
    buffer = filled(4, 6, ends=[3])
    for number in range(4, 104):
        buffer.append({"id": number, "reward": 1.0, "truncated": False})
        starts = buffer.sample(64, slices=Slices(length=2)).keys
        assert starts.min() >= buffer.ring.oldest
        assert starts.max() <= number - 1
    assert ids(buffer) == list(range(98, 104))
    assert buffer.statistics().open_episodes == 1


def test_an_episode_left_open_is_not_glued_to_the_next() -> None:
    buffer = filled(10, 20, ends=[3, 7])
    assert buffer.end_episode() == 1
    assert buffer.end_episode() == 0
    buffer.extend(rows(4, 10, ends=[13]))
    assert np.bincount(buffer.ring.mark("#episode", buffer.ring.keys())).tolist() == [4, 4, 2, 4]


@pytest.mark.parametrize("select", SELECTIONS)
def test_episodes_that_overflow_a_small_buffer_are_drawn_whole_or_not_at_all(select: Any) -> None:
    """Two of 4 rows, one that is left after 2, and 4 again: 6 rows are held of them."""
    buffer, number = ReplayBuffer(6, select=select, returns="numpy"), 0
    lengths = [4, 4, 2, 4]
    episode_of, place_of = (np.zeros(100, int) for _ in range(2))
    for episode in range(100):
        length = min(lengths[episode % 4], 100 - number)
        for place in range(length):
            left = length == 2
            buffer.append({"id": number, "truncated": place == length - 1 and not left})
            episode_of[number], place_of[number] = episode, place
            number += 1
            batch = buffer.sample(min(len(buffer), 2), slices=Slices(length=4, pad=True))
            seen = np.where(batch.mask, batch["id"], batch["id"][:, :1])
            assert (episode_of[seen] == episode_of[batch.keys][:, None]).all()
            held = buffer.ring.keys()
            assert ids(buffer) == held.tolist() == list(range(max(0, number - 6), number))
            assert buffer.ring.mark("#episode", held).tolist() == episode_of[held].tolist()
            assert buffer.ring.mark("#place", held).tolist() == place_of[held].tolist()
        if length == 2:
            assert buffer.end_episode() == 1
        if number == 100:
            break
    assert buffer.statistics().added == 100


def test_an_open_episode_whose_rows_have_all_gone_can_be_ended() -> None:
    buffer = filled(2, 4)
    buffer.extend(rows(4, 2), env=1)
    assert buffer.end_episode(0) == 1
    assert buffer.end_episode(7) == 0
    buffer.extend(rows(1, 6), env=0)
    assert buffer.ring.mark("#place", np.array([6])).tolist() == [0]


def test_steps_of_several_environments_do_not_mix() -> None:
    buffer = ReplayBuffer(8, returns="numpy", select="fifo")
    for _ in range(3):
        buffer.append({"reward": 1.0}, env=0)
        buffer.append({"reward": 10.0}, env=1)
    batch = buffer.sample(6, n_step=2, gamma=0.5)
    assert batch["reward"].tolist() == [1.5, 15, 1.5, 15, 1, 10]
    assert batch.steps.tolist() == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("lead", [1, 2, 3])
def test_frames_of_one_environment_never_come_from_another(lead: int) -> None:
    """A row whose predecessor lay further back than the others' had a neighbour's row for its past."""
    buffer = ReplayBuffer(2, returns="numpy", select="fifo")
    for env in [1] + [0] * lead:
        buffer.append({"obs": float(env)}, env=env)
    buffer.extend({"obs": np.array([1.0])}, env=np.array([1]))
    with pytest.raises(Starved):
        buffer.sample(2, stack=2)
    back, _ = buffer.ring.chain_back(buffer.ring.keys()[-1:], 2)
    assert back[0, 1] < buffer.ring.oldest


def test_one_row_episodes_are_rows_and_evicting_them_keeps_the_sums_right() -> None:
    buffer = filled(5, 3, ends=range(5), select={"select": "prioritized", "alpha": 1.0})
    buffer.update_priorities([2, 3, 4], [1.0, 2.0, 3.0])
    batch = buffer.sample(100, n_step=3, gamma=0.5)
    assert set(batch.steps) == {1}
    buffer.extend(rows(2, 5, ends=[5, 6]))
    buffer.update_priorities([5, 6], [0.5, 0.25])
    buffer.sample(1)
    assert total(buffer) == 3.75


def test_environments_that_wait_long_do_not_make_a_block_slow_or_wrong() -> None:
    buffer = ReplayBuffer(64, returns="numpy")
    buffer.extend(rows(1), env=0)
    for number in range(1, 3001, 3):
        buffer.extend(rows(3, number, ends=range(3001)), env=1)
    buffer.extend(rows(2, 3001, ends=[3002]), env=np.array([0, 1]))
    assert buffer.ring.mark("#place", np.array([3001, 3002])).tolist() == [1, 0]
    assert buffer.ring.following(np.array([3001])).tolist() == [1]
    assert len(np.unique(buffer.ring.mark("#episode", buffer.ring.keys()))) == 64

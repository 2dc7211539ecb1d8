"""Columns of rows that are there can be changed, and what was changed is saved with them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ConfigError, Ordered, ReplayBuffer
from pipeline.checkpoint import verify
from tests.support.disk import ScriptedFiles
from tests.support.replay import everything, filled
from tests.support.replay import rows as plain_rows
from tests.support.replaying import CAPACITY, contents, fill


def changed(buffer: ReplayBuffer, name: str = "reward") -> list[float]:
    found: list[float] = buffer.ring.mark(name, buffer.ring.keys()).tolist()
    return found


def test_rows_that_are_there_are_changed_and_each_key_is_told_what_became_of_it() -> None:
    buffer = filled(10, 6)
    result = buffer.write_back([3, 4, 9, 5], {"reward": [1.5, 2.5, 3.5, 4.5]})
    assert result.applied.tolist() == [False, True, True, True]
    assert result.stale.tolist() == [True, False, False, False]
    assert not result.refused.any()
    assert changed(buffer) == [2.5, 4.5, 1, 1, 1, 3.5]
    assert buffer.sample(100)["reward"].dtype == np.float32


def test_a_row_of_another_version_is_refused() -> None:
    buffer = ReplayBuffer(8, returns="numpy")
    for version in range(4):
        buffer.extend(plain_rows(3, 3 * version), version=version)
    result = buffer.write_back([0, 4, 5, 9], {"reward": np.full(4, 7)}, versions=[0, 1, 2, 3])
    assert result.stale.tolist() == [True, False, False, False]
    assert result.refused.tolist() == [False, False, True, False]
    assert result.applied.tolist() == [False, True, False, True]
    assert changed(buffer) == [7, 1, 1, 1, 1, 7, 1, 1]
    assert buffer.write_back([6, 9], {"reward": [0, 0]}, versions=2).applied.tolist() == [True, False]
    batch = buffer.sample(5).torch()
    assert buffer.write_back(batch.keys, {"reward": batch["reward"]}, versions=batch.versions).applied.all()


def test_of_a_key_that_is_named_twice_the_last_counts() -> None:
    buffer = filled(3)
    buffer.write_back([1, 1, 1], {"reward": [5, 6, 7]})
    assert changed(buffer) == [1, 7, 1]


def test_columns_of_any_kind_are_changed() -> None:
    buffer = ReplayBuffer(5)
    image = torch.zeros(5, 40, 40, dtype=torch.bfloat16)
    buffer.extend({"obs": {"image": image, "x": torch.zeros(5, 2)}, "n": np.arange(5)})
    new = torch.rand(2, 40, 40).to(torch.bfloat16)
    buffer.write_back(torch.tensor([1, 3]), {"obs": {"image": new}, "n": np.array([-1, -3], np.int8)})
    batch = buffer.sample(50)
    for at, key in enumerate(batch.keys.tolist()):
        expected = new[[1, 3].index(key)] if key in (1, 3) else image[0]
        assert torch.equal(batch["obs"]["image"][at], expected)
        assert batch["n"][at] == (-key if key in (1, 3) else key)


@pytest.mark.parametrize(
    ("keys", "columns", "more", "said"),
    [
        ([0, 1], {"reward": [1.0]}, {}, "1 rows, where 2 keys"),
        ([0], {"other": [1.0]}, {}, "there is none"),
        ([0], {"reward": [[1.0, 2.0]]}, {}, "shape"),
        ([0], {"id": [0.5]}, {}, "cannot hold"),
        ([0], {}, {}, "at least one column"),
        ([7], {"reward": [1.0]}, {}, "never the key"),
        ([-1], {"reward": [1.0]}, {}, "never the key"),
        ([0.0], {"reward": [1.0]}, {}, "whole numbers"),
        ([0], {"truncated": [True]}, {}, "where episodes end"),
        ([0, 1], {"reward": [1.0, 2.0], "id": [1, 2**70]}, {}, "stored|shape|hold"),
        ([0], {"reward": [1.0]}, {"versions": [0, 1]}, "versions"),
        ([0], {"reward": [1.0]}, {"versions": 0.5}, "versions"),
    ],
)
def test_what_is_bad_is_refused_and_nothing_changes(keys: Any, columns: Any, more: Any, said: str) -> None:
    buffer = filled(5)
    before = everything(buffer)
    with pytest.raises(ConfigError, match=said):
        buffer.write_back(keys, columns, **more)
    assert everything(buffer) == before


def test_what_two_rows_share_is_not_changed() -> None:
    buffer = ReplayBuffer(20, share_next_obs=True)
    fill(buffer, 0, 10)
    for name in ("obs.n", "next_obs.half"):
        with pytest.raises(ConfigError, match="share_next_obs"):
            buffer.write_back([1], {name: [1]})
    assert buffer.write_back([1], {"reward": [1]}).applied.all()


def test_an_order_by_a_column_follows_its_changes() -> None:
    buffer = filled(5, select=Ordered(by="max", field="reward"))
    buffer.write_back([3, 1], {"reward": [9, 4]})
    assert buffer.sample(2).keys.tolist() == [3, 1]


def test_what_was_changed_is_saved_whenever_that_was(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    after: dict[int, Any] = {}

    def change(buffer: ReplayBuffer, count: int) -> None:
        keys = rng.choice(buffer.ring.keys(), count, replace=False)
        buffer.write_back(keys, {"reward": rng.random(count)})
        buffer.write_back(keys[:2], {"image": rng.integers(0, 255, (2, 32, 64), np.uint8), "obs.n": keys[:2] * 10})

    for life in range(3):
        with ReplayBuffer(CAPACITY, directory=tmp_path, keep=None) as buffer:
            buffer.resume(continue_episodes=True)
            for step in range(10 * life, 10 * life + 4):
                assert life == 0 or step > 10 * life or contents(buffer) == after[10 * life - 7]
                fill(buffer, 25 * len(after), 25)
                change(buffer, 10)
                buffer.save(step, wait=True)
                after[step] = contents(buffer)
                change(buffer, 10)  # and that is not saved in this life's last generation
    for step, expected in after.items():
        with ReplayBuffer(CAPACITY, directory=tmp_path, keep=None) as again:
            again.resume(step, continue_episodes=True)
            assert contents(again) == expected
    with ReplayBuffer(30, directory=tmp_path, keep=None) as smaller:
        smaller.resume(3, continue_episodes=True)
        assert changed(smaller) == after[3]["reward"][-30:]
    assert verify(str(tmp_path)).whole


def test_a_row_that_is_changed_while_it_is_saved_is_saved_as_it_was(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedFiles):
        def create(self, path: str) -> int:
            if path.endswith(".fbs"):
                begun.set()
                assert go_on.wait(30)
            return super().create(path)

    with ReplayBuffer(CAPACITY, directory=tmp_path, files=Slow()) as buffer:
        fill(buffer, 0, 90)
        before = contents(buffer)
        saving = buffer.save(1)
        assert begun.wait(30)
        buffer.write_back(buffer.ring.keys()[10:20], {"reward": np.full(10, 0.125)})
        assert not saving.done
        go_on.set()
        assert saving.wait(30)
        last = contents(buffer)
        assert last != before
        buffer.save(2, wait=True)
    for step, expected in ((1, before), (2, last)):
        with ReplayBuffer(CAPACITY, directory=tmp_path) as again:
            again.resume(step, continue_episodes=True)
            assert contents(again) == expected


def test_what_is_changed_before_it_is_saved_costs_nothing(tmp_path: Path) -> None:
    with ReplayBuffer(CAPACITY, directory=tmp_path) as buffer:
        fill(buffer, 0, 30)
        buffer.write_back(range(30), {"reward": np.zeros(30)})
        buffer.save(1, wait=True)
        assert buffer._written.columns() == []
        buffer.write_back(range(5), {"reward": np.ones(5)})
        assert buffer._written.columns() == ["reward"]
        fill(buffer, 30, CAPACITY)
        assert buffer._written.columns() == []
    with ReplayBuffer(CAPACITY, directory=tmp_path) as again:
        again.resume()
        assert changed(again) == [0] * 30


def test_changes_are_in_a_state_dict() -> None:
    buffer, again = (ReplayBuffer(CAPACITY) for _ in range(2))
    fill(buffer, 0, 70)
    buffer.write_back(range(60, 64), {"reward": np.full(4, 9)})
    again.load_state_dict(buffer.state_dict(), continue_episodes=True)
    assert contents(again) == contents(buffer)


async def test_tasks_change_rows(tmp_path: Path) -> None:
    buffer = filled(5)
    result = await buffer.aio.write_back([1], {"reward": [3]}, versions=0)
    assert result.applied.all()

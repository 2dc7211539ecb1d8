"""A replay buffer at the edges of its numbers: one row, the last environment, keys and episodes beyond 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ConfigError, ReplayBuffer, Slices, UsageError
from pipeline.replay import folder_verbs as module
from tests.support.replay import everything, filled, ids, prioritized, probabilities, rows

LAST_ENV = 2**20 - 1


@pytest.mark.parametrize("select", ["uniform", "prioritized", "without_replacement", "lifo"])
def test_a_buffer_of_one_row(select: Any) -> None:
    buffer = ReplayBuffer(1, select=select, returns="numpy")
    for number in range(3):
        buffer.append({"obs": float(number), "next_obs": number + 1.0, "reward": 2.0})
        batch = buffer.sample(1, n_step=1, gamma=0.5, stack=1)
        assert (batch["obs"].tolist(), batch.discount.tolist(), batch.steps.tolist()) == ([number], [0.5], [1])
        assert buffer.sample(1, slices=Slices(length=1))["obs"].tolist() == [[number]]
        assert buffer.sample(1, slices=Slices(length=3, pad=True)).mask.tolist() == [[True, False, False]]
    buffer.extend({"obs": np.arange(5.0), "next_obs": np.arange(5.0), "reward": np.ones(5)}, env=[0, 1, 0, 1, 0])
    assert buffer.sample(1)["obs"].tolist() == [4]


def test_the_last_environment_that_there_can_be() -> None:
    buffer = filled(2)
    buffer.extend(rows(2, 2), env=LAST_ENV)
    buffer.append({"id": 4, "reward": 1.0, "truncated": False}, env=np.int64(LAST_ENV))  # type: ignore[arg-type]
    buffer.extend(rows(2, 5), env=np.array([0, LAST_ENV], np.uint32))
    assert buffer.ring.chain(np.array([0, 2]), 5)[0].tolist() == [[0, 1, 5, 5, 5], [2, 3, 4, 6, 6]]
    assert buffer.end_episode(LAST_ENV) == 1


@pytest.mark.parametrize("how", ["append", "one", "wide", "mixed"])
def test_an_environment_that_comes_back_after_more_rows_than_32_bits_count(how: str) -> None:
    buffer = filled(2, 8, fields={"obs": "id"})
    buffer.ring.added += 2**32  # as if another environment had added so many, and taken them away
    buffer.ring.size = 0
    first = buffer.ring.added
    if how == "append":
        keys = [buffer.append({"id": 7, "reward": 1.0, "truncated": False}) for _ in range(2)]
    else:
        options = {"one": {}, "wide": {"envs": 2}, "mixed": {"env": [1, 0]}}[how]
        keys = list(buffer.extend(rows(2), **options))  # type: ignore[arg-type]
    assert keys == [first, first + 1]
    of_env_0 = keys[1] if how == "mixed" else keys[0]
    assert buffer.ring.mark("#place", np.array([of_env_0])).tolist() == [2]
    back, counts = buffer.ring.chain_back(np.array([of_env_0]), 3)
    assert counts.tolist() == [3]
    assert (back[0, 1:] < buffer.ring.oldest).all()
    assert set(buffer.sample(50).keys) == set(keys)
    assert set(buffer.sample(50, stack=2).keys) == set(keys) - {of_env_0}


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3, 2**53 - 3])
def test_keys_go_on_beyond_the_bits_of_a_mark(start: int) -> None:
    buffer = filled(4, 4, select={"select": "prioritized", "alpha": 1.0})
    buffer.clear()
    buffer.ring.added = start
    buffer._drawer.clear()
    for number in range(6):
        buffer.append({"id": number, "reward": 1.0, "truncated": False})
    assert ids(buffer) == [2, 3, 4, 5]
    batch = buffer.sample(200, n_step=3, gamma=1.0)
    assert set(batch.keys) == set(range(start + 2, start + 6))
    assert (batch["id"] == batch.keys - start).all()
    assert (batch["reward"] == np.minimum(3, start + 6 - batch.keys)).all()
    assert buffer.update_priorities([start, start + 5], [5.0, 5.0]).applied.tolist() == [False, True]
    assert probabilities(buffer) == [0.125, 0.125, 0.125, 0.625]


@pytest.mark.parametrize("how", ["append", "one", "wide", "mixed"])
def test_an_episode_longer_than_its_marks_can_count_is_refused_and_can_be_ended(how: str) -> None:
    def add() -> None:
        if how == "append":
            buffer.append({"id": 7, "reward": 1.0, "truncated": False})
        else:
            buffer.extend(rows(2), **{"one": {}, "wide": {"envs": 2}, "mixed": {"env": [1, 0]}}[how])  # type: ignore[arg-type]

    buffer = filled(2)
    buffer.ring.episodes.state()
    buffer.ring.episodes._tails[2, 0] = 2**31 - 2
    before = everything(buffer)
    with pytest.raises(UsageError, match=r"env=0: .* end_episode\(0\)"):
        add()
    assert everything(buffer) == before
    buffer.end_episode(0)
    add()
    assert buffer.ring.mark("#place", buffer.ring.keys()[2:]).max() <= 1


def test_an_n_step_longer_than_its_episode() -> None:
    buffer = filled(4, ends=[1, 3], select="fifo")
    batch = buffer.sample(4, n_step=10, gamma=1.0)
    assert batch["reward"].tolist() == [2, 1, 2, 1]
    assert batch.steps.tolist() == [2, 1, 2, 1]


def test_a_batch_goes_to_the_device_that_is_asked_for() -> None:
    batch = prioritized([1, 2, 3]).sample(4, gamma=0.5)
    found = batch.to("meta")
    assert set(found) == {"id", "reward", "truncated", "weights", "discount"}
    assert {each.device.type for each in found.values()} == {"meta"}
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            batch.to("cuda")


def test_a_buffer_of_before_a_fork_is_no_buffer_of_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = filled(2)
    monkeypatch.setattr(module, "_buffers", [buffer])
    module._mark_forked()
    for verb in (lambda: buffer.sample(1), lambda: buffer.extend(rows(1)), buffer.clear, buffer.end_episode):
        with pytest.raises(UsageError, match="made before a fork"):
            verb()


def test_memory_is_given_back_by_clear() -> None:
    buffer = filled(2)
    buffer.clear()
    assert buffer.ring.storage.records.nbytes == 0
    assert buffer.ring.storage._bytes.nbytes == 0
    assert buffer.statistics().row_bytes == 0


@pytest.mark.parametrize("env", [10**9, LAST_ENV + 1, -1, 2**63, 2**70, True, 1.0, "0", None, np.int64(10**9)])
def test_what_is_no_environment_is_refused(env: Any) -> None:
    buffer = ReplayBuffer(10)
    one = {"id": 4, "reward": 1.0, "truncated": False}
    for add in (lambda: buffer.append(one, env=env), lambda: buffer.extend(rows(2), env=env)):
        with pytest.raises(ConfigError, match="env="):
            add()
    with pytest.raises(ConfigError, match="env="):
        buffer.add(np.zeros(2), 0, 1.0, np.zeros(2), False, False, env=env)
    with pytest.raises(ConfigError, match="env="):
        buffer.extend(rows(2), env=[0, 10**9])
    assert (len(buffer), buffer.schema) == (0, None)

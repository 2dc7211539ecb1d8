"""State that each rank has of its own, beside its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from pipeline.checkpoint import verify
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, RankFailed, UsageError
from pipeline.replay import ReplayBuffer
from tests.support.ranks import fine, on_ranks


class Env:
    """An environment with a random state."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def draws(self, count: int = 3) -> list[float]:
        found: list[float] = self.rng.random(count).tolist()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class Box:
    """Something that is the same on all ranks."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def build(directory: Path, ranks: Ranks | None) -> ReplayBuffer:
    return ReplayBuffer(50, directory=directory, ranks=ranks)


def train(directory: Path, ranks: Ranks) -> list[float]:
    env, box = Env(ranks.rank), Box(ranks.rank)
    with build(directory, ranks) as buffer:
        buffer.attach(box=box)
        buffer.attach_own(env=env)
        buffer.resume()
        for step in range(1, 4):
            env.draws()
            buffer.extend({"n": np.arange(4) + 10 * ranks.rank, "done": np.arange(4) == 3})
            buffer.save(step, wait=True)
            assert buffer.statistics().save["rows"] == 4 * step
        return env.draws()


def load(directory: Path, ranks: Ranks, step: int | None = None, **how: Any) -> tuple[list[float], Any, int]:
    env, box = Env(77), Box(-1)
    with build(directory, ranks) as buffer:
        buffer.attach(box=box)
        buffer.attach_own(env=env)
        resumed = buffer.resume(step, **how)
        return env.draws(), resumed, box.value


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("rebalance", [False, True])
def test_as_many_ranks_take_theirs_back(tmp_path: Path, size: int, rebalance: bool) -> None:
    before = fine(on_ranks(size, lambda ranks: train(tmp_path, ranks)))
    found = fine(on_ranks(size, lambda ranks: load(tmp_path, ranks, rebalance=rebalance)))
    assert [draws for draws, _, _ in found] == before
    assert [box for _, _, box in found] == [0] * size  # what is attached for all is the first rank's
    assert all(resumed.left == () for _, resumed, _ in found)
    assert verify(str(tmp_path)).whole
    older = fine(on_ranks(size, lambda ranks: load(tmp_path, ranks, 1)))
    assert [draws for draws, _, _ in older] == [Env(rank).draws(6)[3:] for rank in range(size)]
    again = fine(on_ranks(size, lambda ranks: load(tmp_path, ranks)))  # the older one is the newest by now
    assert [draws for draws, _, _ in again] == [draws for draws, _, _ in older]


@pytest.mark.parametrize("loaded", [1, 2, 4])
def test_another_number_of_ranks_does_not_load_it_and_says_so(tmp_path: Path, loaded: int) -> None:
    fine(on_ranks(3, lambda ranks: train(tmp_path, ranks)))
    with structlog.testing.capture_logs() as logs:
        found = fine(on_ranks(loaded, lambda ranks: load(tmp_path, ranks)))
    assert [draws for draws, _, _ in found] == [Env(77).draws()] * loaded
    assert all(resumed.left == ("env",) for _, resumed, _ in found)
    assert [box for _, _, box in found] == [0] * loaded
    said = [each for each in logs if each["event"] == "own.left"]
    assert [(each["names"], each["saved"], each["ranks"]) for each in said] == [(["env"], 3, loaded)] * loaded


def test_without_ranks_it_is_attached_as_anything(tmp_path: Path) -> None:
    env = Env(1)
    with build(tmp_path, None) as buffer:
        buffer.attach_own(env=env)
        buffer.resume()
        buffer.save(1, wait=True)
        before = env.draws()
    env = Env(2)
    with build(tmp_path, None) as buffer:
        buffer.attach_own(env=env)
        assert buffer.resume().left == ()
        assert env.draws() == before


def test_all_ranks_attach_the_same_names(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> None:
        with build(tmp_path, ranks) as buffer:
            buffer.attach_own(**{"one" if ranks.first else "other": Env(0)})
            buffer.resume()
            buffer.save(1, wait=True)

    for error in on_ranks(2, save):
        assert isinstance(error, RankFailed)
        assert "own is ['other'] on rank 1" in str(error)
    assert not list((tmp_path / "generations").glob("*/manifest.json"))


def test_what_was_attached_is_attached_before_it_is_resumed(tmp_path: Path) -> None:
    fine(on_ranks(2, lambda ranks: train(tmp_path, ranks)))

    def forget(ranks: Ranks) -> None:
        with build(tmp_path, ranks) as buffer:
            buffer.attach(box=Box(0))
            buffer.resume()

    for error in on_ranks(2, forget):
        assert isinstance(error, UsageError | RankFailed)
        assert "attach_own() the same before resume()" in str(error)


def test_names_are_of_one_kind(tmp_path: Path) -> None:
    def attach(ranks: Ranks) -> None:
        with build(tmp_path, ranks) as buffer:
            buffer.attach(one=Box(1))
            with pytest.raises(ConfigError, match="one"):
                buffer.attach_own(one=Env(0))
            buffer.attach_own(other=Env(0))
            with pytest.raises(ConfigError, match="other"):
                buffer.attach(other=Box(1))
            with pytest.raises(ConfigError, match="state_dict"):
                buffer.attach_own(third=3)

    fine(on_ranks(1, attach))


def test_what_a_rank_cannot_store_fails_the_save_on_all(tmp_path: Path) -> None:
    class Bad(Env):
        broken = False

        def state_dict(self) -> dict[str, Any]:
            return {"what": object()} if self.broken else super().state_dict()

    def save(ranks: Ranks) -> str:
        env = Bad(ranks.rank)
        with build(tmp_path, ranks) as buffer:
            buffer.attach_own(env=env)
            buffer.resume()
            buffer.save(1, wait=True)
            env.broken = ranks.rank == 1
            said = ""
            try:
                buffer.save(2, wait=True)
            except Exception as error:
                said = str(error)
            env.broken = False
            buffer.save(3, wait=True)
            return said

    first, second = fine(on_ranks(2, save))
    assert "rank 1 failed" in first
    assert "attached 'env'" in second

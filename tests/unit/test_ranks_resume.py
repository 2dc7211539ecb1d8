"""What fails on one rank of a resume, or is asked of it alone, is told on all of them, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.buffer.transitions.ring import Ring
from pipeline.distributed import Ranks
from pipeline.errors import ForebayError, RankFailed, StoreError, UsageError
from pipeline.replay import ReplayBuffer
from pipeline.replay.rank_saver import RankSaver
from tests.support.ranks import fine, on_ranks

ROWS = 10


def uids(rank: int, begin: int = 0) -> np.ndarray:
    return np.arange(begin, begin + ROWS) + 1000 * rank


def save(directory: Path, size: int) -> None:
    def train(ranks: Ranks) -> None:
        with ReplayBuffer(100, directory=directory, ranks=ranks) as buffer:
            buffer.resume()
            buffer.extend({"uid": uids(ranks.rank)})
            buffer.save(1, wait=True)

    fine(on_ranks(size, train))


def check_told(directory: Path, size: int, why: str, how: Callable[[Ranks], dict[str, Any]] = lambda ranks: {}) -> None:
    """A resume that fails on the rank 1 says so on all of them."""

    def go_on(ranks: Ranks) -> None:
        with ReplayBuffer(100, directory=directory, ranks=ranks) as buffer:
            buffer.resume(**how(ranks))

    for rank, error in enumerate(on_ranks(size, go_on)):
        assert isinstance(error, ForebayError)
        assert why in str(error)
        assert isinstance(error, RankFailed) == (rank != 1 or "All ranks need the same" in str(error))


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("early", [0, 1])
def test_rows_that_any_rank_has_added_before_are_refused_and_stay(tmp_path: Path, early: int, saved: bool) -> None:
    if saved:
        save(tmp_path, 2)

    def go_on(ranks: Ranks) -> Any:
        with ReplayBuffer(100, directory=tmp_path, ranks=ranks) as buffer:
            if ranks.rank == early:
                buffer.extend({"uid": uids(9)})
            with pytest.raises(UsageError if ranks.rank == early else RankFailed, match="comes first"):
                buffer.resume()
            return len(buffer)

    assert fine(on_ranks(2, go_on)) == [ROWS * (rank == early) for rank in range(2)]


def test_what_the_disk_does_not_give_one_rank_is_no_damage_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    own = RankSaver._own_shard

    def failing(self: RankSaver, shard: Any, like: Any) -> Any:
        if self.ranks.rank == 1:
            raise StoreError("the disk gives nothing")
        return own(self, shard, like)

    monkeypatch.setattr(RankSaver, "_own_shard", failing)
    check_told(tmp_path, 2, "the disk gives nothing", lambda ranks: {"allow_partial": True})


def test_who_has_no_memory_for_what_comes_to_it_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 3)
    wanted = RankSaver._moved
    like = Ring.like
    poor: set[int] = set()

    def moved(self: RankSaver, stored: Any, ring: Any) -> Any:
        if self.ranks.rank == 1:
            poor.add(id(ring))
        return wanted(self, stored, ring)

    def made(self: Ring, schema: Any) -> Any:
        if id(self) in poor:
            raise StoreError("no memory")
        return like(self, schema)

    monkeypatch.setattr(RankSaver, "_moved", moved)
    monkeypatch.setattr(Ring, "like", made)
    check_told(tmp_path, 2, "no memory")


@pytest.mark.parametrize("asked", ["rebalance", "allow_partial"])
def test_what_one_rank_alone_asks_for_is_refused_on_all(tmp_path: Path, asked: str) -> None:
    save(tmp_path, 2)
    check_told(tmp_path, 2, f"'{asked}': True", lambda ranks: {asked: ranks.rank == 1})


class Bad:
    """What a rank has attached for itself, and cannot be saved."""

    def __init__(self, rank: int) -> None:
        self.rank, self.loaded = rank, False

    def state_dict(self) -> dict[str, Any]:
        if self.loaded and self.rank == 1:
            raise RuntimeError("no state")
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = True


def test_an_older_generation_that_one_rank_cannot_make_the_newest_is_it_for_nobody(tmp_path: Path) -> None:
    def train(ranks: Ranks) -> None:
        with ReplayBuffer(100, directory=tmp_path, ranks=ranks) as buffer:
            buffer.attach_own(bad=Bad(ranks.rank))
            buffer.resume()
            for step in (1, 2):
                buffer.extend({"uid": uids(ranks.rank)})
                buffer.save(step, wait=True)

    def go_back(ranks: Ranks) -> None:
        with ReplayBuffer(100, directory=tmp_path, ranks=ranks) as buffer:
            buffer.attach_own(bad=Bad(ranks.rank))
            buffer.resume(step=1)

    fine(on_ranks(2, train))
    first, second = on_ranks(2, go_back)
    assert isinstance(first, RankFailed)
    assert "no state" in str(first)
    assert isinstance(second, RuntimeError)
    assert str(second) == "no state"

"""The process that serves the ranks' store ends: what others do then, and what it waits for before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

from pipeline import ReplayBuffer
from pipeline.distributed import Ranks
from pipeline.errors import RankLost
from tests.support.children import ChildProcess
from tests.support.ranks import at_once, fine

GROUP: Any = torch.distributed
HALF_AN_HOUR = timedelta(minutes=30)
"""What a process group's store has by default."""


def served(pipe: Connection) -> None:
    """Serve a store until a word comes."""
    store = GROUP.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.fixture
def server() -> Iterator[ChildProcess]:
    child = ChildProcess(served)
    yield child
    child.kill()
    child.pipe.close()


@pytest.mark.parametrize("verb", ["all", "look", "hear"])
def test_others_do_not_try_for_half_an_hour_to_reach_it_again(server: ChildProcess, verb: str) -> None:
    store = GROUP.TCPStore("127.0.0.1", server.hear(), is_master=False, timeout=HALF_AN_HOUR)
    ranks = Ranks(store, 1, 2, timeout_s=1.0)
    do = {
        "all": partial(ranks.all, "rows", 1),
        "look": partial(ranks.look, "rows"),
        "hear": partial(ranks.hear, "rows", 0),
    }
    server.kill()
    for _ in range(2):  # the first one finds that the connection has ended
        with pytest.raises(RankLost, match="the process group's store does not answer"):
            do[verb]()
    assert store.timeout == HALF_AN_HOUR  # it is the process group's


def test_what_ranks_told_is_not_forgotten_rank_by_rank_where_it_has_ended(server: ChildProcess) -> None:
    store = GROUP.TCPStore("127.0.0.1", server.hear(), is_master=False, timeout=HALF_AN_HOUR)
    ranks = Ranks(store, 0, 10_000, timeout_s=0.1)
    server.kill()
    ranks.forget("rows", 0, range(1, 10_000))


class Slow:
    """A store that is slow to forget."""

    def __init__(self, store: Any, closed: threading.Event, late: list[bool]) -> None:
        self._store, self._closed, self._late = store, closed, late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> Slow:
        return Slow(self._store, self._closed, self._late)

    def delete_key(self, key: str) -> bool:
        if "save heard" in key:
            self._closed.wait(0.5)
            self._late.append(self._closed.is_set())
        found: bool = self._store.delete_key(key)
        return found


def test_a_buffer_is_closed_when_nothing_more_is_to_be_said_of_its_save(tmp_path: Path) -> None:
    """Its process may end with that, and the store with its process."""
    closed, late = threading.Event(), list[bool]()
    store: Any = GROUP.HashStore()
    ranks = [Ranks(Slow(store, closed, late), 0, 2), Ranks(store, 1, 2)]

    def life(own: Ranks) -> None:
        with ReplayBuffer(64, directory=str(tmp_path / "run"), ranks=own) as buffer:
            buffer.resume()
            buffer.extend({"x": np.arange(8.0)})
            buffer.save(1)
        if own.first:
            closed.set()

    fine(at_once([lambda: life(ranks[0]), lambda: life(ranks[1])]))
    assert late == [False]

"""Saves of several ranks beside those who add and sample: what they cost, and of which moment they are."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint import verify
from pipeline.config import Prioritized
from pipeline.distributed import Ranks
from pipeline.replay import ReplayBuffer
from tests.support.ranks import fine, on_ranks

PRIORITIZED = Prioritized(alpha=0.6, beta=0.4)
LIMIT = 64 << 10


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("incomplete", ["keep", "truncate", "drop"])
@pytest.mark.parametrize("select", ["uniform", PRIORITIZED, "without_replacement"], ids=["uniform", "prio", "epochs"])
def test_a_large_buffer_without_rows_takes_nothing(tmp_path: Path, select: Any, incomplete: Any) -> None:
    """S3, on each rank and on all of them together."""

    def save(ranks: Ranks) -> None:
        with ReplayBuffer(10**6, directory=tmp_path, ranks=ranks, select=select, incomplete=incomplete) as buffer:
            buffer.resume()
            buffer.save(1, wait=True)

    fine(on_ranks(3, save))
    assert 0 < size_of(tmp_path) < LIMIT


def test_bytes_follow_the_rows(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> None:
        with ReplayBuffer(10**6, directory=tmp_path, ranks=ranks, select=PRIORITIZED) as buffer:
            buffer.resume()
            if ranks.first:
                buffer.extend({"n": np.arange(1000), "done": np.arange(1000) % 10 == 9})
            buffer.save(1, wait=True)

    fine(on_ranks(3, save))
    assert 40_000 < size_of(tmp_path) < LIMIT + 100_000


class Producers:
    """Threads that add blocks of rows to a buffer, each in an environment of its own, until they are told to stop."""

    def __init__(self, buffer: ReplayBuffer, rank: int, count: int, block: int) -> None:
        self._buffer, self._rank, self._block = buffer, rank, block
        self._stop = threading.Event()
        self.blocks = [0] * count
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        self._threads.append(threading.Thread(target=self._consume))

    def _run(self, number: int) -> None:
        try:
            while not self._stop.is_set():
                first = self.blocks[number] * self._block
                place = np.arange(first, first + self._block)
                uid = (self._rank * 8 + number) * 10**9 + place
                self._buffer.extend({"uid": uid, "done": place % 7 == 6}, env=number)
                self.blocks[number] += 1
        except BaseException as error:
            self.errors.append(error)

    def _consume(self) -> None:
        try:
            while not self._stop.is_set():
                if self._buffer.can_sample():
                    batch = self._buffer.sample(8)
                    self._buffer.update_priorities(batch.keys, np.ones(8))
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> Producers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *given: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self.errors, self.errors


@pytest.mark.parametrize("incomplete", ["keep", "drop"])
@pytest.mark.parametrize("loaded", [2, 3])
def test_an_add_during_a_save_is_wholly_in_or_wholly_out(tmp_path: Path, incomplete: Any, loaded: int) -> None:
    """S7, of a ring that wraps around all the while; and no row is there twice."""
    block, capacity = 5, 3_000

    def build(ranks: Ranks, capacity: int) -> ReplayBuffer:
        more: dict[str, Any] = {"select": PRIORITIZED, "incomplete": incomplete, "keep": None}
        return ReplayBuffer(capacity, directory=tmp_path, ranks=ranks, **more)

    def train(ranks: Ranks) -> list[int]:
        with build(ranks, capacity) as buffer:
            buffer.resume()
            with Producers(buffer, ranks.rank, 3, block) as producers:
                for step in range(1, 7):
                    buffer.save(step, wait=True)
            return producers.blocks

    made = fine(on_ranks(2, train))
    assert all(count > 10 for counts in made for count in counts)

    def load(ranks: Ranks, step: int) -> tuple[int, list[int]]:
        with build(ranks, 2 * capacity) as buffer:
            buffer.resume(step)
            if not len(buffer):
                return 0, []
            return len(buffer), buffer.ring.storage.view("uid")[buffer.ring.slots(buffer.ring.keys())].tolist()

    for step in (3, 6):
        found = fine(on_ranks(loaded, lambda ranks, step=step: load(ranks, step)))  # type: ignore[misc]
        uids = sorted(uid for _, each in found for uid in each)
        assert uids
        assert len(set(uids)) == len(uids)
        for number in range(16):
            own = np.array([uid % 10**9 for uid in uids if uid // 10**9 == number], np.int64)
            if len(own) and incomplete == "keep":
                assert np.array_equal(own, np.arange(own[0], own[-1] + 1))  # no gap
                assert (own[-1] + 1) % block == 0  # the last add is there to its end
                assert own[-1] < block * made[number // 8][number % 8]
            elif len(own):
                assert (own[0] % 7, own[-1] % 7) == (0, 6)  # whole episodes alone
                assert np.array_equal(own, np.arange(own[0], own[-1] + 1))
    assert verify(str(tmp_path)).whole

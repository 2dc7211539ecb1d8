"""Where ranks meet to save, in orders of their calls that chance chooses: one call of the store at a time."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from pipeline.distributed import Ranks
from pipeline.replay import meeting
from pipeline.replay.meeting import Meeting, Wish

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
STEPS = 30


class Died(BaseException):
    """The rank is gone."""


class Turns:
    """Threads of which one runs at a time; which one, chance says at every call of the store."""

    def __init__(self, chance: random.Random, size: int) -> None:
        self.chance, self.size = chance, size
        self.mine = [threading.Semaphore(0) for _ in range(size)]
        self.back = threading.Semaphore(0)
        self.may: list[Callable[[], bool] | None] = [lambda: True] * size  # None: it has ended
        self.dies: dict[int, int] = {}  # after how many turns
        self.seconds = 0.0

    def turn(self, rank: int, may: Callable[[], bool] = lambda: True) -> None:
        """Let others run, until this one may, and it is its turn."""
        self.may[rank] = may
        self.back.release()
        self.mine[rank].acquire()
        self.dies[rank] = self.dies.get(rank, 10**9) - 1
        if self.dies[rank] < 0:
            raise Died

    def run(self, do: Callable[[int], None]) -> None:
        """Run ``do(rank)`` for all ranks, to their ends."""

        def body(rank: int) -> None:
            try:
                self.turn(rank)
                do(rank)
            except Died:
                pass
            finally:
                self.may[rank] = None
                self.back.release()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
            self.back.acquire()
        tick = self.chance.choice([0.00001, 0.002, 0.01])
        weights = [self.chance.choice([1, 4, 20]) for _ in range(self.size)]  # some are quicker than others
        while any(self.may):
            ready = [rank for rank, may in enumerate(self.may) if may is not None and may()]
            if not ready:  # who waits for a rank that died
                ready = [rank for rank, may in enumerate(self.may) if may is not None]
                assert any(left < 0 for left in self.dies.values()), "all ranks wait for each other"
                self.dies |= dict.fromkeys(ready, 0)
            self.seconds += self.chance.choice([0.0, tick])
            self.mine[self.chance.choices(ready, [weights[rank] for rank in ready])[0]].release()
            self.back.acquire()
        for thread in threads:
            thread.join()


class TurnStore:
    """A store, as one rank sees it."""

    def __init__(self, keys: dict[str, bytes], turns: Turns, rank: int) -> None:
        self.keys, self.turns, self.rank = keys, turns, rank

    def set(self, key: str, value: str) -> None:
        self.turns.turn(self.rank)
        self.keys[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.turns.turn(self.rank)
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        self.turns.turn(self.rank)
        return all(key in self.keys for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.turns.turn(self.rank)
        return self.keys.setdefault(key, desired.encode())

    def add(self, key: str, amount: int) -> int:
        return amount

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise AssertionError("nobody waits")

    def delete_key(self, key: str) -> bool:
        raise AssertionError("nothing goes")


class World:
    """Ranks that train and meet. What they save is written down: (step, what for) for each of them."""

    def __init__(self, seed: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance = random.Random(seed)
        self.size = size
        self.turns = Turns(self.chance, size)
        self.coupled = self.chance.choice([None, 0, 2])  # how many steps a rank may be ahead of an all-reduce
        self.asks = {
            (self.chance.randrange(size), self.chance.randrange(1, STEPS - 5)): self.chance.random() < 0.5
            for _ in range(self.chance.randrange(1, 7))
        }
        self.steps = sorted(self.chance.sample(range(self.chance.choice([STEPS, 400])), STEPS))
        self.entered = [0] * size
        self.saves: list[list[tuple[int, Wish]]] = [[] for _ in range(size)]
        self.passed: list[int] = [0] * size
        monkeypatch.setattr(meeting, "time", self)
        keys: dict[str, bytes] = {}
        self.meetings = [Meeting(Ranks(TurnStore(keys, self.turns, rank), rank, size)) for rank in range(size)]

    def monotonic(self) -> float:
        return self.turns.seconds

    def reduced(self, number: int) -> bool:
        """Whether all ranks have entered the all-reduce of so many steps before."""
        return self.coupled is None or min(self.entered) > number - self.coupled

    def train(self, rank: int) -> None:
        here = self.meetings[rank]
        wish: Wish | None = None
        for number, step in enumerate(self.steps):
            self.entered[rank] = number + 1
            self.turns.turn(rank, lambda number=number: self.reduced(number))  # type: ignore[misc]
            if (rank, number) in self.asks:
                wish = Wish(rank, f"{rank} at {number}", self.asks[rank, number])
            if here.arrive(step, wish) is not None:
                assert here.arrive(step, wish) is not None
                asked = here.end()
                assert asked is not None
                self.saves[rank].append((number, asked))
                if wish is not None and (asked.stop or not wish.stop):
                    wish = None
            self.passed[rank] = number

    def run(self) -> None:
        self.turns.run(self.train)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_save_at_the_same_steps_whoever_asks_and_nobody_waits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = asked = 0
    for seed in range(120 * SOAK):
        world = World(seed, size, monkeypatch)
        world.run()
        assert world.passed == [STEPS - 1] * size, seed
        assert all(saves == world.saves[0] for saves in world.saves), seed
        steps = [number for number, _ in world.saves[0]]
        assert steps == sorted(set(steps)), seed
        assert len(steps) <= len(world.asks), seed
        rounds, asked = rounds + len(steps), asked + len(world.asks)
    assert asked / 3 < rounds < asked or size == 1


@pytest.mark.parametrize("size", [2, 4])
def test_who_is_left_when_a_rank_dies_saves_at_the_same_steps(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = 0
    for seed in range(120 * SOAK):
        world = World(seed, size, monkeypatch)
        world.coupled = None
        dies = world.chance.randrange(size)
        world.turns.dies[dies] = world.chance.randrange(200)
        world.run()
        left = [saves for rank, saves in enumerate(world.saves) if rank != dies]
        assert all(saves == left[0] for saves in left), seed
        assert world.saves[dies] == left[0][: len(world.saves[dies])], seed
        alone += len(left[0]) > len(world.saves[dies])
    assert alone > 3


def test_lock_step_ranks_save_where_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the step itself, or at the next one where another rank has passed that already."""
    for seed in range(20):
        world = World(seed, 3, monkeypatch)
        world.coupled = 0
        monkeypatch.setattr(meeting, "_MOST_AHEAD", 0)
        world.asks = {(seed % 3, 7): False}
        world.run()
        assert world.saves[0][0][0] in (7, 8), seed

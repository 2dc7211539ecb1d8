"""Trajectories of ranks, of which there are others in each life, against a model that is as plain as can be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipeline import Ranks, TrajectoryBuffer
from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import find_generations
from pipeline.replay.trajectory_shards import read_trajectory_shards
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout
from pipeline.tools import merge, reshard, salvage_run
from pipeline.tools.salvaging import SalvagedTrajectoryShards
from tests.properties.conftest import SOAK
from tests.support.ranks import fine, on_ranks
from tests.support.salvaging import flip

RUNS = 25 * SOAK


class One(NamedTuple):
    """A trajectory; they sort by age."""

    age: int
    rank: int
    sequence: int
    life: int
    uid: int
    steps: int
    envs: int

    @property
    def rows(self) -> int:
        return self.steps * self.envs

    def fields(self) -> dict[str, Any]:
        uid = np.full((self.steps, self.envs), self.uid)
        t = np.repeat(np.arange(self.steps)[:, None], self.envs, axis=1)
        return {"uid": uid, "t": t, "half": (uid / 8).astype(np.float16), "max_episode_length": self.uid}


class Saved(NamedTuple):
    """What a generation holds: by rank trajectories, oldest first, and how many there have been."""

    shards: list[list[One]]
    added: list[int]
    age: int


class Model:
    """The ranks of one run, life after life."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.lives, self.names = rng, 0, 0
        self.saved = Saved([[]], [0], 0)

    def loaded(self, size: int, capacity: int | None, rebalance: bool, there: int) -> Saved:
        """What ranks have after a resume that brought ``there`` trajectories: where there is no room for all, the
        oldest of all go, and with one less there would be too much."""
        saved = self.saved
        if size == len(saved.shards) and not rebalance:
            return saved._replace(shards=[each if capacity is None else each[-capacity:] for each in saved.shards])
        aged = sorted(one for each in saved.shards for one in each)
        gone = len(aged) - there
        shards = shared(aged[gone:], size)
        if gone:
            assert capacity is not None
            assert max(map(len, shards)) <= capacity
            one_more = max(map(len, shared(aged[gone - 1 :], size)))
            assert one_more > capacity or len(aged) - gone + 1 > size * capacity
        left = sum(saved.added) - there
        added = [left // size + (rank < left % size) + len(shards[rank]) for rank in range(size)]
        return Saved(shards, added, saved.age)

    def lives_on(self, first: Saved, capacity: int | None) -> tuple[list[list[One]], Saved]:
        """Return what each rank adds to what they have at first, and what they have then."""
        self.lives += 1
        size = len(first.shards)
        shards: list[list[One]] = []
        added: list[int] = []
        new: list[list[One]] = []
        for rank in range(size):
            more = []
            for count in range(int(self.rng.integers(0, 6))):
                self.names += 1
                steps, envs = (int(each) for each in self.rng.integers(1, (9, 4)))
                more.append(One(first.age + count, rank, count, self.lives, self.names, steps, envs))
            new.append(more)
            whole = [*first.shards[rank], *more]
            shards.append(whole if capacity is None else whole[-capacity:])
            added.append(first.added[rank] + len(more))
        return new, Saved(shards, added, first.age + max(map(len, new)))


def shared(aged: Sequence[One], size: int) -> list[list[One]]:
    """The rule: oldest first, each to who has the fewest transitions, the fewest trajectories, the lowest number."""
    found: list[list[One]] = [[] for _ in range(size)]
    for one in aged:
        least = min(range(size), key=lambda rank: (sum(each.rows for each in found[rank]), len(found[rank]), rank))
        found[least].append(one)
    return found


def check(buffer: TrajectoryBuffer, shard: list[One], added: int, window: int) -> None:
    """Compare a rank's buffer with the model."""
    infos = buffer.infos()
    assert [each.max_episode_length for each in infos] == [one.uid for one in shard]
    assert [each.trajectory_id for each in infos] == list(range(added - len(shard), added))
    assert buffer.trajectory_counter == added
    assert buffer.total_samples == sum(one.rows for one in shard)
    for info, one in zip(infos, shard, strict=True):
        whole = buffer.trajectory(info.trajectory_id)
        for name, expected in one.fields().items():
            assert np.array_equal(np.asarray(whole[name]), expected), (name, one)
    if shard:
        inside = shard if window <= 0 else shard[-window:]
        batch = buffer.sample(200)
        rows = {(one.uid, t) for one in inside for t in range(one.steps)}
        assert set(zip(batch["uid"].tolist(), batch["t"].tolist(), strict=True)) <= rows
        assert len(batch["uid"]) == min(200, sum(one.rows for one in inside))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_lives_of_any_number_of_ranks_are_those_of_the_model(seed: int) -> None:
    rng = np.random.default_rng([11, seed])
    model = Model(rng)
    with TemporaryDirectory() as folder:
        for _ in range(5):
            _live(model, Path(folder), rng)
        assert verify(folder).whole


def _live(model: Model, directory: Path, rng: np.random.Generator) -> None:
    size, rebalance, saves = int(rng.integers(1, 5)), bool(rng.random() < 0.3), bool(rng.random() < 0.8)
    capacity = int(rng.integers(3, 12)) if rng.random() < 0.4 else None
    window = int(rng.integers(-1, 6))
    options: dict[str, Any] = {"capacity": capacity, "sample_window_size": window, "keep": int(rng.integers(1, 3))}
    cache, written = int(rng.integers(1, 5)), [bool(each) for each in rng.random(size) < 0.5]
    how: Any = {"rebalance": rebalance, "verify": "lazy" if rng.random() < 0.5 else "full", "evict_oldest": True}

    def look(ranks: Ranks) -> int:
        with TrajectoryBuffer(directory=directory, strict=False, ranks=ranks, **options) as it:
            it.resume(**how)
            return len(it)

    first = model.loaded(size, capacity, rebalance, sum(fine(on_ranks(size, look))))
    new, then = model.lives_on(first, capacity)

    def train(ranks: Ranks) -> None:
        rank = ranks.rank
        more: dict[str, Any] = {"auto_save": written[rank], "cache_size": cache, "seed": rank, **options}
        with TrajectoryBuffer(directory=directory, strict=False, ranks=ranks, **more) as it:
            it.resume(**how)
            check(it, first.shards[rank], first.added[rank], window)
            for one in new[rank]:
                it.add_trajectories([one.fields()])
            check(it, then.shards[rank], then.added[rank], window)
            if saves:
                it.save(1, wait=True)
            check(it, then.shards[rank], then.added[rank], window)

    fine(on_ranks(size, train))
    if saves:
        model.saved = then


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_lives_between_which_tools_put_them_together_anew(seed: int) -> None:
    """Resharded, salvaged after damage, and merged: it comes to what the model says, and lives go on with it."""
    rng = np.random.default_rng([12, seed])
    model = Model(rng)
    with TemporaryDirectory() as folder:
        directory = Path(folder, "0")
        for number in range(1, 6):
            _live(model, directory, rng)
            if find_generations(Layout(str(directory)), run_id_of(directory)).complete:
                _merged(model.saved, directory, Path(folder, f"{number} merged"))
                directory = _by_tool(model, directory, Path(folder, str(number)), rng)
                assert verify(str(directory)).whole


def run_id_of(directory: Path) -> str:
    run = Layout(str(directory)).read_run()
    assert run is not None
    return run.run_id


def _merged(saved: Saved, directory: Path, out: Path) -> None:
    """By their numbers, of each number rank after rank."""
    every = [
        (added - len(shard) + at, rank, one)
        for rank, (shard, added) in enumerate(zip(saved.shards, saved.added, strict=True))
        for at, one in enumerate(shard)
    ]
    in_order = [one for _, _, one in sorted(every)]
    numbers = [number for number, _, _ in sorted(every)]
    made = merge([directory], out)
    assert made.units == len(every)
    stays = bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    with TrajectoryBuffer(directory=out, strict=False, sample_window_size=0) as it:
        it.resume()
        check(it, in_order, numbers[-1] + 1 if stays else len(in_order), 0)


def _by_tool(model: Model, directory: Path, out: Path, rng: np.random.Generator) -> Path:
    saved = model.saved
    if rng.random() < 0.5:
        size, rebalance = int(rng.integers(1, 5)), bool(rng.random() < 0.3)
        reshard(directory, out, size, rebalance=rebalance)
        model.saved = model.loaded(size, None, rebalance, sum(map(len, saved.shards)))
        return out
    newest = find_generations(Layout(str(directory)), run_id_of(directory)).complete[-1]
    left = []
    for listed, shard in zip(read_trajectory_shards(newest), saved.shards, strict=True):
        hurt = set(np.flatnonzero(rng.random(len(shard)) < 0.2).tolist())
        for at in hurt:
            block = listed.blocks[at]
            path = Path(Layout(str(directory)).segment(*block.segment_key))
            flip(path, block.offset + HEADER_BYTES + int(rng.integers(block.length)))
        left.append([one for at, one in enumerate(shard) if at not in hurt])
    found = salvage_run(directory, out)
    assert isinstance(found, SalvagedTrajectoryShards)
    assert found.trajectories_lost == len(found.losses) == sum(map(len, saved.shards)) - sum(map(len, left))
    assert found.shards == [sum(one.rows for one in each) for each in left]
    model.saved = saved._replace(shards=left)
    return out

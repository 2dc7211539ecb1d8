"""Resharding by command: what N ranks then resume is what they would have resumed of the M shards themselves."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.checkpoint import verify
from pipeline.config import Prioritized
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, Damaged, UsageError
from pipeline.tools import merge, reshard
from tests.support.keeping import PRIORITIZED, digest, everything, load, odd_rows, play, rows_by_id
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter

CURRENT = Prioritized(alpha=0.6, beta=0.4, new="current_max")


def train(directory: Path, size: int, select: Any = "uniform", steps: int = 20) -> list[dict[str, Any]]:
    """Save on ``size`` ranks in several lives, of different speeds, with open episodes and such without a start."""

    def live(ranks: Ranks, life: int) -> dict[str, Any]:
        counter = Counter()
        with ReplayBuffer(60, directory=directory, ranks=ranks, select=select, seed=1) as buffer:
            buffer.attach(counter=counter)
            buffer.resume()
            for t in range(steps + 5 * ranks.rank):
                done = [(t + env) % (3 + 2 * ranks.rank) == 0 for env in range(3)]
                buffer.extend(odd_rows(10 * life + ranks.rank, t, 3, done=done), envs=3, version=t)
            if select is CURRENT:
                keys = buffer.ring.keys()
                buffer.update_priorities(keys, (1 + ranks.rank) * (1 + keys % 7))
            counter.step = life
            buffer.save(life, wait=True)
            return everything(buffer)

    for life in (1, 2):
        found = fine(on_ranks(size, partial(live, life=life)))
    return found


def resumed(directory: Path, size: int, select: Any = "uniform", **options: Any) -> list[dict[str, Any]]:
    def live(ranks: Ranks) -> dict[str, Any]:
        counter = Counter()
        with ReplayBuffer(2000, directory=directory, ranks=ranks, select=select, seed=1) as buffer:
            buffer.attach(counter=counter)
            step = buffer.resume(**options).step
            found = everything(buffer)
            draws = [buffer.sample(8).keys.tolist() for _ in range(3)] if buffer.can_sample() else []
            return {**found, "step": (step, counter.step), "draws": draws}

    return fine(on_ranks(size, live))


@pytest.mark.parametrize("select", ["uniform", CURRENT], ids=["uniform", "prioritized"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (4, 1), (1, 4), (2, 2)], ids=str)
def test_as_if_the_ranks_had_done_it_themselves(tmp_path: Path, before: int, after: int, select: Any) -> None:
    """Down to the next draws."""
    train(tmp_path / "a", before, select)
    was = digest(tmp_path / "a")
    made = reshard(tmp_path / "a", tmp_path / "b", after)
    assert digest(tmp_path / "a") == was
    found = verify(str(tmp_path / "b"))
    assert found.whole, found.damages
    assert len(made.shards) == after
    got = resumed(tmp_path / "b", after, select)
    assert [len(each["keys"]) for each in got] == made.shards
    assert got == resumed(tmp_path / "a", after, select)


def test_as_many_ranks_keep_every_bit_and_segments_are_linked(tmp_path: Path) -> None:
    before = train(tmp_path / "a", 2, CURRENT)
    made = reshard(tmp_path / "a", tmp_path / "b", 2)
    assert made.linked == made.bytes > 0
    assert {path.stat().st_nlink for path in (tmp_path / "b" / "segments").iterdir()} == {2}
    kept = resumed(tmp_path / "b", 2, CURRENT, continue_episodes=True)
    for one, other in zip(before, kept, strict=True):
        assert {name: other[name] for name in one} == one
    anew = reshard(tmp_path / "a", tmp_path / "c", 2, rebalance=True)
    assert max(anew.shards) - min(anew.shards) <= 25
    assert resumed(tmp_path / "c", 2, CURRENT) == resumed(tmp_path / "a", 2, CURRENT, rebalance=True)


def test_as_many_ranks_have_room_for_what_they_have_or_are_refused(tmp_path: Path) -> None:
    train(tmp_path / "a", 2)
    held = reshard(tmp_path / "a", tmp_path / "plain", 2).shards
    most = max(held)
    hows: list[dict[str, Any]] = [{}, {"evict_oldest": True}]
    for how in hows:
        rank = held.index(most)
        with pytest.raises(ConfigError, match=rf"capacity={most - 1}: .*a: rank {rank} has {most} rows, .*--rebalance"):
            reshard(tmp_path / "a", tmp_path / "b", 2, capacity=most - 1, dry_run=True, **how)
    assert not (tmp_path / "b").exists()
    assert reshard(tmp_path / "a", tmp_path / "b", 2, capacity=most).shards == held
    fewer = reshard(tmp_path / "a", tmp_path / "c", 2, capacity=most - 20, rebalance=True, evict_oldest=True)
    assert max(fewer.shards) <= most - 20


def test_in_any_number_of_steps(tmp_path: Path) -> None:
    """R14: 4 -> 3 -> 4 is 4 -> 4 shared out anew."""
    train(tmp_path / "a", 4)
    reshard(tmp_path / "a", tmp_path / "three", 3)
    reshard(tmp_path / "three", tmp_path / "four", 4)
    reshard(tmp_path / "a", tmp_path / "anew", 4, rebalance=True)
    found = [resumed(tmp_path / name, 4) for name in ("four", "anew")]
    for one, other in zip(*found, strict=True):
        assert {**one, "draws": 0, "counts": 0} == {**other, "draws": 0, "counts": 0}


def test_new_episodes_never_have_the_name_of_an_old_one(tmp_path: Path) -> None:
    """T7: names hold the life in which an episode began; the new run's lives come after all of these."""
    train(tmp_path / "a", 2)  # in its life 2
    for life in range(3):
        source, target = tmp_path / ("a" if life == 0 else f"r{life - 1}"), tmp_path / f"r{life}"
        reshard(source, target, 2 + life % 2)

        def live(ranks: Ranks, target: Path = target, life: int = life) -> Any:
            with ReplayBuffer(2000, directory=target, ranks=ranks, seed=1) as buffer:
                buffer.attach(counter=Counter())
                buffer.resume()
                for t in range(4):
                    buffer.extend(odd_rows(100 + life, t, 1, done=[True]))
                buffer.save(10 + life, wait=True)
                return len(buffer)

        before = sum(fine(on_ranks(2 + life % 2, live)))
    made = reshard(tmp_path / "r2", tmp_path / "end", 1)  # a name that is there twice would be damage
    assert made.rows == before


@pytest.mark.parametrize("size", [1, 2])
def test_what_begins_afterwards_is_newer(tmp_path: Path, size: int) -> None:
    """Also than what one process had: the next ranks have the episodes in the order of their age."""
    if size == 1:
        play(tmp_path / "a", 1, 30)
    else:
        train(tmp_path / "a", size)
    reshard(tmp_path / "a", tmp_path / "b", 3)

    def more(ranks: Ranks) -> None:
        with ReplayBuffer(2000, directory=tmp_path / "b", ranks=ranks, seed=1) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            for t in range(6):
                buffer.extend(odd_rows(100 + ranks.rank, t, 1, done=[t % 2 == 1]))
            buffer.save(10, wait=True)

    fine(on_ranks(3, more))
    for found in resumed(tmp_path / "b", 2):
        later = np.array([run >= 100 for run, _ in found["id"]])
        begin = int(np.flatnonzero(later)[0])
        assert begin > 0
        assert later[begin:].all()


def test_a_segment_that_is_too_short_is_not_linked(tmp_path: Path) -> None:
    train(tmp_path / "a", 2)
    segment = max((tmp_path / "a" / "segments").iterdir())
    os.truncate(segment, segment.stat().st_size // 2)
    with pytest.raises(Damaged, match=rf"{segment.name}: has \d+ bytes, where \d+ were written"):
        reshard(tmp_path / "a", tmp_path / "b", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_three_shards_of_single_steps(tmp_path: Path) -> None:
    """Case 126: sizes follow from the plan, and M -> N -> M has the same rows."""

    def save(ranks: Ranks) -> None:
        with ReplayBuffer(100, directory=tmp_path / "a", ranks=ranks) as buffer:
            buffer.resume()
            begin = (0, 5, 6)[ranks.rank]
            for number in range(begin, begin + (5, 1, 4)[ranks.rank]):
                buffer.extend({"run": np.array([number]), "t": np.zeros(1, int), "terminated": np.ones(1, bool)})
            buffer.save(1, wait=True)

    def names(ranks: Ranks, directory: Path) -> list[int]:
        with ReplayBuffer(100, directory=directory, ranks=ranks) as buffer:
            buffer.resume()
            return [row[0] for row in everything(buffer).get("id", [])]

    fine(on_ranks(3, save))
    for size, sizes in ((1, [10]), (2, [5, 5]), (4, [3, 3, 2, 2])):
        made = reshard(tmp_path / "a", tmp_path / str(size), size)
        assert made.shards == sizes
        found = fine(on_ranks(size, partial(names, directory=tmp_path / str(size))))
        assert sorted(number for each in found for number in each) == list(range(10))
        again = reshard(tmp_path / "a", tmp_path / f"{size} again", size)
        assert fine(on_ranks(size, partial(names, directory=Path(again.directory)))) == found
    reshard(tmp_path / "4", tmp_path / "back", 3)
    found = fine(on_ranks(3, lambda ranks: names(ranks, tmp_path / "back")))
    assert sorted(number for each in found for number in each) == list(range(10))


def test_a_shard_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """Case 127: also where fewer ranks are to load."""
    train(tmp_path / "a", 3)
    shutil.rmtree(next((tmp_path / "a" / "generations").glob("*/shards/0002")))
    newest = max((tmp_path / "a" / "generations").iterdir())
    shutil.rmtree(newest / "shards" / "0002", ignore_errors=True)
    for size in (1, 2, 3):
        with pytest.raises(Damaged, match="0002"):
            reshard(tmp_path / "a", tmp_path / "b", size)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_of_one_process_for_ranks_and_back(tmp_path: Path) -> None:
    before = play(tmp_path / "a", 1, 30, envs=3, capacity=70, select=PRIORITIZED)
    made = reshard(tmp_path / "a", tmp_path / "b", 3)
    assert sum(made.shards) == 70
    merge([tmp_path / "b"], tmp_path / "c")
    mass = rows_by_id(load(tmp_path / "c", select=PRIORITIZED), ("reward", "image", "bits", "mass"))
    assert {which: [row[:-2] for row in each] for which, each in mass.items()} == {
        which: [row[:-2] for row in each]
        for which, each in rows_by_id(before, ("reward", "image", "bits", "mass")).items()
    }


def test_room(tmp_path: Path) -> None:
    train(tmp_path / "a", 2)
    with pytest.raises(ConfigError, match=r"room|hold"):
        reshard(tmp_path / "a", tmp_path / "b", 1, capacity=100)
    made = reshard(tmp_path / "a", tmp_path / "b", 1, capacity=100, evict_oldest=True)
    assert made.rows <= 100
    assert "oldest" in made.left_out["episodes"]
    assert [len(each["keys"]) for each in resumed(tmp_path / "b", 1)] == made.shards


def test_what_is_refused_and_a_dry_run(tmp_path: Path) -> None:
    train(tmp_path / "a", 2)
    with pytest.raises(ConfigError, match="to=0"):
        reshard(tmp_path / "a", tmp_path / "b", 0)
    with pytest.raises(ConfigError, match="to=4097: 4096 ranks at the most"):
        reshard(tmp_path / "a", tmp_path / "b", 4097)
    said = reshard(tmp_path / "a", tmp_path / "b", 3, dry_run=True)
    kept = reshard(tmp_path / "a", tmp_path / "b", 2, dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert said.shards == reshard(tmp_path / "a", tmp_path / "b", 3).shards
    assert sum(kept.shards) == said.rows
    with pytest.raises(UsageError, match="buffer of ranks"), ReplayBuffer(9, directory=tmp_path / "b") as buffer:
        buffer.resume()

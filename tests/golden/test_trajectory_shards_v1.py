"""A folder of format version 1 in which three ranks have trajectories opens in every version after it."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import status_of, verify
from pipeline.distributed import Ranks
from tests.golden.make_trajectories_v1 import trajectory
from tests.golden.make_trajectory_shards_v1 import made, three, two
from tests.support.disk import says_no_machine
from tests.support.ranks import fine, on_ranks

HERE = Path(__file__).parent / "trajectory_shards_v1"
EXPECTED = json.loads((HERE / "expected.json").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(HERE / "run", tmp_path / "run")
    return tmp_path / "run"


def test_it_is_whole_and_says_nothing_of_the_machine_that_made_it() -> None:
    assert verify(str(HERE / "run")).whole
    found = status_of(HERE / "run")
    assert (found.state, found.kind) == ("to be continued", "trajectory shards")
    assert found.newest is not None
    assert found.newest.rows == len(uids(EXPECTED["three"]))  # trajectories
    says_no_machine(HERE, most=400_000)


def test_three_ranks_have_what_they_had_and_draw_what_they_would_have_drawn(run: Path) -> None:
    assert fine(on_ranks(3, lambda ranks: three(ranks, run))) == EXPECTED["three"]


def test_two_ranks_have_the_trajectories_of_three(run: Path) -> None:
    found = fine(on_ranks(2, lambda ranks: two(ranks, run)))
    assert found == EXPECTED["two"]
    assert sorted(uids(found)) == sorted(uids(EXPECTED["three"]))


def uids(ranks: list[Any]) -> list[int]:
    """What tells the trajectories of all ranks from each other."""
    return list(chain(*([info[2] for info in each["infos"]] for each in ranks)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_saved_after_it_is_whole(run: Path, size: int) -> None:
    def go_on(ranks: Ranks) -> int:
        buffer, _, _ = made(run, ranks, capacity=40)
        with buffer:
            buffer.resume()
            buffer.add_trajectories([trajectory(2000 + ranks.rank)])
            buffer.save(9, wait=True)
            return len(buffer)

    sizes = fine(on_ranks(size, go_on))
    assert sum(sizes) == len(uids(EXPECTED["three"])) + size
    assert verify(str(run)).whole


def test_older_generations_open_too(run: Path) -> None:
    def older(ranks: Ranks) -> tuple[int, int]:
        buffer, counter, own = made(run, ranks)
        with buffer:
            buffer.resume(2)
            assert own.step == 20 + ranks.rank
            return len(buffer), counter.step

    assert fine(on_ranks(2, older)) == [(4, 2), (6, 2)]

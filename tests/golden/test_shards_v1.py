"""A folder of format version 1 in which three ranks have shards of a buffer opens in every version after it."""

from __future__ import annotations

import json
import shutil
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.buffer.transitions.layout import EPISODE
from pipeline.checkpoint import status_of, verify
from pipeline.distributed import Ranks
from tests.golden.make_shards_v1 import made, three, two
from tests.support.disk import says_no_machine
from tests.support.ranks import fine, on_ranks

HERE = Path(__file__).parent / "shards_v1"
EXPECTED = json.loads((HERE / "expected.json").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(HERE / "run", tmp_path / "run")
    return tmp_path / "run"


def test_it_is_whole_and_says_nothing_of_the_machine_that_made_it() -> None:
    assert verify(str(HERE / "run")).whole
    assert status_of(HERE / "run").state == "to be continued"
    says_no_machine(HERE, most=400_000)


def test_three_ranks_have_what_they_had_and_draw_what_they_would_have_drawn(run: Path) -> None:
    found = fine(on_ranks(3, lambda ranks: three(ranks, run)))
    assert [plain(each) for each in found] == [plain(each) for each in EXPECTED["three"]]


def test_two_ranks_have_the_rows_of_three(run: Path) -> None:
    found = fine(on_ranks(2, lambda ranks: two(ranks, run)))
    assert [plain(each) for each in found] == [plain(each) for each in EXPECTED["two"]]
    names = [of_rows(each) for each in found]
    assert sorted(chain(*names)) == sorted(chain(*(of_rows(each) for each in EXPECTED["three"])))
    for each, mine in zip(found, names, strict=True):
        for (before, number), (after, other) in pairwise(zip(mine, each[EPISODE], strict=True)):
            assert after == before + 1 or other == number + 1


def of_rows(found: dict[str, Any]) -> list[int]:
    """The number of each row, in their order."""
    numbers: list[int] = found["n"]
    return numbers


def plain(found: dict[str, Any]) -> str:
    """Everything, in which NaN is the same as NaN."""
    return json.dumps(found, sort_keys=True)


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_saved_after_it_is_whole(run: Path, size: int) -> None:
    def go_on(ranks: Ranks) -> int:
        buffer, _ = made(run, ranks, 40)
        with buffer:
            buffer.resume()
            buffer.save(9, wait=True)
            return len(buffer)

    sizes = fine(on_ranks(size, go_on))
    assert sum(sizes) == sum(len(each["n"]) for each in EXPECTED["three"])
    assert verify(str(run)).whole


def test_older_generations_open_too(run: Path) -> None:
    def older(ranks: Ranks) -> tuple[int, int]:
        buffer, counter = made(run, ranks)
        with buffer:
            buffer.resume(2)
            return len(buffer), counter.step

    assert fine(on_ranks(3, older)) == [(18, 2), (0, 2), (10, 2)]

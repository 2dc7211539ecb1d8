"""A folder of format version 1 in which two ranks have rows of which not the oldest go first opens in every version
after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import status_of, verify
from pipeline.distributed import Ranks
from tests.golden.make_shards_v1b import held, made
from tests.support.disk import says_no_machine
from tests.support.ranks import fine, on_ranks

HERE = Path(__file__).parent / "shards_v1b"
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(HERE / "run", tmp_path / "run")
    return tmp_path / "run"


def test_it_is_whole_and_says_nothing_of_the_machine_that_made_it() -> None:
    assert verify(str(HERE / "run")).whole
    assert status_of(HERE / "run").state == "to be continued"
    says_no_machine(HERE, most=400_000)


@pytest.mark.parametrize(("name", "size", "capacity"), [("two", 2, 12), ("three", 3, 10)])
def test_ranks_have_what_they_had_and_draw_what_they_would_have_drawn(
    run: Path, name: str, size: int, capacity: int
) -> None:
    assert fine(on_ranks(size, lambda ranks: held(ranks, run, capacity))) == EXPECTED[name]
    numbers = [sorted(n for each in EXPECTED[of] for n in each["n"]) for of in ("two", "three")]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_saved_after_it_is_whole(run: Path, size: int) -> None:
    def go_on(ranks: Ranks) -> int:
        buffer, _ = made(run, ranks, 12)
        with buffer:
            buffer.resume()
            buffer.save(9, wait=True)
            return len(buffer)

    assert sum(fine(on_ranks(size, go_on))) == 24
    assert verify(str(run)).whole

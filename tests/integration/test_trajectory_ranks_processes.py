"""Ranks are processes: they add trajectories and save, are all killed at some moment, and others of another number go
on, and back."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import verify
from pipeline.tools import merge, reshard, salvage_run
from tests.support.ranked import processes, serve
from tests.support.trajectory_ranks import LONGEST, rows_of, train

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
SIZES = [(1, 2, 1), (2, 1), (4, 3, 4), (3, 4)]
if SOAK > 1:
    SIZES += [(8, 8), (8, 1, 8), (5, 7, 5)]


class Run:
    """Lives of one run, each with its number of ranks, and each ended by a kill of all."""

    def __init__(self, server: Any, directory: Path) -> None:
        self.server, self.directory = server, directory
        self.lives = 0
        self.rng = random.Random(4)
        self.by_step: dict[int, list[list[int]]] = {0: []}
        """What ranks had when they saved."""
        self.sure = 0
        """The newest step of which a rank has said that it is saved."""

    def live(self, size: int, saves: int) -> None:
        self.lives += 1
        with processes(self.server, train, self.directory, size) as ranks:
            ranks.start(self.lives)
            resumed = [each.hear() for each in ranks.ranks]
            assert {kind for kind, *_ in resumed} == {"resumed"}, resumed
            self._is_as_it_was([step for _, step, _ in resumed], [found for *_, found in resumed])
            for _ in range(2 * saves):
                self._said(0, size, ranks.ranks[0].hear())
            for each in self.rng.sample(ranks.ranks, size):  # in the middle of whatever they do
                each.process.kill()
            assert set(ranks.ends()) <= {-9, 1}
            for rank, each in enumerate(ranks.ranks):
                for said in each.rest():
                    self._said(rank, size, said)

    def _said(self, rank: int, size: int, said: Any) -> None:
        kind, what, *more = said
        if kind == "saving":
            self.by_step.setdefault(what, [[] for _ in range(size)])[rank] = more[0]
        elif kind == "saved":
            self.sure = max(self.sure, what)
        else:  # one that was not killed yet, and found the others gone
            assert kind == "raised"
            assert "AssertionError" not in what, what

    def _is_as_it_was(self, steps: list[int], found: list[list[int]]) -> None:
        assert len(set(steps)) == 1
        assert steps[0] >= self.sure
        before = self.by_step[steps[0]]
        assert Counter(uid for each in found for uid in each) == Counter(uid for each in before for uid in each)
        assert max(Counter(uid for each in found for uid in each).values(), default=1) == 1
        if len(before) == len(found):
            assert found == before
        loads = [sum(map(rows_of, each)) for each in found]
        assert len(before) == len(found) or max(loads) - min(loads) <= LONGEST
        self.by_step = {steps[0]: found}


@pytest.mark.timeout(300)
def test_between_kills_tools_reshard_and_salvage_what_is_there(tmp_path: Path) -> None:
    """As the next ranks would have gone on themselves, or as many of them with what is whole, which is all."""
    run = Run(serve(), tmp_path / "a")
    run.live(2, 3)
    reshard(tmp_path / "a", tmp_path / "b", 3)
    run.directory = tmp_path / "b"
    run.live(3, 3)
    found = salvage_run(tmp_path / "b", tmp_path / "c")
    assert found.whole
    run.directory = tmp_path / "c"
    run.live(3, 3)
    assert run.sure > 0
    assert verify(str(tmp_path / "c")).whole
    assert merge([tmp_path / "c"], tmp_path / "m").units in {sum(map(len, each)) for each in run.by_step.values()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sizes", SIZES)
def test_killed_ranks_go_on_as_another_number_of_them(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    run = Run(serve(), tmp_path)
    for size in (*sizes, sizes[-1]):
        run.live(size, 3)
    assert run.sure > 0
    assert verify(str(tmp_path)).whole

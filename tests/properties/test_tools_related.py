"""Whatever tools and processes make of runs, in any order: no merge has a row twice, and runs that have nothing to do
with each other are merged."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import ReplayBuffer
from pipeline.errors import ConfigError
from pipeline.tools import merge, reshard, salvage_run, split
from tests.properties.conftest import SOAK

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["merge", "split", "split", "reshard", "salvage", "go on"]),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)


class Run(NamedTuple):
    """A run of the model."""

    path: Path
    rows: frozenset[int]
    """Which rows it holds; each row that was ever added has a number of its own."""
    roots: frozenset[int]
    """From which runs that no tool made something may be in it."""
    ranks: bool = False


class World:
    def __init__(self, folder: Path, remove: str) -> None:
        self.folder, self.remove = folder, remove
        self.runs: list[Run] = []
        self._numbers = itertools.count()
        self._next = 0
        for root in range(3):
            path = folder / f"root{root}"
            self.runs.append(Run(path, self.added(path), frozenset([root])))

    def added(self, path: Path, capacity: int = 1000) -> frozenset[int]:
        """Have a process add four episodes to what is there, and save."""
        with ReplayBuffer(capacity, directory=path, seed=1, remove=self.remove) as buffer:
            buffer.resume()
            n = np.arange(self._next, self._next + 8)
            self._next += 8
            buffer.extend({"n": n, "terminated": n % 2 == 1})
            buffer.save(1, wait=True)
            return frozenset(buffer.ring.storage.view("n")[buffer.ring.slots(buffer.ring.keys())].tolist())

    def name(self) -> Path:
        return self.folder / str(next(self._numbers))

    def step(self, what: str, one: int, other: int) -> None:
        first = self.runs[one % len(self.runs)]
        if what == "merge":
            second = self.runs[other % len(self.runs)]
            path = self.name()
            if first.path != second.path and merged(first, second, path):
                roots = first.roots | second.roots
                self.runs.append(Run(path, first.rows | second.rows, roots))
        elif what == "split" and not first.ranks:
            parts = [self.name(), self.name()]
            split(first.path, parts, where={"n": [("in", sorted(first.rows)[: 2 * other])]} if other else "n < 0")
            left = frozenset(sorted(first.rows)[: 2 * other])
            for part, rows in zip(parts, (left, first.rows - left), strict=True):
                self.runs.append(Run(part, rows, first.roots))
        elif what == "reshard":
            path = self.name()
            reshard(first.path, path, 1 + other % 2)
            self.runs.append(Run(path, first.rows, first.roots, ranks=True))
        elif what == "salvage" and not (first.ranks and self.remove != "fifo"):
            path = self.name()
            salvage_run(first.path, path)
            self.runs.append(Run(path, first.rows, first.roots, first.ranks))
        elif what == "go on" and not first.ranks:
            at = self.runs.index(first)
            self.runs[at] = first._replace(rows=self.added(first.path))


def merged(one: Run, other: Run, out: Path, **how: Any) -> bool:
    """Merge two runs, if that is not refused; return whether it was not."""
    try:
        made = merge([one.path, other.path], out, **how)
    except ConfigError as error:
        if "Leave one of" not in str(error):
            raise
        return False
    assert not one.rows & other.rows, "rows are there twice"
    assert made.rows == len(one.rows) + len(other.rows)
    return True


@settings(max_examples=8 * SOAK)
@given(STEPS, st.sampled_from(["fifo", "stalest"]))
def test_no_row_is_there_twice(steps: list[tuple[str, int, int]], remove: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        world = World(Path(name), remove)
        for step in steps:
            world.step(*step)
        for one, other in itertools.combinations(world.runs, 2):
            allowed = merged(one, other, world.folder / "out", dry_run=True)
            assert allowed or one.roots & other.roots, "refused without a reason"


@settings(max_examples=5 * SOAK)
@given(STEPS, STEPS, st.sampled_from(["fifo", "stalest"]))
def test_what_is_made_of_one_part_goes_with_what_is_made_of_the_other(
    left: list[tuple[str, int, int]], right: list[tuple[str, int, int]], remove: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = World(folder, remove)
        a, b, _ = world.runs
        merge([a.path, b.path], folder / "all")
        split(folder / "all", [folder / "x", folder / "y"], where="n < 6")
        rows = frozenset(n for n in a.rows | b.rows if n < 6), frozenset(n for n in a.rows | b.rows if n >= 6)
        sides = []
        for steps, path, own in zip((left, right), ("x", "y"), rows, strict=True):
            world.runs = [Run(folder / path, own, frozenset([0, 1]))]
            for step in steps:
                world.step(*step)
            sides.append(world.runs)
        for one, other in itertools.product(*sides):
            assert merged(one, other, folder / "out", dry_run=True), "parts have nothing in common"

"""A buffer that others than the oldest rows leave, against a plain list of rows."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline import Prioritized, Remove, ReplayBuffer
from pipeline.buffer.transitions import blocks as block_sizes
from pipeline.buffer.transitions import pool
from pipeline.store.frames import HEADER_BYTES
from pipeline.tools import SalvagedRows, salvage_run
from tests.properties.conftest import SOAK
from tests.properties.test_replay_model import in_file
from tests.support.keeping import stored
from tests.support.salvaging import flip

VALUES = st.one_of(st.integers(-3, 3), st.just(float("nan")), st.just(float("inf")), st.just(-float("inf")))
NEW = st.tuples(VALUES, st.integers(0, 3))
VERBS = st.one_of(
    st.tuples(st.just("append"), NEW),
    st.tuples(st.just("extend"), st.lists(VALUES, max_size=9), st.integers(0, 3)),
    st.tuples(st.just("prioritize"), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=4)),
    st.tuples(st.just("write"), st.lists(st.tuples(st.integers(0, 40), VALUES), max_size=4)),
    st.tuples(st.just("clear")),
    st.tuples(st.just("again")),
)
REMOVERS = [
    Remove(by="lifo"),
    Remove(by="stalest"),
    Remove(by="lowest_priority"),
    Remove(by="min", field="x"),
    Remove(by="max", field="x"),
]


def image(number: int) -> np.ndarray:
    return np.full(1100, number % 251, np.uint8)


@dataclass
class Row:
    number: int
    key: int
    x: float
    version: int
    priority: float = 1.0
    there: bool = True


class Both:
    """The buffer and a list, which are told the same."""

    def __init__(self, capacity: int, remove: Remove, options: dict[str, Any] | None = None) -> None:
        self.capacity, self.remove, self.options = capacity, remove, options or {}
        self.buffer = self.make()
        self.rows: list[Row] = []
        self.not_kept = 0

    def make(self) -> ReplayBuffer:
        select = Prioritized(alpha=1)
        return ReplayBuffer(self.capacity, select=select, remove=self.remove, returns="numpy", **self.options)

    @property
    def there(self) -> list[Row]:
        return [row for row in self.rows if row.there]

    def worth(self, row: Row) -> tuple[float, int]:
        x = -row.x if self.remove.by == "max" else row.x
        worth = {"stalest": row.version, "lowest_priority": row.priority, "lifo": -row.number}
        return worth.get(self.remove.by, -np.inf if np.isnan(x) else x), row.number

    def add(self, values: list[float], version: int, keys: list[int]) -> None:
        highest = max((row.priority for row in self.there), default=0.0) or 1.0
        for x, key in zip(values, keys, strict=True):
            self.rows.append(Row(len(self.rows), key, x, version, highest))
        new = self.rows[len(self.rows) - len(values) :]
        for row in sorted(self.there, key=self.worth)[: max(0, len(self.there) - self.capacity)]:
            row.there = False
        assert [row.there for row in new] == [row.key >= 0 for row in new]
        self.not_kept += sum(not row.there for row in new)

    def do_append(self, new: tuple[float, int]) -> None:
        x, version = new
        number = len(self.rows)
        key = self.buffer.append({"x": float(x), "n": np.array(number), "image": image(number)}, version=version)
        self.add([x], version, [key])

    def do_extend(self, values: list[float], version: int) -> None:
        numbers = np.arange(len(self.rows), len(self.rows) + len(values))
        images = np.array([image(number) for number in numbers.tolist()], np.uint8).reshape(-1, 1100)
        keys = self.buffer.extend({"x": np.array(values, float), "n": numbers, "image": images}, version=version)
        self.add(values, version, list(keys))

    def do_prioritize(self, given: list[tuple[int, int]]) -> None:
        rows = {number: priority for number, priority in given if number < len(self.rows)}
        keys = [self.rows[number].key for number in rows]
        applied = self.buffer.update_priorities(keys, list(rows.values())).applied
        assert applied.tolist() == [self.rows[number].there for number in rows]
        for number, priority in rows.items():
            self.rows[number].priority = float(priority)

    def do_write(self, given: list[tuple[int, float]]) -> None:
        rows = {number: x for number, x in given if number < len(self.rows)}
        if not rows or self.buffer.schema is None:
            return
        result = self.buffer.write_back(
            [self.rows[number].key for number in rows], {"x": list(map(float, rows.values()))}
        )
        assert result.applied.tolist() == [self.rows[number].there for number in rows]
        assert (result.applied ^ result.stale).all()
        for number, x in rows.items():
            self.rows[number].x = x

    def do_clear(self) -> None:
        self.buffer.clear()
        for row in self.rows:
            row.there = False

    def do_again(self) -> None:
        state = self.buffer.state_dict()
        self.buffer = self.make()
        self.buffer.load_state_dict(state)

    def check(self) -> None:
        there, ring = self.there, self.buffer.ring
        statistics = self.buffer.statistics()
        assert (statistics.size, statistics.added, statistics.not_kept) == (len(there), len(self.rows), self.not_kept)
        assert ring.keys().tolist() == [row.key for row in there]
        assert sorted(ring.slots(ring.keys())) == list(range(len(there)))
        assert ring.alive(np.array([row.key for row in self.rows], np.int64)).tolist() == [
            row.there for row in self.rows
        ]
        kept = [row.key for row in self.rows if row.key >= 0]
        assert len(set(kept)) == len(kept)
        if there:
            assert ring.mark("n", ring.keys()).tolist() == [row.number for row in there]
            images = ring.storage.view("image")[ring.slots(ring.keys())]
            assert np.array_equal(images, [image(row.number) for row in there])
            assert ring.mark("#version", ring.keys()).tolist() == [row.version for row in there]
            assert np.array_equal(ring.mark("x", ring.keys()), [row.x for row in there], equal_nan=True)
            assert self.buffer.drawer.mass(ring.keys()).tolist() == [row.priority for row in there]
        if sum(row.priority for row in there):
            batch = self.buffer.sample(20)
            assert {(key, n) for key, n in zip(batch.keys.tolist(), batch["n"].tolist(), strict=True)} <= {
                (row.key, row.number) for row in there if row.priority
            }


@pytest.mark.parametrize("storage", ["memory", "mapped"])
@pytest.mark.parametrize("one_by_one", [0, 512])
@pytest.mark.parametrize("remove", REMOVERS, ids=lambda remove: remove.by)
@settings(max_examples=60 * SOAK, deadline=None)
@given(st.integers(1, 7), st.lists(VERBS, max_size=12))
def test_the_rows_that_stay_are_those_of_a_list(
    tmp_path_factory: pytest.TempPathFactory,
    remove: Remove,
    one_by_one: int,
    storage: str,
    capacity: int,
    verbs: list[tuple[Any, ...]],
) -> None:
    both = Both(capacity, remove, in_file(storage, tmp_path_factory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_ONE_BY_ONE", one_by_one)
        for verb, *arguments in verbs:
            getattr(both, f"do_{verb}")(*arguments)
            both.check()


HURT = st.tuples(st.just("hurt"), st.integers(0, 15), st.sampled_from(["salvage", "partial"]))


class OnDisk(Both):
    """A buffer that is saved, of whose blocks some are damaged, and that goes on without them."""

    def __init__(self, capacity: int, remove: Remove, folder: Path, more: dict[str, Any]) -> None:
        self.folder, self.more, self.step = folder, more, 0
        super().__init__(capacity, remove, more | {"directory": folder / "0"})
        self.buffer.resume()

    def do_hurt(self, hurt: int, how: str) -> None:
        self.step += 1
        with self.buffer as buffer:
            buffer.save(self.step, wait=True)
        run, out = self.options["directory"], self.folder / str(self.step)
        gone: set[int] = set()
        for number, (path, block, arrays) in enumerate(list(stored(run))):
            if hurt >> number & 1:
                flip(path, block.offset + HEADER_BYTES + block.length // 2)
                gone |= set(arrays["n"].tolist())
        lost = [row for row in self.there if row.number in gone]
        if how == "salvage":
            made = salvage_run(run, out)
            assert isinstance(made, SalvagedRows)
            assert (made.rows_lost, made.rows_kept) == (len(lost), len(self.there) - len(lost))
            self.options["directory"] = out
        self.buffer = self.make()
        resumed = self.buffer.resume(allow_partial=how == "partial")
        assert resumed.lost.rows == (len(lost) if how == "partial" else 0)
        for row in lost:
            row.there = False
        if lost:  # keys are others then
            before = max(row.key for row in self.rows)
            for row, key in zip(self.there, self.buffer.ring.keys().tolist(), strict=True):
                assert key > before
                row.key = key

    def close(self) -> None:
        self.buffer.close()


WRITTEN = [("extend", [1, 2, 3, 0, 1, 2], 0), ("hurt", 0, "partial"), ("write", [(3, 3), (5, -1)])]
"""Blocks of three rows, and what two of the second one are since they were written."""
OLD_ONES_LATER = [("extend", [3, -3, -3, 2, 2, 2], 0), ("hurt", 0, "partial"), ("extend", [1, 1], 1)]
"""A block of which one row is left: that is written again, behind newer ones."""


@pytest.mark.parametrize("more", [{}, {"compress": {"image": "zlib"}}], ids=["plain", "compressed"])
@pytest.mark.parametrize("remove", REMOVERS, ids=lambda remove: remove.by)
@settings(max_examples=12 * SOAK, deadline=None)
@given(st.integers(1, 7), st.lists(st.one_of(VERBS.filter(lambda verb: verb[0] != "again"), HURT), max_size=12))
@example(6, [*WRITTEN, ("hurt", 1, "salvage")])
@example(6, [*WRITTEN, ("hurt", 1, "partial")])
@example(6, [*OLD_ONES_LATER, ("hurt", 0, "partial"), ("hurt", 1, "salvage")])
@example(6, [*OLD_ONES_LATER, ("hurt", 0, "salvage"), ("hurt", 1, "partial")])
def test_the_rows_of_whole_blocks_stay(
    remove: Remove, more: dict[str, Any], capacity: int, verbs: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sizes, "BLOCK_BYTES", 3800)
        both = OnDisk(capacity, remove, Path(name), more)
        for verb, *arguments in [
            *verbs,
            ("hurt", 0b10, "salvage"),
            ("extend", [1, 0, -1, 2], 1),
            ("hurt", 1, "partial"),
        ]:
            getattr(both, f"do_{verb}")(*arguments)
            both.check()
        both.close()


@settings(max_examples=40 * SOAK, deadline=None)
@given(st.integers(1, 100), st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=60), min_size=1, max_size=12))
def test_one_by_one_and_in_blocks_the_same_rows_stay(capacity: int, blocks: list[list[int]]) -> None:
    buffers = [ReplayBuffer(capacity, remove={"by": "min", "field": "x"}, returns="numpy") for _ in range(2)]
    number = 0
    for block in blocks:
        numbers = np.arange(number, number + len(block))
        buffers[0].extend({"x": np.array(block), "n": numbers})
        for x, n in zip(block, numbers, strict=True):
            buffers[1].append({"x": np.int64(x), "n": n})
        number += len(block)
        found = [buffer.ring.mark("n", buffer.ring.keys()).tolist() for buffer in buffers]
        assert found[0] == found[1]
        assert len({buffer.statistics().size for buffer in buffers}) == 1

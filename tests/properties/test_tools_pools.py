"""Merging, splitting and resharding pools against plain lists of rows: whatever went, was changed, or lies where."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.buffer.transitions import blocks as block_sizes
from pipeline.distributed import Ranks
from pipeline.tools import merge, reshard, routing, split
from tests.properties.conftest import SOAK
from tests.support.pooled import CHOICES, content, held, in_pieces, load, made, rows
from tests.support.ranks import fine, on_ranks

LIFE = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("cut"), st.integers(0, 2), st.just(0), st.just(0)),
        st.tuples(st.just("change"), st.integers(1, 4), st.just(0), st.just(0)),
        st.tuples(st.just("draw"), st.integers(1, 3), st.just(0), st.just(0)),
        st.tuples(st.just("save"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=12,
)


class Run(NamedTuple):
    """What one pool lives through, and how many rows it holds."""

    life: list[tuple[str, int, int, int]]
    capacity: int
    compress: bool

    def save(self, directory: Path, run: int, options: dict[str, Any]) -> dict[str, Any]:
        """Live it; return all that is there."""
        packed = {"compress": {"image": "zlib"}} if self.compress else {}
        with made(directory, self.capacity, **packed, **options) as buffer:
            buffer.resume()
            for step, (what, one, env, version) in enumerate(self.life):
                if what == "add":
                    added = buffer.ring.added
                    keys = np.array(buffer.extend(rows(run, added, one), env=env, version=version))
                    if buffer.drawer.takes_priorities:
                        buffer.update_priorities(keys[keys >= 0], 1 + (added + np.flatnonzero(keys >= 0)) % 11)
                elif what == "cut":
                    buffer.end_episode(one)
                elif what == "change" and len(buffer):
                    changed = buffer.ring.keys()[::one]
                    buffer.write_back(changed, {"value": changed + step / 8})
                elif what == "draw" and len(buffer):
                    buffer.sample(min(one, len(buffer)))
                elif what == "save":
                    buffer.save(step, wait=True)
            buffer.save(99, wait=True)
            return held(buffer)


RUNS = st.builds(Run, LIFE, st.integers(2, 9), st.booleans())
OPTIONS = st.sampled_from(sorted(CHOICES)).map(CHOICES.__getitem__)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sizes, "BLOCK_BYTES", 7000)
    monkeypatch.setattr(routing, "AT_ONCE", 2)
    in_pieces(monkeypatch, 3, 4)


def room(*directories: Path) -> int:
    """What the pool of a run has to be built with."""
    return max(
        int(line.partition(":")[2].strip(" ,"))
        for each in directories
        for path in each.glob("generations/*/**/replay.json")
        for line in path.read_text().splitlines()
        if line.strip().startswith('"capacity"')
    )


def read(directory: Path, **options: Any) -> dict[str, Any]:
    return load(directory, room(directory), **options)


def joined(every: list[dict[str, Any]]) -> dict[Any, Any]:
    found = {which: row for each in every for which, row in content(each).items()}
    assert len(found) == sum(len(each["id"]) for each in every)
    return found


@settings(max_examples=15 * SOAK)
@given(st.lists(RUNS, min_size=1, max_size=3), OPTIONS, st.data())
def test_a_merge_has_every_row_in_any_grouping_and_a_split_is_undone(
    runs: list[Run], options: dict[str, Any], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [folder / f"run{number}" for number in range(len(runs))]
        before = [run.save(path, at, options) for at, (run, path) in enumerate(zip(runs, paths, strict=True))]
        merge(paths, folder / "all")
        found = read(folder / "all", **options)
        assert content(found) == joined(before)
        assert found["counts"] == tuple(sum(each["counts"][at] for each in before) for at in range(3))
        if len(runs) == 1:
            assert found == before[0]
        order = data.draw(st.permutations(paths))
        merge(order[1:] or order, folder / "some")
        if len(order) > 1:
            merge([folder / "some", order[0]], folder / "grouped")
            assert read(folder / "grouped", **options) == found
        check_split(folder, found, options, data)


def check_split(folder: Path, found: dict[str, Any], options: dict[str, Any], data: st.DataObject) -> None:
    size = len(found["id"])
    how: dict[str, Any] = data.draw(
        st.one_of(
            st.integers(0, size).map(lambda count: {"count": count}),
            st.integers(0, 100).map(lambda score: {"where": {"score": (">", score)}}),
            st.just({"by": "version"}),
        )
    )
    split(folder / "all", folder / "parts" if "by" in how else [folder / "parts/x", folder / "parts/y"], **how)
    parts = sorted((folder / "parts").iterdir())
    read_parts = [read(each, **options) for each in parts]
    if "count" in how:
        assert [each["id"] for each in read_parts] == [found["id"][: how["count"]], found["id"][how["count"] :]]
    if "where" in how:
        met = [np.frombuffer(each, np.float32)[0] > how["where"]["score"][1] for each in found.get("score", ())]
        assert read_parts[0]["id"] == [which for which, own in zip(found["id"], met, strict=True) if own]
    if "by" in how:
        assert [set(each["#version"]) for each in read_parts] == [{v} for v in sorted(set(found.get("#version", ())))]
    assert joined(read_parts) == content(found)
    if parts:
        merge(data.draw(st.permutations(parts)), folder / "back")
        assert read(folder / "back", **options) == found


@settings(max_examples=15 * SOAK)
@given(RUNS, OPTIONS, st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_a_reshard_has_every_row_and_ranks_draw_from_it(run: Run, options: dict[str, Any], sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = content({**run.save(folder / "run", 0, options), "#end": None})
        source = folder / "run"
        for number, size in enumerate(sizes):
            shards = reshard(source, folder / str(number), size, rebalance=True).shards
            assert sum(shards) == len(before)
            assert max(shards) - min(shards) <= 1
            source = folder / str(number)

        def live(ranks: Ranks) -> dict[str, Any]:
            with made(source, room(source), ranks=ranks, **options) as buffer:
                buffer.resume()
                if len(buffer):
                    buffer.sample(1)
                return {**held(buffer), "uses": {}, "#end": None}

        shutil.copytree(source, folder / "copy")
        ranks = fine(on_ranks(sizes[-1], live))
        merge([folder / "copy"], folder / "one")
        assert content({**read(folder / "one", **options), "#end": None}) == before
        assert {which for each in ranks for which in each["id"]} == before.keys()

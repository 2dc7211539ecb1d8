"""Merging and splitting against a plain list: rows of several runs, in any grouping, and any episodes taken out."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import ReplayBuffer
from pipeline.tools import merge, split
from tests.properties.conftest import SOAK
from tests.support.keeping import load

ENDS = st.lists(st.booleans(), max_size=12)


def save(directory: Path, run: int, ends: list[bool], capacity: int) -> list[tuple[int, int]]:
    """Save rows of one environment; return those that are there, by (run, key)."""
    with ReplayBuffer(capacity, directory=directory) as buffer:
        buffer.resume()
        for t, end in enumerate(ends):
            buffer.extend({"run": np.array([run]), "t": np.array([t]), "terminated": np.array([end])})
        buffer.save(1, wait=True)
    return [(run, t) for t in range(len(ends))][-capacity:]


@settings(max_examples=6 * SOAK)
@given(st.lists(ENDS, min_size=1, max_size=3), st.integers(3, 12), st.data())
def test_a_merge_is_a_sort_and_a_split_takes_whole_episodes(
    runs: list[list[bool]], capacity: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [save(folder / f"run{run}", run, ends, capacity) for run, ends in enumerate(runs)]
        paths = [folder / f"run{run}" for run in range(len(runs))]
        model = sorted((row for each in rows for row in each), key=lambda row: (row[1], row[0]))
        made = merge(paths, folder / "all")
        assert load(folder / "all").get("id", []) == model
        episodes = {
            row: (sum(runs[row[0]][: row[1]]), row[0]) for row in model
        }  # an episode is named by how many ended before it, and its run
        assert made.units == len(set(episodes.values()))
        count = data.draw(st.integers(0, made.units))
        oldest = set(sorted(set(episodes.values()))[:count])
        split(folder / "all", [folder / "x", folder / "y"], count=count)
        assert load(folder / "x").get("id", []) == [row for row in model if episodes[row] in oldest]
        assert load(folder / "y").get("id", []) == [row for row in model if episodes[row] not in oldest]
        merge([folder / "y", folder / "x"], folder / "back")
        assert load(folder / "back") == load(folder / "all")

"""Which parts of episodes are left where rows have not come."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from pipeline.buffer.transitions.layout import AHEAD, BEHIND, CUT, END, EPISODE, OPEN, PLACE, SERIAL, TERMINATED
from pipeline.replay import row_set
from pipeline.replay.gaps import Gaps, Unfollowed
from pipeline.replay.row_set import RowSet


@pytest.mark.parametrize("seed", range(30))
def test_parts_and_marks_are_those_that_can_be_counted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 5, rng.integers(0, 12))
    there = rng.random(int(rows.sum())) < rng.choice([0.2, 0.6, 0.9, 1.0])
    parts: list[tuple[int, list[int]]] = []  # the episode of each, and where its rows lie
    at = 0
    for episode, count in enumerate(rows.tolist()):
        for place in range(at, at + count):
            if there[place]:
                if place == at or not there[place - 1]:
                    parts.append((episode, []))
                parts[-1][1].append(place)
        at += count
    gaps = Gaps.of(there, rows)
    assert gaps.lengths.tolist() == [len(part) for _, part in parts]
    assert gaps.whose.tolist() == [episode for episode, _ in parts]
    assert gaps.rows == int(there.sum())
    each = [(number, place, len(part)) for number, (_, part) in enumerate(parts) for place in range(len(part))]
    ends = rng.choice([OPEN, TERMINATED], gaps.rows)
    for begin in range(gaps.rows + 1):
        for end in range(begin, gaps.rows + 1):
            marks = gaps.marks(ends[begin:end], 100, slice(begin, end))
            own = each[begin:end]
            assert marks[EPISODE].tolist() == [number for number, *_ in own]
            assert marks[PLACE].tolist() == [place for _, place, _ in own]
            assert marks[BEHIND].tolist() == [place > 0 for _, place, _ in own]
            assert marks[AHEAD].tolist() == [place + 1 < length for _, place, length in own]
            assert marks[SERIAL].tolist() == list(range(100 + begin, 100 + end))
            expected = [
                CUT if place + 1 == length and mark == OPEN else mark
                for (_, place, length), mark in zip(own, ends[begin:end].tolist(), strict=True)
            ]
            assert marks[END].tolist() == expected


def set_of(there: np.ndarray) -> RowSet:
    found = RowSet(len(there))
    found.add(np.flatnonzero(there))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_what_is_found_of_stretches_is_what_is_found_row_by_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 6, rng.integers(0, 30))
    count = int(rows.sum())
    there = rng.random(count) < rng.choice([0.0, 0.2, 0.6, 0.9, 1.0])
    aside = there & (rng.random(count) < rng.choice([0.0, 0.3, 1.0]))
    stretches = set_of(there).stretches()
    gaps = Gaps.of_stretches(stretches, rows)
    for one, other in zip(gaps, Gaps.of(there, rows), strict=True):
        assert one.tolist() == other.tolist()
    assert [int(np.flatnonzero(there)[begin]) for begin in gaps.begins.tolist()] == gaps.among(stretches).tolist()
    found = Unfollowed.within(gaps, stretches, np.flatnonzero(aside))
    for one, other in zip(found, Unfollowed.of(there, aside, rows), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("seed", range(30))
def test_a_set_of_rows_is_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_set, "_PIECE", 2)
    monkeypatch.setattr(row_set, "_LONG", 8 + seed % 3)
    rng = np.random.default_rng(seed)
    count = int(rng.choice([0, 1, 7, 8, 16, 61]))
    there, found = np.zeros(count, bool), RowSet(count)
    for _ in range(6 if count else 0):
        begins = rng.integers(0, count, 3)
        lengths = np.minimum(rng.integers(0, 12, 3), count - begins)
        found.add_runs(np.stack([begins, lengths], axis=1))
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
            there[begin : begin + length] = True
        gone = rng.integers(0, count, 2)
        found.remove(gone)
        there[gone] = False
    assert found.all().tolist() == there.tolist()
    assert len(found) == int(there.sum())
    begins, ends = found.stretches()
    edges = np.flatnonzero(np.diff(there, prepend=False, append=False))
    assert (begins.tolist(), ends.tolist()) == (edges[::2].tolist(), edges[1::2].tolist())


def test_what_is_held_of_rows_that_have_come_is_a_bit_of_each() -> None:
    """Rows by the million, in long episodes, and of them a few gaps."""
    rows = np.full(1000, 8000)
    count = int(rows.sum())
    tracemalloc.start()
    try:
        there = RowSet(count)
        for begin in range(0, count, 20_000):
            there.add_runs(np.array([[begin, 19_999 if begin % 400_000 == 0 else 20_000]]))
        stretches = there.stretches()
        gaps = Gaps.of_stretches(stretches, rows)
        found = Unfollowed.within(gaps, stretches, np.empty(0, np.int64))
        there.remove(found.rows)
        assert len(there) == count - 20 - len(found.rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < count // 8 + (4 << 20)  # what a piece takes aside

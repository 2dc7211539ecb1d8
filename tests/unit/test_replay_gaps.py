"""Which parts of episodes are left where rows have not come."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.buffer.transitions.layout import AHEAD, BEHIND, CUT, END, EPISODE, OPEN, PLACE, SERIAL, TERMINATED
from pipeline.replay.gaps import Gaps


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

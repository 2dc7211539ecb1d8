"""Ranks are processes: they train, save, are all killed, and others of another number go on, and back."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import ChildProcess
from tests.support.training_ranks import ENVS, STEPS, server, train

PAIRS = [(1, 2, "uniform"), (2, 1, "prioritized"), (4, 3, "uniform"), (3, 4, "prioritized")]
if int(os.environ.get("FOREBAY_SOAK", "1")) > 1:
    every = [(1, 2), (2, 1), (4, 3), (3, 4), (8, 8), (8, 1), (1, 8), (5, 7)]
    PAIRS = [(*pair, select) for pair in every for select in ("uniform", "prioritized")]


def run(store: Any, directory: Path, size: int, life: int, select: str) -> tuple[list[Any], list[Any], list[int]]:
    """One life: return by rank what was there at first, and at the save, and the steps that they resumed."""
    children = [ChildProcess(train, store.port, str(directory), rank, size, life, select) for rank in range(size)]
    try:
        found = [child.hear() for child in children]
        end = [child.hear() for child in children]
        assert [child.hear() for child in children] == ["saved"] * size
    finally:
        for child in children:
            child.kill()
    return [rows for _, rows in found], end, [step for step, _ in found]


def joined(every: list[Any]) -> dict[tuple[int, int], float]:
    """What each row weighs, of all ranks together: no row is there twice."""
    assert max(Counter(row for rows, _ in every for row in rows).values(), default=1) == 1
    return {row: mass for rows, masses in every for row, mass in zip(rows, masses, strict=True)}


def check_whole(every: list[Any]) -> None:
    """Each episode lies in one place, in its order."""
    for rows, _ in every:
        starts: dict[int, int] = {}
        for (uid, t), before in zip(rows, [(-1, -1), *rows], strict=False):
            if uid == before[0]:
                assert t == before[1] + 1
            else:
                assert uid not in starts, "an episode is in two parts"
                starts[uid] = t


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("first", "then", "select"), PAIRS)
def test_killed_ranks_go_on_as_another_number_of_them(tmp_path: Path, first: int, then: int, select: str) -> None:
    store = server()
    empty, saved, steps = run(store, tmp_path, first, 1, select)
    assert steps == [0] * first
    assert not joined(empty)
    rows = [len(each[0]) for each in saved]
    assert rows == [ENVS * (STEPS + rank) for rank in range(first)]  # the moment is another one on each rank

    found, more, steps = run(store, tmp_path, then, 2, select)
    assert steps == [STEPS] * then
    assert joined(found) == joined(saved)
    if first != then:  # else each rank has what it had, as it lay
        check_whole(found)
        loads = [len(each[0]) for each in found]
        assert max(loads) - min(loads) <= 11
    for (before, _), (after, _) in zip(found, more, strict=True):
        assert after[: len(before)] == before  # new rows come after old ones, which go first
        assert len(after) > len(before)

    back, _, steps = run(store, tmp_path, first, 3, select)
    assert steps == [2 * STEPS] * first
    assert joined(back) == joined(more)
    if first != then:
        check_whole(back)

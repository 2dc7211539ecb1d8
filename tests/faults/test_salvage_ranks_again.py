"""A pipeline of ranks that was salvaged, and went on, is damaged and salvaged again, and again: no item is trained once
too often, and what is trained too seldom was listed."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from pipeline import Damaged
from pipeline.checkpoint import Salvaged, salvage, verify
from tests.faults.test_salvage_again import damage
from tests.support.rank_runs import ITEMS, killed, live, trained_to_the_end

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
SEEDS = range(4 + 40 * (SOAK - 1))


def listed(found: Salvaged) -> set[int]:
    """The uids that are not run again."""
    numbers = set[int]()
    for loss in found.losses:
        if "not run" in loss.lost:
            assert "more" not in loss.lost, "not all are listed"
            numbers |= {int(uid) for uid in re.findall(r"uid (\d+)", loss.lost)}
            numbers |= {int(uid) for uid in re.findall(r"\d+", loss.lost.partition("uids ")[2])}
    return numbers


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_trained_once_too_often_however_often_a_run_is_salvaged(tmp_path: Path, seed: int) -> None:
    chance, lost = random.Random(seed), set[int]()
    sizes = [chance.choice((1, 2, 3)) for _ in range(chance.randrange(1, 3))]
    directory, size = killed(tmp_path, *sizes, steps=3, more=1), sizes[-1]
    for turn in range(3):
        damage(str(directory), chance)
        target = tmp_path / f"salvaged{turn}"
        try:
            found = salvage(directory, target)
        except Damaged:  # nothing says what the weights have seen
            return
        if found.left_out:  # the weights are gone, with what they had seen
            return
        lost |= listed(found)
        assert verify(str(target)).whole
        directory, size = tmp_path / f"went on{turn}", chance.choice((size, 1, 2, 3))
        live(target, size, 1, more=1, copy=directory)
    trained_to_the_end(directory, size)
    count = trained_to_the_end(directory, 1 if size > 1 else 2)  # what was left over on some ranks
    assert max(count.values()) == 1, {uid for uid, times in count.items() if times > 1}
    assert {uid for uid in range(ITEMS) if uid not in count} <= lost

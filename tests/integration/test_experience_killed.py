"""An off-policy trainer whose rollouts fill its buffer is killed for real, again and again."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import verify
from tests.support.children import Ended, child
from tests.support.experience import ROWS, play_until_done

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
COUNT, KILLS = 600, 12


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SOAK))
def test_every_item_is_played_once_through_random_kills(tmp_path: Path, seed: int) -> None:
    chance, committed, held, kills = random.Random(seed), 0, 0, 0
    while True:
        with child(play_until_done, str(tmp_path), COUNT) as process:
            kind, step, size = process.hear()
            assert kind == "resumed", step
            assert step >= committed, "committed, and gone"
            assert size >= held, "rows were written, and are gone"
            committed = step
            done: Any = None
            patience = chance.randrange(1, 4) if kills < KILLS else 10**6
            try:
                while patience:
                    heard: tuple[Any, ...] = process.hear()
                    if heard[0] != "saved":
                        done = heard
                        break
                    _, committed, held = heard
                    patience -= 1
            except Ended:
                raise AssertionError("it ended by itself") from None
            if done is not None:
                break
            process.process.join(chance.uniform(0, 0.03))
            process.kill()
            kills += 1
    kind, rows, retired = done
    assert kind == "done", rows
    assert kills == KILLS
    assert retired == COUNT
    assert max(Counter(rows).values()) == 1, "no row is there twice"
    lengths = Counter(index for index, _ in rows)
    assert sorted(lengths) == list(range(COUNT))
    cut = 0
    for index, length in lengths.items():
        whole = ROWS * (1 + index % 4)
        assert sorted(place for of, place in rows if of == index) == list(range(length))
        assert length <= whole
        cut += length < whole
    assert cut <= 8 * kills, "of those that were in flight at a kill"
    assert verify(str(tmp_path)).whole

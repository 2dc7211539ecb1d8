"""A short fuzzing by chance: the same bytes each time. ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.mutations import mutated
from tests.fuzz.targets import Targets
from tests.support.opening import little_memory

EACH = 300


@pytest.mark.parametrize("name", sorted(Targets("").all))
def test_no_error_but_ours_comes_through(name: str, tmp_path: Path) -> None:
    targets, rng = Targets(str(tmp_path)), random.Random(f"fuzz {name}")
    seeds = targets.seeds()[name]
    with little_memory(256 << 20):
        for seed in seeds:
            targets.all[name](seed)
        for _ in range(EACH):
            data = mutated(rng, seeds)
            try:
                targets.all[name](data)
            except BaseException as error:
                raise AssertionError(f"{name}: {data[:200]!r}") from error

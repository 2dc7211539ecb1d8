"""The seeds of the suite; ``make soak`` plays many more."""

from __future__ import annotations

import pytest

from tests.simulation.play import simulate

SEEDS, AT_ONCE = 300, 25


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_whatever_comes_every_item_is_trained_once_or_dropped_and_counted(first: int) -> None:
    trained = 0
    for seed in range(first, first + AT_ONCE):
        try:
            trained += simulate(seed)
        except AssertionError as error:
            raise AssertionError(f"python -m tests.simulation --seed {seed}: {error}") from error
    assert trained > AT_ONCE

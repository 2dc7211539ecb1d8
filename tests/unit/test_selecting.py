"""What a selection goes on from where rows of several buffers come together."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import UsageError
from pipeline.replay.selecting import selection_of
from pipeline.replay.state import BufferState

NAMES = {"selector.aside.int64", "selector.priorities.float64"}


def saved(size: int = 1, selection: str = "prioritized", **selector: Any) -> BufferState:
    said = {"batches": 1, "ever": 2.0, "alpha": 0.6, "most": 1.0} | selector if selection == "prioritized" else {}
    return BufferState(size=size, added=9, selection=selection, selector=said)


def test_of_each_number_the_largest() -> None:
    states = [saved(floor=5.0, floor_until=9), saved(batches=7, most=4.0), saved(ever=8.0, floor=3.0)]
    selected = selection_of(states, [NAMES] * 3)
    assert selected.extras[0] == "selector.priorities.float64"  # of which the writer notes the largest
    whole = {"batches": 7, "ever": 8.0, "alpha": 0.6}
    assert selected.state(30, 4.0) == {**whole, "most": 4.0, "floor": 5.0, "floor_until": 30}
    assert selected.state(30) == {**whole, "floor": 4.0, "floor_until": 30}


def test_without_a_floor_there_is_none() -> None:
    assert "floor" not in selection_of([saved(), saved()], [NAMES] * 2).state(30, 1.0)


def test_buffers_without_rows_have_no_say() -> None:
    empty = saved(0, "uniform")
    selected = selection_of([empty, saved(alpha=0.5), saved(0, alpha=0.7)], [set(), NAMES, set()])
    assert (selected.selection, set(selected.extras), selected.left_out) == ("prioritized", NAMES, {})
    assert selected.state(3, 1.0)["alpha"] == 0.5
    assert selection_of([empty], [set()]) == ("uniform", [], [], {})


def test_what_one_of_them_lacks_is_left_out() -> None:
    selected = selection_of([saved(), saved()], [NAMES, set()])
    assert (selected.selection, selected.extras, selected.state(3, 1.0)) == ("", [], {})


def test_different_kinds_and_powers() -> None:
    assert (
        "prioritized, uniform" in selection_of([saved(), saved(selection="uniform")], [NAMES] * 2).left_out["selection"]
    )
    assert selection_of([saved(selection=""), saved(selection="uniform")], [set()] * 2).left_out == {}
    with pytest.raises(UsageError, match=r"different alphas: \[0\.5, 0\.6\]"):
        selection_of([saved(alpha=0.5), saved()], [NAMES] * 2)


def test_what_not_every_buffer_says_of_its_rows_is_left_out_and_told() -> None:
    states = [BufferState(size=2, added=2, selection="prioritized", selector={"alpha": 0.6})] * 2
    found = selection_of(states, [{"selector.priorities.float64", "selector.x.int64"}, {"selector.priorities.float64"}])
    assert found.extras == ["selector.priorities.float64"]
    assert list(found.left_out) == ["selector.x.int64"]
    found = selection_of(states, [{"selector.priorities.float64"}, set()])
    assert (found.selection, found.extras) == ("", [])
    assert list(found.left_out) == ["selector.priorities.float64"]

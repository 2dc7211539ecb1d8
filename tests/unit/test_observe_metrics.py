"""Nested statistics become flat numbers."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.observe import flatten


class Inner(msgspec.Struct, frozen=True):
    produced: int
    mean: float | None = None
    name: str = "math"


class Outer(msgspec.Struct):
    groups: int
    full: bool
    task: dict[str, Inner]


def test_structs_and_mappings_nest_with_slashes() -> None:
    outer = Outer(groups=3, full=True, task={"math": Inner(7, 0.5), "tools": Inner(1)})
    assert flatten({"buffer": outer}) == {
        "buffer/groups": 3.0,
        "buffer/full": 1.0,
        "buffer/task/math/produced": 7.0,
        "buffer/task/math/mean": 0.5,
        "buffer/task/tools/produced": 1.0,
    }


def test_a_prefix_stands_before_every_name() -> None:
    assert flatten(Inner(2), "task/math") == {"task/math/produced": 2.0}


def test_a_key_of_several_parts_is_joined() -> None:
    assert flatten({("math", "failed"): 2, 5: 1}) == {"math/failed": 2.0, "5": 1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "3", [1, 2], b"x", 10**400, 1j, {}, {1}])
def test_what_is_no_finite_number_is_left_out(value: Any) -> None:
    assert flatten({"a": value, "b": 1}) == {"b": 1.0}


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1)]
)
def test_every_kind_of_single_number_counts_and_becomes_a_plain_float(value: Any) -> None:
    flat = flatten({"a": value})
    assert flat == {"a": 1.0}
    assert type(flat["a"]) is float


def test_arrays_with_dimensions_are_no_numbers() -> None:
    assert flatten({"a": np.zeros(3), "b": torch.zeros(1)}) == {}


def test_a_number_without_a_name_is_left_out() -> None:
    assert flatten(3) == {}
    assert flatten(3, "a") == {"a": 3.0}

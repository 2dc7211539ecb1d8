"""What an export to LeRobot decides and counts, without the packages that it is written with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.errors import Damaged
from pipeline.tools.formats.lerobot_places import column_of, features_of, places_of
from pipeline.tools.formats.lerobot_stats import Moments
from pipeline.tools.interchange.by_row import ROW, in_order
from pipeline.tools.interchange.streams import Rows


def schema(**columns: tuple[str, tuple[int, ...]]) -> Schema:
    return Schema(tuple(Column(name.replace("__", "."), *each) for name, each in sorted(columns.items())))


def test_columns_have_the_names_and_places_that_lerobot_expects() -> None:
    given = schema(
        obs__state=("float32", (3,)),
        obs__images__front=("uint8", (8, 6, 3)),
        obs__images__wrist=("uint8", (3, 8, 6)),
        next_obs__state=("float32", (3,)),
        next_obs__odd=("float32", (3,)),
        action=("int64", ()),
        reward=("float64", ()),
        next__reward=("float32", ()),
        terminated=("bool", ()),
        half=("bfloat16", (2,)),
        index=("int64", ()),
        timestamp=("float64", ()),
        task_index=("int64", ()),
        counts=("uint64", ()),
        deep=("float32", (1, 1, 1, 1, 1, 1)),
        nothing=("float32", (0,)),
    )
    found = {place.column: (place.how, place.feature) for place in places_of(given)}
    assert found == {
        "obs.state": ("numbers", "observation.state"),
        "obs.images.front": ("image", "observation.images.front"),
        "obs.images.wrist": ("image, channels first", "observation.images.wrist"),
        "next_obs.state": ("next", ""),
        "next_obs.odd": ("numbers", "next_obs.odd"),  # there is no observation of that name
        "action": ("numbers", "action"),
        "reward": ("numbers", "next.reward"),
        "next.reward": ("beside", ""),
        "terminated": ("numbers", "next.terminated"),
        "half": ("numbers", "half"),
        "index": ("beside", ""),
        "timestamp": ("beside", ""),
        "task_index": ("numbers", "task_index"),
        "counts": ("beside", ""),
        "deep": ("beside", ""),
        "nothing": ("beside", ""),
    }
    features = features_of(given, places_of(given))
    assert features["half"] == {"dtype": "float32", "shape": [2], "names": None}
    assert features["action"]["shape"] == features["next.done"]["shape"] == [1]
    front = features["observation.images.front"]
    assert front == {"dtype": "image", "shape": [8, 6, 3], "names": ["height", "width", "channels"]}
    assert features["timestamp"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("feature", "column"),
    [
        ("observation", "obs"),
        ("observation.images.top", "obs.images.top"),
        ("next.reward", "reward"),
        ("next.state", "next.state"),
        ("action", "action"),
        ("observations", "observations"),
    ],
)
def test_features_of_others_have_names_here(feature: str, column: str) -> None:
    assert column_of(feature) == column


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_moments_of_batches_are_those_of_all(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((50, *shape)) * 1e3 + 1e6
    moments = Moments()
    for begin, stop in ((0, 1), (1, 30), (30, 50)):
        moments.add(values[begin:stop])
    told = moments.told(shape or (1,), 50)
    for name, expected in (
        ("mean", values.mean(0)),
        ("std", values.std(0)),
        ("min", values.min(0)),
        ("max", values.max(0)),
    ):
        assert np.allclose(told[name], expected, rtol=1e-9), name
        assert np.shape(told[name]) == (shape or (1,))
    assert told["count"] == [50]


def numbered(*parts: list[int]) -> Iterator[Rows]:
    for part in parts:
        yield Rows({"x": np.array(part) * 10}, {ROW: np.array(part, np.int64), "#key": np.array(part)})


def test_rows_come_in_order_as_soon_as_those_before_them_are_there() -> None:
    found = list(in_order(numbered([3, 5], [0], [1, 2], [6, 4], [7]), 8, "here"))
    assert np.concatenate([rows.columns["x"] for rows in found]).tolist() == list(range(0, 80, 10))
    assert all(set(rows.marks) == {"#key"} for rows in found)
    first = next(in_order(numbered([0, 2], [3], [1]), 4, "here"))
    assert first.columns["x"].tolist() == [0], "it does not wait for the end"
    assert list(in_order(numbered(), 0, "here")) == []


@pytest.mark.parametrize("parts", [([0, 1], [1]), ([0, 1, 3],), ([0, 4],), ([-1],), ()])
def test_numbers_that_are_missing_or_there_twice_are_refused(parts: tuple[list[int], ...]) -> None:
    with pytest.raises(Damaged, match="here: "):
        list(in_order(numbered(*parts), 3, "here"))

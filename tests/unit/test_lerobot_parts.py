"""What an export to LeRobot decides and counts, without the packages that it is written with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.errors import Damaged
from pipeline.tools.formats.lerobot_places import column_of, features_of, places_of
from pipeline.tools.formats.lerobot_stats import QUANTILES, Totals, image_stats_of, stats_of
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


def test_statistics_of_episodes_are_those_of_numpy_and_join_to_those_of_all() -> None:
    values = np.random.default_rng(1).standard_normal((50, 3)) * 1e3 + 1e6
    totals = Totals()
    for begin, stop in ((0, 1), (1, 30), (30, 50)):
        stats = stats_of(values[begin:stop])
        for name, part in QUANTILES.items():
            assert np.allclose(stats[name], np.quantile(values[begin:stop], part, axis=0), rtol=1e-12), name
        totals.add(stats, stop - begin)
    told = totals.told((3,))
    expected = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
    for name, each in expected.items():
        assert np.allclose(told[name], each, rtol=1e-9), name
    assert told["count"] == [50]
    assert Totals().told((3,)) == {}


def test_statistics_of_images_are_by_channel_and_from_0_to_1() -> None:
    images = np.random.default_rng(2).integers(3, 250, (4, 6, 5, 3), np.uint8)
    stats = image_stats_of(images)
    pixels = images.reshape(-1, 3) / 255
    for name, each in {
        "mean": pixels.mean(0),
        "std": pixels.std(0),
        "min": pixels.min(0),
        "max": pixels.max(0),
    }.items():
        assert np.allclose(stats[name], each), name
    for name, part in QUANTILES.items():
        assert np.allclose(stats[name], np.quantile(pixels, part, axis=0, method="inverted_cdf")), name


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

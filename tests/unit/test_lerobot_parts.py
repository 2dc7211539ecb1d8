"""What an export to LeRobot decides and counts, without the packages that it is written with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.errors import Damaged
from pipeline.tools.formats.lerobot_places import column_of, features_of, places_of
from pipeline.tools.formats.lerobot_stats import QUANTILES, Totals, image_stats_of, stats_of
from pipeline.tools.formats.lerobot_videos import ONE_EACH, SEVERAL, parts_of_each, parts_of_several, sizes_of
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


def test_an_episode_ends_where_the_next_one_begins_in_its_file(tmp_path: Path) -> None:
    for number in (0, 1):
        file = tmp_path / "videos" / "top" / "chunk-002" / f"file-00{number}.mp4"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    told = {
        "episode_index": np.array([4, 0, 1, 3]),
        "videos/top/chunk_index": np.array([2, 2, 2, 2]),
        "videos/top/file_index": np.array([0, 1, 1, 0]),
        "videos/top/from_timestamp": np.array([1.5, 2.0, 0.0, 0.5]),
    }
    part_of = parts_of_several(str(tmp_path), SEVERAL, "top", told)
    found = {episode: part_of(episode) for episode in (0, 1, 3, 4)}
    assert {episode: (part.path[-12:], *part[1:]) for episode, part in found.items()} == {
        0: ("file-001.mp4", 2.0, np.inf),
        1: ("file-001.mp4", 0.0, 2.0),
        3: ("file-000.mp4", 0.5, 1.5),
        4: ("file-000.mp4", 1.5, np.inf),
    }
    with pytest.raises(Damaged, match="data has episode 2, which is not in meta/episodes"):
        part_of(2)
    file.unlink()
    with pytest.raises(Damaged, match=r"file-001\.mp4: is missing, and has top of episode 1"):
        parts_of_several(str(tmp_path), SEVERAL, "top", told)


def test_an_episode_of_version_2_has_a_file_of_its_own(tmp_path: Path) -> None:
    for number in range(5):
        file = tmp_path / "videos" / f"chunk-00{number // 2}" / "top" / f"episode_00000{number}.mp4"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    part_of = parts_of_each(str(tmp_path), ONE_EACH, "top", episodes=5, chunk=2)
    assert part_of(4) == (str(file), 0.0, np.inf)
    for missing in (5, -1):
        with pytest.raises(Damaged, match=f"data has episode {missing}, and .* says that there are 5"):
            part_of(missing)
    with pytest.raises(Damaged, match=r"episode_000005\.mp4: is missing, and has top of episode 5"):
        parts_of_each(str(tmp_path), ONE_EACH, "top", episodes=6, chunk=2)


@pytest.mark.parametrize("template", ["../{video_key}", "/{video_key}", "{video_key.real}", "{}", "{video_key:>9}", ""])
def test_a_video_is_inside_the_dataset(tmp_path: Path, template: str) -> None:
    with pytest.raises(Damaged, match=r"info\.json: video_path "):
        parts_of_each(str(tmp_path), template, "top", episodes=1, chunk=1)
    with pytest.raises(Damaged, match="not inside the folder"):
        parts_of_each(str(tmp_path), ONE_EACH, "..", episodes=1, chunk=1)


def test_channels_are_first_or_last() -> None:
    assert sizes_of((4, 5, 3)) == ((4, 5), False)
    assert sizes_of((3, 4, 5)) == ((4, 5), True)
    for shape in ((4, 5, 1), (4, 5), (4, 5, 6, 3), ()):
        with pytest.raises(ValueError, match="where \\[height, width, 3\\] is needed"):
            sizes_of(shape)


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

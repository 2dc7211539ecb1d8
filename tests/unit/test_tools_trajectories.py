"""Merging and splitting buffers of trajectories: in order of their numbers, and by link where these stay."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import TrajectoryBuffer
from pipeline.checkpoint import verify
from pipeline.errors import ConfigError, Damaged
from pipeline.tools import inspect, merge, split
from tests.support.keeping import digest
from tests.support.trajectories import check, contents, trajectory


def save(directory: Path, numbers: list[int], **options: Any) -> Any:
    with TrajectoryBuffer(directory=directory, **options) as buffer:
        buffer.resume()
        for number in numbers:
            buffer.add_trajectories([trajectory(number, steps=2 + number % 3)])
        buffer.save(3, wait=True)
        return contents(buffer)


def load(directory: Path, **options: Any) -> tuple[Any, list[int]]:
    """All that is there, and which trajectory each is, by rising number."""
    found = verify(str(directory))
    assert found.whole, found.damages
    with TrajectoryBuffer(directory=directory, **options) as buffer:
        buffer.resume()
        state, infos, rows = contents(buffer)
        if len(buffer):
            check(buffer.sample(num_chunks=40))
        ends = np.cumsum([info.num_samples for info in infos])
        return (state, infos, rows), [rows["actions"][end - 1][0] for end in ends.tolist()]


@pytest.mark.parametrize("how", [{"count": 5}, {"count": 0}, {"fraction": 1.0}, {"by": "version"}], ids=str)
def test_what_was_split_and_merged_is_what_it_was(tmp_path: Path, how: dict[str, Any]) -> None:
    before, was = save(tmp_path / "a", list(range(3, 15)), capacity=9, sample_window_size=4), digest
    digested = was(tmp_path / "a")
    places = [tmp_path / "parts"] if "by" in how else [tmp_path / "x", tmp_path / "y"]
    made = split(tmp_path / "a", places, **how)
    assert sum(each.units for each in made) == 9
    merge([each.directory for each in made], tmp_path / "back")
    (facts,) = inspect(tmp_path / "back").buffers
    assert facts.selection == "uniform over the newest 4"
    assert repr(load(tmp_path / "back")[0]) == repr(before)
    assert was(tmp_path / "a") == digested


def test_of_each_number_one_run_after_the_other_in_numeric_order(tmp_path: Path) -> None:
    runs = {"rank_1": [10, 11, 12], "rank_2": [20, 21], "rank_10": [30, 31, 32, 33]}
    for name, numbers in runs.items():
        save(tmp_path / name, numbers)
    made = merge([tmp_path / name for name in ("rank_1", "rank_10", "rank_2")], tmp_path / "all")
    assert (made.units, made.linked) == (9, 0)
    assert load(tmp_path / "all")[1] == [10, 20, 30, 11, 21, 31, 12, 32, 33]
    ids = json.loads((tmp_path / "all" / "ids.json").read_text())
    assert ids["trajectories"][:4] == [[0, 0, 0], [1, 1, 0], [2, 2, 0], [3, 0, 1]]
    assert [os.path.basename(part["directory"]) for part in ids["parts"]] == ["rank_1", "rank_2", "rank_10"]


def test_the_grouping_does_not_matter(tmp_path: Path) -> None:
    for name, numbers in (("a", [1, 2, 3]), ("b", [11, 12]), ("c", [21, 22, 23, 24])):
        save(tmp_path / name, numbers)
    a, b, c = (tmp_path / name for name in "abc")
    merge([a, b, c], tmp_path / "at once")
    merge([merge([a, b], tmp_path / "ab").directory, c], tmp_path / "left")
    merge([merge([b, c], tmp_path / "bc").directory, a], tmp_path / "right")
    found = [load(tmp_path / name) for name in ("at once", "left", "right")]
    assert repr(found[0]) == repr(found[1]) == repr(found[2])
    assert len(found[0][1]) == 9


def test_whole_segments_whose_numbers_stay_are_linked(tmp_path: Path) -> None:
    save(tmp_path / "a", [1, 2, 3])
    with TrajectoryBuffer(directory=tmp_path / "a") as buffer:  # another life, so another segment
        buffer.resume()
        buffer.add_trajectories([trajectory(number) for number in (4, 5)])
        buffer.save(4, wait=True)
    made = merge([tmp_path / "a"], tmp_path / "m")
    names = sorted((tmp_path / "m" / "segments").iterdir())
    assert made.linked == made.bytes
    assert [path.stat().st_nlink for path in names] == [2, 2]
    old, new = split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=2)
    assert old.linked == 0  # a part of a segment is copied
    assert 0 < new.linked < new.bytes
    assert load(tmp_path / "x")[1] == [1, 2]
    with TrajectoryBuffer(directory=tmp_path / "y", capacity=2, keep=1) as buffer:  # what is removed here stays there
        buffer.resume()
        for step in range(5, 9):
            buffer.add_trajectories([trajectory(10 + step), trajectory(20 + step)])
            buffer.save(step, wait=True)
    assert load(tmp_path / "y")[1] == [18, 28]
    assert load(tmp_path / "a")[1] == [1, 2, 3, 4, 5]


def test_a_segment_that_somebody_may_write_in_is_copied(tmp_path: Path) -> None:
    with TrajectoryBuffer(directory=tmp_path / "a") as buffer:
        buffer.resume()
        buffer.add_trajectories([trajectory(number) for number in (1, 2)])
        buffer.save(1, wait=True)
        assert merge([tmp_path / "a"], tmp_path / "m").linked == 0
        buffer.add_trajectories([trajectory(3)])
        buffer.save(2, wait=True)
    assert load(tmp_path / "m")[1] == [1, 2]


def test_where_no_link_can_be_it_is_copied(tmp_path: Path) -> None:
    from pipeline.store.files import OsFiles

    class NoLinks(OsFiles):
        def link(self, old: str, new: str) -> None:
            raise OSError(18, "Invalid cross-device link")

    save(tmp_path / "a", [1, 2, 3])
    made = merge([tmp_path / "a"], tmp_path / "m", files=NoLinks())
    assert made.linked == 0
    assert load(tmp_path / "m")[1] == [1, 2, 3]


def test_names_of_weights_are_no_paths(tmp_path: Path) -> None:
    with TrajectoryBuffer(directory=tmp_path / "a") as buffer:
        buffer.resume()
        for name in ("../x", "..?x", ""):
            buffer.add_trajectories([{**trajectory(1), "model_weights_id": name}])
        buffer.save(1, wait=True)
    made = split(tmp_path / "a", tmp_path / "parts", by="version")
    assert len(made) == 3
    assert {Path(each.directory).parent for each in made} == {tmp_path / "parts"}


def test_bits_that_are_no_numbers_stay(tmp_path: Path) -> None:
    odd = torch.tensor([0x7FC00123, -0x80000000, 0x7F800001, 5], dtype=torch.int64).to(torch.int32).view(torch.float32)
    for name in ("a", "b"):
        with TrajectoryBuffer(directory=tmp_path / name) as buffer:
            buffer.resume()
            buffer.add_trajectories([{"rewards": odd.reshape(2, 2), "half": odd.reshape(2, 2).bfloat16()}])
            buffer.save(1, wait=True)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    with TrajectoryBuffer(directory=tmp_path / "m") as buffer:
        buffer.resume()
        rows = buffer.state_dict()["rows"]
        assert np.asarray(rows["rewards"]).tobytes() == 2 * odd.numpy().tobytes()
        assert np.asarray(rows["half"]).tobytes() == 2 * odd.bfloat16().view(torch.int16).numpy().tobytes()


def test_large_ones_that_are_copied_as_they_are(tmp_path: Path) -> None:
    """Each is read into the memory that the one before it lay in."""
    with TrajectoryBuffer(directory=tmp_path / "a") as buffer:
        buffer.resume()
        for number in range(4):
            buffer.add_trajectories([{"rewards": torch.full((200, 100), float(number))}])
        buffer.save(1, wait=True)
    made = split(tmp_path / "a", [tmp_path / "x"], count=3)
    assert (made[0].linked, made[0].renumbered) == (0, 0)
    assert verify(str(tmp_path / "x")).whole
    with TrajectoryBuffer(directory=tmp_path / "x") as buffer:
        buffer.resume()
        rewards = np.asarray(buffer.state_dict()["rows"]["rewards"])
    assert np.array_equal(rewards, np.repeat([0.0, 1.0, 2.0], 20_000))


def test_what_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", [1, 2, 3])
    split(tmp_path / "a", [tmp_path / "x"], count=2)
    with TrajectoryBuffer(directory=tmp_path / "other") as buffer:
        buffer.resume()
        buffer.add_trajectories([{"rewards": torch.zeros(2, 2)}])
        buffer.save(1, wait=True)
    before = sorted(tmp_path.iterdir())
    for runs, match in ((["a", "x"], "trajectory 0 of run .* copies or parts"), (["a", "other"], "schema: field")):
        with pytest.raises(ConfigError, match=match):
            merge([tmp_path / run for run in runs], tmp_path / "m")
    for how, match in (({"by": "task"}, "of no task"), ({"where": "rewards > 1"}, "count, fraction and by='version'")):
        with pytest.raises(ConfigError, match=match):
            split(tmp_path / "a", tmp_path / "m", **how)  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_payload_is_found_where_it_is_copied(tmp_path: Path) -> None:
    save(tmp_path / "a", [1, 2, 3])
    save(tmp_path / "b", [4, 5, 6])
    path = next((tmp_path / "b" / "segments").iterdir())
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Damaged, match=str(path)):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]

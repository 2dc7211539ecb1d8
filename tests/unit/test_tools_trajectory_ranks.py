"""Tools read a run of trajectories that ranks have, which an earlier version wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import TrajectoryBuffer
from pipeline.checkpoint import verify
from pipeline.cli import main
from pipeline.errors import ConfigError
from pipeline.tools import inspect, merge, reshard, salvage_run, sample_run, show_item, split
from pipeline.tools.exporting import export
from pipeline.tools.importing import import_data
from tests.support.keeping import digest
from tests.support.kept import fingerprint

GOLDEN = Path(__file__).parents[1] / "golden" / "trajectory_shards_v1"
RUN = GOLDEN / "run"
EXPECTED: list[Any] = json.loads((GOLDEN / "expected.json").read_text())["three"]
HELD = [info[2] for each in EXPECTED for info in each["infos"]]


def test_what_each_rank_holds_is_inspected() -> None:
    before = fingerprint(RUN)
    found = inspect(RUN)
    assert [each.rank for each in found.buffers] == [0, 1, 2]
    for facts, expected in zip(found.buffers, EXPECTED, strict=True):
        assert facts.episodes == facts.blocks == len(expected["infos"])
        assert facts.rows == facts.rewards.count == len(expected["rows"]["rewards"])
        assert facts.added == expected["counter"]
        assert facts.unread == 0
    (one,) = inspect(RUN / "generations" / "00000003" / "shards" / "0001").buffers
    assert one == found.buffers[1]
    assert fingerprint(RUN) == before


def test_a_batch_is_what_the_rank_would_have_drawn() -> None:
    for rank, expected in enumerate(EXPECTED):
        found = sample_run(RUN, 5, rank=rank)
        (actions,) = (each for each in found.keys if each.key == "actions")
        first = expected["draws"][0]
        assert (found.rank, found.there, found.of) == (rank, len(expected["rows"]["rewards"]), "transitions")
        assert (actions.least, actions.most) == (min(first), max(first))
    with pytest.raises(ConfigError, match="3 ranks wrote it"):
        sample_run(RUN, 5, rank=3)


def test_a_trajectory_is_shown_by_the_number_that_it_has_there() -> None:
    with pytest.raises(ConfigError, match="name a shard"):
        show_item(RUN, 3)
    shard = RUN / "generations" / "00000003" / "shards" / "0001"
    infos = {info[0]: info for info in EXPECTED[1]["infos"]}
    for number, (_, shape, longest, weights) in infos.items():
        found = show_item(shard, number)
        assert found.facts["longest episode"] == longest
        assert found.facts["weights"] == weights
        (rewards,) = (each for each in found.tensors if each.name == "rewards")
        assert list(rewards.shape) == shape
    with pytest.raises(ConfigError, match=f"{min(infos)} to {max(infos)} are there"):
        show_item(shard, max(infos) + 1)


def test_all_of_them_are_exported_in_the_order_of_their_age_and_imported_as_one_run(tmp_path: Path) -> None:
    assert export(RUN, tmp_path / "out", to="jsonl").count == len(HELD)
    import_data(tmp_path / "out", tmp_path / "run")
    with TrajectoryBuffer(directory=tmp_path / "run", sample_window_size=0) as buffer:
        buffer.resume()
        infos = buffer.infos()
        assert sorted(info.max_episode_length for info in infos) == sorted(HELD)
        assert [info.trajectory_id for info in infos] == list(range(len(HELD)))
    place = {info.max_episode_length: info.trajectory_id for info in infos}
    for expected in EXPECTED:
        places = [place[info[2]] for info in expected["infos"]]
        assert places == sorted(places)


def test_it_is_merged_split_resharded_and_salvaged(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RUN, tmp_path / "run"))  # files of it are linked
    merge([run], tmp_path / "merged")
    old, new = split(run, [tmp_path / "old", tmp_path / "new"], count=4)
    assert (old.units, new.units) == (4, len(HELD) - 4)
    reshard(run, tmp_path / "one", to=1)
    salvage_run(run, tmp_path / "salvaged")
    assert digest(run) == digest(RUN)
    with TrajectoryBuffer(directory=tmp_path / "merged", sample_window_size=0) as buffer:
        buffer.resume()
        assert sorted(info.max_episode_length for info in buffer.infos()) == sorted(HELD)
    (facts,) = inspect(tmp_path / "one").buffers
    assert facts.episodes == len(HELD)
    kept = inspect(tmp_path / "salvaged").buffers
    assert [each.episodes for each in kept] == [len(each["infos"]) for each in EXPECTED]
    assert [each.added for each in kept] == [each["counter"] for each in EXPECTED]


def test_status_counts_trajectories(capsys: Any) -> None:
    assert main(["status", str(RUN)]) == 3
    shown = capsys.readouterr().out
    assert f"holds     {len(HELD)} trajectories" in shown
    assert "3 of 3 ranks; rows of rank 0: " in shown


def test_verify_says_which_trajectory_is_gone(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    path = run / "segments" / "000001-0001-000001.fbs"
    content = bytearray(path.read_bytes())
    content[16640 + 500] ^= 1
    path.write_bytes(content)
    damages = verify(str(run)).damages  # of each generation that lists it
    assert {each.offset for each in damages} == {16640}
    assert all("number 5 of rank 1 when it was written" in each.lost for each in damages)

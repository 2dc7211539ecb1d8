"""A buffer of trajectories of which some are damaged: every other one comes along, whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Damaged, TrajectoryBuffer
from pipeline.checkpoint import verify
from pipeline.cli import main
from pipeline.replay.trajectory_state import STATE_FILE
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout
from pipeline.store.segments import Block
from pipeline.tools.salvaging import SalvagedTrajectories, salvage_run
from tests.faults.test_salvage_rows import blocks_of
from tests.support.disk import tree
from tests.support.replaying import Counter
from tests.support.salvaging import flip
from tests.support.trajectories import check, numbers, trajectory

COUNT = 12


def saved(directory: str) -> str:
    """Trajectory n has the number n in each row; of two generations the newest has all."""
    with TrajectoryBuffer(directory=directory, seed=3, sample_window_size=0) as buffer:
        counter = Counter()
        buffer.attach(counter=counter)
        buffer.resume()
        for step, (begin, end) in enumerate(((0, 7), (7, COUNT)), 1):
            buffer.add_trajectories([trajectory(n, 1 + n % 4, 1 + n % 3) for n in range(begin, end)])
            counter.step = step
            buffer.save(step, wait=True)
    return directory


def damage(directory: str, block: Block) -> None:
    flip(Path(Layout(directory).segment(*block.segment_key)), block.offset + HEADER_BYTES + block.length // 2)


def salvaged(directory: str, target: Path, **more: Any) -> SalvagedTrajectories:
    before = tree(directory)
    found = salvage_run(directory, target, **more)
    assert tree(directory) == before
    assert isinstance(found, SalvagedTrajectories)
    return found


def held(buffer: TrajectoryBuffer) -> list[int]:
    """Return which trajectories are there; each is whole."""
    found = []
    for info in buffer.infos():
        actions = buffer.trajectory(info.trajectory_id)["actions"]
        assert tuple(actions.shape[:2]) == info.shape
        number = int(actions.reshape(-1, actions.shape[-1])[0, 0])
        want = trajectory(number, 1 + number % 4, 1 + number % 3)["actions"]
        assert torch.equal(actions, want)
        found.append(number)
    return found


@pytest.mark.parametrize("gone", [[], [0], [COUNT - 1], [3, 4], [0, 2, 5, 11], range(1, COUNT), range(COUNT)])
def test_those_that_are_whole_come_along(run_directory: str, tmp_path: Path, gone: Any) -> None:
    blocks = blocks_of(saved(run_directory))
    for at in gone:
        damage(run_directory, blocks[at])
    there = [number for number in range(COUNT) if number not in gone]
    rehearsed = salvaged(run_directory, tmp_path / "out", rehearse=True)
    assert not (tmp_path / "out").exists()
    found = salvaged(run_directory, tmp_path / "out")
    assert (found.trajectories_kept, found.trajectories_lost) == (len(there), len(gone))
    assert rehearsed.losses == found.losses
    assert sorted((loss.offset, loss.bytes) for loss in found.losses) == sorted(
        (blocks[at].offset, blocks[at].length) for at in gone
    )
    assert {loss.lost.split(",")[0] for loss in found.losses} == {f"trajectory {at}" for at in gone}
    rows = [(1 + n % 4) * (1 + n % 3) for n in range(COUNT)]
    assert (found.rows_kept, found.rows_lost) == (sum(rows[n] for n in there), sum(rows[n] for n in gone))
    assert found.whole == (not gone)
    assert verify(str(tmp_path / "out")).whole
    with TrajectoryBuffer(directory=tmp_path / "out", sample_window_size=0) as buffer:
        counter = Counter()
        buffer.attach(counter=counter)
        assert buffer.resume().step == counter.step == 2
        assert held(buffer) == there
        if there:
            assert buffer.infos()[-1].trajectory_id == COUNT - 1, "numbers go on where they were"
            batch = buffer.sample(64)
            check(batch)
            assert numbers(batch) <= set(there)
        buffer.add_trajectories([trajectory(COUNT, 1 + COUNT % 4, 1 + COUNT % 3)])
        buffer.save(3, wait=True)
        assert held(buffer) == [*there, COUNT]
    assert verify(str(tmp_path / "out")).whole


def test_what_comes_next_is_drawn_as_if_nothing_had_been(run_directory: str, tmp_path: Path) -> None:
    saved(run_directory)
    salvaged(run_directory, tmp_path / "out")
    drawn = []
    for directory in (run_directory, str(tmp_path / "out")):
        with TrajectoryBuffer(directory=directory, seed=3, sample_window_size=0) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            drawn.append([buffer.sample(8)["actions"].tolist() for _ in range(4)])
    assert drawn[0] == drawn[1]


def test_a_damaged_state_leads_to_the_generation_before_it(run_directory: str, tmp_path: Path) -> None:
    saved(run_directory)
    newest, before = (Path(run_directory, "generations", f"{number:08d}", STATE_FILE) for number in (1, 0))
    flip(newest, newest.stat().st_size // 2)
    found = salvaged(run_directory, tmp_path / "out")
    assert (found.step, found.trajectories_kept, found.trajectories_lost) == (1, 7, 0)
    assert (found.generations_usable, found.generations_unusable) == (1, 1)
    flip(before, before.stat().st_size // 2)
    with pytest.raises(Damaged, match="no generation says how the buffer stood"):
        salvage_run(run_directory, tmp_path / "none")


def test_a_trainers_file_that_is_damaged_is_left_out_and_said(run_directory: str, tmp_path: Path) -> None:
    saved(run_directory)
    for number in range(2):
        file = Path(run_directory, "generations", f"{number:08d}", "trainer", "counter.safetensors")
        flip(file, file.stat().st_size - 1)
    found = salvaged(run_directory, tmp_path / "out")
    assert list(found.left_out) == ["trainer/counter.safetensors"]
    assert found.trajectories_kept == COUNT


def test_the_command(run_directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run_directory, blocks_of(saved(run_directory))[5])
    out = tmp_path / "out"
    assert main(["salvage", run_directory, str(out), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "kept         11 trajectories with 54 rows, and 1 with 6 rows are lost" in told
    assert "lost   trajectory 5, of 2 steps in 3 environments" in told
    assert not os.path.exists(out)
    assert main(["salvage", run_directory, str(out)]) == 0
    assert "11 trajectories" in capsys.readouterr().out
    assert main(["verify", str(out)]) == 0
    assert main(["inspect", str(out), "--json"]) == 0

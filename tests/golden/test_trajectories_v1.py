"""Folders of buffers of trajectories of format version 1 open in every version after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load

from pipeline.checkpoint import verify
from pipeline.store.frames import PAYLOAD, scan
from tests.golden.make_trajectories_v1 import made, seen, trajectory
from tests.support.disk import says_no_machine

HERE = Path(__file__).parent / "trajectories_v1"
EXPECTED = json.loads((HERE / "expected.json").read_text())


def test_nothing_of_the_machine_that_made_it_is_in_the_files() -> None:
    says_no_machine(HERE, most=300_000)


def test_it_is_whole() -> None:
    assert verify(str(HERE / "run")).whole


@pytest.mark.parametrize("step", [2, 4, 7])
def test_it_opens_with_what_it_held_and_draws_what_it_would_have_drawn(tmp_path: Path, step: int) -> None:
    shutil.copytree(HERE / "run", tmp_path / "run")
    buffer, counter = made(tmp_path / "run")
    with buffer:
        assert buffer.resume(step).step == counter.step == step
        assert seen(buffer) == EXPECTED[str(step)]
        buffer.add_trajectories([trajectory(99)])
        buffer.save(12, wait=True)
    assert verify(str(tmp_path / "run")).whole


def test_a_payload_opens_with_safetensors_alone() -> None:
    found = 0
    for path in sorted((HERE / "run" / "segments").iterdir()):
        tag = int(json.loads((HERE / "run" / "run.json").read_text())["run_id"][:16], 16)
        for frame in scan(str(path), run_tag=tag):
            if frame.header.kind == PAYLOAD:
                fields = load(frame.payload)
                given = trajectory(frame.header.sequence + 2)
                assert fields["rewards"].tolist() == given["rewards"].tolist()
                assert fields["curr_obs.states"].tolist() == given["curr_obs"]["states"].tolist()
                found += 1
    assert found >= 14

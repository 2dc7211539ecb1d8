"""Folders of replay buffers of format version 1 open in every version after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint import verify
from tests.golden.make_replay_v1 import OPTIONS, made, seen
from tests.support.disk import says_no_machine

HERE = Path(__file__).parent / "replay_v1"
EXPECTED = json.loads((HERE / "expected.json").read_text())


@pytest.fixture(params=list(OPTIONS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_nothing_of_the_machine_that_made_it_is_in_the_files() -> None:
    says_no_machine(HERE, most=300_000)


def test_it_is_whole(name: str) -> None:
    assert verify(str(HERE / name)).whole


def test_it_opens_with_what_it_held_and_draws_what_it_would_have_drawn(tmp_path: Path, name: str) -> None:
    shutil.copytree(HERE / name, tmp_path / name)
    buffer, counter = made(name, tmp_path / name)
    with buffer:
        resumed = buffer.resume(continue_episodes=True)
        assert (resumed.step, resumed.rows, counter.step) == (11, 40, 11)
        assert seen(buffer) == EXPECTED[name]
        buffer.save(12, wait=True)
    assert verify(str(tmp_path / name)).whole


@pytest.mark.parametrize("step", [7, 10])
def test_older_generations_open_too(tmp_path: Path, name: str, step: int) -> None:
    shutil.copytree(HERE / name, tmp_path / name)
    buffer, counter = made(name, tmp_path / name)
    with buffer:
        assert buffer.resume(step).rows == 40
        assert counter.step == step

"""What a run takes of memory: what is held, what a save and a resume take on top, and that nothing grows with time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.memory import OF_SALVAGE, SIZE

SOAK = int(os.environ.get("FOREBAY_SOAK", "1")) > 1
STEPS, ROLLOUTS = (1000, 100_000) if SOAK else (400, 30_000)
CALLS = 100_000 if SOAK else 4000
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="resident memory is told by /proc"),
]


def measure(what: str, directory: str, count: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.memory", what, directory, str(count)],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=110,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("what", "buffered"), [("buffer", SIZE // 4), ("trainer", 1)])
def test_a_save_copies_nothing_and_a_resume_holds_things_once(run_directory: str, what: str, buffered: int) -> None:
    """256 MiB of rollouts, or of weights."""
    found = measure(what, run_directory)
    assert found["buffered"] == buffered
    assert found["save"] <= 64 + 16
    assert found["load"] <= 1.1 * SIZE


def test_a_fast_producer_is_bounded_and_many_steps_take_no_more_than_some(run_directory: str) -> None:
    """A thousand steps under ``make soak``."""
    found = measure("steps", run_directory, STEPS)
    assert (found["held"], found["in flight"]) == (16, 4)
    assert found["tasks"] <= 4 + 6
    assert found["segments"] <= 4 << 20
    resident, generations = found["resident"], found["generations"]
    assert len(resident) == STEPS // 50
    assert max(resident[len(resident) // 2 :]) <= 1.01 * max(resident[:4])
    assert max(generations) <= min(generations) + 200, "but for the digits of some counts, and a segment that is listed"


def test_trivial_rollouts_leave_nothing_behind(run_directory: str) -> None:
    """A hundred thousand under ``make soak``."""
    found = measure("rollouts", run_directory, ROLLOUTS)
    assert found["trained"] == ROLLOUTS // 32 * 32
    assert found["tasks"] <= 8 + 6
    assert found["growth"] < 10 * ROLLOUTS, "bytes: a megabyte for a hundred thousand"


@pytest.mark.parametrize("row_bytes", [64, 65_536])
def test_a_replay_buffer_is_saved_in_pieces_and_resumed_once(run_directory: str, row_bytes: int) -> None:
    """256 MiB of rows, small ones and large ones."""
    found = measure("transitions", run_directory, row_bytes)
    assert found["buffered"] == (SIZE << 20) // row_bytes
    assert found["held"] >= SIZE
    assert found["save"] <= 64 + 16
    assert found["load"] <= 1.1 * found["held"]


@pytest.mark.parametrize("what", OF_SALVAGE)
def test_a_replay_buffer_is_salvaged_in_pieces(run_directory: str, what: str) -> None:
    """256 MiB of small rows, whole and damaged."""
    found = measure(what, run_directory, 64)
    assert found["rows whole"] == (SIZE << 20) // 64
    assert 0 < found["rows hurt"] < found["rows whole"]
    assert found["whole"] <= 64
    assert found["hurt"] <= 64


def test_a_run_whose_rollouts_fill_a_buffer_is_salvaged_and_split_in_pieces(run_directory: str) -> None:
    """256 MiB of small rows, half of which came after the generation."""
    found = measure("salvage episodes", run_directory, 64)
    assert found["rows whole"] == found["rows split"] == (SIZE << 20) // 64
    assert 0 < found["rows hurt"] < found["rows whole"]
    assert max(found["whole"], found["hurt"]) <= 64
    assert found["split"] <= 96


@pytest.mark.parametrize("ranks", [1, 2])
def test_trajectories_are_salvaged_one_by_one(run_directory: str, ranks: int) -> None:
    """256 MiB of them, of 4 MiB each, of one process and of ranks."""
    found = measure("salvage trajectories", run_directory, ranks)
    assert found["kept whole"] == SIZE // 4
    assert found["kept hurt"] == SIZE // 4 - 1
    assert found["whole"] <= 64
    assert found["hurt"] <= 64


def test_calls_of_a_replay_buffer_leave_nothing_behind(run_directory: str) -> None:
    """A hundred thousand under ``make soak``."""
    found = measure("calls", run_directory, CALLS)
    assert found["added"] == CALLS
    assert found["growth"] < 10 * CALLS, "bytes: a megabyte for a hundred thousand"

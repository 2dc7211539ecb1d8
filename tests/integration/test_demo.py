"""`forebay demo` as people run it: processes, a real kill, signals, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
SCRIPT = "import sys; from tasks.demo.command import main; sys.exit(main(sys.argv[1:]))"


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start the demo as the command does (the working folder is no place to import from), with no terminal."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def summary_of(*arguments: str, cwd: Path) -> dict[str, Any]:
    """Run the demo to its end with ``--json`` and return what it printed, with its exit code checked."""
    process = start(*arguments, "--json", cwd=cwd)
    out, err = process.communicate(timeout=100)
    assert out, err
    summary: dict[str, Any] = json.loads(out)
    assert process.returncode == (0 if summary["solved"] else 1), err
    return summary


def test_it_kills_its_training_process_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    given = ("--steps", "12", "--seed", "3", "--directory", "run")
    # A file that a user may well have must not stand in for our package.
    (tmp_path / "tasks.py").write_text("raise SystemExit('the wrong tasks')\n")
    summary = summary_of(*given, cwd=tmp_path)
    assert summary["lost"] == 0
    assert summary["trained_twice"] == 0
    assert summary["findings"] == []
    assert summary["recovered"] >= 1
    assert summary["repeated_steps"]
    assert len(summary["kills"]) == 1
    assert summary["steps"] == 12
    assert summary["trained"] == 12 * 16
    assert max(map(int, summary["staleness"])) <= 2
    assert summary["seconds_to_resume"] > 0
    assert (tmp_path / "run" / summary["curve"]).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert str(tmp_path) not in (tmp_path / "run" / "summary.json").read_text()
    # Run again in the same folder, it says the same of the same files.
    assert summary_of(*given, cwd=tmp_path) == summary


def test_ctrl_c_saves_and_the_next_run_goes_on(tmp_path: Path) -> None:
    given = ("--steps", "12", "--no-kill", "--directory", "run")
    process = start(*given, cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if "Step 5" in line:
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to both processes
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Stopped and saved. To go on: forebay demo" in err
    assert "Traceback" not in err
    assert out == ""
    summary = summary_of(*given, cwd=tmp_path)
    assert (summary["lost"], summary["trained_twice"], summary["kills"]) == (0, 0, [])
    assert summary["steps"] == 12


@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_saves_in_time_and_so_does_a_second_one(tmp_path: Path, times: int) -> None:
    given = ("--steps", "8", "--no-kill", "--directory", "run")
    process = start(*given, cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if "Step 5" in line:
            break
    for _ in range(times):
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)  # what launchers grant
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    summary = summary_of(*given, cwd=tmp_path)
    assert (summary["lost"], summary["trained_twice"], summary["findings"], summary["steps"]) == (0, 0, [], 8)

"""Commands as people use them: at a narrow and a wide terminal, in a pipe, beside a run in use, stopped by Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import verify
from pipeline.cli import main
from pipeline.store.files import OsFiles
from pipeline.tools import inspect, sample_run
from tests.support import standing
from tests.support.children import child
from tests.support.salvaging import flip
from tests.support.terminals import COMMAND, ROOT, on_terminal, piped

NARROW, WIDE = 46, 140
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of rollouts with a payload that is damaged."""
    path = Path(shutil.copytree(GOLDEN / "v1", tmp_path_factory.mktemp("runs") / "a"))
    flip(path / "segments/000001-0000-000001.fbs", 700)
    return path


@pytest.mark.parametrize("columns", [NARROW, WIDE])
@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["inspect", "RUN"], 0, ["to be continued", "Rollouts", "no answer to 3", "2024-01-01"]),
        (["inspect", "RUN", "--item", "4"], 0, ["Member 0: reward", "logprobs", "What happened"]),
        (["inspect", "RUN/journals/000001-0000.fbj"], 0, ["a journal", "claim", "58 events"]),
        (["verify", "RUN"], 1, ["damaged, 1 place", "at byte", "lost"]),
        (["verify", "RUN", "--quick"], 0, ["whole, as far as sizes"]),
        (["salvage", "RUN", "OUT", "--dry-run"], 0, ["would be written", "dry run"]),
        (["sample", "RUN", "-n", "2"], 0, ["solver.ids", "groups/s"]),
    ],
    ids=lambda value: "-".join(value[:1] + value[2:]) if isinstance(value, list) and value[:1] != ["to"] else None,
)
def test_what_a_person_sees_fits_the_terminal(
    run: Path, tmp_path: Path, columns: int, arguments: list[str], code: int, shown: list[str]
) -> None:
    places = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    given = [arguments[0]]
    for each in arguments[1:]:
        for name, path in places.items():
            each = each.replace(name, path)
        given.append(each)
    session = on_terminal(given, columns)
    assert session.code == code, session.text
    assert all(len(line) <= columns for line in session.lines), session.text
    flat = " ".join(session.text.split())
    assert all(each in flat for each in shown), session.text
    assert "\x1b[1m" in session.raw or "\x1b[3" in session.raw, "titles stand out"
    assert f"{arguments[0]}:" not in session.text, "the bar is taken away"


@pytest.mark.parametrize("command", ["inspect", "verify", "sample"])
def test_what_lasts_has_a_bar_with_bytes_and_the_time_left(run: Path, command: str) -> None:
    session = on_terminal([command, str(run)], WIDE)
    (bar,) = {each for each in session.raw.split("\r") if each.startswith(f"{command}: 0.00B of ")}
    assert "B/s, ? left" in bar
    assert f"{command}:" not in session.text, "the bar is taken away"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "RUN"], 0), (["verify", "RUN", "--json"], 1), (["sample", "RUN", "--json"], 0),
        (["salvage", "RUN", "OUT"], 0),
    ],
)  # fmt: skip
def test_in_a_pipe_there_are_no_colours_and_the_exit_code_says_how_it_went(
    run: Path, tmp_path: Path, arguments: list[str], code: int
) -> None:
    """By the real command."""
    given = [{"RUN": str(run), "OUT": str(tmp_path / "out")}.get(each, each) for each in arguments]
    session = piped(given)
    assert session.code == code, session.raw
    assert "\x1b" not in session.raw
    assert "\r" not in session.raw
    if "--json" in arguments:
        json.loads(session.raw)
    if arguments[0] == "salvage":
        assert verify(str(tmp_path / "out")).whole
        assert os.listdir(tmp_path) == ["out"]


def test_wrong_command_lines(capsys: Any, run: Path) -> None:
    wrong = {"inspect": [], "verify": [str(run), "--deep"], "salvage": [str(run)], "sample": [str(run), "-n", "x"]}
    for arguments in ([name, *more] for name, more in wrong.items()):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
    assert main(["inspect", str(run.parent / "nothing")]) == 2
    assert "is absent" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify", "salvage", "sample"])
def test_help_has_an_example_and_the_exit_codes(command: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    told = capsys.readouterr().out
    assert f"example:\n  forebay {command} " in told
    assert "exit codes:\n  0  " in told


@pytest.mark.parametrize("after", [0, 3, 9])
def test_ctrl_c_leaves_no_half_written_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, capsys: Any
) -> None:
    calls = 0

    class Stopped(OsFiles):
        def write(self, handle: int, chunks: Any) -> int:
            nonlocal calls
            calls += 1
            if calls > after:
                raise KeyboardInterrupt
            return super().write(handle, chunks)

    monkeypatch.setattr("pipeline.tools.salvaging.Copying", Stopped)
    assert main(["salvage", str(run), str(tmp_path / "out")]) == 130
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr().err == "forebay salvage: stopped\n"


def test_follow_tells_what_is_written_until_ctrl_c(run_directory: str) -> None:
    """A real process follows a real run, and is stopped by a real signal."""
    with child(standing.fill, run_directory, "transitions") as process:
        assert process.hear() == "saved"
        follower = subprocess.Popen(
            [*COMMAND, "inspect", run_directory, "--follow", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        )
        try:
            assert follower.stderr is not None
            assert follower.stdout is not None
            assert follower.stderr.readline() == "forebay inspect: following; Ctrl-C ends it\n"
            process.pipe.send("go on")
            told = [json.loads(follower.stdout.readline()) for _ in range(2)]
            assert sorted(each["event"] for each in told) == ["closed", "committed"]
            follower.send_signal(signal.SIGINT)
            rest, errors = follower.communicate()
            assert (follower.returncode, rest, errors) == (0, "", "")
        finally:
            follower.kill()
            follower.communicate()


@pytest.mark.parametrize("kind", ["transitions", "trajectories"])
def test_a_buffer_in_use_is_looked_at_and_goes_on(run_directory: str, kind: str, capsys: Any) -> None:
    with child(standing.fill, run_directory, kind) as process:
        assert process.hear() == "saved"
        found = inspect(run_directory)
        assert found.status is not None
        assert (found.status.state, len(found.buffers)) == ("running", 1)
        assert sample_run(run_directory, 4).drawn == 4
        assert main(["verify", run_directory]) == 0
        process.pipe.send("go on")
        assert process.rest()[-1][0] == "raised"
    assert inspect(run_directory).generation.step == 3  # type: ignore[union-attr]


def test_a_run_of_rollouts_in_use_says_what_is_running(run_directory: str) -> None:
    with child(standing.train, run_directory) as process:
        assert process.hear() == "saved"
        (task,) = inspect(run_directory).tasks
        assert task.states["trained"] == 8
        assert task.states["running"] > 0
        assert sample_run(run_directory, 4).of == "groups"
        process.kill()
    (task,) = inspect(run_directory).tasks
    assert (task.states["running"], task.states["waiting"] > 0) == (0, True)

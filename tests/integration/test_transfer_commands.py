"""`forebay export` and `forebay import` as they are called: exit codes, what stays after a kill, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.cli import main
from pipeline.errors import ConfigError, Damaged, Locked, NewerFormat
from pipeline.tools.exporting import export
from pipeline.tools.importing import import_data
from pipeline.tools.interchange.aside import SUFFIX, aside
from tests.support.disk import tree
from tests.support.experience import fed, filled, resumed
from tests.support.kept_runs import replay_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A small run of a buffer."""
    with ReplayBuffer(100, directory=str(tmp_path / "run"), seed=1) as buffer:
        buffer.resume()
        end = np.arange(40) % 8 == 7
        buffer.extend({"obs": np.arange(80.0).reshape(40, 2), "reward": np.arange(40), "terminated": end})
        buffer.save(4, wait=True)
    return str(tmp_path / "run")


async def test_of_a_run_that_has_both_the_command_says_how_to_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer, run = ReplayBuffer(100, seed=1), str(tmp_path / "run")
    async with fed(buffer, 3, directory=run) as pipe:
        await resumed(pipe)
        await pipe.start()
        await filled(pipe)
        await (await pipe.save(1)).committed()
    assert main(["export", run, str(tmp_path / "out"), "--to", "jsonl"]) == 2
    assert "--content" in capsys.readouterr().err
    for each in ("transitions", "rollouts"):
        assert main(["export", run, str(tmp_path / each), "--to", "jsonl", "--content", each]) == 0


def test_both_commands_say_what_they_did(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, new = str(tmp_path / "out"), str(tmp_path / "new")
    assert main(["export", run, out, "--to", "jsonl", "--dry-run"]) == 0
    assert "40 transitions of step 4 as jsonl would be written" in capsys.readouterr().out
    assert not os.path.exists(out)
    assert main(["export", run, out, "--to", "jsonl", "--where", "reward>=10"]) == 0
    assert "30 transitions of step 4 as jsonl, 1 file of" in capsys.readouterr().out
    lines = Path(out, "transitions-00000.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {
        "obs": [20.0, 21.0],
        "reward": 10,
        "terminated": False,
        "#key": 10,
        "#episode": 1,
        "#place": 2,
        "#version": 0,
        "#end": 0,
    }
    assert main(["import", out, new, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 30
    with ReplayBuffer(100, directory=new, seed=1) as buffer:
        assert (buffer.resume().step, len(buffer)) == (4, 30)
    assert main(["status", new]) == 3


def test_a_wrong_call_exits_with_2_and_a_damaged_source_with_1(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["export", run, out, "--to", "jsonl", "--where", "reward~3"]) == 2
    assert main(["export", run, out, "--to", "jsonl", "--where", "obs>3"]) == 2
    assert main(["export", run, out, "--to", "jsonl", "--task", "math"]) == 2
    assert main(["export", run, f"{run}/out", "--to", "jsonl"]) == 2
    assert "must not lie in" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "absent"), out, "--to", "jsonl"]) == 1
    assert main(["import", str(tmp_path / "absent"), out]) == 2
    with pytest.raises(SystemExit) as raised:
        main(["export", run, out, "--to", "csv"])
    assert raised.value.code == 2
    segment = next(Path(run, "segments").iterdir())
    raw = bytearray(segment.read_bytes())
    raw[600] ^= 1
    segment.write_bytes(raw)
    assert main(["export", run, out, "--to", "jsonl"]) == 1
    assert segment.name in capsys.readouterr().err
    assert not os.path.exists(out)
    assert not os.path.exists(out + SUFFIX)


@pytest.mark.parametrize("to", ["jsonl", "safetensors"])
def test_an_export_that_was_changed_is_refused(run: str, tmp_path: Path, to: str) -> None:
    out, new = tmp_path / "out", tmp_path / "new"
    export(run, out, to=to)
    described = json.loads((out / "forebay.json").read_text())
    part = out / described["files"][0]["path"]
    whole = part.read_bytes()
    for damaged in (whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        part.write_bytes(damaged)
        with pytest.raises(Damaged, match=part.name):
            import_data(out, new)
        assert not new.exists()
    part.unlink()
    with pytest.raises(Damaged, match="is missing"):
        import_data(out, new)
    part.write_bytes(whole)
    for change, error, text in (
        ({"format_version": 2}, NewerFormat, "format 2; this version reads up to 1"),
        ({"content": "rows"}, Damaged, "cannot be"),
        ({"files": [{**described["files"][0], "path": "../x"}]}, Damaged, "not inside"),
    ):
        (out / "forebay.json").write_text(json.dumps({**described, **change}))
        with pytest.raises(error, match=text):
            import_data(out, new)
        assert not new.exists()


def test_a_place_that_is_taken_is_refused_and_left_as_it_is(run: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="must be absent or an empty folder"):
        export(run, tmp_path / "out", to="jsonl")
    assert tree(tmp_path) == before
    with aside(str(tmp_path / "other")), pytest.raises(Locked), aside(str(tmp_path / "other")):
        pass


_EXPORT = """
import os, sys
from pipeline.tools.exporting import export
def stop(done, total):
    print("begun", flush=True)
    sys.stdin.readline()
export(sys.argv[1], sys.argv[2], to="jsonl", progress=stop)
"""
_COMMAND = """
import sys
import pipeline.tools.exporting as exporting
whole = exporting.OutFolder.ended
def ended(self, path, count):
    print("begun", flush=True)
    sys.stdin.readline()
    whole(self, path, count)
exporting.OutFolder.ended = ended
from pipeline.cli import main
sys.exit(main(["export", sys.argv[1], sys.argv[2], "--to", "jsonl"]))
"""


@pytest.mark.parametrize(
    ("script", "number", "code"),
    [
        (_EXPORT, signal.SIGKILL, -signal.SIGKILL),
        (_COMMAND, signal.SIGINT, 130),
        (_COMMAND, signal.SIGTERM, 143),
    ],
    ids=["killed", "ctrl-c", "terminated"],
)
def test_a_stopped_export_leaves_nothing_under_its_name(
    run: str, tmp_path: Path, script: str, number: int, code: int
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", script, run, str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.send_signal(number)
        assert child.wait() == code
    assert not out.exists()
    assert os.path.exists(str(out) + SUFFIX) == (number == signal.SIGKILL)
    assert export(run, out, to="jsonl").count == 40  # what was left does not hinder
    assert not os.path.exists(str(out) + SUFFIX)


def test_a_failed_import_leaves_nothing_under_its_name(tmp_path: Path) -> None:
    export(replay_run(tmp_path / "run"), tmp_path / "out", to="safetensors", part_bytes=100_000)
    last = max(tmp_path.glob("out/*.safetensors"))
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(Damaged, match=last.name):
        import_data(tmp_path / "out", tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_pickles_are_refused_with_what_to_run_where_they_were_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("buffer.pkl", "stable_baselines3"), ("replay_buffer.pth", "storage_state")):
        (tmp_path / name).write_bytes(b"\x80\x04.")
        assert main(["import", str(tmp_path / name), str(tmp_path / "new")]) == 2
        told = capsys.readouterr().err
        assert said in told
        compile(told[told.index("\n\n") + 2 :], name, "exec")


def test_rollouts_of_others_are_lines_with_tensors(tmp_path: Path) -> None:
    ids = {"0.prompt_ids": {"dtype": "I64", "shape": [2], "data": [4, 5]}}
    lines = [
        {"uid": uid, "member": member, "task": "math", "reward": 0.5, "agents": [""], "policies": [""], "tensors": ids}
        for uid in range(3)
        for member in range(2)
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert import_data(path, tmp_path / "new", step=4).count == 6
    assert export(tmp_path / "new", tmp_path / "out", to="jsonl", tasks=["math"]).count == 6
    for change, said in (({"uid": -1}, "uid -1"), ({"reward": "1"}, "reward"), ({"agents": []}, "0 agents and 1")):
        path.write_text(json.dumps({**lines[0], **change}))
        with pytest.raises(Damaged, match=said):
            import_data(path, tmp_path / "other")
    path.write_text(json.dumps({**lines[0], "reward": 1e400}).replace("Infinity", "1e400"))
    with pytest.raises(Damaged):
        import_data(path, tmp_path / "other")


def test_rows_of_others_are_read_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        {"obs": {"x": [at, 0.5]}, "r": at / 2, "terminals": at % 3 == 2, "truncated": at == 4, "episode": 7 + at // 3}
        for at in range(8)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    renamed = {"terminals": "terminated", "r": "reward"}
    assert import_data(path, tmp_path / "new", rename=renamed).count == 8
    with ReplayBuffer(10, directory=str(tmp_path / "new"), seed=1) as buffer:
        buffer.resume()
        batch = buffer.sample(64, n_step=8, gamma=1.0)
        first = int(batch.keys[0])
        left = min(end for end in (2, 4, 5, 7) if end >= first)
        assert float(batch["reward"][0]) == sum(at / 2 for at in range(first, left + 1))
        assert buffer.statistics().episodes == 4
    path.write_text('{"obs": 1}\n{"obs": 2, "x": 3}\n')
    with pytest.raises(Damaged, match="line 2"):
        import_data(path, tmp_path / "other")
    path.write_text('{"obs": "text"}\n')
    with pytest.raises(ConfigError, match="obs"):
        import_data(path, tmp_path / "other")

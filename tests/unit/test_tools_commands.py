"""The commands that make new runs: what they print, and how they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pipeline.cli.merge
from pipeline.cli import main
from tests.support.keeping import load, play


@pytest.fixture
def two(tmp_path: Path) -> Path:
    play(tmp_path / "a", 1, 10)
    play(tmp_path / "b", 2, 10)
    return tmp_path


def test_merge_split_and_reshard(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, m = (str(two / name) for name in "abm")
    assert main(["merge", a, b, "--out", m, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{m}: would be replay, step 3\n  holds ")
    assert not Path(m).exists()
    assert main(["merge", a, b, "--out", m]) == 0
    shown = capsys.readouterr()
    assert f"made of   {b}, generation 1, step 3" in shown.out
    assert "left out  trainer/counter.safetensors" in shown.out
    assert shown.err == ""  # no bar where there is no terminal
    assert len(load(Path(m))["keys"]) == 40
    parts = [str(two / "x"), str(two / "y")]
    assert main(["split", m, "--where", "run == 1", "--json", "--out", *parts]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [each["directory"] for each in found] == parts
    assert [each["rows"] for each in found] == [20, 20]
    assert main(["reshard", m, "--to", "3", "--out", str(two / "r")]) == 0
    assert "ranks     3; rows of each: 1" in capsys.readouterr().out


def test_exit_codes(two: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a, m = str(two / "a"), str(two / "m")
    assert main(["merge", a, str(two / "none"), "--out", m]) == 2
    assert "there is no run of forebay" in capsys.readouterr().err
    assert main(["merge", a, "--out", str(two / "b")]) == 2
    assert "must be absent or an empty folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["split", a, "--out", m])
    assert ended.value.code == 2

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline.cli.merge, "merge", interrupted)
    assert main(["merge", a, "--out", m]) == 130
    assert "forebay merge: stopped" in capsys.readouterr().err
    assert sorted(path.name for path in two.iterdir()) == ["a", "b"]

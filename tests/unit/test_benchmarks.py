"""The benchmarks run, and their verdict follows from their figures. No figure is asserted."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import peaks
from benchmarks.__main__ import main
from benchmarks.harness import Row, times
from benchmarks.replay_peers import PEERS
from benchmarks.replay_sides import PYTHONS, Peers


def test_the_verdict_follows_from_the_figures() -> None:
    assert Row(name="a", ours=1.0, unit="us", limit=1.0, asked="").ok
    assert not Row(name="a", ours=1.1, unit="us", limit=1.0, asked="").ok
    row = times("a", [9.0, 1.0, 2.0], "bare", [1.0, 0.5, 7.0], unit="us", most=2)
    assert (row.ours, row.limit, row.peers, row.ok) == (2.0, 2.0, {"bare": 1.0}, True)


@pytest.mark.slow
def test_a_small_run_prints_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overhead", "--json", "--scale", "0.002"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 18
    for row in rows:
        assert set(row) == {"name", "ours", "unit", "peers", "limit", "asked", "ok"}
        assert row["ok"] == (row["ours"] <= row["limit"])


@pytest.mark.slow
def test_a_small_run_of_two_processes_prints_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", "--json", "--scale", "0.02"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4


@pytest.mark.slow
def test_small_chats_print_rows(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    assert main(["agents", "--json", "--scale", "0.008"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    for row in rows:
        assert row["ok"] == (row["ours"] <= row["limit"])
        assert all(each > 0 for each in [row["ours"], *row["peers"].values()])


@pytest.mark.slow
def test_a_small_simulation_of_every_staleness_policy_prints_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["staleness", "--json", "--scale", "0.03"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert len(rows) == 30
    for row in rows:
        assert row["ours"] >= 0.99, "no policy can be faster than a trainer that never waits"
        assert row["peers"]["stalest"] <= 2 or row["name"].startswith("mask")
        assert 0 < row["peers"]["tokens trained of generated"] <= 1


@pytest.mark.slow
def test_small_checkpoints_print_rows_and_leave_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOREBAY_TORCHRL_PYTHON", raising=False)
    assert main(["checkpoint", "--json", "--scale", "0.003", "--folder", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names)) == 20 + 5 * hasattr(os, "posix_fadvise") + 4 * peaks.possible()
    for row in rows:
        assert row["ok"] == (row["ours"] <= row["limit"])
        assert row["name"].startswith("extra memory") or row["ours"] > 0
    (written,) = [row["ours"] for row in rows if row["name"] == "bytes on the disk, 0.003 GB"]
    assert 1 < written < 1.1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_small_saves_of_transitions_print_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["transitions", "--json", "--scale", "0.002", "--folder", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names)) == 14 + 8 * hasattr(os, "posix_fadvise") + 2 * peaks.possible()
    for row in rows:
        assert row["ok"] == (row["ours"] <= row["limit"])
    (written,) = [row for row in rows if row["name"] == "bytes on the disk, 1% full"]
    assert written["peers"]["content"] < written["ours"] <= written["limit"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_small_runs_that_are_checked_and_merged_print_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["tools", "--json", "--scale", "0.002", "--folder", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    names = [row["name"] for row in rows]
    commands = 9 if find_spec("datasets") is None else 13
    assert len(names) == len(set(names)) == 3 + 2 * hasattr(os, "posix_fadvise") + commands * peaks.possible()
    for row in rows:
        assert row["ok"] == (row["ours"] <= row["limit"])
    linked = rows[-1]["peers"]
    assert linked["MB linked"] == linked["of MB"] > 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_small_replay_buffers_print_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PYTHONS:
        monkeypatch.delenv(name, raising=False)
    assert main(["replay", "--json", "--scale", "0.002"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names)) == 21
    for row in rows:
        assert row["ok"] == (row["ours"] <= row["limit"])
        assert row["ours"] > 0
        assert not set(row["peers"]) & set(PEERS), "nobody was asked"


@pytest.mark.slow
def test_a_peer_in_another_interpreter_takes_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHONS[0], os.pathsep.join([sys.executable] * 2))
    monkeypatch.delenv(PYTHONS[1], raising=False)
    with Peers() as peers:
        peers.open("uniform", "M", 256)
        for name in peers.having("sample"):
            assert peers.timed(name, "sample", 2, None) > 0
        peers.close()
        assert peers.having("sample") == []


def test_figures_of_a_folder_in_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.disk.in_memory", lambda folder: True)
    with pytest.raises(SystemExit, match="lies in memory"):
        main(["checkpoint", "--folder", str(tmp_path)])

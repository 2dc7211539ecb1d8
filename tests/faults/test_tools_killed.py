"""Tools that make new runs, killed or failing at every change of the folder: the source stays as it is, what is made is
there as a whole or not at all, and the next one for the same place makes it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import TrajectoryBuffer
from pipeline.checkpoint import verify
from pipeline.cli import main
from pipeline.errors import Locked, StoreError
from pipeline.store.files import FilesLike
from pipeline.testing import RecordingFiles, Replay
from pipeline.tools import merge, reshard, split
from pipeline.tools.output import Output
from tests.support.children import ChildProcess
from tests.support.disk import ScriptedFiles, no_space
from tests.support.episodes import fill
from tests.support.keeping import digest, merge_and_die, play
from tests.support.rank_runs import killed
from tests.support.trajectories import trajectory
from tests.unit.test_trajectory_ranks import save_some

SOAK = int(os.environ.get("FOREBAY_SOAK", "1")) > 1
Tool = Callable[[Path, Path, FilesLike | None], None]


def merges(source: Path, out: Path, files: FilesLike | None = None) -> None:
    merge([source / "a", source / "b"], out / "m", files=files)


def splits(source: Path, out: Path, files: FilesLike | None = None) -> None:
    split(source / "a", [out / "x", out / "y"], count=3, files=files)


def parts(source: Path, out: Path, files: FilesLike | None = None) -> None:
    split(source / "a", out / "parts", by="version", files=files)


def reshards(source: Path, out: Path, files: FilesLike | None = None) -> None:
    reshard(source / "a", out / "r", 2, files=files)


def links(source: Path, out: Path, files: FilesLike | None = None) -> None:
    merge([source / "t"], out / "t", files=files)


def of_ranks(source: Path, out: Path, files: FilesLike | None = None) -> None:
    reshard(source / "g", out / "g", 3, files=files)


def shelves(source: Path, out: Path, files: FilesLike | None = None) -> None:
    merge([source / "ts"], out / "ts", files=files)


def reshelves(source: Path, out: Path, files: FilesLike | None = None) -> None:
    reshard(source / "ts", out / "ts3", 3, files=files)


def plays(source: Path, out: Path, files: FilesLike | None = None) -> None:
    merge([source / "e"], out / "e", files=files)


def splits_items(source: Path, out: Path, files: FilesLike | None = None) -> None:
    split(source / "e", [out / "e1", out / "e2"], fraction=0.5, files=files)


TOOLS: dict[str, tuple[Tool, list[str]]] = {
    "merge": (merges, ["m"]),
    "split": (splits, ["x", "y"]),
    "split by": (parts, ["parts"]),
    "reshard": (reshards, ["r"]),
    "link": (links, ["t"]),
    "groups": (of_ranks, ["g"]),
    "shelves": (shelves, ["ts"]),
    "reshard by link": (reshelves, ["ts3"]),
    "items": (plays, ["e"]),
    "split items": (splits_items, ["e1", "e2"]),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("source")
    play(folder / "a", 1, 8)
    play(folder / "b", 2, 5)
    with TrajectoryBuffer(directory=folder / "t") as buffer:
        buffer.resume()
        buffer.add_trajectories([trajectory(number) for number in range(3)])
        buffer.save(1, wait=True)
    save_some(folder / "ts", 2, 3)
    fill(folder / "e", 6)
    shutil.move(killed(folder / "lives", 2), folder / "g")
    shutil.rmtree(folder / "lives")
    before = digest(folder)
    yield folder
    assert digest(folder) == before


def runs_in(folder: Path) -> list[Path]:
    return [folder] if (folder / "run.json").exists() else [each for each in folder.iterdir() if each.is_dir()]


def check_whole(folder: Path) -> None:
    found = runs_in(folder)
    assert found
    for run in found:
        seen = verify(str(run))
        assert seen.whole, seen.damages
        assert seen.generations == 1


@pytest.mark.parametrize("name", TOOLS)
def test_killed_before_any_change(tmp_path: Path, source: Path, name: str) -> None:
    """What it leaves is recognised, and removed by the next one."""
    tool, outs = TOOLS[name]
    shutil.copytree(source, tmp_path / "s", symlinks=True)
    (tmp_path / "recorded").mkdir()
    files = RecordingFiles(str(tmp_path / "recorded"))
    tool(tmp_path / "s", tmp_path / "recorded", files)
    before = digest(tmp_path / "s")
    replay = Replay(str(tmp_path / "replayed"))
    for upto in range(len(files.changes)):
        replay.forward(files.changes, upto)
        there = [out for out in outs if (tmp_path / "replayed" / out).exists()]
        for out in there:
            check_whole(tmp_path / "replayed" / out)
        if there != outs and (SOAK or upto % 11 == len(name) % 11 or upto > len(files.changes) - 5):
            copy = Path(replay.copy(str(tmp_path / "again")))
            for out in there:  # of two parts the first may be there; whoever begins anew begins with both
                shutil.rmtree(copy / out)
            tool(tmp_path / "s", copy, None)
            assert sorted(path.name for path in copy.iterdir()) == sorted(outs)
            for out in outs:
                check_whole(copy / out)
            shutil.rmtree(copy)
    assert digest(tmp_path / "s") == before


@pytest.mark.parametrize("error", [no_space, KeyboardInterrupt], ids=["full", "Ctrl-C"])
@pytest.mark.parametrize("name", TOOLS)
def test_a_call_that_fails(tmp_path: Path, source: Path, name: str, error: Any) -> None:
    """Nothing of it stays, and it is an error of the library's, or the one that came."""
    tool, outs = TOOLS[name]
    (tmp_path / "counted").mkdir()
    counting = ScriptedFiles()
    tool(source, tmp_path / "counted", counting)
    for number in range(1 if SOAK else 1 + len(name) % 7, len(counting.calls) + 1, 1 if SOAK else 13):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = ScriptedFiles(number, error)
        failed = False
        try:
            tool(source, folder, files)
        except (StoreError, KeyboardInterrupt):
            failed = True
        assert not files.open, f"call {number}, {counting.calls[number - 1]}, left files open"
        left = sorted(path.name for path in folder.iterdir())
        for out in set(outs) & set(left):  # one of two parts; or all was done, but for the cleaning
            check_whole(folder / out)
        assert set(left) <= {*outs, *(f"{out}.part" for out in outs)}
        assert failed or set(outs) <= set(left)
        for out in set(outs) & set(left):
            shutil.rmtree(folder / out)
        tool(source, folder, None)
        assert sorted(path.name for path in folder.iterdir()) == sorted(outs)


def test_a_disk_that_is_full_for_good_leaves_what_the_next_removes(tmp_path: Path, source: Path) -> None:
    for number in range(3, 40, 5):
        with contextlib.suppress(StoreError):
            merges(source, tmp_path, ScriptedFiles(number, stays=True))
        assert not (tmp_path / "m").exists()
    merges(source, tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_two_at_a_time_for_one_place(tmp_path: Path, source: Path) -> None:
    output = Output(str(tmp_path / "m"), "merge")
    output.begin()
    with pytest.raises(Locked, match=r"m\.part/lock"):
        merges(source, tmp_path, None)
    output.abandon()
    merges(source, tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_killed_with_sigkill(tmp_path: Path, source: Path) -> None:
    """A real process, and a real signal; the lock is freed by that."""
    before = digest(source)
    child = ChildProcess(merge_and_die, [str(source / "a"), str(source / "b")], str(tmp_path / "m"), 15)
    assert child.rest() == []
    child.process.join()
    assert child.process.exitcode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["m.part"]
    assert digest(source) == before
    merges(source, tmp_path, None)
    check_whole(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


SALVAGE = """
import os, signal, sys
from pipeline.cli import main
from pipeline.tools import output

def die(*given):
    os.kill(os.getpid(), signal.SIGKILL)

place, name = sys.argv[1].split(".")
setattr(getattr(output, place), name, die)
main(["salvage", *sys.argv[2:]])
"""


@pytest.mark.parametrize("when", ["GenerationWriter.commit", "Output.finish"])
def test_a_salvage_killed_with_sigkill(tmp_path: Path, source: Path, when: str) -> None:
    """As of the other tools: what it leaves is no run, and the next one for the same place removes it."""
    run, out = str(source / "a"), tmp_path / "v"
    before = digest(source)
    left = subprocess.run([sys.executable, "-c", SALVAGE, when, run, str(out)], capture_output=True, timeout=100)
    assert left.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["v.part"]
    assert main(["merge", run, "--out", str(tmp_path / "v")]) == 0  # whichever tool it is
    shutil.rmtree(out)
    subprocess.run([sys.executable, "-c", SALVAGE, when, run, str(out)], capture_output=True, timeout=100)
    assert main(["salvage", run, str(out)]) == 0
    check_whole(out)
    assert [path.name for path in tmp_path.iterdir()] == ["v"]
    assert digest(source) == before


def test_a_salvage_of_what_another_process_is_making(tmp_path: Path, source: Path, capsys: Any) -> None:
    output = Output(str(tmp_path / "v"), "salvage")
    output.begin()
    assert main(["salvage", str(source / "a"), str(tmp_path / "v")]) == 1
    assert "v.part" in capsys.readouterr().err
    output.abandon()
    assert main(["salvage", str(source / "none"), str(tmp_path / "deep" / "v")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_salvage_does_not_touch_what_is_not_its_own(tmp_path: Path, source: Path, capsys: Any) -> None:
    (tmp_path / "v.part").mkdir()
    (tmp_path / "v.part" / "mine").write_text("mine")
    assert main(["salvage", str(source / "a"), str(tmp_path / "v")]) == 2
    assert "Move it away" in capsys.readouterr().err
    assert (tmp_path / "v.part" / "mine").read_text() == "mine"
    (tmp_path / "w").write_text("mine")
    assert main(["salvage", str(source / "a"), str(tmp_path / "w")]) == 2
    assert (tmp_path / "w").read_text() == "mine"

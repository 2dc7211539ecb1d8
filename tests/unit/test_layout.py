"""The folder of a run: made whole or not at all, recognised, and never mistaken for something else."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from pipeline.errors import Damaged, NewerFormat, NotARun, StoreError
from pipeline.store.layout import Layout, write_file
from tests.support.disk import Killed, ScriptedFiles, tree
from tests.support.runs import pipeline


def layout_of(folder: Path) -> Layout:
    return Layout(str(folder))


def test_an_absent_or_empty_folder_is_no_run_yet(tmp_path: Path) -> None:
    assert layout_of(tmp_path / "absent" / "deeper").read_run() is None
    assert layout_of(tmp_path).read_run() is None
    assert os.listdir(tmp_path) == []


def test_a_new_run_is_found_again_with_its_id(tmp_path: Path) -> None:
    layout = layout_of(tmp_path / "a" / "run")
    made = layout.create_run(ScriptedFiles())
    assert layout.read_run() == made
    assert len(made.run_id) == 32
    assert made.tag == int(made.run_id[:16], 16)
    assert layout_of(tmp_path / "b").create_run(ScriptedFiles()).run_id != made.run_id
    fields = msgspec.json.decode(Path(layout.run_file).read_bytes())
    assert fields == {"kind": "forebay run", "format_version": 1, "run_id": made.run_id}


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_call_of_its_making_it_is_a_run_or_can_be_made_again(tmp_path: Path, after: bool) -> None:
    files = ScriptedFiles()
    layout_of(tmp_path / "counted").create_run(files)
    assert len(files.calls) > 8
    for call in range(1, len(files.calls) + 1):
        layout = layout_of(tmp_path / str(call))
        with pytest.raises(Killed):
            layout.create_run(ScriptedFiles(call, Killed, torn=True, after=after))
        Path(layout.directory).mkdir(exist_ok=True)
        Path(layout.lock_file).touch()
        found = layout.read_run()
        if found is None:
            made = layout.create_run(ScriptedFiles())
            assert layout.read_run() == made
        else:
            assert len(found.run_id) == 32
        assert not os.path.exists(layout.run_file + ".part")


@pytest.mark.parametrize("names", [["notes.txt"], ["lock", "model.bin"], ["run.json.bak"], [".git"]])
def test_a_folder_that_holds_something_else_is_refused_by_what_it_holds(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(NotARun, match=names[-1]):
        layout_of(tmp_path).read_run()
    for number in range(9):
        (tmp_path / f"x{number}").touch()
    with pytest.raises(NotARun, match=r"\.\.\."):
        layout_of(tmp_path).read_run()


@pytest.mark.parametrize("folder", ["journals", "segments", "generations"])
def test_a_run_without_its_marker_is_never_begun_anew(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    assert layout_of(tmp_path).read_run() is None, "empty, as a crash leaves it"
    (tmp_path / folder / "000001-0000.fbj").touch()
    with pytest.raises(NotARun, match=folder):
        layout_of(tmp_path).read_run()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotARun, match="is a file"):
        layout_of(tmp_path / "file").read_run()


@pytest.mark.parametrize(
    ("content", "error", "shown"),
    [
        (b"", Damaged, "damaged"),
        (b'{"run_id": "xyz"}', Damaged, "damaged"),
        (b'{"run_id": ""}', Damaged, "damaged"),
        (b'{"run_id": 3}', Damaged, "damaged"),
        (b'{"kind": "\xff"}', Damaged, "damaged"),
        (b"[" * 10**5, Damaged, "damaged"),
        (b'{"kind": "something else", "run_id": "00112233445566778899aabbccddeeff"}', NotARun, "something else"),
        (b'{"format_version": 7, "run_id": "00112233445566778899aabbccddeeff"}', NewerFormat, "format 7;.* up to 1"),
    ],
)
def test_a_marker_that_is_not_ours_or_newer_is_refused(
    tmp_path: Path, content: bytes, error: type[Exception], shown: str
) -> None:
    layout = layout_of(tmp_path)
    Path(layout.run_file).write_bytes(content)
    with pytest.raises(error, match=f"run.json: .*{shown}"):
        layout.read_run()


def test_a_field_of_the_future_in_the_marker_is_passed_over(tmp_path: Path) -> None:
    layout = layout_of(tmp_path)
    Path(layout.run_file).write_bytes(b'{"run_id": "00112233445566778899aabbccddeeff", "x": 1}')
    found = layout.read_run()
    assert found is not None
    assert (found.kind, found.format_version, found.tag) == ("forebay run", 1, 0x0011223344556677)


@pytest.mark.parametrize("how", [{}, {"torn": True}, {"after": True}, {"power": True}, {"power": True, "after": True}])
def test_a_small_file_is_the_old_or_the_new_one_at_any_call(tmp_path: Path, how: dict[str, bool]) -> None:
    files = ScriptedFiles()
    path = str(tmp_path / "f")
    write_file(files, path, b"old")
    assert files.calls == ["create", "write", "sync", "close", "rename", "sync_directory"]
    seen = set()
    for call in range(1, len(files.calls) + 2):
        write_file(ScriptedFiles(), path, b"old")
        with contextlib.suppress(Killed):
            write_file(ScriptedFiles(call, Killed, **how), path, b"new")
        content = Path(path).read_bytes()
        assert content in (b"old", b"new")
        seen.add(content)
        write_file(ScriptedFiles(), path, b"newest")
        assert tree(tmp_path) == {"f": b"newest"}, "a part that was left over is in nobody's way"
    assert seen == {b"old", b"new"}


@pytest.mark.parametrize("below", [(), ("deeper",)])
async def test_a_target_that_cannot_be_a_folder_is_refused_before_anything_runs(
    tmp_path: Path, below: tuple[str, ...]
) -> None:
    """CASES 133: one class of error, at opening."""
    (tmp_path / "file").write_bytes(b"somebody's")
    directory = tmp_path.joinpath("file", *below)
    with pytest.raises(StoreError, match="file"):
        async with pipeline(directory=str(directory)):
            raise AssertionError("was opened")
    assert tree(tmp_path) == {"file": b"somebody's"}

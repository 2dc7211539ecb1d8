"""``forebay verify`` and ``forebay salvage`` over a run that is damaged in one way after the other: the place is named,
what is lost is said, the exit code says so, and the rest is kept."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import verify
from pipeline.cli import main
from pipeline.store.frames import HEADER_BYTES, PAYLOAD
from tests.faults import test_salvage_damage as ways
from tests.faults.test_salvage_damage import GENERATIONS, JOURNALS, MARKERS, SEGMENTS
from tests.support.disk import tree
from tests.support.salvaging import EVERY, flip, frames, goes_on, two_lives

pytestmark = pytest.mark.virtual_time


def promised_payload(run: Path) -> str:
    """Of the first segment, which the first life wrote and synced."""
    name = "segments/000001-0000-000001.fbs"
    first = next(frame for frame in frames(str(run), name) if frame.header.kind == PAYLOAD)
    flip(run / name, first.offset + HEADER_BYTES + 70)
    return name


IN_A_PLACE = {
    ways.before_a_mark, ways.in_a_mark, ways.in_a_header, ways.in_the_first_record, ways.journal_cut, promised_payload,
}  # fmt: skip
UNPROMISED = {
    ways.after_the_last_mark,
    ways.generation_emptied,
    ways.needed_payload,
    ways.segment_gone,
    ways.segment_cut,
}
"""What a crash could have left as well, as it lies behind the last mark: it is told, and is no damage."""
SEEN_QUICKLY = {
    ways.before_a_mark, ways.in_a_mark, ways.in_a_header, ways.in_the_first_record, ways.journal_gone,
    ways.last_journal_gone, ways.journal_cut, ways.journal_folder, ways.journal_fifo, ways.old_segment_gone,
    ways.manifest, ways.marker, ways.other_marker,
}  # fmt: skip


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    return Path(await two_lives(tmp_path))


def asked(capsys: Any, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("damage", [*JOURNALS, *SEGMENTS, promised_payload, *GENERATIONS, *MARKERS])
async def test_each_way_is_found_named_and_salvaged(
    run: Path, tmp_path: Path, damage: Callable[[Path], str], capsys: Any
) -> None:
    assert asked(capsys, "verify", run)[0] == 0
    named = damage(run)
    before = tree(run)
    code, found = asked(capsys, "verify", run)
    if damage in UNPROMISED:
        assert (code, found["whole"]) == (0, True)
        assert any(named in line for line in found["unpromised"])
    else:
        assert (code, found["whole"]) == (1, False)
        (first, *_) = [each for each in found["damages"] if each["path"].startswith(named)]
        assert first["what"]
        assert first["lost"]
        if damage in IN_A_PLACE:
            assert first["offset"] is not None
    quick = asked(capsys, "verify", run, "--quick")[1]
    if damage in SEEN_QUICKLY:
        assert any(each["path"].startswith(named) for each in quick["damages"])
    told = asked(capsys, "salvage", run, tmp_path / "out", "--dry-run")[1]
    assert not (tmp_path / "out").exists()
    code, kept = asked(capsys, "salvage", run, tmp_path / "out")
    assert code == 0
    same = ("directory", "step", "origin", "losses", "groups_kept", "members_kept", "members_again", "items_again")
    assert {name: told[name] for name in same} == {name: kept[name] for name in same}
    if damage is promised_payload:  # it was trained, so nobody needs it
        assert kept["whole"]
    else:
        assert any(loss["path"].startswith(named) for loss in kept["losses"])
    assert tree(run) == before
    assert verify(str(tmp_path / "out")).whole
    manifest = json.loads((tmp_path / "out/generations/00000000/manifest.json").read_text())
    assert manifest["options"]["directory"] == str(tmp_path / "out")
    assert await goes_on(str(tmp_path / "out")) == EVERY


async def test_what_a_person_is_told(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["verify", str(run)]) == 0
    assert f"{run}: whole\n  generations  5\n" in capsys.readouterr().out
    promised_payload(run)
    ways.needed_payload(run)
    ways.trainer(run)
    assert main(["verify", str(run)]) == 1
    told = capsys.readouterr().out
    assert f"{run}: damaged, 2 places\n" in told
    assert "1. generations/00000004/trainer/trained.safetensors\n" in told
    assert "lost   the state of 'trained' in generation 4 (step 4), which cannot be resumed" in told
    assert "2. segments/000001-0000-000001.fbs at byte 0\n" in told
    assert re.search(r"  lost   the rollout of member [01] of uid \d+\n", told)
    assert "had not been synced; a resume runs the item again" in told
    assert told.endswith("forebay salvage RUN OUT\n")
    assert main(["salvage", str(run), str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert f"{tmp_path / 'out'}: written\n" in told
    assert "the member is run again" in told
    assert "1 member to be run again" in told


@pytest.mark.parametrize("holds", ["file", "run"])
async def test_an_output_that_is_there_is_not_touched(run: Path, tmp_path: Path, holds: str, capsys: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / holds).write_text("mine")
    assert main(["salvage", str(run), str(out)]) == 2
    assert main(["salvage", str(run), str(out), "--dry-run"]) == 2
    assert "must be absent or an empty folder" in capsys.readouterr().err
    assert os.listdir(out) == [holds]


async def test_what_cannot_be_salvaged_leaves_nothing(run: Path, tmp_path: Path, capsys: Any) -> None:
    for number in range(5):
        (run / f"generations/{number:08d}/consumer.json").unlink()
    assert main(["salvage", str(run), str(tmp_path / "out")]) == 1
    assert "no generation says what the weights have seen" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["life1", "life2", "run"]


async def test_where_there_is_no_run(tmp_path: Path, capsys: Any) -> None:
    for command, why in ((["verify"], "there is no run"), (["salvage", str(tmp_path / "out")], "is absent")):
        assert main([command[0], str(tmp_path / "nothing"), *command[1:]]) == 2
        assert why in capsys.readouterr().err

"""Which generations there are, which one is resumed, which are kept, and what a manifest may say."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.checkpoint.generations import (
    Found,
    GenerationWriter,
    Stored,
    check_generation,
    choose,
    find_generations,
    next_number,
)
from pipeline.checkpoint.manifest import MANIFEST_VERSION, FileInfo, Manifest, decode_manifest, encode_manifest
from pipeline.checkpoint.retire import Kept, retire
from pipeline.checkpoint.survey import without_manifest
from pipeline.errors import Damaged, NewerFormat, OtherRun, StoreError
from pipeline.store.frames import crc32c
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import Layout, RunFile
from pipeline.store.segments import SegmentInfo
from tests.support.disk import Killed, ScriptedFiles, new_run
from tests.support.generations import commit, says, whole


@pytest.fixture
def run(tmp_path: Path) -> tuple[Layout, RunFile]:
    return new_run(tmp_path / "run")


def numbers(layout: Layout, run: RunFile) -> list[tuple[int, int]]:
    """(number, step) of every complete generation, as found."""
    return [(each.manifest.generation, each.manifest.step) for each in find_generations(layout, run.run_id).complete]


class TestFinding:
    def test_an_empty_or_absent_folder_holds_none(self, run: tuple[Layout, RunFile]) -> None:
        layout, marker = run
        assert find_generations(layout, marker.run_id) == Found([], [])
        os.rmdir(layout.generations)
        assert find_generations(layout, marker.run_id) == Found([], [])
        assert next_number(layout) == 0
        with pytest.raises(StoreError, match="holds no complete generation"):
            choose(find_generations(layout, marker.run_id), None, "runs/a")

    def test_numbers_decide_and_never_the_text_or_the_time_of_a_name(self, run: tuple[Layout, RunFile]) -> None:
        """CASES 43: 500 before 2500, 99999999 before 100000000, whatever the padding."""
        layout, marker = run
        for number in (100_000_000, 500, 99_999_999, 2500, 9):
            commit(layout, marker, number, number + 1)
        os.rename(os.path.join(layout.generations, "00002500"), os.path.join(layout.generations, "2500"))
        for name in ("step_final", "7.tmp", "00000007.part", "x12", "-3"):
            os.makedirs(os.path.join(layout.generations, name))
        Path(layout.generations, "200000000").touch()  # a file, and no generation
        os.utime(os.path.join(layout.generations, "00000009"))
        expected = [9, 500, 2500, 99_999_999, 100_000_000]
        assert numbers(layout, marker) == [(number, number + 1) for number in expected]
        found = find_generations(layout, marker.run_id)
        assert choose(found, None, "").manifest.generation == 100_000_000
        assert choose(found, 2501, "").manifest.generation == 2500
        assert next_number(layout) == 200_000_001

    def test_a_folder_without_a_manifest_does_not_exist(self, run: tuple[Layout, RunFile]) -> None:
        """CASES 41: the writer of step 20 is still busy."""
        layout, marker = run
        commit(layout, marker, 0, 10)
        busy = GenerationWriter(layout, ScriptedFiles(), 1)
        busy.begin()
        busy.add("consumer.json", b"{}")
        assert choose(find_generations(layout, marker.run_id), None, "").manifest.step == 10
        os.rename(busy.folder, os.path.join(layout.generations, "00000001"))
        assert choose(find_generations(layout, marker.run_id), None, "").manifest.step == 10

    def test_of_several_generations_of_a_step_the_newest_is_taken(self, run: tuple[Layout, RunFile]) -> None:
        layout, marker = run
        for number, step in enumerate((10, 20, 10, 30, 20)):
            commit(layout, marker, number, step)
        found = find_generations(layout, marker.run_id)
        assert choose(found, 10, "").manifest.generation == 2
        assert choose(found, 20, "").manifest.generation == 4
        assert choose(found, None, "").manifest.generation == 4, "the highest number, whatever its step"
        with pytest.raises(StoreError, match="runs/a: no generation of step 15; there are steps 10, 20, 30"):
            choose(found, 15, "runs/a")

    def test_a_damaged_newest_one_is_refused_and_the_one_before_offered(self, run: tuple[Layout, RunFile]) -> None:
        """CASES 41: it is used only when asked for."""
        layout, marker = run
        commit(layout, marker, 0, 10)
        second = commit(layout, marker, 1, 20)
        path = Path(second.folder, "manifest.json")
        path.write_bytes(path.read_bytes()[:-20])
        found = find_generations(layout, marker.run_id)
        with pytest.raises(Damaged, match=rf"generation 1 is damaged: {path}.*resume\(step=10\)"):
            choose(found, None, "")
        assert choose(found, 10, "").manifest.generation == 0
        commit(layout, marker, 2, 30)
        assert choose(find_generations(layout, marker.run_id), None, "").manifest.step == 30

    def test_a_damaged_only_one_is_damage_and_not_an_empty_run(self, run: tuple[Layout, RunFile]) -> None:
        layout, marker = run
        Path(commit(layout, marker, 0, 10).folder, "manifest.json").write_bytes(b"")
        with pytest.raises(Damaged, match="generation 0 is damaged"):
            choose(find_generations(layout, marker.run_id), None, "")

    def test_a_generation_of_another_run_is_refused_with_both_ids(
        self, run: tuple[Layout, RunFile], tmp_path: Path
    ) -> None:
        layout, marker = run
        other_layout, other = new_run(tmp_path / "other")
        copied = commit(other_layout, other, 4, 40)
        shutil.copytree(copied.folder, os.path.join(layout.generations, "00000004"))
        with pytest.raises(OtherRun, match=rf"run {other.run_id}, the folder to run {marker.run_id}"):
            find_generations(layout, marker.run_id)

    def test_a_renamed_generation_is_damaged(self, run: tuple[Layout, RunFile]) -> None:
        layout, marker = run
        os.rename(commit(layout, marker, 3, 10).folder, os.path.join(layout.generations, "00000009"))
        found = find_generations(layout, marker.run_id)
        assert found.complete == []
        assert [(number, "says generation 3" in str(error)) for number, error in found.damaged] == [(9, True)]


class TestRetention:
    @pytest.mark.parametrize(
        ("steps", "keep", "kept"),
        [
            ([10, 20, 30, 40], 2, [2, 3]),
            ([10, 20, 30, 40], 1, [3]),
            ([10, 20, 30, 40], None, [0, 1, 2, 3]),
            ([10, 20, 30, 40], 9, [0, 1, 2, 3]),
            ([10, 20, 20, 20, 20], 2, [0, 4]),
            ([10, 20, 30, 10], 2, [2, 3]),
            ([10, 20, 30, 10], 1, [3]),
            ([10, 10], None, [0, 1]),
            ([], 1, []),
        ],
    )
    def test_distinct_steps_are_counted_and_the_newest_always_stays(
        self, run: tuple[Layout, RunFile], steps: list[int], keep: int | None, kept: list[int]
    ) -> None:
        layout, marker = run
        for number, step in enumerate(steps):
            commit(layout, marker, number, step)
        found = find_generations(layout, marker.run_id).complete
        gone = retire(layout, ScriptedFiles(), found, Kept(keep))
        assert [number for number, _ in numbers(layout, marker)] == kept
        assert sorted(gone + kept) == list(range(len(steps)))
        assert sorted(map(int, os.listdir(layout.generations))) == kept

    @pytest.mark.parametrize(("keep", "every", "left"), [(1, 3, [1, 4, 7, 9]), (2, 4, [1, 5, 8, 9]), (None, 2, None)])
    def test_every_so_many_steps_one_is_kept_for_good(
        self, run: tuple[Layout, RunFile], keep: int | None, every: int, left: list[int] | None
    ) -> None:
        layout, marker = run
        for number, step in enumerate((0, 0, 1, 2, 3, 4, 5, 6, 8, 7)):  # of step 0 there are two
            commit(layout, marker, number, step)
        retire(layout, ScriptedFiles(), find_generations(layout, marker.run_id).complete, Kept(keep, every))
        assert [number for number, _ in numbers(layout, marker)] == (list(range(10)) if left is None else left)

    def test_keep_compares_numbers(self, run: tuple[Layout, RunFile]) -> None:
        """CASES 43: keep=2 of 500, 2500, 900000, 100000 keeps 100000 and 900000."""
        layout, marker = run
        for number in (500, 2500, 900_000, 100_000):
            commit(layout, marker, number, number)
        retire(layout, ScriptedFiles(), find_generations(layout, marker.run_id).complete, Kept(2))
        assert [number for number, _ in numbers(layout, marker)] == [100_000, 900_000]

    def test_wherever_it_is_cut_no_folder_is_there_that_may_have_been_damaged(
        self, run: tuple[Layout, RunFile]
    ) -> None:
        layout, marker = run
        again, done = itertools.count(1), False
        while not done:
            shutil.rmtree(layout.generations)
            os.mkdir(layout.generations)
            for number in range(4):
                commit(layout, marker, number, number)
            shutil.copytree(Path(layout.generations, "00000000"), Path(layout.generations, "00000000.part"))
            files = ScriptedFiles(fail_at=next(again), error=Killed)
            found = find_generations(layout, marker.run_id).complete
            try:
                retire(layout, files, found, Kept(2))
                done = True
            except Killed:
                files.end()
            left = {name for name in os.listdir(layout.generations) if not name.endswith(".part")}
            assert without_manifest(layout) == []
            assert {f"{number:08}" for number, _ in numbers(layout, marker)} == left
            assert [number for number, _ in numbers(layout, marker)][-2:] == [2, 3]
            retire(layout, ScriptedFiles(), found, Kept(2))
            assert set(os.listdir(layout.generations)) == {"00000002", "00000003"}
        assert next(again) > 20

    def test_leftovers_up_to_the_newest_are_removed_and_what_is_foreign_or_beyond_it_stays(
        self, run: tuple[Layout, RunFile]
    ) -> None:
        layout, marker = run
        commit(layout, marker, 5, 10)
        for name in ("00000003", "00000004.part", "5.part", "00000006.part", "00000007", "notes", "3.txt", "x.part"):
            folder = Path(layout.generations, name, "trainer")
            folder.mkdir(parents=True)
            (folder / "file").touch()
            (folder / "link").symlink_to(layout.run_file)
            (folder / "folder link").symlink_to(layout.directory)
        retire(layout, ScriptedFiles(), find_generations(layout, marker.run_id).complete, Kept(1))
        names = {"00000005", "00000006.part", "00000007", "notes", "3.txt", "x.part"}
        assert set(os.listdir(layout.generations)) == names
        assert os.path.exists(layout.run_file), "a link is removed, not what it leads to"
        assert says(find_generations(layout, marker.run_id).complete[0]) == whole(10)


FULL = Manifest(
    run_id="ab" * 16,
    generation=7,
    parent=5,
    step=40,
    incarnation=3,
    reason="checkpoint",
    world_size=2,
    written="2024-05-01T00:00:00+00:00",
    journals=[JournalPosition(incarnation=1, rank=1, sequence=2**40, bytes=2**50)],
    segments=[SegmentInfo(name="000001-0000-000001.fbs", bytes=9, sealed=True)],
    files=[FileInfo(path="trainer/a b/é.bin", bytes=3, crc32c="00c0ffee")],
    attached=["model"],
    options={"seed": -(2**63), "nested": {"share": 0.1, "none": None, "list": [1, "x"]}},
    tasks={"é": {"group_size": 4}},
    left_out={"rng": "no such state"},
)


class TestManifest:
    def test_it_comes_back_equal_with_a_checksum(self) -> None:
        raw = encode_manifest(FULL)
        found = decode_manifest(raw, "here")
        assert msgspec.structs.replace(found, checksum="") == FULL
        assert len(found.checksum) == 8
        assert encode_manifest(found) == raw
        assert decode_manifest(encode_manifest(Manifest()), "here").generation == 0

    def test_every_flipped_byte_is_damage_or_changes_nothing(self) -> None:
        """What changes nothing is a space that became another blank, or the name of a field at its default."""
        raw = encode_manifest(FULL)
        intact = decode_manifest(raw, "here")
        unnoticed, seen = set(), set()
        for place in range(len(raw)):
            for mask in (0x01, 0x02, 0x2A, 0x80):
                bad = bytearray(raw)
                bad[place] ^= mask
                newer = b"format_version" in raw[place - 20 : place]
                try:
                    found = decode_manifest(bytes(bad), "here")
                except (Damaged, NewerFormat) as error:
                    seen.add((type(error), newer))
                else:
                    assert found == intact
                    unnoticed.add(raw[place : place + 1])
        assert seen == {(Damaged, False), (Damaged, True), (NewerFormat, True)}
        assert unnoticed <= {b" ", b"\n"}

    def test_every_prefix_is_damage(self) -> None:
        raw = encode_manifest(FULL)
        for cut in range(len(raw) - 2):
            with pytest.raises(Damaged):
                decode_manifest(raw[:cut], "here")

    @pytest.mark.parametrize("raw", [b"null", b"[]", b'"x"', b"3", b'{"format_version": "1"}', b"[" * 10**5, b"\xff"])
    def test_what_is_no_manifest_is_damage(self, raw: bytes) -> None:
        with pytest.raises(Damaged, match="here"):
            decode_manifest(raw, "here")

    def test_a_newer_format_is_refused_with_both_numbers_whatever_else_it_holds(self) -> None:
        raw = msgspec.json.encode({"format_version": MANIFEST_VERSION + 4, "files": "another type now"})
        with pytest.raises(NewerFormat, match=f"format {MANIFEST_VERSION + 4}; .* up to {MANIFEST_VERSION}"):
            decode_manifest(raw, "here")

    @pytest.mark.parametrize("change", ["without", "with"])
    def test_one_of_a_version_with_fewer_or_more_fields_loads(self, change: str) -> None:
        """The rules of evolution: the checksum covers the fields that the file has, not those that the reader knows."""
        fields: dict[str, Any] = msgspec.to_builtins(FULL)
        if change == "without":
            del fields["left_out"], fields["journals"][0]["rank"], fields["segments"][0]["sealed"]
        else:
            fields = {"of the future": [1, {"x": 0.5}], **fields}
            fields["files"][0]["sha256"] = "00"
        fields["checksum"] = ""
        fields["checksum"] = f"{crc32c(msgspec.json.encode(fields)):08x}"
        found = decode_manifest(msgspec.json.format(msgspec.json.encode(fields)), "here")
        assert found.files == FULL.files
        assert found.left_out == ({} if change == "without" else FULL.left_out)
        fields["step"] = 41
        with pytest.raises(Damaged, match="checksum"):
            decode_manifest(msgspec.json.encode(fields), "here")

    @pytest.mark.parametrize(
        "path",
        ["/etc/passwd", "../up", "a/../../b", "..", "", "a//b", "a/", "/", "./a", "a/./b", "nul\0byte"],
    )
    def test_a_name_that_leads_out_of_the_folder_is_refused(self, path: str) -> None:
        bad = msgspec.structs.replace(FULL, files=[FileInfo(path=path, bytes=1, crc32c="00000000")])
        with pytest.raises(Damaged, match="not inside the generation's folder"):
            decode_manifest(encode_manifest(bad), "here")


class TestFilesOfAGeneration:
    @pytest.fixture
    def stored(self, run: tuple[Layout, RunFile]) -> Stored:
        return commit(*run, 0, 10)

    def test_a_whole_one_passes(self, stored: Stored) -> None:
        check_generation(stored)

    @pytest.mark.parametrize("path", ["consumer.json", "files/deep/er.txt", "trainer/model.safetensors"])
    def test_a_missing_short_or_changed_file_is_named(self, stored: Stored, path: str) -> None:
        full = Path(stored.folder, path)
        raw = full.read_bytes()
        for bad, reason in ((raw[:-1], "long"), (raw + b"x", "long"), (raw[:-1] + b"\x7f", "crc32c"), (b"", "long")):
            full.write_bytes(bad)
            with pytest.raises(Damaged, match=f"{full}.*{reason}"):
                check_generation(stored)
        full.unlink()
        with pytest.raises(Damaged, match=f"{full}: missing"):
            check_generation(stored)

    def test_what_is_read_later_is_compared_by_size_alone(self, stored: Stored) -> None:
        path = "trainer/model.safetensors"
        full = Path(stored.folder, path)
        raw = full.read_bytes()
        full.write_bytes(raw[:-1] + b"\x7f")
        check_generation(stored, later=[path])
        with pytest.raises(Damaged, match=f"{full}.*crc32c"):
            check_generation(stored, later=["consumer.json"])
        full.write_bytes(raw[:-1])
        with pytest.raises(Damaged, match=f"{full}.*long"):
            check_generation(stored, later=[path])

    @pytest.mark.timeout(20)
    @pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "fifo", "folder", "dangling link"])
    def test_links_and_special_files_are_refused(self, stored: Stored, tmp_path: Path, kind: str) -> None:
        full = Path(stored.folder, "files/deep/er.txt")
        raw = full.read_bytes()
        if kind == "link to a folder":
            shutil.copytree(full.parent, tmp_path / "elsewhere")
            shutil.rmtree(full.parent)
            full.parent.symlink_to(tmp_path / "elsewhere")
        else:
            full.unlink()
        if kind == "link to a file":
            (tmp_path / "elsewhere").write_bytes(raw)
            full.symlink_to(tmp_path / "elsewhere")
        elif kind == "dangling link":
            full.symlink_to(tmp_path / "nowhere")
        elif kind == "fifo":
            os.mkfifo(full)
        elif kind == "folder":
            full.mkdir()
        with pytest.raises(Damaged, match="a link or a special file"):
            check_generation(stored)

    def test_a_run_behind_a_link_is_fine(self, stored: Stored, run: tuple[Layout, RunFile], tmp_path: Path) -> None:
        (tmp_path / "alias").symlink_to(run[0].directory)
        alias = Layout(str(tmp_path / "alias"))
        (found,) = find_generations(alias, run[1].run_id).complete
        check_generation(found)

    def test_files_that_somebody_else_wrote_are_taken_in_and_links_refused(self, run: tuple[Layout, RunFile]) -> None:
        layout, _ = run
        writer = GenerationWriter(layout, ScriptedFiles(), 1)
        writer.begin()
        writer.add("consumer.json", b"{}")
        theirs = Path(writer.folder, "files", "sub")
        theirs.mkdir(parents=True)
        (theirs / "shard").write_bytes(b"123456789")
        writer.adopt()
        assert [(info.path, info.bytes, info.crc32c) for info in writer.infos] == [
            ("consumer.json", 2, f"{crc32c(b'{}'):08x}"),
            ("files/sub/shard", 9, "e3069283"),
        ]
        (theirs / "link").symlink_to(layout.run_file)
        with pytest.raises(StoreError, match="only plain files"):
            writer.adopt()

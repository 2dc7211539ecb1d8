"""Files that somebody made on purpose: an error of ours that names the file, soon, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest
import torch

from pipeline import ForebayError, Task
from pipeline.checkpoint import salvage, status_of, verify
from pipeline.checkpoint.manifest import FileInfo
from pipeline.checkpoint.trainer_state import read_state
from pipeline.errors import Damaged, StoreError
from pipeline.records import AnyEvent, Claimed, Finished, Started
from pipeline.store.codec import read_header, unpack
from pipeline.store.files import OsFiles
from pipeline.store.frames import EVENTS, HEADER_BYTES, crc32c, crc32c_of_file, encode_frame, scan
from pipeline.store.journal import encode_events
from pipeline.store.layout import Layout
from pipeline.store.segments import SegmentInfo
from pipeline.tools.exporting import export
from pipeline.wiring.folder import RunFolder
from tests.support.crashes import Trained, begin, crashed_copy, inline_pipeline, lasting, train
from tests.support.disk import tree
from tests.support.opening import find, little_memory, reseal, rewrite, told
from tests.support.runs import task

MEMORY = 256 << 20
JOURNAL, SEGMENT = "journals/000001-0000.fbj", "segments/000001-0000-000001.fbs"
NEWEST = "generations/00000001"
TRAINER = f"{NEWEST}/trainer/trained.safetensors"
FILES = ["run.json", f"{NEWEST}/manifest.json", f"{NEWEST}/consumer.json", f"{NEWEST}/progress.json", TRAINER]
FILES += [JOURNAL, SEGMENT]

pytestmark = [pytest.mark.virtual_time, pytest.mark.timeout(30)]


def tasks() -> list[Task]:
    return [task(6, lasting({}), group_size=2)]


def look(directory: str) -> Any:
    return told(find(directory, tasks(), ["trained"]))


class Run(NamedTuple):
    directory: str
    tag: int

    def path(self, name: str) -> Path:
        return Path(self.directory, name)

    def append(self, *events: AnyEvent | bytes) -> None:
        """Add a frame to the journal, as whole as any: of events, or of these bytes."""
        frames = [each for each in scan(str(self.path(JOURNAL)), run_tag=self.tag) if each.header.kind == EVENTS]
        first = frames[-1].header.sequence + frames[-1].header.number
        given = [each for each in events if isinstance(each, bytes)]
        payload = given[0] if given else encode_events([each for each in events if not isinstance(each, bytes)])
        frame = encode_frame(
            EVENTS, payload, incarnation=1, rank=0, run_tag=self.tag, sequence=first, number=len(events)
        )
        with open(self.path(JOURNAL), "ab") as file:
            file.write(b"".join(frame))

    def refused(self, *names: str, verified: bool = True) -> str:
        """Opening it is an error that names one of the files, with little memory; and `verify` finds it as well."""
        with little_memory(MEMORY):
            with pytest.raises(ForebayError) as refusal:
                look(self.directory)
            assert any(name in str(refusal.value) for name in names), refusal.value
            if verified:
                try:
                    assert any(each.path in names for each in verify(self.directory).damages)
                except ForebayError as error:
                    assert any(name in str(error) for name in names), error  # noqa: PT017
        return str(refusal.value)


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    """A step trained and saved, and groups that wait."""
    async with inline_pipeline(tasks(), directory=str(tmp_path / "1"), concurrency=3, capacity=6) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        await train(pipe, trained, await pipe.get_batch(1))
        await anyio.sleep(1.1)
        await (await pipe.save(1)).committed()
        await anyio.sleep(1.0)
        directory = crashed_copy(str(tmp_path / "1"), tmp_path / "run")
    marker = Layout(directory).read_run()
    assert marker is not None
    look(directory)
    assert verify(directory).whole
    return Run(directory, marker.tag)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


class TestPickles:
    @pytest.mark.parametrize("name", FILES)
    async def test_under_any_of_our_names(self, run: Run, name: str, tmp_path: Path) -> None:
        run.path(name).write_bytes(pickle.dumps(Bomb(tmp_path / "touched")))
        if name not in ("run.json", JOURNAL, SEGMENT) and not name.endswith("manifest.json"):
            reseal(run.directory)
        run.refused(name, verified=name.split("/")[-1] in ("run.json", "manifest.json", "000001-0000.fbj"))
        assert not (tmp_path / "touched").exists()

    async def test_as_torch_saves_them(self, run: Run, tmp_path: Path) -> None:
        torch.save({"weight": torch.zeros(2), "more": Bomb(tmp_path / "touched")}, run.path(TRAINER))
        reseal(run.directory)
        run.refused(TRAINER, verified=False)
        assert not (tmp_path / "touched").exists()

    async def test_inside_whole_records(self, run: Run, tmp_path: Path) -> None:
        bomb = pickle.dumps(Bomb(tmp_path / "touched"))
        for raw in (bomb, blob(b"\x81\xa4info\x81\xa1a" + bomb), blob(bomb), blob(bomb, "0.n", "BOOL")):
            for read in (unpack, read_header):
                with pytest.raises(Damaged, match="here"):
                    read(raw, "here")
        for name in ("__tree__", "0"):
            with pytest.raises(Damaged, match="state"):
                state(tmp_path, blob(bomb, name))
        run.append(bomb)
        run.refused(JOURNAL)
        assert not (tmp_path / "touched").exists()

    async def test_nothing_is_unpickled_on_the_way(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def unpickles(*args: Any, **more: Any) -> Any:
            raise AssertionError("something is unpickled")

        for name in ("load", "loads", "Unpickler", "_Unpickler", "_loads", "_load"):
            monkeypatch.setattr(pickle, name, unpickles)
        monkeypatch.setattr(torch, "load", unpickles)
        with pytest.raises(AssertionError, match="is unpickled"):
            pickle.loads(b"N.")  # noqa: S301
        look(run.directory)
        verify(run.directory)
        async with inline_pipeline(tasks(), directory=run.directory, concurrency=3, capacity=6) as pipe:
            trained = Trained()
            assert (await begin(pipe, trained=trained)).step == 1
            await train(pipe, trained, await pipe.get_batch(2))


def blob(content: bytes, name: str = "__item__", dtype: str = "U8", shape: Any = None, end: int | None = None) -> bytes:
    """A safetensors file of one tensor, which may say of itself what it likes."""
    entry = {
        "dtype": dtype,
        "shape": [len(content)] if shape is None else shape,
        "data_offsets": [0, end or len(content)],
    }
    head = msgspec.json.encode({name: entry})
    return struct.pack("<Q", len(head)) + head + content


def state(folder: Path, raw: bytes) -> Any:
    """Read a trainer file whose checksum fits."""
    path = folder / "state.safetensors"
    path.write_bytes(raw)
    size, checksum = crc32c_of_file(str(path))
    return read_state(str(path), size=size, checksum=checksum)


class TestPaths:
    @pytest.mark.parametrize("name", ["../../secret", "000001-0000.fbs", "000001-0000-000001.fbj", "a-b-c.fbs", ""])
    async def test_segments_whose_names_are_none(self, run: Run, name: str) -> None:
        rewrite(run.directory, segments=[SegmentInfo(name=name, bytes=64, live=64)])
        assert "no segment's name" in run.refused(f"{NEWEST}/manifest.json")

    @pytest.mark.parametrize("path", ["../../../secret", "/etc/passwd", "files/../../x", "", ".", "files//x", "nul\0"])
    async def test_that_lead_out_of_the_folder(self, run: Run, path: str) -> None:
        rewrite(run.directory, files=[FileInfo(path=path, bytes=0, crc32c="00000000")])
        assert "inside" in run.refused(f"{NEWEST}/manifest.json")

    async def test_that_are_longer_than_any_name(self, run: Run) -> None:
        rewrite(run.directory, files=[FileInfo(path="x" * 5000, bytes=0, crc32c="00000000")])
        run.refused("x" * 5000, verified=False)
        assert not verify(run.directory).whole


def fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, outside: Path) -> None:
    path.mkdir()


def link_to_fifo(path: Path, outside: Path) -> None:
    os.mkfifo(outside)
    path.symlink_to(outside)


def loop(path: Path, outside: Path) -> None:
    path.symlink_to(path)


def dangling(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def device(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS: list[Callable[[Path, Path], None]] = [fifo, folder, link_to_fifo, loop, dangling, device]


class TestWhatIsNoPlainFile:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", FILES)
    async def test_in_the_place_of_any_file(self, run: Run, name: str, kind: Any, tmp_path: Path) -> None:
        run.path(name).unlink()
        kind(run.path(name), tmp_path / "outside")
        said = run.refused(*([name, run.directory] if name == "run.json" else [name]))
        assert not name.endswith("manifest.json") or "resume(step=0) takes the one before it" in said

    @pytest.mark.parametrize("kind", KINDS)
    async def test_among_the_journals_and_segments_that_nobody_counts_on(
        self, run: Run, kind: Any, tmp_path: Path
    ) -> None:
        for name in ("journals/000002-0000.fbj", "segments/000002-0000-000001.fbs"):
            kind(run.path(name), tmp_path / name.split("/")[0])
        run.refused("journals/000002-0000.fbj")
        assert {each.path for each in verify(run.directory).damages} == {
            "journals/000002-0000.fbj",
            "segments/000002-0000-000001.fbs",
        }

    async def test_a_link_to_the_same_bytes_is_refused_in_a_generation_by_both(self, run: Run, tmp_path: Path) -> None:
        shutil.move(run.path(TRAINER), tmp_path / "outside")
        run.path(TRAINER).symlink_to(tmp_path / "outside")
        assert "a link" in run.refused(TRAINER)

    async def test_a_lock_that_is_a_link_is_not_written_through(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("mine")
        run.path("lock").symlink_to(tmp_path / "mine")
        with pytest.raises(StoreError, match="lock"):
            RunFolder(run.directory, OsFiles()).open()
        assert (tmp_path / "mine").read_text() == "mine"

    @pytest.mark.parametrize("name", ["00000002.part", "00000000", "00000001.part"])
    async def test_a_link_among_the_generations_is_removed_and_not_followed(
        self, run: Run, name: str, tmp_path: Path
    ) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("mine")
        shutil.rmtree(run.path(f"generations/{name}"), ignore_errors=True)
        run.path(f"generations/{name}").symlink_to(tmp_path / "mine")
        async with inline_pipeline(tasks(), directory=run.directory, keep=1) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            await train(pipe, trained, await pipe.get_batch(1))
            await (await pipe.save(2)).committed()
        assert (tmp_path / "mine" / "thesis.txt").read_text() == "mine"


ENDLESS = {
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xff",
    "text": b"\xdb\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x01",
    "arrays in arrays": b"\xdd\x00\xff\xff\xff" * 1000,
    "deep arrays": b"\x91" * 100_000,
    "deep maps": b"\x81\xa1a" * 100_000,
    "no text": b"\xa2\xff\xff",
}


class TestGiantsAndDepths:
    @pytest.mark.parametrize("kind", ENDLESS)
    async def test_in_messagepack(self, run: Run, kind: str, tmp_path: Path) -> None:
        raw = ENDLESS[kind]
        with little_memory(MEMORY):
            for content in (raw, b"\x82\xa3uid\x01\xa4info\x81\xa1a" + raw):
                for read in (unpack, read_header):
                    with pytest.raises(Damaged, match="here"):
                        read(blob(content), "here")
            for content in (raw, b"\x81\xa1a" + raw, b"\x81\xa8\x00forebay\x92\xa5tuple" + raw):
                with pytest.raises(Damaged, match=r"state\.safetensors"):
                    state(tmp_path, blob(content, "__tree__"))
        inherit = b"\x91\x99\xa7inherit\x90\x80\x80\x80\x81\xa1a\x81\xa1b"
        for number, content in enumerate((raw, b"\x91" + raw, b"\x91\x92\xa4drop" + raw, inherit + raw)):
            copy = Run(crashed_copy(run.directory, tmp_path / f"copy{number}"), run.tag)
            copy.append(content)
            copy.refused(JOURNAL)

    @pytest.mark.parametrize("name", FILES[:4])
    @pytest.mark.parametrize("depth", [200, 900, 1000, 1100, 100_000])
    async def test_in_json(self, run: Run, name: str, depth: int) -> None:
        raw = run.path(name).read_bytes().rstrip()
        before = look(run.directory)
        with_more = raw[:-1] + b',"more":' + b"[" * depth + b"]" * depth + b"}"
        run.path(name).write_bytes(with_more)
        if name.endswith("manifest.json"):
            run.refused(name)
            return
        if name != "run.json":
            reseal(run.directory)
        try:
            assert look(run.directory)[:3] == before[:3], "an unknown field is passed over"
        except ForebayError as error:
            assert name in str(error)  # noqa: PT017
            assert depth > 500

    @pytest.mark.parametrize("depth", [200, 900, 1000, 1100, 5000])
    async def test_in_a_manifest_whose_checksum_fits(self, run: Run, depth: int) -> None:
        path = run.path(f"{NEWEST}/manifest.json")
        fields = msgspec.json.decode(path.read_bytes())
        nest = b"[" * depth + b"]" * depth
        compact = msgspec.json.encode({**fields, "checksum": ""})[:-1] + b',"more":' + nest + b"}"
        sealed = compact.replace(b'"checksum":""', b'"checksum":"%08x"' % crc32c(compact))
        path.write_bytes(sealed)
        try:
            look(run.directory)
        except ForebayError as error:
            assert "manifest.json" in str(error)  # noqa: PT017
            assert depth > 500

    async def test_in_the_head_of_a_blob(self, tmp_path: Path) -> None:
        for head in (b'{"a":' * 100_000, b'{"a":{"dtype":"U8","x":' + b"[" * 100_000, b"[" * 100_000):
            raw = struct.pack("<Q", len(head)) + head
            for read in (unpack, read_header):
                with pytest.raises(Damaged, match="here"):
                    read(raw, "here")
            with pytest.raises(Damaged, match=r"state\.safetensors"):
                state(tmp_path, raw)

    @pytest.mark.parametrize("length", [2**40, 2**63 - 1, 2**63, 2**64 - 1])
    async def test_in_the_lengths_of_frames_and_tensors(self, run: Run, length: int, tmp_path: Path) -> None:
        good = blob(b"\x80")
        with little_memory(MEMORY):
            for raw in (
                struct.pack("<Q", length) + good[8:],
                blob(b"\x80", shape=[length]),
                blob(b"\x80", end=length),
                blob(b"\x80", shape=[length, length, 0]),
                blob(b"", "0.n", shape=[length, 0, length]),
            ):
                with pytest.raises(Damaged, match="here"):
                    unpack(raw, "here")
                with pytest.raises(Damaged):
                    state(tmp_path, raw)
        for name in (JOURNAL, SEGMENT):
            copy = Run(crashed_copy(run.directory, tmp_path / name.split("/")[0]), run.tag)
            raw_ = bytearray(copy.path(name).read_bytes())
            struct.pack_into("<Q", raw_, 24, length)
            struct.pack_into("<I", raw_, HEADER_BYTES - 4, crc32c(bytes(raw_[: HEADER_BYTES - 4])))
            copy.path(name).write_bytes(raw_)
            if name == JOURNAL:
                copy.refused(name)
            else:  # of the payload that was trained
                assert any(each.path == name for each in verify(copy.directory).damages)

    @pytest.mark.parametrize(
        "events",
        [
            [Claimed(50, "numbers", 0, 5, 5, size=2**40, need=1)],
            [Claimed(50, "numbers", 0, 5, 5), Started(50, member=2**40)],
            [Claimed(50, "numbers", 0, 5, 5), Finished(50, -7, 1, 0.0, 0, 0)],
            [Claimed(50, "no such task", 0, 2**60, 2**60), Started(50), Started(50, 1)],
        ],
    )
    async def test_in_the_numbers_of_events(self, run: Run, events: list[AnyEvent]) -> None:
        run.append(*events)
        run.refused(JOURNAL, verified=False)

    async def test_a_lease_that_does_not_add_up(self, run: Run, tmp_path: Path) -> None:
        path = run.path(f"{NEWEST}/consumer.json")
        for fields in ({"leases": [{"step": 2, "uids": [1, 2], "lives": [0]}]}, {"trained": [[5, 1]]}):
            path.write_bytes(msgspec.json.encode({"format_version": 1, "step": 1, **fields}))
            reseal(run.directory)
            run.refused("consumer.json", verified=False)
            # What a resume refuses, no tool takes for whole.
            assert status_of(run.directory).state == "broken"
            with pytest.raises(Damaged, match=r"consumer\.json"):
                export(run.directory, tmp_path / "out", to="jsonl")
            saved = salvage(run.directory, tmp_path / f"salvaged {sorted(fields)}")
            assert (saved.step, saved.generations_unusable) == (0, 1), "it goes on from the generation before"

    @pytest.mark.parametrize("name", ["load", "nn.Module", "torch.ops", "__class__", "dtype"])
    async def test_a_dtype_that_is_another_name_of_torch(self, name: str, tmp_path: Path) -> None:
        tree = msgspec.msgpack.encode({"\0forebay": ["dtype", name]})
        with pytest.raises(Damaged, match="damaged"):
            state(tmp_path, blob(tree, "__tree__"))

    async def test_a_long_hole_at_the_end_is_passed_over_soon(self, run: Run) -> None:
        before = look(run.directory)
        for name in (JOURNAL, SEGMENT):
            os.truncate(run.path(name), run.path(name).stat().st_size + (1 << 28))
        assert look(run.directory) == before
        assert len(verify(run.directory).unpromised) == 2


class TestMany:
    async def test_files_in_a_manifest(self, run: Run) -> None:
        many = [FileInfo(path=f"files/{n}", bytes=0, crc32c="00000000") for n in range(20_000)]
        rewrite(run.directory, files=many)
        run.refused(f"{NEWEST}/files/0")

    async def test_names_that_are_not_ours(self, run: Run) -> None:
        before = look(run.directory)
        for n in range(500):
            run.path(f"journals/{n}.fbj").touch()
            run.path(f"segments/{n}-x.fbs").touch()
            run.path(f"generations/{1000 + n}").mkdir()
        run.path(f"journals/{'9' * 200}-0.fbj").touch()
        run.path(f"segments/{'9' * 200}-0-1.fbs").touch()
        assert look(run.directory) == before
        held = RunFolder(run.directory, OsFiles())
        held.open()
        assert held.incarnation < 2**32, "no header has room for it"
        held.release()

    async def test_tiny_records(self, run: Run) -> None:
        before = look(run.directory)
        raw = run.path(JOURNAL).read_bytes()
        empty = b"".join(encode_frame(7, b"", incarnation=1, rank=0, run_tag=run.tag))
        run.path(JOURNAL).write_bytes(raw + empty * 20_000 + b"FBAY" * 100_000)
        assert look(run.directory) == before
        assert tree(run.directory)

"""Folders that are no run, or a damaged one: refused by name, before anything is changed."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pipeline import (
    Damaged,
    ForebayError,
    Locked,
    NewerFormat,
    NotARun,
    OtherRun,
    Pipeline,
    StoreError,
    WriteFailed,
)
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting, train
from tests.support.disk import ScriptedFiles
from tests.support.runs import task

pytestmark = pytest.mark.virtual_time


def open_on(directory: str, **options: Any) -> Pipeline:
    return inline_pipeline(task(12, lasting({})), directory=directory, capacity=8, **options)


async def make_run(directory: str, *, saves: int = 2) -> None:
    """A closed run: ``saves`` steps trained and saved, some groups buffered."""
    async with open_on(directory, keep=None) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=2, until=saves):
            await train(pipe, trained, batch)
            await (await pipe.save(batch.step)).committed()
        await anyio.sleep(10)
        await (await pipe.save(saves)).committed()


def newest(directory: str) -> Path:
    """The folder of the newest generation."""
    return max((Path(directory) / "generations").iterdir(), key=lambda path: int(path.name))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def listing(directory: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(directory).rglob("*")) if path.is_file()}


class TestNotARun:
    async def test_a_folder_with_other_peoples_files(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        before = listing(str(tmp_path))
        with pytest.raises(NotARun, match=r"thesis\.tex"):
            async with open_on(str(tmp_path)):
                pass
        assert listing(str(tmp_path)) == before, "and nothing was made in it"

    async def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(NotARun, match="is a file"):
            async with open_on(str(tmp_path / "file")):
                pass

    async def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="file"):
            async with open_on(str(tmp_path / "file" / "run")):
                pass

    async def test_a_folder_that_was_left_with_a_half_made_marker_is_empty(self, tmp_path: Path) -> None:
        (tmp_path / "run.json.part").write_text('{"kin')
        async with open_on(str(tmp_path)) as pipe:
            await begin(pipe)
            await pipe.get_batch(2)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": 5}', '{"run_id": "not hexadecimal"}', "\xff"])
    async def test_a_damaged_marker(self, run_directory: str, content: str) -> None:
        await make_run(run_directory, saves=1)
        Path(run_directory, "run.json").write_text(content, encoding="latin-1")
        with pytest.raises(Damaged, match=r"run\.json"):
            async with open_on(run_directory):
                pass

    async def test_a_run_of_a_newer_format_is_refused_with_both_numbers(self, run_directory: str) -> None:
        await make_run(run_directory, saves=1)
        marker = Path(run_directory, "run.json")
        fields = msgspec.json.decode(marker.read_bytes())
        marker.write_bytes(msgspec.json.encode({**fields, "format_version": 99}))
        with pytest.raises(NewerFormat, match=r"run\.json.*99.*1"):
            async with open_on(run_directory):
                pass

    async def test_after_each_refusal_the_lock_is_free(self, run_directory: str) -> None:
        await make_run(run_directory, saves=1)
        marker = Path(run_directory, "run.json")
        good = marker.read_bytes()
        for bad in (b"{", good.replace(b'"format_version": 1', b'"format_version": 7')):
            marker.write_bytes(bad)
            with pytest.raises(StoreError):
                async with open_on(run_directory):
                    pass
        marker.write_bytes(good)
        async with open_on(run_directory) as pipe:
            pipe.attach(trained=Trained())
            assert (await pipe.resume()).step == 1


class TestLock:
    async def test_two_pipelines_on_one_folder(self, run_directory: str) -> None:
        async with open_on(run_directory) as first:
            await begin(first)
            for _ in range(2):
                with pytest.raises(Locked, match="another pipeline of this process"):
                    async with open_on(run_directory):
                        pass
            await first.get_batch(2)
        async with open_on(run_directory) as second:
            await begin(second)

    async def test_the_same_folder_by_another_name(self, run_directory: str, tmp_path: Path) -> None:
        async with open_on(run_directory):
            os.symlink(run_directory, tmp_path / "link")
            with pytest.raises(Locked):
                async with open_on(str(tmp_path / "link")):
                    pass


class TestGenerations:
    async def test_one_of_another_run(self, tmp_path: Path) -> None:
        ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
        await make_run(ours)
        await make_run(theirs)
        shutil.copytree(newest(theirs), Path(ours, "generations", "00000077"))
        with pytest.raises(OtherRun, match="00000077"):
            async with open_on(ours) as pipe:
                await pipe.resume()
        shutil.rmtree(Path(ours, "generations", "00000077"))
        async with open_on(ours) as pipe:
            pipe.attach(trained=Trained())
            assert (await pipe.resume()).step == 2

    async def test_one_under_another_number(self, run_directory: str) -> None:
        await make_run(run_directory)
        newest(run_directory).rename(Path(run_directory, "generations", "00000077"))
        await self.refused(run_directory, "00000077")

    async def test_all_gone(self, run_directory: str) -> None:
        await make_run(run_directory)
        for folder in Path(run_directory, "generations").iterdir():
            shutil.rmtree(folder)
        await self.refused(run_directory, "every generation is gone")

    async def test_a_newer_manifest(self, run_directory: str) -> None:
        await make_run(run_directory)
        manifest = newest(run_directory) / "manifest.json"
        fields = msgspec.json.decode(manifest.read_bytes())
        manifest.write_bytes(msgspec.json.encode({**fields, "format_version": 42}))
        with pytest.raises(NewerFormat, match=r"manifest\.json.*42"):
            async with open_on(run_directory) as pipe:
                await pipe.resume()

    @pytest.mark.parametrize("name", ["manifest.json", "consumer.json", "progress.json", "trainer/trained.safetensors"])
    @pytest.mark.parametrize("way", ["flipped", "cut", "longer", "missing", "empty"])
    async def test_a_damaged_file_is_named_and_the_one_before_can_be_taken(
        self, run_directory: str, name: str, way: str
    ) -> None:
        await make_run(run_directory)
        path = newest(run_directory) / name
        content = path.read_bytes()
        if way == "flipped":
            flip(path, random.Random(name).randrange(len(content)))
        elif way == "missing":
            path.unlink()
        else:
            path.write_bytes({"cut": content[:-3], "longer": content + b" {}", "empty": b""}[way])
        if name == "manifest.json" and way == "missing":  # then it does not exist, and the one before is the newest
            async with open_on(run_directory) as pipe:
                pipe.attach(trained=Trained())
                assert (await pipe.resume()).step == 2
            return
        await self.refused(run_directory, os.path.basename(name))
        async with open_on(run_directory) as pipe:
            trained = Trained()
            pipe.attach(trained=trained)
            assert (await pipe.resume(step=1)).step == 1
            await pipe.start(weights_current=True)
            assert (await finish(pipe, trained, 2)).items == list(range(12))

    async def test_any_byte_of_the_manifest(self, run_directory: str) -> None:
        await make_run(run_directory)
        path = newest(run_directory) / "manifest.json"
        good = path.read_bytes()
        rng = random.Random(7)
        for offset in sorted(rng.sample(range(len(good)), 40)):
            flip(path, offset, rng.randrange(8))
            with pytest.raises((Damaged, NewerFormat, OtherRun), match=r"manifest\.json"):
                async with open_on(run_directory) as pipe:
                    await pipe.resume()
            path.write_bytes(good)

    @staticmethod
    async def refused(directory: str, match: str) -> None:
        """``resume`` raises Damaged, and neither the live objects nor the files are touched."""
        async with open_on(directory) as pipe:
            trained = Trained()
            trained.batches, trained.weight[:] = [[1, 2]], 5.0
            pipe.attach(trained=trained)
            ledger, files = pipe.ledger.snapshot(), listing(directory)
            for _ in range(2):
                with pytest.raises(Damaged, match=match):
                    await pipe.resume()
            assert (trained.batches, trained.weight.tolist()) == ([[1, 2]], [5.0] * 4)
            assert pipe.ledger.snapshot() == ledger
            assert (pipe.version, pipe.progress.next_consumer_step) == (0, 1)
            assert listing(directory) == files


class TestJournalsAndSegments:
    @pytest.mark.parametrize("seed", range(6))
    async def test_a_flipped_bit_in_a_journal(self, run_directory: str, seed: int) -> None:
        await make_run(run_directory)
        path = Path(run_directory, "journals", "000001-0000.fbj")
        manifest = msgspec.json.decode((newest(run_directory) / "manifest.json").read_bytes())
        (promised,) = [each["bytes"] for each in manifest["journals"]]
        rng = random.Random(seed)
        offset = rng.choice([rng.randrange(64), *(rng.randrange(promised) for _ in range(1))])
        while path.read_bytes()[offset : offset + 8] == bytes(8) or path.read_bytes()[offset] == 0:
            offset = rng.randrange(promised)  # zeros may be padding, which nobody reads
        flip(path, offset, rng.randrange(8))
        await TestGenerations.refused(run_directory, r"000001-0000\.fbj")

    @pytest.mark.parametrize("way", ["cut", "missing"])
    async def test_a_journal_that_a_generation_counts_on(self, run_directory: str, way: str) -> None:
        await make_run(run_directory)
        path = Path(run_directory, "journals", "000001-0000.fbj")
        if way == "cut":
            path.write_bytes(path.read_bytes()[:1000])
        else:
            path.unlink()
        await TestGenerations.refused(run_directory, r"000001-0000\.fbj")

    @pytest.mark.parametrize("way", ["flipped", "cut", "missing"])
    async def test_a_segment_with_rollouts_that_wait(self, run_directory: str, way: str) -> None:
        await make_run(run_directory)
        path = Path(run_directory, "segments", "000001-0000-000001.fbs")
        content = path.read_bytes()
        if way == "flipped":
            flip(path, content.rindex(b"__item__"))
        elif way == "cut":
            path.write_bytes(content[: content.rindex(b"__item__")])
        else:
            path.unlink()
        await TestGenerations.refused(run_directory, r"000001-0000-000001\.fbs")

    async def test_a_journal_and_a_segment_of_another_run(self, tmp_path: Path) -> None:
        ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
        await make_run(ours)
        await make_run(theirs)
        kept = Path(ours, "journals", "000001-0000.fbj").read_bytes()
        shutil.copyfile(Path(theirs, "journals", "000001-0000.fbj"), Path(ours, "journals", "000001-0000.fbj"))
        async with open_on(ours) as pipe:
            pipe.attach(trained=Trained())
            with pytest.raises(OtherRun, match=r"000001-0000\.fbj"):
                await pipe.resume()
        Path(ours, "journals", "000001-0000.fbj").write_bytes(kept)
        name = Path("segments", "000001-0000-000001.fbs")
        shutil.copyfile(theirs / name, ours / name)
        await TestGenerations.refused(ours, r"000001-0000-000001\.fbs")

    async def test_a_torn_end_beyond_the_last_save_costs_what_was_in_it(
        self, run_directory: str, tmp_path: Path
    ) -> None:
        async with open_on(run_directory) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=2, until=1):
                await train(pipe, trained, batch)
            await (await pipe.save(1)).committed()
            saved = os.path.getsize(Path(run_directory, "journals", "000001-0000.fbj"))
            await anyio.sleep(10)
            copy = crashed_copy(run_directory, tmp_path / "copy")
        journal = Path(copy, "journals", "000001-0000.fbj")
        whole = journal.read_bytes()
        assert len(whole) > saved + 128
        for number, size in enumerate(sorted(random.Random(1).sample(range(saved, len(whole)), 8))):
            torn = str(tmp_path / f"torn-{number}")
            shutil.copytree(copy, torn)
            Path(torn, "journals", "000001-0000.fbj").write_bytes(whole[:size])
            async with open_on(torn) as pipe:
                again = Trained()
                assert (await begin(pipe, trained=again)).step == 1
                assert (await finish(pipe, again, 2)).items == list(range(12)), f"cut at {size}"


class TestFailingDisk:
    async def test_a_resume_that_fails_at_any_call_neither_hangs_nor_harms(self, tmp_path: Path) -> None:
        master = str(tmp_path / "master")
        await make_run(master)
        resumed = failed = 0
        for number in range(1, 50):
            directory = str(tmp_path / str(number))
            shutil.copytree(master, directory)
            try:
                with anyio.fail_after(1000):
                    async with open_on(directory, files=ScriptedFiles(fail_at=number)) as pipe:
                        trained = Trained()
                        pipe.attach(trained=trained)
                        await pipe.resume()
                        resumed += 1
            except OSError:  # of which StoreError is one
                failed += 1
            async with open_on(directory) as pipe:
                trained = Trained()
                assert (await begin(pipe, trained=trained)).step == 2, f"call {number} failed"
                assert (await finish(pipe, trained, 2)).items == list(range(12)), f"call {number} failed"
        assert failed > 10 < resumed

    async def test_start_after_a_resume_that_failed_to_commit_asks_for_the_weights_first(self, tmp_path: Path) -> None:
        master = str(tmp_path / "master")
        await make_run(master)
        outcomes = set()
        for number in range(1, 40):
            directory = str(tmp_path / str(number))
            shutil.copytree(master, directory)
            try:
                async with open_on(directory, files=ScriptedFiles(fail_at=number)) as pipe:
                    pipe.attach(trained=Trained())
                    try:
                        await pipe.resume()
                        outcomes.add("resumed")
                        continue
                    except ForebayError:
                        with pytest.raises(ForebayError, match=r"weight_update|resume\(\)|could not|closed|failed"):
                            await pipe.start()
                    await pipe.start(weights_current=True)
                    outcomes.add("started")
                    assert (await pipe.get_batch(2)).step == 3
            except (ForebayError, OSError):
                outcomes.add("refused")
        assert outcomes == {"resumed", "started", "refused"}

    @pytest.mark.parametrize("stays", [False, True])
    async def test_whoever_waits_for_a_commit_is_told_when_it_fails_at_any_call(
        self, tmp_path: Path, stays: bool
    ) -> None:
        outcomes = set()
        for number in range(30, 90, 2):
            directory = str(tmp_path / str(number))
            files = ScriptedFiles(fail_at=number, stays=stays)
            told = False
            try:
                with anyio.fail_after(10_000):
                    async with open_on(directory, files=files) as pipe:
                        trained = Trained()
                        await begin(pipe, trained=trained)
                        async for batch in pipe.batches(groups=2, until=3):
                            await train(pipe, trained, batch)
                            saving = await pipe.save(batch.step)
                            try:
                                await saving.committed()
                            except WriteFailed:
                                told = True
                                raise
                outcomes.add("saved")
            except TimeoutError:
                pytest.fail(f"call {number}: somebody waits for ever")
            except WriteFailed:
                outcomes.add("told" if told else "raised")
            async with open_on(directory) as pipe:
                again = Trained()
                await begin(pipe, trained=again)
                assert (await finish(pipe, again, 2)).items == list(range(12)), f"call {number} failed"
        assert "told" in outcomes

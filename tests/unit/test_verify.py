"""``verify`` finds every changed byte that was promised, names the file, and changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from pipeline import ForebayError, NotARun
from pipeline.checkpoint import Verified, verify
from pipeline.store.frames import HEADER_BYTES, scan
from pipeline.store.layout import Layout
from tests.support.crashes import Trained, begin, crashed_copy, inline_pipeline, lasting, train
from tests.support.disk import tree
from tests.support.runs import task

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def directory(tmp_path: Path) -> str:
    """Two lives: the first was killed, the second saved after its last rollout, and was killed then."""
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    for life, (folder, steps) in enumerate(((first, 2), (second, 4))):
        async with inline_pipeline(
            task(12, lasting({})), directory=folder, concurrency=3, capacity=6, segment_bytes=900, keep=None
        ) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            while len(trained.batches) < steps:
                await train(pipe, trained, await pipe.get_batch(2))
            await anyio.sleep(10)
            await (await pipe.save(steps)).committed()
            if life == 0:
                crashed_copy(folder, second)
            else:
                crashed_copy(folder, tmp_path / "run")
    return str(tmp_path / "run")


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def damaged(found: Verified) -> set[str]:
    return {each.path for each in found.damages}


async def test_a_whole_run_is_whole_and_unchanged(directory: str) -> None:
    before = tree(directory)
    found = verify(directory)
    assert (found.whole, found.damages, found.unpromised) == (True, [], [])
    assert found.generations == len(os.listdir(os.path.join(directory, "generations")))
    assert (found.journals, found.payloads, found.bytes) == (2, 10, sum(map(len, before.values())))
    assert verify(directory, quick=True) == found
    assert tree(directory) == before


def places(directory: str) -> Iterator[tuple[str, int]]:
    """A byte of every part of every file that is promised: of headers, payloads and files without records."""
    run = Layout(directory).read_run()
    assert run is not None
    for path in sorted(Path(directory).rglob("*")):
        if path.suffix in (".fbj", ".fbs"):
            frames = list(scan(str(path), run_tag=run.tag))
            for frame in frames[:-1] if path.suffix == ".fbj" else frames:  # the last mark promises what is before it
                yield str(path.relative_to(directory)), frame.offset + 9
                if frame.payload:
                    yield str(path.relative_to(directory)), frame.offset + HEADER_BYTES + len(frame.payload) // 2
        elif path.is_file() and path.name not in ("run.json", "lock"):
            yield str(path.relative_to(directory)), path.stat().st_size // 3


async def test_every_changed_byte_is_found_and_its_file_named(directory: str, tmp_path: Path) -> None:
    there = list(places(directory))
    assert len(there) > 80
    footers = 0
    for number, (name, at) in enumerate(there):
        copy = str(tmp_path / f"copy{number}")
        shutil.copytree(directory, copy)
        flipped(Path(copy, name), at)
        found = verify(copy)
        if name.endswith(".fbs") and found.whole:  # a footer repeats what the records say
            footers += 1
            assert any(name in line for line in found.unpromised)
        else:
            assert name in damaged(found), (name, at, found)
        shutil.rmtree(copy)
    assert footers < 12


@pytest.mark.parametrize("quick", [False, True])
async def test_a_file_that_is_short_or_gone_is_found_quickly_as_well(
    directory: str, tmp_path: Path, quick: bool
) -> None:
    for name in [name for name in tree(directory) if name not in ("run.json", "lock") and "manifest" not in name]:
        for how in ("short", "gone"):
            copy = tmp_path / "copy"
            shutil.copytree(directory, copy)
            if how == "gone":
                (copy / name).unlink()
            elif (copy / name).stat().st_size > 200:
                os.truncate(copy / name, 100)
            else:
                shutil.rmtree(copy)
                continue
            found = verify(str(copy), quick=quick)
            # Older lives' segments are in no manifest that is kept: their payloads are looked for, unless it is quick.
            if not (quick and name.startswith("segments/000001")):
                assert name in damaged(found), (name, how, found)
            shutil.rmtree(copy)


async def test_what_a_crash_cut_off_is_no_damage(directory: str) -> None:
    journal = Path(directory, "journals", "000002-0000.fbj")
    journal.write_bytes(journal.read_bytes() + b"FBAY and then the power of the process ended")
    found = verify(directory)
    assert found.whole
    (line,) = found.unpromised
    assert str(journal) in line


async def test_what_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="there is no run"):
        verify(str(tmp_path / "nothing"))
    (tmp_path / "file.txt").write_text("mine")
    with pytest.raises(ForebayError):
        verify(str(tmp_path))

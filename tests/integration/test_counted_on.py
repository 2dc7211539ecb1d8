"""What a resume has folded is counted on from then on: later damage to it is found, not taken for a torn end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline import Damaged, OtherRun
from pipeline.store.frames import HEADER_BYTES
from tests.support.runs import pipeline, task


async def test_damage_beyond_the_older_generation_is_no_torn_end_after_a_resume(run_directory: str) -> None:
    async with pipeline(task(40), directory=run_directory, concurrency=4) as pipe:
        await pipe.start()
        async for _ in pipe.batches(groups=4, until=4):  # journaled, and beyond what generation 0 counts on
            pass
    journal = Path(run_directory, "journals", "000001-0000.fbj")
    whole = journal.read_bytes()
    async with pipeline(task(40), directory=run_directory) as pipe:
        assert (await pipe.resume()).buffered >= 16
    at = len(whole) - 2 * HEADER_BYTES + 3  # inside the last record
    journal.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    async with pipeline(task(40), directory=run_directory) as pipe:
        with pytest.raises(Damaged, match=r"000001-0000\.fbj at byte \d+"):
            await pipe.resume()
    journal.write_bytes(whole)
    async with pipeline(task(40), directory=run_directory) as pipe:
        assert (await pipe.resume()).buffered >= 16


async def test_a_commit_that_finds_a_stranger_beside_it_is_a_commit_all_the_same(
    run_directory: str, tmp_path: Path
) -> None:
    """Old generations are removed after a commit; what cannot be read then is said at the next resume."""
    other = str(tmp_path / "other")
    async with pipeline(directory=other) as pipe:
        await pipe.start()
    async with pipeline(directory=run_directory) as pipe:
        await pipe.start()
        batch = await pipe.get_batch(4)
        shutil.copytree(Path(other, "generations", "00000000"), Path(run_directory, "generations", "00000099"))
        await (await pipe.save(batch.step)).committed()
        await pipe.get_batch(4)
    with pytest.raises(OtherRun, match="00000099"):
        await pipeline(directory=run_directory).__aenter__()
    shutil.rmtree(Path(run_directory, "generations", "00000099"))
    async with pipeline(directory=run_directory) as pipe:
        assert (await pipe.resume()).step == 1

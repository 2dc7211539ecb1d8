"""A salvage that fails or dies: the damaged run is as it was, and what it left behind is no run."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import anyio
import pytest
import torch

from pipeline import ConfigError, Context, Item, NotARun, Rollout, Task, WriteFailed
from pipeline.checkpoint import salvage
from tests.support.crashes import begin, inline_pipeline
from tests.support.disk import Killed, ScriptedFiles
from tests.support.power import VolatileFiles
from tests.support.runs import numbers
from tests.support.salvaging import EVERY, fingerprint, goes_on, make, two_lives

pytestmark = pytest.mark.virtual_time


async def opens(directory: str) -> bool:
    try:
        async with make(1, directory) as pipe:
            return bool((await pipe.resume()).step)
    except NotARun:
        return False


@pytest.mark.parametrize("after", [False, True])
async def test_killed_at_any_call_it_leaves_no_run(tmp_path: Path, after: bool) -> None:
    source = await two_lives(tmp_path)
    before = fingerprint(source)
    whole = ScriptedFiles()
    salvage(source, str(tmp_path / "whole"), files=whole)
    written = 0
    for call in range(1, len(whole.calls) + 1):
        target = tmp_path / f"target{call}"
        files = ScriptedFiles(call, Killed, after=after, stays=True)
        with pytest.raises(Killed):
            salvage(source, str(target), files=files)
        files.end()
        if (target / "run.json").exists():  # all is written: of the last calls only a sync is missing
            written += 1
            assert call > len(whole.calls) - 4
            assert await goes_on(str(target)) == EVERY
        elif target.exists() and any(target.iterdir()) and any(map(any, map(Path.iterdir, target.iterdir()))):
            assert not await opens(str(target))
            with pytest.raises(ConfigError, match="must be absent or an empty folder; it holds"):
                salvage(source, str(target))
    assert written < 4
    assert fingerprint(source) == before


async def test_a_full_disk_is_said_and_leaves_no_run(tmp_path: Path) -> None:
    source = await two_lives(tmp_path)
    before = fingerprint(source)
    whole = ScriptedFiles()
    salvage(source, str(tmp_path / "whole"), files=whole)
    for call in range(1, len(whole.calls)):
        target = tmp_path / f"target{call}"
        files = ScriptedFiles(call, stays=True)
        with pytest.raises(WriteFailed):
            salvage(source, str(target), files=files)
        assert not files.open
        assert not (target / "run.json").exists() or call > len(whole.calls) - 3
    assert fingerprint(source) == before


class DyingFiles(VolatileFiles):
    """The power goes when a folder has been synced for the ``last`` time."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.left = last

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        self.left -= 1
        if not self.left:
            raise Killed


async def test_whenever_the_power_goes_it_is_whole_or_no_run(tmp_path: Path) -> None:
    source = await two_lives(tmp_path)
    died = whole = 0
    for last in range(1, 40):
        target, files = str(tmp_path / f"target{last}"), DyingFiles(last)
        try:
            salvage(source, target, files=files)
            break
        except Killed:
            died += 1
        left = str(tmp_path / f"left{last}")
        files.after_power_loss(target, left)
        files.end()
        if Path(left, "run.json").exists():
            whole += 1
            assert await goes_on(left) == EVERY
    files.end()
    assert died > 5
    assert whole == 2  # the folder's own sync, and its parent's


async def test_a_target_in_use_or_inside_the_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = await two_lives(tmp_path)
    before = fingerprint(str(tmp_path))
    (tmp_path / "link").symlink_to(source)
    for target in (source, str(Path(source, "inside")), str(tmp_path / "link" / "inside"), str(tmp_path)):
        with pytest.raises(ConfigError, match="target="):
            salvage(source, target)
    (tmp_path / "link").unlink()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="target="):
        salvage(source, str(tmp_path / "file"))
    (tmp_path / "file").unlink()
    for missing in ("nothing", "empty"):
        with pytest.raises(NotARun, match="there is no run"):
            salvage(str(tmp_path / missing), str(tmp_path / "target"))
    assert fingerprint(str(tmp_path)) == before
    (tmp_path / "target").mkdir()
    assert salvage(source, str(tmp_path / "target")).whole


async def test_payloads_are_not_held_in_memory(tmp_path: Path) -> None:
    async def large(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(1.0)
        return Rollout({"image": torch.full((1 << 20,), item["n"], dtype=torch.uint8)})

    task = Task("large", source=numbers(32), run=large)
    async with inline_pipeline(task, directory=str(tmp_path / "run"), concurrency=8, capacity=32) as pipe:
        await begin(pipe)
        await anyio.sleep(60.0)
    tracemalloc.start()
    try:
        found = salvage(str(tmp_path / "run"), str(tmp_path / "target"), files=ScriptedFiles())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.members_kept, found.whole) == (32, True)
    assert peak < 20 << 20  # a file of the trainer is read 16 MB at a time

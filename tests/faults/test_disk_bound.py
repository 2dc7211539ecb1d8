"""``max_disk_bytes``: room is made in time, and where none can be made the trainer is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from pipeline import Context, Item, Pipeline, Rollout, Starved, Task
from pipeline.checkpoint import verify
from tests.faults.test_triggers import manifests
from tests.support.crashes import Trained, begin, finish, inline_pipeline, train
from tests.support.runs import numbers, pipeline, solve

virtual = pytest.mark.virtual_time

COUNT = 80
SIZE = 2000  # bytes of a rollout, about


async def large(item: Item, ctx: Context) -> Rollout:
    await anyio.sleep(1 + item["n"] / 1000)
    return Rollout({"n": [item["n"]] * (SIZE // 8)}, reward=1.0)


def make(directory: str, **options: Any) -> Pipeline:
    given = Task("numbers", source=numbers(COUNT), run=large, shuffle=False)
    options.setdefault("keep", 1)
    return inline_pipeline(given, directory=directory, segment_bytes=2 * SIZE, capacity=8, **options)


def size(directory: str) -> int:
    return sum(os.lstat(path).st_size for path in Path(directory).rglob("*") if path.is_file())


@virtual
async def test_a_run_that_never_saves_is_saved_and_stays_below(run_directory: str) -> None:
    most, largest, trained = 30 * SIZE + 40_000, 0, Trained()
    with capture_logs() as logs:
        async with make(run_directory, max_disk_bytes=most) as pipe:
            await begin(pipe, trained=trained)
            async for batch in pipe.batches(groups=4):
                await train(pipe, trained, batch)
                largest = max(largest, size(run_directory))
    assert trained.items == list(range(COUNT))
    assert 0.6 * most < largest <= most + 8 * SIZE  # what was in flight is written all the same
    asked = [line for line in logs if line["event"] == "checkpoint.requested"]
    assert {line["reason"] for line in asked} == {"disk"}
    assert 2 <= len(asked) <= 8  # once each time that it comes near
    assert verify(run_directory).whole


@virtual
async def test_a_resume_counts_what_is_there(run_directory: str) -> None:
    trained = Trained()
    async with make(run_directory) as pipe:
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=4, until=8):
            await train(pipe, trained, batch)
    with capture_logs() as logs:
        async with make(run_directory, max_disk_bytes=size(run_directory) + 4 * SIZE, save_every=5) as pipe:
            await begin(pipe, trained=trained)
            await finish(pipe, trained, 4)
    assert trained.items == list(range(COUNT))
    assert [line for line in logs if line["event"] == "disk.low" and "most" in line]


@virtual
@pytest.mark.parametrize("ahead", [False, True])
async def test_where_no_room_can_be_made_the_trainer_is_told_and_nothing_is_lost(
    run_directory: str, ahead: bool
) -> None:
    """Every generation is kept, and so is what they need."""
    most, trained = 20 * SIZE, Trained()
    async with make(run_directory, keep=None, max_disk_bytes=most, save_every=1) as pipe:
        await begin(pipe, trained=trained)
        with pytest.raises(Starved, match=f"max_disk_bytes={most}: nothing new is begun. A save lets go"):
            await until_it_starves(pipe, trained, ahead=ahead)
    assert size(run_directory) < most + 10 * SIZE + 40_000
    done = len(trained.batches)
    assert 2 <= done < 20
    trained = Trained()
    async with make(run_directory, max_disk_bytes=10 * most) as pipe:
        await begin(pipe, trained=trained)
        await finish(pipe, trained, 4)
    assert trained.items == list(range(COUNT))


async def until_it_starves(pipe: Pipeline, trained: Trained, *, ahead: bool) -> None:
    batch = await pipe.get_batch(4)
    while True:
        following = await pipe.get_batch(4) if ahead else None
        await train(pipe, trained, batch)
        await pipe.ack(batch.step)
        batch = following or await pipe.get_batch(4)


@virtual
async def test_files_that_only_the_trainer_writes_are_asked_for(run_directory: str) -> None:
    trained, saved = Trained(), 0
    async with make(run_directory, max_disk_bytes=30 * SIZE + 60_000) as pipe:
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=4):
            await train(pipe, trained, batch)
            if batch.step == 1 or pipe.save_due(batch.step):
                async with pipe.checkpoint(batch.step) as folder:
                    Path(folder, "mine").write_text("x")
                saved += 1
    assert trained.items == list(range(COUNT))
    assert 3 <= saved <= 9
    assert {each.reason for each in manifests(run_directory)} == {"checkpoint"}


@virtual
async def test_a_trainer_that_does_not_ask_is_told_in_the_end(run_directory: str) -> None:
    """Nobody else can write its files, so nobody makes room: it does not wait for ever."""
    trained = Trained()
    async with make(run_directory, max_disk_bytes=20 * SIZE) as pipe:
        await begin(pipe, trained=trained)
        batch = await pipe.get_batch(4)
        await train(pipe, trained, batch)
        async with pipe.checkpoint(batch.step):
            pass
        with pytest.raises(Starved, match="max_disk_bytes"):
            await finish(pipe, trained, 4)


async def test_a_trainer_that_waits_meanwhile_goes_on_when_there_is_room(run_directory: str) -> None:
    """From far below the bound to above it in one batch: what comes next waits for the generation, in real time."""

    async def at_once(item: Item, ctx: Context) -> Rollout:
        await anyio.lowlevel.checkpoint()
        return Rollout({"n": [item["n"]] * 4000}, reward=1.0)

    given, trained = Task("numbers", source=numbers(COUNT), run=at_once, shuffle=False), Trained()
    options: dict[str, Any] = {"keep": 1, "segment_bytes": 40_000, "capacity": 8, "max_disk_bytes": 300_000}
    async with pipeline(given, directory=run_directory, **options) as pipe:
        await begin(pipe, trained=trained)
        async for batch in pipe.batches(groups=8):
            await train(pipe, trained, batch)
    assert trained.items == list(range(COUNT))


@virtual
async def test_little_left_in_the_file_system_is_told(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.wiring.disk._SEGMENTS", 1 << 50)
    with capture_logs() as logs:
        async with make(run_directory) as pipe:
            await begin(pipe)
            await pipe.get_batch(4)
    assert [line for line in logs if line["event"] == "disk.low" and line["free"] > 0]


@pytest.mark.parametrize("most", [None, 10**9])
async def test_a_folder_that_was_removed_is_told_by_whoever_writes_and_not_by_the_look(
    run_directory: str, tmp_path: Path, most: int | None
) -> None:
    async with inline_pipeline(
        Task("t", source=numbers(4), run=solve), directory=run_directory, max_disk_bytes=most
    ) as pipe:
        await begin(pipe, trained=Trained())
        disk = pipe._run.producer.disk
        assert disk is not None
        os.rename(run_directory, tmp_path / "elsewhere")
        await disk.look()
        os.rename(tmp_path / "elsewhere", run_directory)
        assert not disk.full

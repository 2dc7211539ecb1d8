"""The same seed gives the same order, the same batches and the same bytes, whatever Python hashes by."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Pipeline, Retry, Rollout, Task
from pipeline.store.frames import EVENTS, scan
from pipeline.store.journal import read_journals
from pipeline.store.layout import Layout
from pipeline.testing import FakeTrainer, Numbers, RecordingFiles, VirtualClockLoop

ROOT = Path(__file__).parents[2]


async def run(item: Item, ctx: Context) -> Rollout:
    await anyio.sleep(0.1 + 2 * ctx.rng.random())
    if ctx.rng.random() < 0.2:
        raise ValueError("a bad day")
    return Rollout({"draws": ctx.rng.random(3), "n": [item["n"]]}, reward=ctx.rng.random(), info={"b": 1, "a": [2]})


def tasks() -> list[Task]:
    return [
        Task(name, source=Numbers(count), run=run, share=share, group_size=size, on_failure=Retry(attempts=9), epochs=2)
        for name, count, share, size in (("wide", 5, 1.0, 3), ("é", 7, 2.5, 1), ("z", 4, 1.0, 2))
    ]


async def whole(directory: str) -> dict[str, Any]:
    """One run in a life; what must be the same in every other."""
    trainer = FakeTrainer(key=lambda group: [group.task, group.epoch, group.index, group.reward_mean])
    files = RecordingFiles(directory)
    pipe = Pipeline(
        tasks(), directory=directory, files=files, inline=True, watchdog=None, seed=3, concurrency=5, capacity=9
    )
    async with pipe:
        pipe.attach(trainer=trainer)
        await pipe.start()
        async for batch in pipe.batches(groups=4):
            trainer.step(batch)
            if batch.step % 3 == 0:
                await (await pipe.save(batch.step)).committed()
    return {"batches": trainer.batches, "digests": digests(directory)}


def digests(directory: str) -> dict[str, str]:
    """Digest of every file's content, without times, host, process and the run's id, which may differ."""
    layout = Layout(directory)
    run_file = layout.read_run()
    assert run_file is not None
    found: dict[str, str] = {}
    for path in sorted(Path(directory).rglob("*")):
        name = os.path.relpath(path, directory)
        if not path.is_file() or name in ("lock", "run.json"):
            continue
        found[name] = hashlib.sha256(_content(path, run_file.run_id, run_file.tag)).hexdigest()
    return found


def _content(path: Path, run_id: str, tag: int) -> bytes:
    if path.suffix in (".fbj", ".fbs"):
        frames = scan(str(path), run_tag=tag)
        return b"".join(
            f"{frame.header.kind} {frame.header.sequence} {frame.header.number} {frame.header.life};".encode()
            + (b"" if frame.header.kind == EVENTS else frame.payload)
            for frame in frames
        )
    if path.name == "manifest.json":
        fields = json.loads(path.read_bytes())
        for varies in ("run_id", "written", "checksum"):
            del fields[varies]
        fields["options"]["directory"] = fields["journals"] = ""  # a host's name has its own length
        return json.dumps(fields, sort_keys=True).encode()
    return path.read_bytes().replace(run_id.encode(), b"")


def events(directory: str) -> list[str]:
    """What the journals say, but for what varies: host, process, times of day."""
    layout = Layout(directory)
    run_file = layout.read_run()
    assert run_file is not None
    logged = read_journals(layout, run_tag=run_file.tag)
    return [repr(each.event) for each in logged if type(each.event).__name__ not in ("Opened", "Closed")]


def once(directory: str) -> dict[str, Any]:
    loop = VirtualClockLoop()
    try:
        result = loop.run_until_complete(whole(directory))
    finally:
        loop.close()
    return {**result, "events": hashlib.sha256("\n".join(events(directory)).encode()).hexdigest()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The run in processes of their own, under several hash seeds."""
    folder = tmp_path_factory.mktemp("determinism")
    children = {}
    for name in ("0", "1", "random"):
        code = f"import json; from {__name__} import once; print(json.dumps(once({str(folder / name)!r})))"
        children[name] = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": name, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
    found = {}
    for name, child in children.items():
        printed, _ = child.communicate(timeout=100)
        assert child.returncode == 0
        found[name] = json.loads(printed)
    return found


def test_batches_are_the_same_under_every_hash_seed(results: dict[str, dict[str, Any]]) -> None:
    assert len(results["0"]["batches"]) == 8
    assert results["0"]["batches"] == results["1"]["batches"] == results["random"]["batches"]


def test_events_are_the_same(results: dict[str, dict[str, Any]]) -> None:
    assert results["0"]["events"] == results["1"]["events"] == results["random"]["events"]


def test_every_byte_of_the_checkpoints_is_the_same(results: dict[str, dict[str, Any]]) -> None:
    assert any(name.startswith("generations") for name in results["0"]["digests"])
    assert results["0"]["digests"] == results["1"]["digests"] == results["random"]["digests"]


def test_and_in_this_process_as_well(tmp_path: Path, results: dict[str, dict[str, Any]]) -> None:
    again = once(str(tmp_path / "same"))
    assert again["batches"] == results["0"]["batches"]


async def test_random_state_of_the_process_is_left_alone(tmp_path: Path) -> None:
    import random

    import numpy as np
    import torch

    before = (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist())  # type: ignore[index]
    async with Pipeline(tasks(), directory=str(tmp_path / "run"), watchdog=None, seed=3) as pipe:
        pipe.attach(trainer=FakeTrainer())
        await pipe.resume()
        await pipe.start()
        await pipe.get_batch(2)
        await (await pipe.save(1)).committed()
    after = (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist())  # type: ignore[index]
    assert before == after

"""What is drawn from a saved run of a pipeline whose rollouts fill a buffer is what that buffer would have drawn next,
however it draws: the generation says so, where a pipeline's manifest does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline import ReplayBuffer, UsageError
from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.checkpoint.manifest import MANIFEST_FILE, FileInfo, encode_manifest
from pipeline.replay.looking import look_at
from pipeline.store.frames import crc32c
from pipeline.store.layout import Layout
from tests.support.experience import fed, filled, resumed

SELECTIONS: list[dict[str, Any]] = [
    {"select": "uniform", "window": 5},
    {"select": "uniform", "uses": 1},
    {"select": "uniform", "window_trajectories": 2},
    {"select": "prioritized", "alpha": 0.3, "beta": {"start": 0.3, "end": 0.9, "over": 5}, "eps": 0.5},
    {"select": "ordered", "by": "min", "field": "reward"},
    {"select": "ordered", "by": "lifo", "uses": 1},
    {"select": "without_replacement", "last": "keep", "uses": 2},
    {"select": "staleness", "half_life": 2.0},
]


async def saved(directory: str, select: dict[str, Any]) -> tuple[int, Stored]:
    buffer = ReplayBuffer(60, select=select, seed=4)
    async with fed(buffer, directory=directory) as pipe:
        await resumed(pipe)
        await pipe.start()
        await filled(pipe)
        buffer.sample(5)
        if buffer.drawer.takes_priorities:
            buffer.update_priorities(buffer.ring.keys()[:20], np.arange(20.0))
        await (await pipe.save(1)).committed()
    layout = Layout(directory)
    run = layout.read_run()
    assert run is not None
    return run.tag, find_generations(layout, run.run_id).complete[-1]


def drawn(buffer: ReplayBuffer) -> list[Any]:
    batches = [buffer.sample(count) for count in (3, 8, 2)]
    return [[each.keys.tolist(), each["obs"].tolist(), each.weights.tolist()] for each in batches]


@pytest.mark.parametrize("select", SELECTIONS)
async def test_what_comes_next_is_drawn(run_directory: str, select: dict[str, Any]) -> None:
    tag, stored = await saved(run_directory, select)
    found = drawn(look_at(Layout(run_directory), tag, stored))
    buffer = ReplayBuffer(60, select=select, seed=4)
    async with fed(buffer, directory=run_directory) as pipe:
        await resumed(pipe)
        assert found == drawn(buffer)


@pytest.mark.parametrize("select", SELECTIONS)
async def test_of_an_earlier_version_the_kind_is_known_or_it_says_what_is_not(
    run_directory: str, select: dict[str, Any]
) -> None:
    tag, stored = await saved(run_directory, select)
    path = os.path.join(stored.folder, "replay.json")
    state = json.loads(Path(path).read_text())
    del state["options"]
    raw = json.dumps(state).encode()
    os.unlink(path)
    Path(path).write_bytes(raw)
    files = [info for info in stored.manifest.files if info.path != "replay.json"]
    files.append(FileInfo(path="replay.json", bytes=len(raw), crc32c=f"{crc32c(raw):08x}"))
    stored = Stored(stored.folder, msgspec.structs.replace(stored.manifest, files=files))
    Path(stored.folder, MANIFEST_FILE).write_bytes(encode_manifest(stored.manifest))
    if select["select"] == "staleness":  # the others have defaults
        with pytest.raises(UsageError, match="an earlier version wrote it"):
            look_at(Layout(run_directory), tag, stored)
    else:
        assert len(look_at(Layout(run_directory), tag, stored).sample(3)) == 3

"""Priorities grow with the rows: no tool that needs none of them at once has them all in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline import ReplayBuffer, tools
from pipeline.config import Prioritized
from pipeline.tools.exporting import export
from pipeline.tools.importing import import_data
from tests.support.memory import growth

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="resident memory is told by /proc"
)
ROWS = 4_000_000  # 32 MB of priorities


def made(directory: Path) -> str:
    with ReplayBuffer(ROWS, directory=directory, select=Prioritized(alpha=0.5), seed=5) as buffer:
        ends = np.arange(1 << 16) % 1000 == 999
        while buffer.ring.added < ROWS:
            count = min(1 << 16, ROWS - buffer.ring.added)
            buffer.extend({"n": np.ones(count, np.uint8), "terminated": ends[:count]})
        buffer.save(1, wait=True)
    return str(directory)


def inspected(run: str) -> None:
    (buffer,) = tools.inspect(run).buffers
    assert (buffer.priorities.count, buffer.priorities.least, buffer.priorities.most) == (ROWS, 1.0, 1.0)


def imported(run: str) -> None:
    assert import_data(f"{run}-rows", f"{run}-again").count == ROWS


@pytest.mark.parametrize("look", [inspected, imported])
def test_memory_does_not_grow_with_them(tmp_path: Path, look: Callable[[str], None]) -> None:
    run = made(tmp_path / "run")
    if look is imported:
        export(run, f"{run}-rows", to="safetensors", part_bytes=4 << 20)
    found: dict[str, float] = {}
    with growth(found, "look"):
        look(run)
    assert found["look"] < 24

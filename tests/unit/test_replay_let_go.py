"""A buffer that nobody has any more gives its memory back at once, not when Python next looks for circles."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Limiter, ReplayBuffer, TrajectoryBuffer
from pipeline.config import Prioritized, StalenessWeighted, Uniform, WithoutReplacement

LINUX = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is a thing of Linux")
SELECT = ["uniform", "fifo", Prioritized(), Uniform(uses=2), StalenessWeighted(half_life=2), WithoutReplacement()]


@pytest.fixture(autouse=True)
def circles_are_left() -> Iterator[None]:
    """What is in a circle lands in ``gc.garbage``."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def rows(count: int) -> dict[str, Any]:
    return {"obs": np.zeros((count, 3), np.float32), "done": np.zeros(count, bool)}


def circles(use: Callable[[], None]) -> list[str]:
    """The types of what ``use`` leaves behind in circles, of this project's alone."""
    use()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    return sorted(type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("pipeline."))


@pytest.mark.parametrize("select", SELECT, ids=str)
@pytest.mark.parametrize("storage", ["memory", pytest.param("shared", marks=LINUX), "mapped"])
def test_a_buffer_is_in_no_circle(storage: Any, select: Any, tmp_path: Path) -> None:

    def use() -> None:
        options: dict[str, Any] = {"directory": str(tmp_path / "run"), "limiter": Limiter(min_size=2), "seed": 1}
        buffer = ReplayBuffer(16, storage=storage, select=select, **options)
        buffer.extend(rows(4))
        buffer.sample(2)
        buffer.save(1, wait=True)
        buffer.close()

    assert circles(use) == []


@pytest.mark.parametrize("kept", [False, True])
def test_a_trajectory_buffer_is_in_no_circle(kept: bool, tmp_path: Path) -> None:
    def use() -> None:
        buffer = TrajectoryBuffer(directory=str(tmp_path / "run") if kept else None)
        buffer.add_trajectories([{"x": torch.zeros(4, 2)}])
        buffer.sample(1)
        if kept:
            buffer.save(1, wait=True)
            buffer.close()

    assert circles(use) == []


@LINUX
def test_shared_memory_is_given_back_at_once() -> None:
    def memories() -> int:
        paths = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return sum("memfd:forebay" in os.readlink(each) for each in paths if os.path.lexists(each))

    before = memories()
    buffer = ReplayBuffer(16, storage="shared", seed=1)
    buffer.extend(rows(4))
    assert memories() > before
    del buffer
    assert memories() == before

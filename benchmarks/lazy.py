"""How soon a buffer can be used that is resumed with ``verify="lazy"``, beside one that is read as a whole; and what
sampling costs where rows lie in a file.

Rows of two kinds, ``size`` bytes of each: images of 4x84x84 with those that follow, and small ones of 17 float32
observations with those that follow, 6 actions, a reward and a flag. Columns of ones, but for what tells rows apart:
nothing here depends on what is in them, as no file system that is asked about compresses.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy as np

from benchmarks import disk
from benchmarks.harness import Row, times
from pipeline import ReplayBuffer

IMAGES, SMALL = "images", "small rows"
BATCH, DRAWS = 256, 100
How = Literal["full", "lazy"]


def rows_of(kind: str, first: int, count: int) -> dict[str, Any]:
    """Return rows numbered from ``first`` on."""
    number = np.arange(first, first + count)
    if kind == IMAGES:
        image = np.ones((count, 4, 84, 84), np.uint8)
        return {"obs": image, "next_obs": image, "action": number, "reward": number / 2, "done": number % 500 == 499}
    obs = np.repeat(number.astype(np.float32), 17).reshape(count, 17)
    return {
        "obs": obs,
        "action": obs[:, :6],
        "reward": number.astype(np.float32),
        "next_obs": obs + 1,
        "done": number % 500 == 499,
    }


def rows(place: Callable[[str], str], size: int, rounds: int) -> list[Row]:
    """Return every row.

    Args:
        place: gives a path at which nothing lies.
        size: bytes of content.
        rounds: after one that is not counted.
    """
    found: list[Row] = []
    for kind, row_bytes in ((IMAGES, 2 * 4 * 84 * 84 + 17), (SMALL, 165)):
        count, run = max(2 * BATCH, size // row_bytes), place("lazy")
        with ReplayBuffer(count, directory=run) as buffer:
            for first in range(0, count, 4096):
                buffer.extend(rows_of(kind, first, min(4096, count - first)))
            buffer.save(0, wait=True)
        del buffer
        found += _resumes(run, kind, count, rounds)
        found.append(_sampling(run, kind, count, rounds))
    return found


def _resumes(run: str, kind: str, count: int, rounds: int) -> list[Row]:
    took: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    caches = ["warm", "cold"] if disk.evict([]) else ["warm"]
    for _ in range(rounds + 1):
        for cache in caches:
            hows: list[How] = ["lazy", "full"]
            for how in hows:
                paths = disk.needed_by_resume(run)
                if cache == "cold":
                    disk.evict(paths)
                else:
                    disk.read_through(paths)
                resumed, batch = _once(run, count, how)
                took[cache, how, "resume"].append(resumed)
                took[cache, how, "batch"].append(batch)
    found = []
    for cache in caches:
        for what, name in (("resume", "lazy resume"), ("batch", "lazy resume and the first batch")):
            lazy, full = (median(took[cache, how, what][1:]) for how in ("lazy", "full"))
            name = f"{name}, mapped, {kind}, page cache {cache}"
            found.append(Row(name=name, ours=lazy, unit="s", limit=0.1, asked="0.1 s", peers={"verify='full'": full}))
    return found


def _once(run: str, count: int, how: How) -> tuple[float, float]:
    """Seconds to the end of the resume, and to that of the first batch."""
    with ReplayBuffer(count, directory=run, storage="mapped", seed=1) as buffer:
        begun = time.perf_counter()
        assert buffer.resume(verify=how).rows == count
        resumed = time.perf_counter() - begun
        buffer.sample(BATCH)
        return resumed, time.perf_counter() - begun


def _sampling(run: str, kind: str, count: int, rounds: int) -> Row:
    """Uniform samples of rows that are all there, by turns."""
    sides: dict[str, Any] = {}
    storages = ("mapped", "memory")
    for storage in storages:
        with ReplayBuffer(count, directory=run, storage=storage, seed=1, returns="numpy") as buffer:
            buffer.resume()
        sides[storage] = partial(buffer.sample, BATCH)
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        for storage, sample in sides.items():
            begun = time.perf_counter()
            for _ in range(DRAWS):
                sample()
            took[storage].append(1e6 * (time.perf_counter() - begun) / DRAWS)
    mapped, memory = (took[storage][1:] for storage in storages)
    return times(f"uniform sample of {BATCH}, mapped, {kind}", mapped, "in memory", memory, unit="us", most=1.5)


if __name__ == "__main__":
    import shutil
    import sys
    import tempfile

    from benchmarks.harness import show

    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=os.getcwd()) as folder:

        def cleared(name: str) -> str:
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
            return os.path.join(folder, name)

        show(rows(cleared, int(float(sys.argv[1]) * 10**9), int(sys.argv[2])))

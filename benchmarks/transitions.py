"""What saving and resuming a buffer of transitions costs, beside the disk's own speed, by turns in one run.

Rows of 17 float32 observations, 6 actions, a reward, the next observation and a flag: 165 bytes; a buffer that is full.
Every round begins with a new folder, the first is not counted, and medians are shown. Reading goes through one block of
memory, which is the least that it can cost. All of it lies in ``folder``, which must not be in memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from benchmarks import disk, lazy, peaks
from benchmarks.harness import Row, times
from pipeline import ReplayBuffer
from pipeline.checkpoint import verify

GB, MB = 10**9, 10**6
ROW = 165  # bytes of content
SEGMENT = 64 << 20
DISK, READ = "the disk", "reading"


def content(count: int) -> dict[str, np.ndarray]:
    """Return rows that no disk can make smaller."""
    rng = np.random.default_rng(0)
    return {
        "obs": rng.random((count, 17), np.float32),
        "action": rng.random((count, 6), np.float32),
        "reward": rng.random(count, np.float32),
        "next_obs": rng.random((count, 17), np.float32),
        "done": rng.random(count) < 0.001,
    }


def filled(folder: str | None, select: str, rows: dict[str, np.ndarray], capacity: int) -> ReplayBuffer:
    """Return a buffer that holds rows; of a prioritized one, each has a priority of its own."""
    buffer = ReplayBuffer(capacity, select=select, directory=folder, seed=1)
    count = len(rows["reward"])
    for start in range(0, count, 1 << 18):
        keys = buffer.extend({name: array[start : start + (1 << 18)] for name, array in rows.items()})
        if select == "prioritized":
            buffer.update_priorities(np.array(keys), 0.1 + rows["reward"][start : start + (1 << 18)])
    return buffer


class Bench:
    """One run of the benchmark in a folder of its own."""

    def __init__(self, folder: str, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds

    def rows(self, size: int) -> list[Row]:
        """Return every row, of buffers with ``size`` bytes of content."""
        count = max(1000, size // ROW)
        found: list[Row] = []
        for select in ("uniform", "prioritized"):
            found += self._saves(select, count)
            found += self._loads(select)
        found += lazy.rows(self.place, size, min(self.rounds, 3))
        return [*found, self._hardly_filled(count), *self._million(count), *self._memory(size)]

    def place(self, name: str) -> str:
        """Return a path in the folder at which nothing lies."""
        path = os.path.join(self.folder, name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.unlink(path)
        return path

    def _saves(self, select: str, count: int) -> list[Row]:
        data, name = content(count), f"{count * ROW / GB:.2g} GB, {select}"
        one_percent = {key: array[: max(1, count // 100)] for key, array in data.items()}
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(self.rounds + 1):
            disk.warm_memory(self.folder, count * ROW)
            found[DISK].append(disk.write_synced(self.place("plain"), _chunks(data)))
            self.place("plain")
            with filled(self.place(select), select, data, count) as buffer:
                disk.warm_memory(self.folder, count * ROW)
                returned, committed = _saved(buffer, 0)
                found["returned"].append(returned)
                found["first"].append(committed)
                buffer.extend(one_percent)
                found["more"].append(_saved(buffer, 1)[1])
        first, most = found["first"][1:], 0.05 if select == "uniform" else 0.1
        return [
            times(f"first save, {name}", first, DISK, found[DISK][1:], unit="s", most=1.3),
            times(f"save after 1% more, {name}", found["more"][1:], "the first save", first, unit="s", most=most),
            Row(
                name=f"the trainer is held, first save, {name}",
                ours=1e3 * median(found["returned"][1:]),
                unit="ms",
                limit=1e3 * median(first),
                asked="less than the save",
            ),
        ]

    def _loads(self, select: str) -> list[Row]:
        run = os.path.join(self.folder, select)
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(self.rounds + 1):
            paths = disk.needed_by_resume(run)
            size = sum(map(os.path.getsize, paths))
            if disk.evict(paths):
                found[READ].append(disk.read_through(paths))
                disk.evict(paths)
                disk.warm_array(2 * size)
                found["load"].append(_resumed(run, select))
                disk.evict(paths)
                found["verify"].append(_verified(run))
        return [
            times(f"{verb}, {select}, page cache cold", found[verb][1:], READ, found[READ][1:], unit="s", most=most)
            for verb, most in (("load", 1.3), ("verify", 1.5))
            if found[verb]
        ]

    def _hardly_filled(self, count: int) -> Row:
        run, held = self.place("hardly"), max(10, count // 100)
        with filled(run, "prioritized", content(held), count) as buffer:
            buffer.save(0, wait=True)
        taken = sum(map(os.path.getsize, disk.files_of(run)))
        return Row(
            name="bytes on the disk, 1% full",
            ours=taken / MB,
            unit="MB",
            limit=(held * (ROW + 64) + 65_536) / MB,
            asked="content + 64 bytes a row + 64 KiB",
            peers={"content": held * ROW / MB},
        )

    def _million(self, count: int) -> list[Row]:
        run, rows = self.place("million"), min(count, 1_000_000)
        with filled(run, "prioritized", content(rows), rows) as buffer:
            buffer.save(0, wait=True)
        loads, reads = [], []
        for _ in range(self.rounds + 1):
            reads.append(disk.read_through(disk.needed_by_resume(run)))
            loads.append(_resumed(run, "prioritized"))
        return [
            Row(
                name=f"load {rows:,} prioritized transitions, beyond reading",
                ours=median(loads[1:]) - median(reads[1:]),
                unit="s",
                limit=0.3,
                asked="0.3 s",
                peers={READ: median(reads[1:])},
            )
        ]

    def _memory(self, size: int) -> list[Row]:
        if not peaks.possible():
            return []
        run, rows = self.place("memory"), []
        for verb in ("save", "load"):
            extra = peaks.measure(f"{verb} transitions", run, size)
            rows.append(
                Row(
                    name=f"extra memory at worst, {verb}, {size / GB:g} GB",
                    ours=extra / MB,
                    unit="MB",
                    limit=SEGMENT / MB,
                    asked="one segment" + (" beyond the rows" if verb == "load" else ""),
                )
            )
        return rows


def _chunks(data: dict[str, np.ndarray]) -> Iterator[memoryview]:
    for array in data.values():
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        yield from (view[start : start + SEGMENT] for start in range(0, len(view), SEGMENT))


def _saved(buffer: ReplayBuffer, step: int) -> tuple[float, float]:
    begun = time.perf_counter()
    saving = buffer.save(step)
    returned = time.perf_counter() - begun
    saving.wait()
    return returned, time.perf_counter() - begun


def _resumed(run: str, select: str) -> float:
    capacity = _capacity(run)
    begun = time.perf_counter()
    with ReplayBuffer(capacity, select=select, directory=run) as buffer:
        assert buffer.resume().rows
        return time.perf_counter() - begun


def _capacity(run: str) -> int:
    import msgspec

    newest = max(os.listdir(os.path.join(run, "generations")), key=int)
    with open(os.path.join(run, "generations", newest, "replay.json"), "rb") as file:
        state: Any = msgspec.json.decode(file.read())
    return int(state["capacity"])


def _verified(run: str) -> float:
    begun = time.perf_counter()
    assert verify(run).whole
    return time.perf_counter() - begun


def run(scale: float = 1.0, *, folder: str | None = None) -> list[Row]:
    """Every row. ``folder`` says on which disk.

    Raises:
        SystemExit: the folder is in memory, and the figures would count.
    """
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=folder or os.getcwd()) as place:
        if scale >= 1 and disk.in_memory(place):
            raise SystemExit(f"{place} lies in memory; name a folder on a disk: --folder")
        return Bench(place, rounds=5 if scale >= 1 else 1).rows(int(scale * GB))

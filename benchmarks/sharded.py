"""Loading the shards of four ranks on three, beside copying the same bytes; ranks are processes.

Rows of 165 bytes of content, of 64 environments on each rank, whose episodes are 200 steps long; prioritized. All files
are in the page cache, on both sides, and nothing is synced on either: it is the cost of moving them that is compared.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from multiprocessing.queues import Queue
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch.distributed

from benchmarks import disk
from benchmarks.harness import Row
from pipeline import Prioritized, Ranks, ReplayBuffer
from pipeline.checkpoint.generations import find_generations
from pipeline.store.layout import Layout

GB = 10**9
ROW = 165  # bytes of content
HELD = 210  # bytes that a row takes in memory, with marks and priority: see `benchmarks replay`
SAVED, LOADED, ENVS, LENGTH = 4, 3, 64, 200
ROUNDS = 3
MILLION = 1_000_000


def _ranks(port: int, rank: int, size: int, name: str) -> Ranks:
    group: Any = torch.distributed
    return Ranks(group.TCPStore("127.0.0.1", port, None, False), rank, size, name=name)


def _buffer(folder: str, capacity: int, ranks: Ranks) -> ReplayBuffer:
    return ReplayBuffer(capacity, select=Prioritized(alpha=0.6, beta=0.4), directory=folder, seed=1, ranks=ranks)


def _save(folder: str, port: int, rank: int, rows: int, queue: Queue[Any]) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(rank)
    with _buffer(folder, rows, _ranks(port, rank, SAVED, "save")) as buffer:
        buffer.resume()
        step = ENVS * LENGTH
        for begin in range(0, rows - step + 1, step):
            obs = rng.random((step, 17), np.float32)
            done = np.arange(begin, begin + step) // ENVS % LENGTH == LENGTH - 1
            buffer.extend(
                {
                    "obs": obs,
                    "action": obs[:, :6],
                    "reward": obs[:, 0],
                    "next_obs": obs,
                    "done": done,
                },
                envs=ENVS,
            )
            keys = buffer.ring.keys()[-step:]
            buffer.update_priorities(keys, rng.random(step) + 0.1)
        buffer.save(1, wait=True)
        queue.put((rank, len(buffer)))


def _load(folder: str, port: int, rank: int, size: int, rows: int, name: str, queue: Queue[Any]) -> None:
    torch.set_num_threads(1)
    ranks = _ranks(port, rank, size, name)
    with _buffer(folder, rows, ranks) as buffer:
        # A virtual machine gives memory that lies idle back to its host, and gets it again at 2 s for 1 GB: so it is
        # taken, and let go, before the clock starts. A copy goes through the kernel's memory, which is there.
        np.ones(rows * HELD, np.uint8)
        ranks.all("begin")
        begun = time.perf_counter()
        buffer.resume()
        queue.put((rank, len(buffer), time.perf_counter() - begun))


def _on_ranks(size: int, target: Any, *arguments: Any) -> list[Any]:
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    processes = [
        spawn.Process(target=target, args=(*arguments[:2], rank, *arguments[2:], queue)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    told = [queue.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return sorted(told)


def _copied(folder: str) -> float:
    """Return the seconds that copying the segments takes."""
    target = folder + ".copy"
    begun = time.perf_counter()
    shutil.copytree(os.path.join(folder, "segments"), target)
    spent = time.perf_counter() - begun
    shutil.rmtree(target)
    return spent


class _Measured(NamedTuple):
    """Shards of so many ranks, loaded by others: medians of seconds.

    Attributes:
        rows, payload: in all shards.
        load, copy, read: by the ranks; copying the segments' files; reading them.
    """

    rows: int
    payload: int
    load: float
    copy: float
    read: float


def _measured(folder: str, rows: int) -> _Measured:
    group: Any = torch.distributed
    store = group.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    told = _on_ranks(SAVED, _save, folder, store.port, rows)
    total = sum(count for _, count in told)
    layout = Layout(folder)
    marker = layout.read_run()
    assert marker is not None
    manifest = find_generations(layout, marker.run_id).complete[-1].manifest
    paths = [os.path.join(layout.segments, info.name) for info in manifest.segments]
    loads, copies, reads = [], [], []
    for round_ in range(ROUNDS + 1):
        copies.append(_copied(folder))
        reads.append(disk.read_through(paths))
        found = _on_ranks(LOADED, _load, folder, store.port, LOADED, 2 * rows, f"load{round_}")
        assert sum(each[1] for each in found) == total
        loads.append(max(each[2] for each in found))
    payload = sum(info.live for info in manifest.segments)
    return _Measured(total, payload, *(median(each[1:]) for each in (loads, copies, reads)))


def run(scale: float = 1.0, folder: str | None = None) -> list[Row]:
    """Every row; ``scale`` below 1 for a quick look at fewer rows."""
    step = ENVS * LENGTH
    with tempfile.TemporaryDirectory(dir=folder, prefix="sharded-") as work:
        many = _measured(os.path.join(work, "many"), max(1, int(GB * scale / ROW / SAVED) // step) * step)
        few = _measured(os.path.join(work, "few"), max(1, round(MILLION * scale / SAVED / step)) * step)
    return [
        Row(
            name=f"4 shards on 3 ranks, {many.payload / GB:.2f} GB, {many.rows:,} prioritized rows",
            ours=many.load,
            unit="s",
            limit=2 * many.copy,
            asked=f"within 2x of a copy ({many.load / many.copy:.2f}x)",
            peers={"a copy of the segments": many.copy},
        ),
        Row(
            name=f"4 shards on 3 ranks, {few.rows:,} prioritized rows",
            ours=few.load,
            unit="s",
            limit=few.read + 0.3,
            asked="under 0.3 s beyond reading",
            peers={"reading": few.read},
        ),
    ]

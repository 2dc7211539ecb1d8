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
from typing import Any

import numpy as np
import torch.distributed

from benchmarks.harness import Row
from pipeline import Prioritized, Ranks, ReplayBuffer
from pipeline.checkpoint.generations import find_generations
from pipeline.store.layout import Layout

GB = 10**9
ROW = 165  # bytes of content
SAVED, LOADED, ENVS, LENGTH = 4, 3, 64, 200
ROUNDS = 3


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


def run(scale: float = 1.0, folder: str | None = None) -> list[Row]:
    """Every row; ``scale`` below 1 for a quick look at fewer rows."""
    rows = max(ENVS * LENGTH, int(GB * scale / ROW / SAVED))
    rows -= rows % (ENVS * LENGTH)
    group: Any = torch.distributed
    store = group.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(dir=folder, prefix="sharded-") as work:
        run_folder = os.path.join(work, "run")
        told = _on_ranks(SAVED, _save, run_folder, store.port, rows)
        total = sum(count for _, count in told)
        layout = Layout(run_folder)
        marker = layout.read_run()
        assert marker is not None
        manifest = find_generations(layout, marker.run_id).complete[-1].manifest
        payload = sum(info.live for info in manifest.segments)
        seconds, copies = [], []
        for round_ in range(ROUNDS + 1):
            copies.append(_copied(run_folder))
            found = _on_ranks(LOADED, _load, run_folder, store.port, LOADED, 2 * rows, f"load{round_}")
            assert sum(each[1] for each in found) == total
            seconds.append(max(each[2] for each in found))
    ours, copy = median(seconds[1:]), median(copies[1:])
    return [
        Row(
            name=f"4 shards on 3 ranks, {payload / GB:.2f} GB, {total:,} prioritized rows",
            ours=ours,
            unit="s",
            limit=2 * copy,
            asked=f"within 2x of a copy ({ours / copy:.2f}x)",
            peers={"a copy of the segments": copy},
        )
    ]

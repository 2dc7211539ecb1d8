"""What a batch costs a trainer in another process, beside one in the pipeline's own, and beside the one copy it needs.

The same batch of 64 rollouts is taken and given back by turns, by blocking trainers; medians are shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import anyio
import anyio.to_thread
import torch

from benchmarks.harness import Endless, Row
from pipeline import Context, Item, Pipeline, Rollout, SyncPipeline, Task
from pipeline.serve import connect
from pipeline.serve.blocking import SyncClient
from pipeline.serve.memory import share

GROUPS, MB = 64, 1 << 20


def run(scale: float = 1.0) -> list[Row]:
    """Return the rows."""
    rows = []
    for name, size, rounds in (("1 MB", MB, 200), ("100 MB", max(MB, int(100 * MB * min(scale, 1))), 12)):
        rows += _measured(name, size, max(2, int(rounds * scale)))
    return rows


def _measured(name: str, size: int, rounds: int) -> list[Row]:
    producer = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving", str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert producer.stdin is not None
    assert producer.stdout is not None
    with producer:
        address = producer.stdout.readline().strip()
        with connect(address).sync() as other, _pipeline(size).sync() as own:
            own.start()
            got: dict[str, list[float]] = {"other": [], "own": [], "copy": []}
            read: dict[str, list[float]] = {"other": [], "own": []}
            for _ in range(rounds + 1):  # the first makes the batches
                for side, pipe in (("other", other), ("own", own)):
                    _take(pipe, got[side].append, read[side].append)
                got["copy"].append(_copied(size))
        producer.stdin.close()
    mine, copy, theirs = (median(got[side][1:]) for side in ("other", "copy", "own"))
    peers = {"one copy": copy, "in the process": theirs}
    asked = "10 ms, or 2x of the one copy into shared memory"
    limit = max(10.0, 2 * copy)
    read_own = median(read["own"][1:])
    whole = Row(
        name=f"get_batch of {name}, and every tensor read",
        ours=median(read["other"][1:]),
        unit="ms",
        limit=max(20.0, 3 * read_own),
        asked="20 ms, or 3x of the process's own",
        peers={"in the process": read_own},
    )
    return [Row(name=f"get_batch of {name}", ours=mine, unit="ms", limit=limit, asked=asked, peers=peers), whole]


def _take(pipe: SyncClient | SyncPipeline, got: Callable[[float], None], read: Callable[[float], None]) -> None:
    begun = time.perf_counter()
    batch = pipe.get_batch(GROUPS)
    got((time.perf_counter() - begun) * 1e3)
    assert len(batch.rollouts) == GROUPS
    read((time.perf_counter() - begun) * 1e3)
    batch.release()


def _copied(size: int) -> float:
    payloads = [bytes(size // GROUPS)] * GROUPS
    begun = time.perf_counter()
    os.close(share(payloads)[0])
    return (time.perf_counter() - begun) * 1e3


def _pipeline(size: int) -> Pipeline:
    async def make(item: Item, ctx: Context) -> Rollout:
        return Rollout({"x": torch.full((size // GROUPS // 4,), item.index, dtype=torch.float32)})

    task = Task("numbers", source=Endless(), run=make, shuffle=False)
    return Pipeline([task], watchdog=None, capacity=GROUPS)


async def _serve(size: int) -> None:
    async with _pipeline(size) as pipe:
        await pipe.start()
        print((await pipe.serve()).address, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(_serve, int(sys.argv[1]))

"""The cost of the library for a rollout that itself costs nothing, beside a bare asyncio loop with a queue.

Both sides run the same number of workers; each rollout yields to the loop once, so that they really are in flight. The
bare loop takes an item from one queue, runs the rollout, and puts the result into another, from which a consumer takes
batches of the same size. Its queues are bounded by a batch, since a pipeline must not outrun its trainer either; the
same loop with endless queues, in which nobody ever waits, is shown beside it. Processor time is measured, since other
processes may share the machine; the sides take turns.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

import anyio
import torch

from benchmarks.harness import Endless, Row, times
from pipeline import Context, Item, Pipeline, Rollout, Task
from pipeline.ledger import BUFFERED

BATCH = 64
BARE = "a bare loop with bounded queues"
ENDLESS = "with endless queues"
_NOTHING = Rollout(reward=1.0)


async def nothing(item: Item, ctx: Context) -> Rollout:
    """A rollout that costs one turn of the loop."""
    await asyncio.sleep(0)
    return _NOTHING


async def bare(workers: int, total: int, *, bound: int = BATCH) -> float:
    """Microseconds for each rollout in a loop without a library; ``bound`` 0 lets the queues grow without end."""
    items: asyncio.Queue[int] = asyncio.Queue(bound)
    results: asyncio.Queue[Rollout] = asyncio.Queue(bound)

    async def feed() -> None:
        for number in range(total):
            await items.put(number)

    async def one(number: int) -> Rollout:
        await asyncio.sleep(0)
        return _NOTHING

    async def work() -> None:
        while True:
            number = await items.get()
            await results.put(await one(number))

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    await asyncio.sleep(0)  # they wait for items, as ours wait for a trainer, when the clock starts
    tasks.append(asyncio.create_task(feed()))
    begun = time.process_time()
    taken = 0
    while taken < total:
        batch = [await results.get() for _ in range(min(BATCH, total - taken))]
        taken += len(batch)
    spent = time.process_time() - begun
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return spent / total * 1e6


async def ours(workers: int, total: int, *, stored: int = 0, time_limit: float | None = None, **options: Any) -> float:
    """Microseconds for each rollout in a pipeline, with ``stored`` groups in the buffer all the while."""
    task = Task("nothing", source=Endless(), run=nothing, timeout=time_limit)
    capacity = stored + max(2 * workers, 4 * BATCH)
    settings = {"concurrency": workers, "capacity": capacity, "batch_groups": BATCH, "watchdog": None, **options}
    async with Pipeline(task, settings) as pipe:
        await pipe.start()
        state = pipe._run.state
        await state.changed.wait_for(lambda: len(state.buffer) >= max(stored, workers))
        begun, taken = time.process_time(), 0
        while taken < total:
            batch = await pipe.get_batch(BATCH)
            await pipe.ack(batch.step)
            taken += len(batch)
        return (time.process_time() - begun) / taken * 1e6


def in_turns(repeats: int, *sides: Callable[[], Awaitable[float]]) -> list[list[float]]:
    """Run the sides by turns, each in a loop of its own."""
    figures: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, place in zip(sides, figures, strict=True):
            place.append(asyncio.run(_as_coroutine(side)))
    return figures


async def _as_coroutine(side: Callable[[], Awaitable[float]]) -> float:
    return await side()


def _durable(workers: int, total: int) -> Callable[[], Awaitable[float]]:
    async def side() -> float:
        with tempfile.TemporaryDirectory() as directory:
            return await ours(workers, total, directory=directory)

    return side


def cost_per_rollout(scale: float) -> list[Row]:
    """At 1, 1,000 and 10,000 in flight."""
    rows = []
    for most, work in ((1, 20_000), (1_000, 60_000), (10_000, 100_000)):
        workers = max(1, min(most, int(10 * scale * most)))  # a very quick look has fewer in flight as well
        total = max(2 * BATCH, int(work * scale))
        plain, endless, memory, timed, kill = in_turns(
            5 if scale >= 1 else 1,
            lambda n=workers, t=total: bare(n, t),  # type: ignore[misc]
            lambda n=workers, t=total: bare(n, t, bound=0),  # type: ignore[misc]
            lambda n=workers, t=total: ours(n, t),  # type: ignore[misc]
            lambda n=workers, t=total: ours(n, t, time_limit=300.0),  # type: ignore[misc]
            _durable(workers, total),
        )
        name = f"rollout, {workers:,} in flight"
        for kind, figures, most in (
            ("in memory", memory, 4),
            ("with timeout=", timed, 5),
            ("durability=kill", kill, 8),
        ):
            row = times(f"{name}, {kind}", figures, BARE, plain, unit="us", most=most)
            rows.append(replace(row, peers={**row.peers, ENDLESS: median(endless)}))
    return rows


def growth(scale: float) -> list[Row]:
    """With 0, 10,000 and 100,000 groups stored: nothing grows."""
    total = max(2 * BATCH, int(40_000 * scale))
    sizes = [0, *(int(size * scale) for size in (10_000, 100_000))]
    workers = max(1, min(1_000, int(10_000 * scale)))
    sides: list[Callable[[], Awaitable[float]]] = [lambda s=size: ours(workers, total, stored=s) for size in sizes]  # type: ignore[misc]
    figures = in_turns(5 if scale >= 1 else 1, *sides)
    return [
        times(f"rollout, {size:,} groups stored", figure, "none stored", figures[0], unit="us", most=1.25)
        for size, figure in zip(sizes[1:], figures[1:], strict=True)
    ]


def index_costs(scale: float) -> list[Row]:
    """Counting, taking by staleness and expiring, at 100,000 groups."""
    from pipeline.buffer import GroupBuffer

    size = max(1_000, int(100_000 * scale))
    buffer = GroupBuffer(order="finished", selector="stalest")
    for uid in range(size):
        buffer.add(uid, uid * 20 // size)
    begun = time.process_time()
    for _ in range(1_000):
        buffer.ready(BATCH)
    ready = (time.process_time() - begun) / 1_000 * 1e6
    begun = time.process_time()
    for _ in range(100):
        buffer.put_back([(uid, 0) for uid in buffer.take(BATCH)])
    take = (time.process_time() - begun) / 100 * 1e6
    begun = time.process_time()
    expired = buffer.older_than(3)
    for uid in expired:
        buffer.remove(uid)
    expire = (time.process_time() - begun) * 1e6
    return [
        Row(name=f"ready?, {size:,} groups", ours=ready, unit="us", limit=5, asked="under 5 us at any size"),
        Row(name=f"take 64 by staleness, {size:,} groups", ours=take, unit="us", limit=500, asked="under 500 us"),
        Row(
            name=f"expire {len(expired):,} of {size:,} groups",
            ours=expire,
            unit="us",
            limit=1_000 + 5 * len(expired),
            asked="under 1 ms and 5 us for each",
        ),
    ]


async def _groups(item: Item, ctx: Context) -> Rollout:
    return Rollout({"ids": torch.zeros(64, dtype=torch.int64)}, reward=1.0)


async def save_and_resume(groups: int) -> list[Row]:
    """A save when everything is in the journal already, and a resume of it: groups of 8."""
    task = Task("groups", source=Endless(), run=_groups, group_size=8)
    with tempfile.TemporaryDirectory() as directory:
        settings = {"directory": directory, "concurrency": 256, "capacity": groups, "watchdog": None}
        async with Pipeline(task, settings) as pipe:
            await pipe.start()
            state = pipe._run.state
            await state.changed.wait_for(lambda: state.ledger.count(BUFFERED) >= groups)
            assert state.writer is not None
            await state.writer.flush()
            saves = []
            for _ in range(7):
                begun = time.perf_counter()
                saving = await pipe.save(0)
                saves.append((time.perf_counter() - begun) * 1e3)
                await saving.committed()
        async with Pipeline(task, settings) as pipe:
            begun = time.process_time()
            resumed = await pipe.resume()
            resume = time.process_time() - begun
            assert resumed.buffered == groups
    name = f"{groups:,} groups of 8"
    return [
        Row(name=f"save returns, {name}", ours=sorted(saves)[3], unit="ms", limit=20, asked="under 20 ms"),
        Row(name=f"resume, {name}", ours=resume, unit="s processor", limit=1, asked="under 1 s at 10,000"),
    ]


async def latency(seconds: float) -> Row:
    """From the end of a batch's last rollout to ``get_batch`` returning, while 1,000 a second finish durably."""
    ends: dict[int, float] = {}

    async def paced(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(0.1)
        ends[item.uid] = time.perf_counter()
        return _NOTHING

    waits: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        task = Task("paced", source=Endless(), run=paced)
        settings = {"directory": directory, "concurrency": 100, "capacity": 200, "watchdog": None, "selector": "fifo"}
        async with Pipeline(task, settings) as pipe:
            await pipe.start()
            begun = time.perf_counter()
            while time.perf_counter() - begun < seconds:
                batch = await pipe.get_batch(10)
                now = time.perf_counter()
                last = max(ends.pop(uid) for uid in batch.uids)
                await pipe.ack(batch.step)
                waits.append((now - last) * 1e3)
    p99 = quantiles(waits, n=100)[98]
    peers = {"median": sorted(waits)[len(waits) // 2]}
    return Row(
        name="get_batch after the last rollout, p99", ours=p99, unit="ms", limit=2, asked="under 2 ms", peers=peers
    )


def import_time() -> Row:
    """``import pipeline`` beyond torch's own."""
    script = "import time, torch; a = time.perf_counter(); import pipeline; print(time.perf_counter() - a)"
    runs = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    return Row(name="import pipeline, beyond torch", ours=sorted(runs)[1], unit="s", limit=0.3, asked="under 0.3 s")


def run(scale: float = 1.0) -> list[Row]:
    """Every row; ``scale`` below 1 for a quick look."""
    rows = cost_per_rollout(scale) + growth(scale) + index_costs(scale)
    rows += asyncio.run(save_and_resume(max(100, int(10_000 * scale))))
    rows.append(asyncio.run(latency(max(1.0, 20 * scale))))
    return [*rows, import_time()]

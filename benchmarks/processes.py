"""The cost of a rollout in a worker process, beside what Python and anyio offer for calling a function in one.

Four workers, four callers that each wait for one call at a time, a function that returns at once. Processor time of
this process and of the workers together, since others may share the machine; medians of rounds in which the sides take
turns.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Awaitable, Callable
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import anyio
import anyio.to_process
import psutil

from benchmarks import in_processes
from benchmarks.harness import Endless, Row, times
from pipeline import Context, Item, Pipeline, ProcessEngine, Task

WORKERS = 4
ROUNDS = 5
WARM = 80  # batches


def spent() -> float:
    """Seconds of processor time that this process and those that it started, and that still run, have taken so far."""
    seconds = time.process_time()
    for child in psutil.Process().children():
        try:
            seconds += int(Path(f"/proc/{child.pid}/schedstat").read_text().split()[0]) / 1e9
        except FileNotFoundError:
            continue
    return seconds


async def by_four(count: int, once: Callable[[], Awaitable[Any]]) -> float:
    """Microseconds for each of ``count`` calls, made by as many callers as there are workers."""

    async def caller() -> None:
        for _ in range(count // WORKERS):
            await once()

    begun = spent()
    async with anyio.create_task_group() as group:
        for _ in range(WORKERS):
            group.start_soon(caller)
    return (spent() - begun) / (count // WORKERS * WORKERS) * 1e6


async def of_engine(engine: ProcessEngine, size: int, count: int) -> float:
    """Attempts in the engine's workers, with no pipeline around them."""
    task = Task("nothing", source=Endless(), run=in_processes.rollout)
    item = Item("nothing", 0, 0, 0, size)
    return await by_four(count, lambda: engine.run(task, item, Context(item, 0, 1, 0)))


async def of_anyio(size: int, count: int) -> float:
    """The same function by ``anyio.to_process``."""
    limiter = anyio.CapacityLimiter(WORKERS)
    return await by_four(count, lambda: anyio.to_process.run_sync(in_processes.call, size, limiter=limiter))


def of_pool(pool: Pool, size: int, count: int) -> float:
    """The same function by a pool of :mod:`multiprocessing`, which is given all calls at once."""
    begun = spent()
    for _ in pool.imap_unordered(in_processes.call, [size] * count):
        pass
    return (spent() - begun) / count * 1e6


async def of_pipeline(count: int) -> float:
    """Rollouts of a whole pipeline, once its workers have started."""
    task = Task("nothing", source=Endless(), run=in_processes.nothing)
    engine = ProcessEngine(workers=WORKERS)
    async with Pipeline(task, engine=engine, capacity=256, watchdog=None) as pipe:
        await pipe.start()
        async with anyio.create_task_group() as group:  # all of them at once, so that each has to be there
            for _ in range(WORKERS):
                group.start_soon(engine.call, in_processes.call, 0)
        batches, begun = max(1, count // 64), 0.0
        async for batch in pipe.batches(groups=64, until=WARM + batches):
            if batch.step == WARM:
                begun = spent()
            elif batch.step == WARM + batches:
                return (spent() - begun) / (batches * 64) * 1e6
    raise AssertionError("it ends with its last batch")


async def _rows(scale: float) -> list[Row]:
    rows = []
    names = "anyio.to_process", "multiprocessing.Pool"
    async with ProcessEngine(workers=WORKERS) as engine:
        with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
            for size, count, what in ((0, 2000, "nothing"), (10_000, 1000, "10 KB"), (10 << 20, 60, "10 MB")):
                many = max(WORKERS, int(count * scale))
                sides: list[list[float]] = [[], [], []]
                for _ in range(ROUNDS + 1):
                    sides[0].append(await of_engine(engine, size, many))
                    sides[1].append(await of_anyio(size, many))
                    sides[2].append(of_pool(pool, size, many))
                mine, *others = [each[1:] for each in sides]  # the first round starts the processes
                for name, theirs in zip(names, others, strict=True):
                    rows.append(times(f"a rollout of {what} in a worker", mine, name, theirs, unit="us", most=1.5))
    whole = [await of_pipeline(max(64, int(2000 * scale))) for _ in range(2)]
    rows.append(Row(name="the same in a whole pipeline, of nothing", ours=min(whole), unit="us", limit=1e4, asked=""))
    return rows


def run(scale: float) -> list[Row]:
    """Measure. About 20 seconds at scale 1."""
    return anyio.run(_rows, scale)

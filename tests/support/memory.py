"""What a run takes of memory, measured in a process of its own.

``python -m tests.support.memory WHAT DIRECTORY COUNT``

Prints one JSON object. Sizes are MiB of resident memory; they count pages of files that are mapped.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from pipeline import Context, Item, Pipeline, Ranks, ReplayBuffer, Rollout, TrajectoryBuffer
from pipeline.store.files import OsFiles
from pipeline.testing import VirtualClockLoop
from pipeline.tools import SalvagedEpisodes, SalvagedRows, salvage_run, split
from pipeline.tools.salvaging import SalvagedTrajectories
from tests.support.crashes import Trained, begin, inline_pipeline
from tests.support.ranks import at_once, fine, ranks_of
from tests.support.runs import pipeline, task
from tests.support.salvaging import flip

SIZE = 256  # MiB


def resident(field: str = "VmRSS") -> float:
    """This process's memory now (``VmHWM``: at its highest), in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


@contextmanager
def growth(into: dict[str, float], name: str) -> Iterator[None]:
    """Note how much more than at its beginning the body had at its highest."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = resident()
    yield
    into[name] = resident("VmHWM") - before


class Weights:
    def __init__(self, mib: int) -> None:
        self.weight = torch.ones(mib << 18)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["weight"])


async def large(item: Item, ctx: Context) -> Rollout:
    return Rollout({"x": torch.full((1 << 20,), float(item["n"]))}, reward=0.0)  # 4 MiB


async def of_a_save(directory: str, mib_of_weights: int, groups: int) -> dict[str, float]:
    """The growth at the highest while a generation is made, and while it is loaded."""
    found: dict[str, float] = {}

    def make() -> Pipeline:
        return pipeline(task(groups, large), directory=directory, capacity=groups, concurrency=2)

    async def live() -> None:
        async with make() as pipe:
            await begin(pipe, weights=Weights(mib_of_weights))
            (await pipe.get_batch(groups)).release()
            await pipe._run.outside.written()
            with growth(found, "save"):
                await (await pipe.save(0)).committed()

    async def load() -> None:
        async with make() as pipe:
            pipe.attach(weights=Weights(mib_of_weights))
            with growth(found, "load"):
                found["buffered"] = (await pipe.resume()).buffered

    await live()
    await load()
    return found


async def of_a_long_run(directory: str, steps: int, payload: int) -> dict[str, Any]:
    """Rollouts come ten times faster than they are trained: what is held, what is resident, and what a save takes."""

    async def run(item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(0.01)
        return Rollout({"x": torch.zeros(payload, dtype=torch.uint8)}, reward=0.0)

    kept: dict[str, Any] = {"held": 0, "in flight": 0, "generations": [], "resident": [], "tasks": 0}
    options: dict[str, Any] = {"capacity": 16, "concurrency": 4, "keep": 1, "segment_bytes": 1 << 20}
    source = task(800, run, epochs=None)
    async with inline_pipeline(source, directory=directory, files=OsFiles(), **options) as pipe:
        await begin(pipe, trained=Trained())
        async for batch in pipe.batches(groups=8, until=steps):
            for _ in range(2):
                counts = pipe.statistics()
                kept["held"] = max(kept["held"], counts.groups.claimed - counts.groups.trained)
                kept["in flight"] = max(kept["in flight"], counts.rollouts.in_flight)
                kept["tasks"] = max(kept["tasks"], len(asyncio.all_tasks()))
                await anyio.sleep(0.2)
            if batch.step % 50 == 0:
                saving = await pipe.save(batch.step)
                await saving.committed()
                folder = Path(directory, "generations", f"{saving.generation:08d}")
                kept["generations"].append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
                kept["segments"] = sum(each.stat().st_size for each in Path(directory, "segments").iterdir())
                gc.collect()
                kept["resident"].append(resident())
    return kept


async def of_trivial_tasks(directory: str, count: int) -> dict[str, Any]:
    """Tasks of the event loop, and what Python has allocated after a tenth of the rollouts and after all."""

    async def run(item: Item, ctx: Context) -> Rollout:
        return Rollout(reward=0.0)

    most, sizes = 0, list[int]()
    options: dict[str, Any] = {"concurrency": 8, "capacity": 64, "segment_bytes": 4 << 20}
    source = task(1000, run, epochs=None)
    async with inline_pipeline(source, directory=directory, files=OsFiles(), **options) as pipe:
        await pipe.start()
        steps = count // 32
        async for batch in pipe.batches(groups=32, until=steps):
            most = max(most, len(asyncio.all_tasks()))
            if batch.step in (steps // 10, steps):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    return {"tasks": most, "growth": sizes[1] - sizes[0], "trained": pipe.ledger.totals["numbers"].trained}


def of_transitions(directory: str, row_bytes: int) -> dict[str, float]:
    """The growth at the highest while a replay buffer is saved, and while it is resumed."""
    found: dict[str, float] = {}
    count = (SIZE << 20) // row_bytes
    options: dict[str, Any] = {"directory": directory, "select": "prioritized"}
    with ReplayBuffer(count, **options) as buffer:
        with growth(found, "held"):
            for first in range(0, count, count // 64):
                numbers = np.arange(first, first + count // 64)
                buffer.extend({"x": np.repeat(numbers.astype(np.int32)[:, None], row_bytes // 4, axis=1)})
            buffer.sample(8)
        with growth(found, "save"):
            buffer.save(1, wait=True)
    del buffer
    with ReplayBuffer(count, **options) as buffer, growth(found, "load"):
        found["buffered"] = buffer.resume().rows
    return found


OF_SALVAGE: dict[str, dict[str, Any]] = {
    "salvage": {},
    "salvage shared": {"share_next_obs": True},
    "salvage pool": {"remove": {"by": "lowest_priority"}},
}


def of_a_salvage(directory: str, row_bytes: int, options: dict[str, Any]) -> dict[str, float]:
    """The growth at the highest while a replay buffer is salvaged of which all is whole, and of which some is not."""
    found: dict[str, float] = {}
    count, envs = (SIZE << 20) // row_bytes, 16
    run, size = Path(directory, "run"), count // 64
    with ReplayBuffer(count, directory=run, select="prioritized", **options) as buffer:
        for first in range(0, count, size):
            numbers = np.arange(first, first + size + envs, dtype=np.int32)
            obs = np.repeat(numbers[:, None], row_bytes // 4, axis=1)
            rows: dict[str, Any] = {"obs": obs[:size], "terminated": numbers[:size] // envs % 200 == 199}
            rows |= {"next_obs": obs[envs:]} if "share_next_obs" in options else {}
            buffer.extend(rows, envs=envs)
        buffer.save(1, wait=True)
    del buffer, rows, obs, numbers
    for number, what in enumerate(("whole", "hurt")):
        with growth(found, what):
            made = salvage_run(run, Path(directory, what))
        assert isinstance(made, SalvagedRows)
        found[f"rows {what}"] = made.rows_kept
        path = sorted((run / "segments").iterdir())[number + 1]
        flip(path, path.stat().st_size // 2)
    return found


async def played(run: Path, count: int, row_bytes: int) -> None:
    """So many rows of a buffer that rollouts fill, in 64 blocks; a generation holds half of them."""
    size, half = count // 64, anyio.Event()
    buffer = ReplayBuffer(count, select="prioritized")

    async def play(item: Item, ctx: Context) -> Rollout:
        if item.index >= 32:
            await half.wait()
        obs = np.full((size, row_bytes // 4), item.index, np.int32)
        await ctx.extend({"obs": obs, "terminated": np.arange(size) % 200 == 199})
        return Rollout()

    async with pipeline(task(64, play), buffer=buffer, directory=str(run), concurrency=1) as pipe:
        await pipe.start()
        await pipe._run.state.changed.wait_for(lambda: buffer.ring.added >= count // 2)
        await (await pipe.save(1)).committed()
        half.set()
        await pipe._run.state.changed.wait_for(lambda: buffer.ring.added >= 64 * size and not pipe.ledger.outstanding)


def of_a_salvage_of_episodes(directory: str, row_bytes: int) -> dict[str, float]:
    """The growth at the highest while such a run is salvaged of which all is whole, and of which some is not, and
    while it is split."""
    found: dict[str, float] = {}
    run = Path(directory, "run")
    anyio.run(played, run, (SIZE << 20) // row_bytes, row_bytes)
    with growth(found, "split"):
        found["rows split"] = sum(each.rows for each in split(run, [Path(directory, each) for each in "xy"], count=32))
    for number, what in enumerate(("whole", "hurt")):
        with growth(found, what):
            made = salvage_run(run, Path(directory, what))
        assert isinstance(made, SalvagedEpisodes)
        found[f"rows {what}"] = made.rows_kept
        path = sorted((run / "segments").iterdir())[number + 1]
        flip(path, path.stat().st_size // 2)
    return found


def of_a_salvage_of_trajectories(directory: str, size: int) -> dict[str, float]:
    """The growth at the highest while trajectories of 4 MiB are salvaged, those of one process or of ranks, of which
    all are whole, and of which some are not."""
    found: dict[str, float] = {}
    run = Path(directory, "run")
    kinds = [None] if size < 2 else ranks_of(size)

    def save(ranks: Ranks | None) -> None:
        options: dict[str, Any] = {"cache_size": 2, "sample_window_size": 0, "auto_save": True}
        with TrajectoryBuffer(directory=run, ranks=ranks, **options) as buffer:
            buffer.resume()
            for number in range(SIZE // 4 // len(kinds)):
                buffer.add_trajectories([{"obs": torch.full((64, 16, 1024), float(number))}])
            buffer.save(1, wait=True)

    fine(at_once([partial(save, each) for each in kinds]))
    for number, what in enumerate(("whole", "hurt")):
        with growth(found, what):
            made = salvage_run(run, Path(directory, what))
        assert isinstance(made, SalvagedTrajectories)
        found[f"kept {what}"] = made.trajectories_kept
        path = sorted((run / "segments").iterdir())[number]
        flip(path, path.stat().st_size // 2)
    return found


def of_many_calls(count: int) -> dict[str, Any]:
    """What Python has allocated after a tenth of the calls of each verb, and after all."""
    limiter = {"min_size": 1, "ratio": 1.0, "error_buffer": 8.0}
    buffer = ReplayBuffer(100, select="prioritized", limiter=limiter)
    sizes = list[int]()
    for number in range(count):
        end = number % 7 == 6
        buffer.add(float(number), 0, 1.0, number + 1.0, end, False, env=number % 3)
        batch = buffer.sample(1, n_step=2, gamma=0.5)
        buffer.update_priorities(batch.keys, [1.0 + number % 5])
        if number in (count // 10, count - 1):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    return {"growth": sizes[1] - sizes[0], "added": buffer.statistics().added}


def main(what: str, directory: str, count: int) -> dict[str, Any]:
    if what == "transitions":
        return of_transitions(directory, count)
    if what == "salvage episodes":
        return of_a_salvage_of_episodes(directory, count)
    if what == "salvage trajectories":
        return of_a_salvage_of_trajectories(directory, count)
    if what in OF_SALVAGE:
        return of_a_salvage(directory, count, OF_SALVAGE[what])
    if what == "calls":
        tracemalloc.start()
        return of_many_calls(count)
    if what == "buffer":
        return anyio.run(of_a_save, directory, 1, SIZE // 4)
    if what == "trainer":
        return anyio.run(of_a_save, directory, SIZE, 1)
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        if what == "steps":
            return runner.run(of_a_long_run(directory, count, 8000))
        tracemalloc.start()
        return runner.run(of_trivial_tasks(directory, count))


if __name__ == "__main__":
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the log goes there
    found = main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    os.write(1, json.dumps(found).encode())

"""A script whose trainer runs in one task or another: ``python -m tests.support.stop_shapes SHAPE DIRECTORY``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import anyio

from pipeline import Pipeline
from tests.support.crashes import Trained
from tests.support.signalled import made


async def trainer(pipe: Pipeline) -> None:
    """Train; at step 2 the launcher sends SIGTERM."""
    trained = Trained()
    pipe.attach(trained=trained)
    async with pipe.weight_update(version=(await pipe.resume()).version):
        pass
    await pipe.start()
    async for batch in pipe.batches(groups=4):
        trained.step(batch)
        if batch.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


async def main(shape: str, directory: str) -> None:
    """Run the trainer as the shape says."""
    async with made(directory) as pipe:
        if shape == "plain":
            await trainer(pipe)
        elif shape == "gather":
            await asyncio.gather(trainer(pipe), anyio.sleep_forever())
        elif shape == "asyncio group":
            async with asyncio.TaskGroup() as group:
                group.create_task(trainer(pipe))
                group.create_task(anyio.sleep_forever())
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(trainer, pipe)
                tasks.start_soon(anyio.sleep_forever)


async def inside(directory: str) -> None:
    """The pipeline itself is opened in a child task."""
    async with asyncio.TaskGroup() as group:
        group.create_task(main("anyio group", directory))
        group.create_task(anyio.sleep_forever())


if __name__ == "__main__":
    given: Any = sys.argv[1:]
    if given[0] == "inside":
        asyncio.run(inside(given[1]))
    elif given[0] in ("trio", "trio group"):
        anyio.run(main, "plain" if given[0] == "trio" else "group", given[1], backend="trio")
    elif given[0] == "anyio group":
        anyio.run(main, *given)
    else:
        asyncio.run(main(*given))

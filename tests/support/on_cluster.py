"""What Ray actors run in tests, and a training process that is made to be killed."""

from __future__ import annotations

import asyncio
import os
import threading
from multiprocessing.connection import Connection
from typing import Any

import anyio
import numpy as np

from pipeline import Context, Item, Rollout
from tests.support.in_workers import number

LOCAL = {"num_cpus": 4, "object_store_memory": 200 << 20, "log_to_driver": False}
"""A small Ray of this machine."""


async def where_async(item: Item, ctx: Context) -> Rollout:
    """A number, and which actor made it, which takes a moment."""
    await anyio.sleep(0.02)
    made = number(item, ctx)
    return Rollout(made.traces, made.reward, {"pid": os.getpid(), "attempt": ctx.attempt})


class Gate:
    """An actor, on the first node, at which attempts wait until somebody opens it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._full, self._open = asyncio.Event(), asyncio.Event()

    async def through(self) -> None:
        """Wait until it is open."""
        self._count -= 1
        if not self._count:
            self._full.set()
        await self._open.wait()

    async def full(self) -> None:
        """Wait until as many wait as were announced."""
        await self._full.wait()

    def open(self) -> None:
        """Let all of them go on."""
        self._open.set()


async def held_async(item: Item, ctx: Context) -> Rollout:
    """As :func:`where_async`, but the first attempts at items 20 to 27 wait at the gate."""
    if 20 <= item.index < 28 and ctx.attempt == 1:
        import ray

        await ray.get_actor("gate").through.remote()
    return await where_async(item, ctx)


async def walk(item: Item, ctx: Context) -> Rollout:
    """Two blocks of three rows of one episode, which say whose they are, and their place."""
    for part in range(2):
        await anyio.sleep(0.01)
        place = np.arange(3 * part, 3 * part + 3)
        rows = {"obs": np.stack([np.full(3, item.index), place], 1).astype(np.float32), "terminated": place == 5}
        await ctx.extend(rows)
    return Rollout(reward=float(item.index))


def deaf(item: Item, ctx: Context) -> Rollout:
    """Hears of nothing at its first try."""
    if ctx.attempt == 1:
        threading.Event().wait()
    return number(item, ctx)


def trainer(pipe: Connection, directory: str, count: int, address: str) -> None:
    """The process's main function: trains in actors until every item has been trained."""
    from pipeline import RayEngine
    from tests.support import killed_workers

    engine: Any = RayEngine(actors=1, per_actor=4, address=address, init={"log_to_driver": False})
    tally = anyio.run(lambda: killed_workers.train(directory, count, engine, pipe.send, where_async))
    pipe.send(("seen", tally.seen.tolist()))

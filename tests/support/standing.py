"""Processes whose runs are looked at from outside: each says where it is, and waits to be told or killed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import anyio
import numpy as np

from pipeline import Context, Item, ReplayBuffer, Rollout, TrajectoryBuffer
from pipeline.replay.folder_verbs import FolderVerbs
from pipeline.store.lock import RunLock, look
from tests.support.runs import pipeline, task
from tests.support.trajectories import trajectory


async def half_ends(item: Item, ctx: Context) -> Rollout:
    """The first twenty items end at once, the others never."""
    if item["n"] >= 20:
        await anyio.sleep_forever()
    return Rollout({"n": [item["n"]]}, reward=0.0)


def train(
    pipe: Connection, directory: str, until: int = 2, count: int = 40, word: str = "", durability: str = "kill"
) -> None:
    """Train and save up to a step, say so, and do as told: ``go on`` until the source ends, ``raise``, or leave."""
    with pipeline(task(count, half_ends), directory=directory, durability=durability).sync() as run:
        with run.weight_update(version=run.resume().version):
            pass
        run.start()
        for batch in run.batches(groups=4, until=until):
            run.save(batch.step).committed()
        pipe.send("saved")
        word = word or pipe.recv()
        if word == "raise":
            raise ValueError("the trainer's own \udcff")
        if word == "wait":
            for _ in run.batches(groups=4):  # what never comes: here a signal is heard
                pass


def made(kind: str, directory: str, **options: Any) -> FolderVerbs:
    if kind == "trajectories":
        return TrajectoryBuffer(directory=directory, **options)
    return ReplayBuffer(100, directory=directory, **options)


def add(buffer: Any, number: int) -> None:
    """Add a trajectory, or ten rows."""
    if isinstance(buffer, TrajectoryBuffer):
        buffer.add_trajectories([trajectory(number)])
    else:
        buffer.extend({"n": np.arange(10) + 10 * number})


def fill(pipe: Connection, directory: str, kind: str) -> None:
    """Fill a buffer and save it, say so, and save again when told to; leave without ``close`` if that is the word."""
    buffer: Any = made(kind, directory)
    begin = buffer.resume().step
    for step in (begin + 1, begin + 2):
        add(buffer, step)
        buffer.save(step, wait=True)
    pipe.send("saved")
    if pipe.recv() == "leave":
        return
    with buffer:
        add(buffer, 9)
        if buffer.save_due():
            pipe.send("asked")
        buffer.save(begin + 3, wait=True)
        raise ValueError("the learner's own")


def holds(pipe: Connection, path: str) -> None:
    """Take a lock, look at it in every way there is, and wait."""
    lock = RunLock(path)
    lock.acquire()
    before = look(path)
    lock.describe(7)
    pipe.send((before, look(path)))
    pipe.recv()
    lock.release()
    pipe.send(look(path))
    pipe.recv()


def begins(pipe: Connection, directory: str) -> None:
    """A buffer that is killed before it saves anything."""
    with ReplayBuffer(100, directory=directory) as buffer:
        buffer.resume()
        pipe.send("resumed")
        pipe.recv()

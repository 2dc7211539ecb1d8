"""Pipelines whose runners are in worker processes, for tests."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import anyio

from pipeline import Context, Item, Pipeline, ProcessEngine, Rollout, Task
from tasks import SequenceSource
from tests.support import in_workers
from tests.support.runs import numbers, pipeline


def runner(name: str, kind: str = "") -> Any:
    """A runner of ``in_workers``; ``kind`` is what its name ends with."""
    return getattr(in_workers, name + kind)


def engine(workers: int = 1, per_worker: int | None = None, **more: Any) -> ProcessEngine:
    """An engine of few workers."""
    return ProcessEngine(workers=workers, per_worker=per_worker, **more)


def items(*contents: Any) -> SequenceSource:
    """A source of these items."""
    return SequenceSource(list(contents))


async def rollouts(pipe: Pipeline, groups: int = 4) -> list[Rollout]:
    """Train everything there is, and return it in the order of the items."""
    found = {}
    async for batch in pipe.batches(groups=groups):
        for group in batch:
            found[group.uid] = list(group)
    pipe.ledger.check()
    return [rollout for uid in sorted(found) for rollout in found[uid]]


async def run_all(given: Task | list[Task], where: ProcessEngine | None, **more: Any) -> list[Rollout]:
    """Run tasks to their end; see :func:`rollouts`."""
    async with pipeline(given, engine=where, **more) as pipe:
        await pipe.start()
        return await rollouts(pipe)


async def one(where: ProcessEngine, run: Any, content: Any = None, **more: Any) -> Rollout:
    """One attempt with no run around it."""
    item = Item("one", 0, 0, 0, content)
    given = Task("one", source=numbers(1), run=run, **more)
    return await where.run(given, item, Context(item, 0, 1, 0))


def gone(pid: int) -> bool:
    """Whether there is no such process, or nothing but its exit code."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def end_of(pid: int) -> None:
    """Return when a process has ended, whoever's it is."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with anyio.fail_after(30):
            await anyio.wait_readable(handle)
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)

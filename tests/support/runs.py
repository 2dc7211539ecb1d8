"""Small tasks and pipelines for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from pipeline import Context, Item, Pipeline, Rollout, Task
from tasks import SequenceSource

Runner = Callable[[Item, Context], Awaitable[Rollout]]
AnyRunner = Runner | Callable[[Item, Context], Rollout] | str


def numbers(count: int) -> SequenceSource:
    """A source of ``{"n": i}``."""
    return SequenceSource([{"n": number} for number in range(count)])


async def solve(item: Item, ctx: Context) -> Rollout:
    """A rollout that takes 1 ms and whose reward is the item's number."""
    await anyio.sleep(0.001)
    return Rollout({"n": [item["n"]]}, reward=float(item["n"]))


def task(count: int = 12, run: AnyRunner = solve, name: str = "numbers", **more: Any) -> Task:
    """A task of ``count`` items, in their own order unless ``shuffle=True``."""
    more.setdefault("shuffle", False)
    return Task(name, source=numbers(count), run=run, **more)


def pipeline(tasks: Task | list[Task] | None = None, **options: Any) -> Pipeline:
    """A pipeline with the watchdog off."""
    options.setdefault("watchdog", None)
    return Pipeline(tasks if tasks is not None else task(), **options)


def ids(batch: Any) -> list[int]:
    """The items' indices of a batch, in order."""
    return [group.index for group in batch]

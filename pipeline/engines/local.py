"""Runs attempts as tasks of this process, and keeps their resources open.

A resource is entered and left in a task of its own: an async context manager may hold a cancel scope, which must be
left in the task that entered it, and workers come and go.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import anyio
import anyio.abc

from pipeline.errors import RunnerError
from pipeline.records import Item, Rollout
from pipeline.task import Task


class LocalEngine:
    """The default engine; implements :class:`pipeline.interfaces.Engine`."""

    def __init__(self) -> None:
        self._group: anyio.abc.TaskGroup | None = None
        self._shared: dict[str, Any] = {}
        self._opening: dict[str, anyio.Lock] = {}
        self._free: dict[str, list[Any]] = {}
        self._closing = anyio.Event()

    async def __aenter__(self) -> LocalEngine:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        assert self._group is not None
        # Resources are closed, not cancelled: each leaves its own `async with` in its own task.
        self._closing.set()
        return await self._group.__aexit__(*exc)

    def run(self, task: Task, item: Item, ctx: Any) -> Awaitable[Rollout]:
        """Run one attempt in the calling task."""
        return task.run(item, ctx) if task.resource is None else self._run_with_resource(task, item, ctx)

    async def _run_with_resource(self, task: Task, item: Item, ctx: Any) -> Rollout:
        given = task.resource
        # Asked first: what @asynccontextmanager makes is callable too, as a decorator.
        if hasattr(given, "__aenter__") and not isinstance(given, type):
            ctx.resource = await self._shared_resource(task.name, given)
            return await task.run(item, ctx)
        free = self._free.setdefault(task.name, [])
        ctx.resource = free.pop() if free else await self._open(task.name, given())
        try:
            rollout = await task.run(item, ctx)
        finally:
            free.append(ctx.resource)
        return rollout

    async def _shared_resource(self, name: str, manager: Any) -> Any:
        if name not in self._shared:
            lock = self._opening.setdefault(name, anyio.Lock())
            async with lock:
                if name not in self._shared:
                    self._shared[name] = await self._open(name, manager)
        return self._shared[name]

    async def _open(self, name: str, manager: Any) -> Any:
        assert self._group is not None
        if not hasattr(manager, "__aenter__"):
            raise RunnerError(f"task {name!r}: resource() returned {manager!r}, which is no async context manager")
        opened = await self._group.start(self._hold, manager, name=f"forebay resource of {name}")
        if isinstance(opened, _NotOpened):
            raise opened.error
        return opened

    async def _hold(self, manager: Any, *, task_status: anyio.abc.TaskStatus[Any]) -> None:
        opened = False
        try:
            # No scope of ours around it: the manager may hold one of its own from its entry to its exit.
            async with manager as resource:
                opened = True
                task_status.started(resource)
                await self._closing.wait()
        except Exception as error:
            if opened:
                raise
            # The attempt that asked for it fails, under its task's policy; the engine goes on.
            task_status.started(_NotOpened(error))


class _NotOpened:
    def __init__(self, error: Exception) -> None:
        self.error = error

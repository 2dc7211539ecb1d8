"""Runs attempts as tasks of this process, and keeps their resources open.

A resource is entered and left in a task of its own: an async context manager may hold a cancel scope, which must be
left in the task that entered it, and workers come and go.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Sequence
from typing import Any

import anyio
import anyio.abc

from pipeline.errors import ConfigError, RunnerError
from pipeline.records import Item, Rollout
from pipeline.task import Task


class LocalEngine:
    """The default engine; implements :class:`pipeline.interfaces.Engine`."""

    def __init__(self) -> None:
        self._group: anyio.abc.TaskGroup | None = None
        # By the manager itself: tasks that name one object share what it opened, as it can be entered only once.
        self._shared: dict[int, Any] = {}
        self._opening: dict[int, anyio.Lock] = {}
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
        return await leave(self._group, *exc)

    def check(self, task: Task) -> None:
        """Refuse what has to be run elsewhere.

        Raises:
            ConfigError: the task's runner is no async function.
        """
        if not is_async(task.run):
            raise ConfigError(
                f"task {task.name!r}: run={task.run!r} must be an async function of (item, ctx); a plain function can "
                "be wrapped with threaded(), or run in worker processes, by Pipeline(..., engine=ProcessEngine())",
                option="run",
            )
        if isinstance(task.resource, str):
            raise ConfigError(
                f"task {task.name!r}: resource={task.resource!r}: names are for runners in worker processes; give the "
                "function itself",
                option="resource",
            )

    def slots(self, tasks: Sequence[Task]) -> int | None:
        """Return None: any number."""
        return None

    def run(self, task: Task, item: Item, ctx: Any) -> Awaitable[Rollout]:
        """Run one attempt in the calling task."""
        return task.run(item, ctx) if task.resource is None else self._run_with_resource(task, item, ctx)

    async def _run_with_resource(self, task: Task, item: Item, ctx: Any) -> Rollout:
        given = task.resource
        # Asked first: what @asynccontextmanager makes is callable too, as a decorator.
        if hasattr(given, "__aenter__") and not isinstance(given, type):
            ctx.resource = await self._shared_resource(task.name, given)
            shared: Rollout = await task.run(item, ctx)
            return shared
        free = self._free.setdefault(task.name, [])
        ctx.resource = free.pop() if free else await self._open(task.name, given())
        try:
            rollout: Rollout = await task.run(item, ctx)
        finally:
            free.append(ctx.resource)
        return rollout

    async def _shared_resource(self, name: str, manager: Any) -> Any:
        key = id(manager)  # its task holds it as long as this engine is open
        if key not in self._shared:
            lock = self._opening.setdefault(key, anyio.Lock())
            async with lock:
                if key not in self._shared:
                    self._shared[key] = await self._open(name, manager)
        return self._shared[key]

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


def is_async(function: Any) -> bool:
    """Whether what a function returns is to be awaited."""
    called = function if inspect.isroutine(function) or not callable(function) else function.__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def backend() -> str:
    """What runs the event loop around the caller."""
    return "trio" if anyio.get_cancelled_exc_class().__module__.startswith("trio") else "asyncio"


async def leave(group: anyio.abc.TaskGroup, *exc: Any) -> bool | None:
    """Leave a task group; an error of the body goes on as it is, and in no group of exceptions."""
    if exc[1] is None or isinstance(exc[1], anyio.get_cancelled_exc_class()):
        return await group.__aexit__(*exc)
    await group.__aexit__(None, None, None)
    return None


class _NotOpened:
    def __init__(self, error: Exception) -> None:
        self.error = error

"""Plain functions as runners."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import anyio
import anyio.to_thread

from pipeline.errors import ConfigError
from pipeline.records import Item, Rollout

PlainRunner: TypeAlias = Callable[[Item, Any], Rollout]
AsyncRunner: TypeAlias = Callable[[Item, Any], Coroutine[Any, Any, Rollout]]  # a pipeline.interfaces.Runner


def threaded(function: PlainRunner, *, abandon_on_cancel: bool = False) -> AsyncRunner:
    """Return a runner that calls a plain ``def function(item, ctx) -> Rollout`` in a worker thread.

    ::

        @threaded
        def solve(item, ctx):
            return Rollout({"answer": slow(item["question"])}, reward=1.0)

    Each attempt in flight has a thread of its own: the pipeline's ``concurrency`` is the limit, not anyio's
    default of 40. Inside, ``anyio.from_thread.run(async_function, ...)`` calls what is asynchronous (``ctx``'s
    asynchronous methods too) and ``anyio.from_thread.check_cancelled()`` ends a function that was told to stop.

    Args:
        function: what to run. An error that it raises is the attempt's error.
        abandon_on_cancel: a thread cannot be stopped from outside. False: an attempt that is cut (a timeout, the
            end of the run) ends when its function returns, so that two never use one ``ctx.resource`` at once.
            True: the attempt ends at once, and the thread goes on unseen until its function returns.

    Raises:
        ConfigError: ``function`` is asynchronous already.
    """
    call = getattr(function, "__call__", None)  # noqa: B004  an object's own, where it is no function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(f"{name} is asynchronous already: give it to the task as it is", option="function")

    @functools.wraps(function)
    async def run(item: Item, ctx: Any) -> Rollout:
        own = anyio.CapacityLimiter(1)  # a limiter of one's own is no limit, whatever else uses threads
        return await anyio.to_thread.run_sync(function, item, ctx, limiter=own, abandon_on_cancel=abandon_on_cancel)

    return run

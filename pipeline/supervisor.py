"""The one task that is not inside a task group: it owns the one that all others are in.

So a pipeline can be opened in one task and closed in another (a pytest-asyncio fixture), which a task group of the
caller's would not allow. Its errors are kept, and raised where somebody can catch them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio


class Supervisor:
    """Runs ``body(ready)`` in a task of its own, until it returns or :meth:`stop` is called.

    ``body`` calls ``ready()`` once it can be used, and waits on :attr:`stopping`.
    """

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self.stopping = anyio.Event()
        self._name = name
        self._ready = anyio.Event()
        self._done = anyio.Event()
        self._task: Any = None

    async def start(self, body: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Start the task and return once it is ready.

        Raises:
            BaseException: whatever ended ``body`` before it was ready.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            import trio  # the only other backend of anyio

            self._task = trio.lowlevel.spawn_system_task(self._run, body, name=self._name)
        else:
            self._task = loop.create_task(self._run(body), name=self._name)
        try:
            await self._ready.wait()
        except BaseException:
            await self.stop()
            raise
        if self._done.is_set() and self.error is not None:
            raise self.error

    async def _run(self, body: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        try:
            await body(self._ready.set)
        except Exception as error:
            self.error = root_cause(error)
        finally:
            self._ready.set()
            self._done.set()

    async def stop(self) -> None:
        """Ask the task to end and wait until it has, even if the caller is being cancelled."""
        self.stopping.set()
        with anyio.CancelScope(shield=True):
            await self._done.wait()

    @property
    def ended(self) -> bool:
        """Whether the task has ended."""
        return self._done.is_set()


def root_cause(error: BaseException) -> BaseException:
    """Return the first error inside nested groups: what a person wants to read first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

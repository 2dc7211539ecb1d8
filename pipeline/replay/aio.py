"""The same buffer for tasks: every verb awaitable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import anyio
import anyio.to_thread
from numpy.typing import ArrayLike

from pipeline.buffer.transitions.batch import TransitionBatch
from pipeline.buffer.transitions.columns import Rows
from pipeline.checkpoint.triggers import exit_by_code
from pipeline.errors import Stopped, StoppedExit, TimedOut, UsageError
from pipeline.replay.folder_verbs import FolderVerbs
from pipeline.replay.heavy import heavy_extend, heavy_keys, heavy_rows, heavy_sample
from pipeline.replay.saving import ReplayResumed
from pipeline.replay.store import Saving
from pipeline.replay.write_back import WrittenBack

if TYPE_CHECKING:
    from pipeline.replay.buffer import ReplayBuffer, Updated

T = TypeVar("T")


class AsyncFolderVerbs:
    """The verbs of any buffer with a folder, for tasks."""

    def __init__(self, buffer: FolderVerbs) -> None:
        self._buffer = buffer

    async def save(self, step: int, *, wait: bool = False) -> Saving:
        """Commit; see :meth:`~pipeline.ReplayBuffer.save`. What is attached is read while this is awaited."""
        self._buffer.listen()
        try:
            return await anyio.to_thread.run_sync(partial(self._buffer.save, step, wait=wait))
        except StoppedExit as stopped:  # from within a task, a SystemExit would tear the loop down
            exit_by_code()
            raise Stopped(stopped.code, stopped.reason, stopped.step, stopped.generation) from None

    async def aclose(self) -> None:
        """Wait for what is being written, and give the folder back."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._buffer.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncReplayBuffer(AsyncFolderVerbs):
    """The verbs of a :class:`~pipeline.ReplayBuffer` for tasks of any event loop, several of them if need be.

    ::

        async with buffer.aio as replay:
            await replay.extend(rows)
            batch = await replay.sample(256)

    They take the arguments of the verbs of the same names, but for ``timeout``: what the limiter holds back waits until
    it is let in, or cancelled (``anyio.fail_after``), and then nothing was changed. Files, and what takes long, are
    left to worker threads: many or large rows, slices, conditions, relabelled goals, the first rows of an order in a
    large buffer; and whatever comes while such a thread, or another process, has the buffer's lock.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        super().__init__(buffer)
        self.buffer = buffer

    async def extend(self, rows: Rows, **more: Any) -> Sequence[int]:
        """Add rows; see :meth:`~pipeline.ReplayBuffer.extend`."""
        work = partial(self.buffer.extend, rows, **_at_once(more))
        return await self._let_in(work, heavy=heavy_extend(self.buffer, rows, more.get("env", 0)))

    async def append(self, row: Rows, **more: Any) -> int:
        """Add one row; see :meth:`~pipeline.ReplayBuffer.append`."""
        work = partial(self.buffer.append, row, **_at_once(more))
        return await self._let_in(work, heavy=heavy_keys(row))

    async def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        info: Any = None,
        **more: Any,
    ) -> Sequence[int]:
        """Add the rows of a step; see :meth:`~pipeline.ReplayBuffer.add`."""
        step = (obs, action, reward, next_obs, terminated, truncated, info)
        work = partial(self.buffer.add, *step, **_at_once(more))
        return await self._let_in(work, heavy=heavy_keys((*step, more.get("extras"))))

    async def sample(self, count: int, **more: Any) -> TransitionBatch:
        """Return a batch; see :meth:`~pipeline.ReplayBuffer.sample`."""
        work = partial(self.buffer.sample, count, **_at_once(more))
        return await self._let_in(work, heavy=heavy_sample(self.buffer, count, more))

    async def update_priorities(self, keys: ArrayLike, priorities: Any) -> Updated:
        """Set priorities; see :meth:`~pipeline.ReplayBuffer.update_priorities`."""
        work = partial(self.buffer.update_priorities, keys, priorities)
        return await self._do(work, heavy=heavy_keys(keys, priorities))

    async def write_back(self, keys: ArrayLike, columns: Rows, **more: Any) -> WrittenBack:
        """Set columns; see :meth:`~pipeline.ReplayBuffer.write_back`."""
        work = partial(self.buffer.write_back, keys, columns, **more)
        return await self._do(work, heavy=heavy_keys(keys) or heavy_rows(columns))

    async def resume(
        self,
        step: int | None = None,
        *,
        continue_episodes: bool = False,
        verify: Literal["full", "lazy"] = "full",
        **more: Any,
    ) -> ReplayResumed:
        """Go on; see :meth:`~pipeline.ReplayBuffer.resume`."""
        self.buffer.listen()
        resume = partial(self.buffer.resume, step, continue_episodes=continue_episodes, verify=verify, **more)
        return await anyio.to_thread.run_sync(resume)

    async def _let_in(self, work: Callable[[], T], *, heavy: bool) -> T:
        """Do ``work`` once the limiter lets it; somebody else may be quicker, and then it waits on."""
        while True:
            try:
                return await self._do(work, heavy=heavy)
            except TimedOut as error:
                may = error.may
            await self.buffer.gate.wait_for(may)

    async def _do(self, work: Callable[[], T], *, heavy: bool) -> T:
        """Do ``work`` here, where a thread would cost more, unless it is heavy or would have to wait for the lock."""
        lock = self.buffer.gate.lock
        if heavy or not lock.acquire(blocking=False):
            return await anyio.to_thread.run_sync(work)
        with ExitStack() as held:
            held.push(lock)
            return work()


def _at_once(more: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a verb that is not to wait by itself.

    Raises:
        UsageError: it is told how long to wait.
    """
    if "timeout" in more:
        raise UsageError("timeout= is for threads: here anyio.fail_after() says how long to wait")
    return more | {"timeout": 0}

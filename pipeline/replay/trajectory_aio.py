"""The same buffer of trajectories for tasks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from pipeline.replay.aio import AsyncFolderVerbs
from pipeline.replay.saving import ReplayResumed
from pipeline.replay.trajectory_loading import Verify

if TYPE_CHECKING:
    from pipeline.replay.trajectories import TrajectoryBuffer


class AsyncTrajectoryBuffer(AsyncFolderVerbs):
    """The verbs of a :class:`~pipeline.TrajectoryBuffer` that take a while, for tasks: worker threads do them.

    ::

        async with buffer.aio as replay:
            await replay.add_trajectories(trajectories)
            batch = await replay.sample(256)
    """

    def __init__(self, buffer: TrajectoryBuffer) -> None:
        super().__init__(buffer)
        self.buffer = buffer

    async def add_trajectories(self, trajectories: Iterable[Any]) -> range:
        """Add trajectories; see :meth:`~pipeline.TrajectoryBuffer.add_trajectories`. Cancelled, it is done all the
        same."""
        return await anyio.to_thread.run_sync(self.buffer.add_trajectories, list(trajectories))

    async def sample(self, num_chunks: int, **more: Any) -> dict[str, Any]:
        """Return a batch; see :meth:`~pipeline.TrajectoryBuffer.sample`."""
        return await anyio.to_thread.run_sync(partial(self.buffer.sample, num_chunks, **more))

    async def resume(self, step: int | None = None, *, verify: Verify = "full", **more: Any) -> ReplayResumed:
        """Go on; see :meth:`~pipeline.TrajectoryBuffer.resume`."""
        self.buffer.listen()
        return await anyio.to_thread.run_sync(partial(self.buffer.resume, step, verify=verify, **more))

"""The asynchronous shell around :class:`StoreWriter`: one task that writes whatever has been queued, in a thread.

Each turn takes all that is queued, so that the busier the run the larger the writes. A failed write ends the task
with the error: the supervisor hands it to whoever waits, and every later verb raises it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

import anyio
import anyio.to_thread

from pipeline.store.journal import JournalPosition
from pipeline.store.segments import SegmentInfo
from pipeline.store.writer import StoreWriter, WriteBatch
from pipeline.waiting import Signal

T = TypeVar("T")
RunBlocking = Callable[[Callable[[], T]], Awaitable[T]]


class WriterService:
    """Drives a writer from the event loop."""

    def __init__(self, writer: StoreWriter, *, synced: bool = False, inline: bool = False, eager: bool = False) -> None:
        """Args:
        writer: what to drive.
        synced: what is written survives a loss of power, as far as :meth:`keep_synced` runs; what is closed does.
        inline: write on the loop itself. For tests on a virtual clock, which leaps while a thread is busy.
        eager: and each event at once, in a record of its own: for tests that cut the run at every event.
        """
        self.writer = writer
        self._synced, self._inline, self._eager = synced, inline, eager
        self._threads = anyio.CapacityLimiter(1)
        self._lock = anyio.Lock(fast_acquire=True)
        self._parked: anyio.Event | None = None
        self._room, self._wrote = Signal(), Signal()
        self._in_files = threading.Lock()
        self._taken: deque[WriteBatch] = deque()
        self._written: deque[WriteBatch] = deque()

    def notify(self) -> None:
        """Wake the writing task, after something was appended."""
        if self._eager and not self._taken:
            self._taken.append(self.writer.take())
            self._write_taken()
            self.writer.done(self._written.popleft())
            self._wrote.notify()
            return
        if self._parked is not None:
            self._parked.set()
            self._parked = None

    async def run(self) -> NoReturn:
        """Write what comes, for ever.

        Raises:
            WriteFailed: something could not be written.
        """
        while True:
            while not self._anything():
                self._parked = anyio.Event()
                await self._parked.wait()
            await self.flush()

    async def keep_synced(self, *, seconds: float = 1.0, most: int = 64 << 20) -> NoReturn:
        """Sync what has been written, at the latest ``seconds`` after that and after ``most`` bytes; for ever.

        Raises:
            WriteFailed: something could not be synced.
        """
        writer = self.writer
        while True:
            await self._wrote.wait_for(lambda: writer.unsynced_bytes)
            with anyio.move_on_after(seconds):
                await self._wrote.wait_for(lambda: writer.unsynced_bytes >= most)
            if writer.unsynced_bytes:  # a generation may have done it meanwhile
                await self._sync_written()

    async def _sync_written(self) -> tuple[JournalPosition, list[SegmentInfo]]:
        async with self._lock:
            with anyio.CancelScope(shield=True):
                synced = await self._blocking(self.writer.sync)
        return synced

    async def room(self) -> None:
        """Wait until the queue has room: back-pressure for producers."""
        await self._room.wait_for(lambda: not self.writer.full)

    async def flush(self) -> None:
        """Write everything that was queued before this call.

        Raises:
            WriteFailed: it could not be written.
        """
        try:
            async with self._lock:
                while self._anything():
                    # Taken means owned: it stays here until it is written, whoever is cancelled meanwhile. A shield
                    # does not stop asyncio's own `task.cancel()` (`wait_for`): the next flush then goes on with it.
                    if not self.writer.idle:
                        self._taken.append(self.writer.take())
                    with anyio.CancelScope(shield=True):
                        await self._blocking(self._write_taken)
                    while self._written:
                        self.writer.done(self._written.popleft())
                    self._room.notify()
                    self._wrote.notify()
        except BaseException:
            self.notify()
            raise

    def _anything(self) -> bool:
        return bool(self._taken or self._written) or not self.writer.idle

    def _write_taken(self) -> None:
        while self._taken:
            self.writer.write(self._taken[0])
            self._written.append(self._taken.popleft())

    async def sync(self) -> tuple[JournalPosition, list[SegmentInfo]]:
        """Write everything queued and make it survive a loss of power."""
        await self.flush()
        return await self._sync_written()

    async def close(self) -> None:
        """Write what is queued, seal the segment and close the files; call it shielded."""
        try:
            if self.writer.error is None:
                await self.flush()
            if self._synced and self.writer.error is None and self.writer.unsynced_bytes:
                await self._sync_written()
        finally:
            async with self._lock:
                await self._blocking(self.writer.close)

    async def _blocking(self, work: Callable[[], T]) -> T:
        if self._inline:
            return work()
        return await anyio.to_thread.run_sync(lambda: self._alone(work), limiter=self._threads)

    def _alone(self, work: Callable[[], T]) -> T:
        # The thread of a call that was cancelled may still be writing.
        with self._in_files:
            return work()

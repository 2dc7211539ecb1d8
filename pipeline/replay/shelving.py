"""Trajectories on their way to the disk, beside the training.

They are written in the order of their numbers, each once, by one thread at a time, which ends when there is nothing
left to write. What leaves the memory is there for good before that: so that what a failed sync leaves in doubt is
written again. What fails is kept, and raised once by the next verb that asks; then it is tried again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from pipeline.buffer.transitions.recycling import Recycler
from pipeline.errors import WriteFailed
from pipeline.replay.gate import Gate
from pipeline.replay.job import Listing, Piece
from pipeline.replay.shelf import DATA, KEY, Shelf, live_bytes
from pipeline.replay.state import encode_state
from pipeline.replay.store import ReplayStore
from pipeline.replay.trajectory_blobs import BlobLayout
from pipeline.replay.trajectory_state import STATE_FILE, TrajectoryState, to_values
from pipeline.store.layout import SegmentKey
from pipeline.store.segments import Block

QUEUE_BYTES = 256 << 20
"""How much may wait to be written before whoever adds waits too."""
_LEAST_SYNC, _MOST_SYNC = 1 << 20, 64 << 20
_AT_ONCE = 16 << 20  # bytes that are written before a save may have its turn


class Shelving:
    """Writes what leaves the memory of one buffer, or all of it."""

    def __init__(
        self, gate: Gate, store: ReplayStore | None, shelf: Shelf, let_go: weakref.WeakMethod[Callable[[], None]]
    ) -> None:
        """Args:
        gate: the buffer's lock.
        store: its folder.
        shelf: its trajectories.
        let_go: lets go in memory what may go, as long as there is a buffer; the lock is held.
        """
        self.queue_bytes = QUEUE_BYTES
        self.wanted = 0
        """Trajectories before this are to be written."""
        self.shelf = shelf
        """The buffer's trajectories as they are now."""
        self._gate, self._store, self._let_go = gate, store, let_go
        self._memory = Recycler()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def let_go(self) -> None:
        """Let go in memory what may go; the lock is held."""
        let_go = self._let_go()
        if let_go is not None:
            let_go()

    # -- the buffer's side: the lock is held -------------------------------------------------------------------

    def want(self, upto: int) -> None:
        """Have the trajectories before ``upto`` written, soon."""
        self.wanted = max(self.wanted, upto)
        if self._store is not None and self._thread is None and self._error is None and self._due(self.shelf):
            thread = threading.Thread(target=self._run, args=(self._store,), name="forebay shelving")
            self._thread = thread
            try:
                thread.start()  # it waits for the lock
            except RuntimeError as error:
                self._thread, self._error = None, WriteFailed(f"no thread could be started: {error}")

    def _due(self, shelf: Shelf) -> bool:
        upto = min(self.wanted, shelf.next)
        return shelf.due(upto) < upto

    @property
    def queued_bytes(self) -> int:
        """Bytes of rows that wait to be written."""
        shelf = self.shelf
        upto = min(self.wanted, shelf.next)
        first = shelf.due(upto)
        return (shelf.start(upto) - shelf.start(first)) * shelf.storage.row_bytes if first < upto else 0

    def wait_for_room(self) -> None:
        """Wait while too much is queued.

        Raises:
            ClosedError: the buffer was closed meanwhile.
        """
        if self._thread is not None:
            self._gate.wait(self._has_room, None, lambda: "the disk is behind")

    def _has_room(self) -> bool:
        return self._error is not None or self.queued_bytes < self.queue_bytes

    def raise_failed(self) -> None:
        """Raise what writing failed with, once.

        Raises:
            WriteFailed: trajectories could not be written; they are in memory still, and it will be tried again.
        """
        with self._gate.lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def used(self) -> frozenset[SegmentKey]:
        """Return the segments in which something lies that the buffer has; the lock is held."""
        return self.shelf.segments()

    def join(self) -> None:
        """Wait until nothing is being written; the lock is not held."""
        thread = self._thread
        if thread is not None:
            thread.join()

    # -- the writing side --------------------------------------------------------------------------------------

    def _run(self, store: ReplayStore) -> None:
        try:
            while True:
                with self._gate.lock:
                    shelf = self.shelf
                    if not self._due(shelf):
                        self._thread = None
                        return
                self._write(store, shelf)
                self._gate.changed()
        except BaseException as error:
            with self._gate.lock:
                self._error, self._thread = error, None
            self._gate.changed()

    def _write(self, store: ReplayStore, shelf: Shelf) -> None:
        """Write some of a shelf's trajectories, and sync now and then."""
        with store.writing:
            try:
                with self._gate.lock:
                    shelf.believe(store.incarnation)
                    upto = min(self.wanted, shelf.next)
                    first = shelf.due(upto)
                    room = max(1, _AT_ONCE // max(1, shelf.storage.row_bytes))
                    while upto > first + 1 and shelf.start(upto) - shelf.start(first) > room:
                        upto -= (upto - first) // 2
                blocks = store.write(self.pieces(shelf, first, upto))
                with self._gate.lock:
                    shelf.note_written(blocks, upto)
                    enough = shelf.storage.row_bytes * shelf.storage.capacity // 4
                if store.unsynced_bytes >= min(max(enough, _LEAST_SYNC), _MOST_SYNC):
                    store.sync()
                    self.synced(shelf)
            except BaseException:
                store.give_up()
                raise

    def synced(self, shelf: Shelf) -> None:
        """Note that what was written is there for good; the caller may write."""
        with self._gate.lock:
            shelf.synced = shelf.written
            self.let_go()

    def pieces(self, shelf: Shelf, first: int, upto: int) -> Iterator[Piece]:
        """Yield trajectories as payloads, but for those that leave the buffer before their turn or while they are
        copied: their memory is the next one's. All that a save holds are there."""
        layout: BlobLayout | None = None
        for number in range(first, upto):
            with self._gate.lock:
                rows = shelf.source(number) if number >= shelf.cached else None
            if rows is None:
                continue
            if layout is None:
                assert shelf.schema is not None
                layout = BlobLayout(shelf.schema)
            blob = layout.encode(rows, self._memory)
            with self._gate.lock:
                torn = number < shelf.cached
            if not torn:
                yield Piece(number, 1, blob)


class TrajectoryJob:
    """Everything that one generation holds of a buffer of trajectories; see :class:`~pipeline.replay.job.SaveJob`."""

    def __init__(
        self, shelving: Shelving, gate: Gate, store: ReplayStore, shelf: Shelf, state: TrajectoryState
    ) -> None:
        """Args:
        shelving, gate, store, shelf: the buffer's; the caller holds the lock.
        state: of the buffer.
        """
        self.values = to_values(shelf)
        self._shelving, self._gate, self._store, self._shelf, self._state = shelving, gate, store, shelf, state
        self._low, self._end = shelf.low, shelf.next
        shelf.held = shelf.low

    def kept(self, blocks: list[Block]) -> list[Block]:
        """Find out what is on the disk."""
        with self._gate.lock:
            self._shelf.believe(self._store.incarnation)
        return []

    def pieces(self) -> Iterator[Piece]:
        """Yield every trajectory that is not on the disk."""
        with self._gate.lock:
            first = self._shelf.due(self._end)
        return self._shelving.pieces(self._shelf, first, self._end)

    def listing(self, kept: list[Block], new: list[Block]) -> Listing:
        """Return where everything lies."""
        shelf = self._shelf
        with self._gate.lock:
            shelf.note_written(new, self._end)
            table = shelf.table(self._low, self._end).copy()
            self._shelving.synced(shelf)
            self.close()
            used = self._shelving.used()
        raw = np.insert(table[:, KEY:DATA], 1, 1, axis=1).tolist()  # as blocks, of one trajectory each
        return Listing([], msgspec.msgpack.encode(raw), live_bytes(table), used)

    def described(self, unknown: dict[str, object]) -> tuple[str, bytes]:
        """Return the file that says the rest."""
        return STATE_FILE, encode_state(self._state, unknown)

    def close(self) -> None:
        """Let the memory go that was held for it."""
        with self._gate.lock:
            self._shelf.held = None
            self._shelving.let_go()

"""Where a buffer lies: in one process, in memory that several have in common, or in a file."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from pipeline.buffer.transitions.compressed import CompressingMemory
from pipeline.buffer.transitions.drawing import Drawer
from pipeline.buffer.transitions.limiter import Counts
from pipeline.buffer.transitions.mapped import MappedPool, MappedRing, MappedStorage
from pipeline.buffer.transitions.memory import ProcessMemory
from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.shared.arrays import SharedArrays, arrays_bytes
from pipeline.buffer.transitions.shared.files import Files
from pipeline.buffer.transitions.shared.header import IDENTITY, PROCESSES, VALUES_AT, Header
from pipeline.buffer.transitions.shared.lock import SharedLock
from pipeline.buffer.transitions.shared.member import Keeper, Member
from pipeline.buffer.transitions.shared.memory import SharedMemory, SharedStorage, shared_tree, tree_bytes
from pipeline.buffer.transitions.shared.next_obs import CommonNextObs
from pipeline.buffer.transitions.shared.ring import Common, SharedRing
from pipeline.buffer.transitions.shared.spill import Spill
from pipeline.buffer.transitions.shared.undo import Undo
from pipeline.buffer.transitions.shared.written import SharedWritten
from pipeline.buffer.transitions.sharing import SharedNextObs
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.buffer.transitions.sums import SumTree
from pipeline.buffer.transitions.writing import Written
from pipeline.config import Prioritized, ReplayOptions, StalenessWeighted, Uniform
from pipeline.replay.gate import Gate
from pipeline.replay.job import Job
from pipeline.replay.shared_job import SharedJob
from pipeline.replay.state import BufferState
from pipeline.replay.waking import Waking
from pipeline.store.scratch import check_possible


class Room(Protocol):
    """Makes the parts of one buffer."""

    @property
    def gate(self) -> Gate:
        """The buffer's lock, and how to wait for what it guards."""
        ...

    def ring(self) -> Ring:
        """Return a ring without rows and columns."""
        ...

    def check(self) -> None:
        """Refuse rows that cannot be weighed, before parts are made for them.

        Raises:
            ConfigError: what they weigh would not fit into memory.
        """
        ...

    def tree(self, capacity: int) -> SumTree:
        """Return a tree of what rows weigh; it takes the place of one that goes, so that nothing is checked."""
        ...

    def written(self, ring: Ring) -> Written:
        """Return what knows which columns of rows were changed."""
        ...

    def next_obs(self, ring: Ring) -> SharedNextObs:
        """Return what keeps next observations that rows share."""
        ...

    def commit(self) -> None:
        """Let what was done with the lock up to now be done, whatever comes next."""
        ...

    def rng(self) -> np.random.Generator:
        """Return the generator of this process's draws."""
        ...

    def job(self, ring: Ring, state: BufferState, values: dict[str, np.ndarray], first: int) -> Job:
        """Return what brings the rows from the key ``first`` on to the disk; the caller has the lock."""
        ...

    def replacing(self) -> None:
        """Take in that other parts are about to be made, which :meth:`use` puts in the place of those in use."""
        ...

    def use(self, ring: Ring, drawer: Drawer, counts: Counts, keeper: Keeper) -> None:
        """Have these be the buffer from now on."""
        ...


def check_weights(options: ReplayOptions) -> None:
    """Refuse what rows weigh, if a selection weighs them and there is no memory for it.

    Raises:
        ConfigError: with the number of bytes.
    """
    select, capacity = options.select, options.capacity
    if isinstance(select, Prioritized | StalenessWeighted) or (isinstance(select, Uniform) and select.uses is not None):
        ProcessMemory().check(9 * capacity, f"capacity={capacity}: what its rows weigh")


class OwnRoom:
    """The memory of this process."""

    def __init__(self, options: ReplayOptions) -> None:
        self.gate = Gate()
        self._options = options

    def ring(self) -> Ring:
        options = self._options
        memory = CompressingMemory(options.compress) if options.compress else None
        remove, storage = options.remove, TransitionStorage(options.capacity, None, memory)
        return Ring(storage) if remove.by == "fifo" else Pool(storage, remove)

    def check(self) -> None:
        check_weights(self._options)

    def tree(self, capacity: int) -> SumTree:
        return SumTree(capacity)

    def written(self, ring: Ring) -> Written:
        return Written(ring)

    def next_obs(self, ring: Ring) -> SharedNextObs:
        return SharedNextObs(ring, self._options.fields)

    def commit(self) -> None:
        """It is."""

    def rng(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self._options.seed, 0]))

    def job(self, ring: Ring, state: BufferState, values: dict[str, np.ndarray], first: int) -> Job:
        return Job(ring, self.gate, state, values, first)

    def replacing(self) -> None:
        """They lie elsewhere."""

    def use(self, ring: Ring, drawer: Drawer, counts: Counts, keeper: Keeper) -> None:
        """Nobody else need know."""


class MappedRoom(OwnRoom):
    """A file in the run's folder, seen as memory; see :mod:`pipeline.buffer.transitions.mapped`."""

    def __init__(self, options: ReplayOptions) -> None:
        """Raises:
        ConfigError: this system has no such files.
        """
        check_possible()
        super().__init__(options)

    def ring(self) -> Ring:
        assert self._options.directory is not None
        remove, storage = self._options.remove, MappedStorage(self._options.capacity, self._options.directory)
        return MappedRing(storage) if remove.by == "fifo" else MappedPool(storage, remove)


class Trees:
    """Makes the trees of a shared buffer."""

    def __init__(self, header: Header, *, new: bool) -> None:
        self.new, self._header = new, header

    def __call__(self, capacity: int) -> SumTree:
        return shared_tree(self._header, capacity, new=self.new)


class SharedRoom:
    """Memory that processes have in common; see :mod:`pipeline.buffer.transitions.shared`."""

    def __init__(self, options: ReplayOptions, files: Files | None = None) -> None:
        """Args:
        options: of the buffer.
        files: where it lies; None: make it.

        Raises:
            ConfigError: this system has no such memory.
        """
        self._new = files is None
        self.files = files or Files.create()
        self._options = options
        tree, arrays = tree_bytes(options.capacity), arrays_bytes(options.capacity)
        self._header = Header(self.files.memory, tree + arrays)
        self._lock = SharedLock(self.files.lock, self.files.closed)
        self.number = 0
        if self._new:
            self._header.words[IDENTITY] = int.from_bytes(os.urandom(8), "little", signed=True)
        else:
            with self._lock:
                self.number = self._header.words[PROCESSES] = self._header.words[PROCESSES] + 1
        self.gate = SharedGate(self._lock, self._header, self.number)
        self._common = Common(
            self._header,
            Spill(self.files.spill, options.capacity, self._header),
            Undo(self.files.undo, self._header),
            SharedArrays(self._header, VALUES_AT + tree, options.capacity),
            isinstance(options.select, Uniform) and options.select.window_trajectories is not None,
        )
        self._member = Member(self._header, self.number, self.gate.waking.wake)
        self._ring: SharedRing | None = None
        # An object of its own and no method: the drawer keeps it, and a circle (this room, its lock, the member, the
        # drawer, this room) would keep the memory of a buffer that nobody has any more.
        self.tree = Trees(self._header, new=self._new)

    def check(self) -> None:
        check_weights(self._options)

    def ring(self) -> Ring:
        memory = SharedMemory(self.files.memory, self._header.end)
        return SharedRing(SharedStorage(self._options.capacity, memory, self._header), self._common)

    def written(self, ring: Ring) -> Written:
        assert isinstance(ring, SharedRing)
        return SharedWritten(ring, self._header)

    def next_obs(self, ring: Ring) -> SharedNextObs:
        assert isinstance(ring, SharedRing)
        return CommonNextObs(ring, self._options.fields, self._common.arrays)

    def commit(self) -> None:
        self._member.commit()

    def rng(self) -> np.random.Generator:
        # Zeros at the end would not count: so the first process draws as a buffer of one process does.
        return np.random.Generator(np.random.PCG64([self._options.seed, 0, self.number]))

    def job(self, ring: Ring, state: BufferState, values: dict[str, np.ndarray], first: int) -> Job:
        return SharedJob(self._common.spill, ring, self.gate, state, values, first)

    def replacing(self) -> None:
        self._member.replacing = True

    def use(self, ring: Ring, drawer: Drawer, counts: Counts, keeper: Keeper) -> None:
        assert isinstance(ring, SharedRing)
        first, self._ring = self._ring is None, ring
        self.tree.new = False
        self._member.bind(ring, drawer, counts, keeper)
        if first:
            if self._new:
                self._member.publish()
            self._lock.guarded = self._member


class SharedGate(Gate):
    """Waiting for what other processes do as well."""

    def __init__(self, lock: SharedLock, header: Header, number: int) -> None:
        super().__init__(lock)
        self.waking = Waking(header, number)
        self._closed = lock.closed
        this = weakref.ref(self)

        def woken() -> bool:
            gate = this()
            if gate is not None:
                gate.changed()
            return gate is not None

        self._woken = woken

    def look(self) -> None:
        with self.lock:
            """Taken, it has told us."""

    def _enlist(self) -> None:
        self.waking.listen(self._woken)

    def _dismiss(self) -> None:
        if not self.waiters and not self._closed:
            self.waking.stop()


def make_room(options: ReplayOptions) -> Room:
    """Return the room that a buffer's options ask for.

    Raises:
        ConfigError: this system has no such memory.
    """
    rooms: dict[str, Callable[[ReplayOptions], Room]] = {"shared": SharedRoom, "mapped": MappedRoom}
    return rooms.get(options.storage, OwnRoom)(options)


def of_members(options: ReplayOptions) -> ReplayOptions:
    """Return the options of those that join: they save nothing."""
    return msgspec.structs.replace(
        options,
        directory=None,
        keep=ReplayOptions(capacity=1).keep,
        keep_every=None,
        keep_within_s=None,
        save_every=None,
        save_every_s=None,
        signals=None,
    )

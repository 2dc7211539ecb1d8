"""Saving a buffer and what was attached to it, and going on from that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from pipeline.buffer.transitions.blocks import rows_of_block
from pipeline.buffer.transitions.compressed import check_compressed
from pipeline.buffer.transitions.pool import Pool
from pipeline.buffer.transitions.ring import Ring
from pipeline.checkpoint.generations import Found, Stored, choose, with_offer
from pipeline.checkpoint.manifest import ShardInfo
from pipeline.checkpoint.trainer_state import CapturedState, check_attachable, load_states
from pipeline.config import ReplayOptions
from pipeline.errors import ClosedError, Damaged, UsageError, WriteFailed
from pipeline.observe import events
from pipeline.replay.episode_ids import EpisodeIds
from pipeline.replay.gate import Gate
from pipeline.replay.incomplete import counts, settled
from pipeline.replay.job import SaveJob, merged_from
from pipeline.replay.loading import Lost, Read, read
from pipeline.replay.numbering import left_behind, numbered_after
from pipeline.replay.parts import Parts, check_sharing, restore, state_of, tag_of, values_of
from pipeline.replay.pooling import PoolJob, assign_places
from pipeline.replay.rooms import Room
from pipeline.replay.store import Generation, ReplayStore, Saving
from pipeline.replay.thinning import load_alone, load_partly, says_dropped, tell_lost
from pipeline.store.files import FilesLike
from pipeline.store.segments import Block
from pipeline.wiring.recovery import read_generation


class _GoesOn(NamedTuple):
    step: int
    """The trainer's step of the generation; 0 in an empty directory."""
    generation: int | None
    rows: int
    """How many rows are there."""


class ReplayResumed(_GoesOn):
    """Where a buffer goes on: (step, generation, rows), and what did not come along."""

    lost: Lost = Lost()
    """With ``allow_partial``: what is gone, on all ranks together."""
    left: tuple[str, ...] = ()
    """Names of what each rank had attached for itself, if it was not loaded: there are other ranks now."""

    def without(self, lost: Lost, left: tuple[str, ...]) -> ReplayResumed:
        """Return the same, with what did not come along."""
        other = ReplayResumed(*self)
        other.lost, other.left = lost, left
        return other


class Loading(NamedTuple):
    """How rows are to be taken back."""

    lazily: bool = False
    """Whether they are left where they lie until they are wanted."""
    continue_episodes: bool = False
    rebalance: bool = False
    """Whether ranks share episodes out anew, though as many had them."""
    evict_oldest: bool = False
    """Whether the oldest episodes go where other ranks have no room for all."""
    allow_partial: bool = False
    """Whether to go on without what is damaged."""


class FoundGeneration(Protocol):
    """What was read of a generation; nothing of it is in use yet."""

    @property
    def stored(self) -> Stored: ...

    @property
    def unknown(self) -> dict[str, Any]: ...

    @property
    def blocks(self) -> list[Block]: ...

    @property
    def states(self) -> dict[str, Any]: ...

    @property
    def lost(self) -> Lost: ...

    @property
    def left(self) -> tuple[str, ...]: ...


P = TypeVar("P")  # what a buffer's state consists of
F = TypeVar("F", bound=FoundGeneration)


class SaverOf(Generic[P, F]):
    """Saves and resumes one buffer, of whatever kind. ``find``, ``take_over`` and ``ready`` belong to whoever holds
    :attr:`lock`."""

    def __init__(self, store: ReplayStore | None, gate: Gate) -> None:
        self.store, self._gate = store, gate
        self.attached: dict[str, Any] = {}
        self.lock = threading.RLock()
        """One save, resume or close at a time. It is taken before the buffer's own lock, never after it."""
        self._ready = self._closed = False
        self._unknown: dict[str, Any] = {}
        self._newest = True  # whether what is resumed is the newest generation
        self._left = ""  # what names the line that is left, where it is not
        self._saving: Saving | None = None
        self._thread: threading.Thread | None = None
        self.loading = Loading()
        """How the next :meth:`find` takes rows back."""

    def attach(self, objects: Mapping[str, Any]) -> None:
        """Add what is saved and restored with the buffer.

        Raises:
            ConfigError: a name cannot be that of a file, or an object has no state.
        """
        check_attachable(objects)
        self.attached.update(objects)

    def attach_own(self, objects: Mapping[str, Any]) -> None:
        """As :meth:`attach`, of what every rank has one of for itself; without ranks that is the same."""
        self.attach(objects)

    # -- saving ------------------------------------------------------------------------------------------------

    def save(self, step: int, parts: P) -> Saving:
        """Capture everything and write it; returns once the trainer's tensors have been read.

        Raises:
            UsageError: there is no directory, or the folder is in use and was not resumed.
            ClosedError: the folder was given back.
            WriteFailed: the trainer's state, or the generation before this one, could not be written.
        """
        with self.lock:
            store = self._opened()
            self.begin()
            if step.__class__ is not int or step < 0:
                raise UsageError(f"save(step={step!r}): a whole number from 0 on is needed")
            self.finish()
            with self._gate.lock:  # what is attached may draw from the buffer: both are of one moment
                states = self._captured()
                job = self._job(parts)
            try:
                generation = store.begin(step, states, list(self.attached))
            except BaseException:
                job.close()
                raise
            self._start(store, generation, job)
            return generation.saving

    def _captured(self) -> list[CapturedState]:
        return [CapturedState(name, each.state_dict()) for name, each in sorted(self.attached.items())]

    def _start(self, store: ReplayStore, generation: Generation, job: SaveJob) -> None:
        """Write beside the trainer. If no thread can be had for that, or a signal comes before it has begun, nothing
        of the generation stays."""
        self._saving = saving = generation.saving
        thread = threading.Thread(target=self._write, args=(store, generation, job), name="forebay save")
        try:
            thread.start()
            self._thread = thread
        except BaseException as error:
            if saving.claim():
                job.close()
                generation.writer.abandon()
                self._saving = None
                saving.end(error)
                if isinstance(error, RuntimeError):
                    raise WriteFailed(f"save(step={saving.step}): no thread could be started: {error}") from error
            raise

    def _write(self, store: ReplayStore, generation: Generation, job: SaveJob) -> None:
        if not generation.saving.claim():
            return
        try:
            store.commit(generation, job, self._unknown)
        except BaseException as error:
            generation.saving.end(error)
        else:
            generation.saving.end()

    def finish(self) -> None:
        """Wait for the generation that is being written. Interrupted in that, it may be waited for again.

        Raises:
            WriteFailed: it could not be, and nobody was told yet.
        """
        saving = self._saving
        if saving is not None:
            saving.wait_until_done()
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raise the error of a save that failed after it had returned; once. A thread that is saving or closing raises
        it itself."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            saving = self._saving
            if saving is not None and saving.done:
                self._saving = None
                if saving.error is not None and not saving.told:
                    raise saving.error
        finally:
            self.lock.release()

    def begin_adding(self) -> None:
        """:meth:`begin`, for a buffer that writes beside the training what is added."""
        self.begin()

    def begin(self) -> ReplayStore:
        """Make sure that the folder is this buffer's: it was resumed, or holds nothing. Return it.

        Raises:
            UsageError, ClosedError, Locked, StoreError: it is not.
        """
        with self.lock:
            store = self._opened()
            if not self._ready:
                self._check_unused(store)
            return store

    @property
    def begun(self) -> bool:
        """Whether :meth:`begin` has nothing to find out: it was done, or there is no folder."""
        return self._ready or self.store is None

    @begun.setter
    def begun(self, begun: bool) -> None:
        self._ready = begun

    def _job(self, parts: P) -> SaveJob:
        """Capture everything as of now; the caller has the buffer's lock."""
        raise NotImplementedError

    def _read(self, stored: Stored, like: Any) -> F:
        """Read and check a generation."""
        raise NotImplementedError

    def _rows(self, parts: P) -> int:
        """Return how many rows there are."""
        raise NotImplementedError

    def _used(self, like: Any) -> bool:
        """Whether rows were added."""
        raise NotImplementedError

    # -- resuming ----------------------------------------------------------------------------------------------

    def find(
        self, step: int | None, like: Any, how: Callable[[], Loading], taken: Callable[[F], P]
    ) -> tuple[F, P] | None:
        """Read and check what to go on from; None in an empty directory. Nothing of it is in use yet.

        Args:
            step: the trainer's step; None: the newest generation.
            like: what there is before.
            how: checks what was asked for, and says how rows are taken back.
            taken: makes the parts of what was read.

        Raises:
            UsageError: rows were added already.
            Damaged, StoreError: it cannot be read; the message offers what can.
        """
        self.loading = how()
        chosen = self._choose(step, like)
        if chosen is None:
            return None
        found = self._offering(*chosen, like)
        return found, taken(found)

    def _offering(self, stored: Stored, found: Found, like: Any) -> F:
        """Read and check a generation; what is wrong with it offers another one."""
        try:
            return self._read(stored, like)
        except Damaged as error:
            raise with_offer(error, stored, found) from None

    def _choose(self, step: int | None, like: Any) -> tuple[Stored, Found] | None:
        """Return what to go on from, and all that there is; None in an empty directory."""
        store = self._opened()
        self._check_first(like)
        found = store.find()
        if not found.complete and not found.damaged:
            if step is not None:
                choose(found, step, store.folder.layout.directory)
            return None
        stored = choose(found, step, store.folder.layout.directory)
        self._newest, self._left = stored is found.complete[-1], left_behind(stored, found)
        return stored, found

    def _check_first(self, like: Any) -> None:
        """Raises:
        UsageError: something else came before.
        """
        if self._used(like) or self._ready:
            raise UsageError("resume() comes first: before rows are added, and once")

    def load_attached(self, found: F) -> None:
        """Load what is attached, in place."""
        load_states(self.attached, found.states)

    def adopt(self, found: F) -> None:
        """Go on from what was read."""
        assert self.store is not None
        self._unknown = found.unknown
        self.store.adopt(found.stored, found.blocks)

    def ready(self, found: F | None, parts: P) -> ReplayResumed:
        """Note that the run goes on from here; where that is not its newest generation, make it the newest one.

        Raises:
            WriteFailed: it could not be made that. What is in use is to be given up.
        """
        store = self.store
        assert store is not None
        if found is not None and not self._newest:
            # Otherwise a crash would bring back what came after it, and was let go.
            self._make_newest(store, found.stored, parts)
        self._ready = True
        if found is None:
            return ReplayResumed(0, None, 0)
        resumed = self._went_on(store, found, parts)
        return resumed.without(found.lost, found.left)

    def _make_newest(self, store: ReplayStore, stored: Stored, parts: P) -> None:
        store.commit(*self._begun_again(store, stored, parts), self._unknown)

    def _went_on(self, store: ReplayStore, found: F, parts: P) -> ReplayResumed:
        manifest = found.stored.manifest
        store.log.info(events.RUN_RECOVERED, generation=manifest.generation, step=manifest.step, rows=self._rows(parts))
        return ReplayResumed(manifest.step, store.parent, self._rows(parts))

    def _begun_again(self, store: ReplayStore, stored: Stored, parts: P) -> tuple[Generation, SaveJob]:
        """Begin a generation that is as an older one."""
        generation = store.begin(stored.manifest.step, (), list(self.attached), like=stored)
        with self._gate.lock:
            return generation, self._job(parts)

    def _opened(self) -> ReplayStore:
        if self.store is None:
            raise UsageError("the buffer has no directory: build it with directory= to save and resume it")
        if self._closed:  # another process may have gone on from there, and let go what this one knows of
            raise ClosedError("this buffer's folder was given back by close(): build another buffer, and resume() it")
        self.store.open()
        return self.store

    def _check_unused(self, store: ReplayStore) -> None:
        found = store.find()
        if found.complete or found.damaged:
            raise UsageError(
                f"{store.folder.layout.directory} holds a saved buffer: call resume() before the first save, or choose "
                "an empty directory"
            )
        self._ready = True

    def check_replaceable(self) -> None:
        """Refuse to exchange the rows of a buffer whose rows lie on the disk under the keys that they have.

        Raises:
            UsageError: it was resumed, or saved.
        """
        if self._ready:
            raise UsageError(
                "load_state_dict() comes before resume() and the first save(): what is on the disk is of other rows"
            )

    def close(self) -> None:
        """Wait for what is being written, and until nothing more is to be said of it, and give the folder back."""
        with self.lock:
            try:
                self.finish()
            finally:
                # Interrupted before it was done, its thread still writes there: the folder is not given back yet.
                if self.store is not None and (self._saving is None or self._saving.done):
                    if self._thread is not None:  # of several ranks it waits until all have heard of the save
                        self._thread.join()
                    self._closed = self._closed or self.store.opened
                    self.store.close()


class Saver(SaverOf[Parts, Read]):
    """Saves and resumes a buffer of transitions."""

    def __init__(self, options: ReplayOptions, room: Room, files: FilesLike | None = None) -> None:
        super().__init__(ReplayStore(options, files) if options.directory is not None else None, room.gate)
        self._options, self._room = options, room
        self.stale_updates = 0

    def _job(self, parts: Parts) -> SaveJob:
        """Capture everything as of now; the caller has the buffer's lock."""
        store, ring = self.store, parts.ring
        assert store is not None
        parts.written.captured = ring.added
        if isinstance(ring, Pool):
            kept, slots = assign_places(ring, store.blocks)
            names = self._row_names(ring)
        state = state_of(parts, self._options, self.stale_updates)
        held = settled(ring, self._options, state, values_of(parts), self._names(ring), store.rank)
        store.shard = self._described(ring, held.shard)
        if isinstance(ring, Pool):
            return PoolJob(ring, self._gate, held.state, held.values | names, kept, slots)
        return self._room.job(ring, held.state, held.values, self._first(ring))

    def said(self) -> dict[str, int]:
        """Return what the newest save says of how many rows it holds."""
        return {} if self.store is None or self.store.shard is None else counts(self.store.shard)

    def _names(self, ring: Ring) -> EpisodeIds | None:
        """Return what names episodes; None: their numbers do."""
        return None

    def _row_names(self, pool: Pool) -> dict[str, np.ndarray]:
        """Return what names rows that are of no episode; nothing: their numbers do."""
        return {}

    def _described(self, ring: Ring, shard: ShardInfo) -> ShardInfo:
        """Return what the manifest is to say of the rows."""
        return shard

    def _first(self, ring: Ring) -> int:
        """The key from which on rows are written: that of the first one which is not on the disk, or an earlier one,
        where many small blocks had better be one."""
        assert self.store is not None
        blocks = self.store.blocks
        unread = ring.storage.unread
        waiting = frozenset() if unread is None else unread.waiting()  # what was not read is not written again
        read = max((number + 1 for number, block in enumerate(blocks) if block.first in waiting), default=0)
        begin = read + merged_from(blocks[read:], rows_of_block(ring))
        if begin < len(blocks):
            return max(blocks[begin].first, ring.oldest)
        return max(blocks[-1].first + blocks[-1].count if blocks else 0, ring.oldest)

    def _used(self, like: Any) -> bool:
        assert isinstance(like, Ring)
        return like.added > 0

    def _rows(self, parts: Parts) -> int:
        return parts.ring.size

    def _read(self, stored: Stored, like: Any) -> Read:
        try:
            return self._read_whole(stored, like)
        except Damaged as error:
            if not self.loading.allow_partial:
                raise
            assert self.store is not None
            states = read_generation(stored, list(self.attached))  # of these all must be whole
            found = load_partly(self.store, self._options, stored, like, error)._replace(states=states)
            tell_lost(self.store.log, stored, found.lost)
            return found

    def _read_whole(self, stored: Stored, like: Ring) -> Read:
        store = self.store
        assert store is not None
        attached = list(self.attached)
        if says_dropped(stored):
            states = read_generation(stored, attached)
            return load_alone(store, self._options, stored, like).read._replace(states=states)
        found = read(store.folder.layout, store.folder.tag, stored, attached, like, lazily=self.loading.lazily)
        check_sharing(found.state, self._options, stored.folder)
        if found.state.schema is not None:
            check_compressed(self._options.compress, found.state.schema)
        return found

    def take_over(self, found: Read, parts: Parts) -> None:
        """Put what was read in use. ``parts`` hold the ring that was read."""
        store = self.store
        assert store is not None
        state = found.state
        try:
            restore(parts, self._options, state, found.values)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{found.stored.folder}: the buffer's state does not fit together ({error!r})") from None
        own = tag_of(self._options)
        if state.selection != own:
            store.log.warning(events.TASK_CHANGED, what="select", before=state.selection, now=own)
        self.stale_updates = state.stale_updates
        parts.ring.numbered = numbered_after(state.numbered, self._left)
        self.adopt(found)
        if parts.ring.storage.unread is not None:
            store.leave_unread(found.stored)

"""A saved buffer, to be looked at: its rows stay where they lie until they are drawn; nothing is locked or written.

What is drawn is what the buffer would have drawn next, where its selection is the one that the generation was saved
with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.batch import TransitionBatch
from pipeline.buffer.transitions.memory import SparseMemory
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.sharing import SharedNextObs
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.buffer.transitions.sums import SumTree
from pipeline.checkpoint.generations import Stored, check_generation
from pipeline.checkpoint.manifest import BLOCKS_FILE, PIPELINE, SHARDS, TRAINER_FOLDER, TRAJECTORY_SHARDS
from pipeline.checkpoint.parts import shard_of
from pipeline.config import ReplayOptions
from pipeline.config.selecting import selection
from pipeline.errors import ConfigError, Damaged, UsageError
from pipeline.replay.buffer import ReplayBuffer
from pipeline.replay.loading import ReadRows, read_state
from pipeline.replay.looked import LookedRing, LookedRows
from pipeline.replay.looked_next import LookedNextObs
from pipeline.replay.looked_order import window_of
from pipeline.replay.looked_pool import LookedPool, LookedPoolRows, find_rows
from pipeline.replay.looked_thinned import LookedThinned, ThinnedRows, keep_rows
from pipeline.replay.next_obs import KEYS_FILE
from pipeline.replay.parts import DRAWING, check_sharing, restore
from pipeline.replay.rooms import OwnRoom
from pipeline.replay.segment_rows import SegmentRows
from pipeline.replay.state import VALUES_FOLDER, BufferState, read_buffer_state, set_generator
from pipeline.replay.trajectories import TrajectoryBuffer
from pipeline.replay.trajectory_loading import Reading, Room
from pipeline.replay.trajectory_loading import read as read_trajectories
from pipeline.replay.trajectory_shards import read_trajectory_shard
from pipeline.replay.unread import UnreadRows
from pipeline.replay.values import Values, ValuesRows
from pipeline.store.layout import Layout
from pipeline.store.segments import Block, read_blocks

_SELECTOR, _WRITTEN, _NEXT_OBS, _POOL = "selector.", "written.", "next_obs.", "pool."
_WHOSE = 12
"""Bytes of what says of which episode a row is, and where in it."""
_UNREAD = (_SELECTOR, _WRITTEN, _NEXT_OBS, _POOL, "episodes.")
"""Values that are read as rows are: of those that are looked at."""


class _LookedAt(ReplayBuffer):
    """Of a buffer, what is drawn from it is in memory."""

    def __init__(self, options: ReplayOptions, ring: Ring) -> None:
        self._begin(options, _Room(options, ring), None)

    def sample(self, count: int, **more: Any) -> TransitionBatch:
        batch = super().sample(count, **more)
        assert isinstance(self.ring, LookedRing)
        batch.keys = self.ring.names(batch.keys)
        return batch


class _Room(OwnRoom):
    """Memory for few of its rows."""

    def __init__(self, options: ReplayOptions, ring: Ring) -> None:
        super().__init__(options)
        self._ring = ring

    def ring(self) -> Ring:
        return self._ring

    def check(self) -> None:
        """What rows weigh stays where it lies."""

    def tree(self, capacity: int) -> SumTree:
        # One draw is not worth the import of a compiler; and nobody sets values, but for those of rows that are new.
        return SumTree(capacity, fast=False, memory=_sparse)

    def next_obs(self, ring: Ring) -> SharedNextObs:
        return LookedNextObs(ring, self._options.fields)


def _sparse(count: int) -> np.ndarray:
    return SparseMemory().array("sums", (count,), np.dtype(np.float64))


def look_at(
    layout: Layout,
    run_tag: int,
    stored: Stored,
    *,
    rank: int = 0,
    seed: int | None = None,
    told: Callable[[int], None] | None = None,
) -> ReplayBuffer:
    """Return a buffer of transitions as a generation holds it, whose rows are read when they are drawn. It has no
    limiter. Blocks; the generation's files are compared with its manifest, but for the trainer's.

    Args:
        layout: the run's paths.
        run_tag: its tag.
        stored: the generation.
        rank: of shards, whose.
        seed: draw by this, instead of by the generation's own stream.
        told: told of the bytes that are read, but for those of rows that are drawn; see :func:`bytes_to_look_at`.

    Raises:
        Damaged: something is missing, or was changed.
        ConfigError: the options that were saved are none of this version.
    """
    with _there(stored):
        own = _without_trainer(shard_of(stored, rank) if stored.manifest.kind == SHARDS else stored)
        check_generation(own, told=told)
        return _looked_at(layout, run_tag, own, seed, told)


def let_go(buffer: ReplayBuffer) -> None:
    """Close the files of a buffer that is looked at, when enough was drawn from it."""
    _close(buffer.ring)


def _close(ring: Ring) -> None:
    unread = ring.storage.unread
    if isinstance(unread, UnreadRows):
        unread.close()
    if isinstance(ring, LookedRing):
        ring.close()


@contextmanager
def _there(stored: Stored) -> Iterator[None]:
    """A generation of a run in use may be removed while it is read.

    Raises:
        Damaged: it was.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{stored.folder}: a file is missing ({error}); was the generation removed meanwhile?") from None


def _looked_at(
    layout: Layout, run_tag: int, own: Stored, seed: int | None, told: Callable[[int], None] | None
) -> ReplayBuffer:
    state, _ = read_buffer_state(own.folder)
    given = _options(state, own.manifest.kind, own.manifest.options)
    if seed is not None:
        given["seed"] = seed
    given.pop("compress", None)  # rows that are drawn are few
    options = ReplayOptions.build(state.capacity, given)
    buffer = _LookedAt(options, LookedRing(TransitionStorage(1)))
    with buffer.gate.lock:
        found = _read(layout, run_tag, own, options, state, told or _nobody)
        try:
            parts = buffer._parts(found.ring)
            try:
                found = _opened(own, found, told)
                restore(parts, buffer.options, found.state, found.values)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise Damaged(f"{own.folder}: the buffer's state does not fit together ({error!r})") from None
        except BaseException:
            _close(found.ring)
            raise
        if seed is not None:
            parts = parts._replace(rng=buffer._room.rng())
    buffer.use_parts(parts)
    return buffer


def bytes_to_look_at(stored: Stored, *, rank: int = 0) -> int:
    """Return how many bytes :func:`look_at`, and the first draw, will read, about.

    Raises:
        Damaged: what it says of itself is not whole.
    """
    with _there(stored):
        return _bytes_of(_without_trainer(shard_of(stored, rank) if stored.manifest.kind == SHARDS else stored))


def _bytes_of(own: Stored) -> int:
    def of(*names: str) -> int:
        begins = tuple(f"{VALUES_FOLDER}/{name}." for name in names)
        return sum(info.bytes for info in own.manifest.files if info.path.startswith(begins))

    state, _ = read_buffer_state(own.folder)
    select = (state.options if own.manifest.kind == PIPELINE else own.manifest.options).get("select")
    by = select.get("by") if isinstance(select, Mapping) else ""
    keys, worth, versions = of("pool.keys"), of("selector.priorities", "selector.used"), 4 * state.size
    looks = {"ordered": by in ("stalest", "freshest"), "staleness": 3}.get(state.selection, 0) * versions
    if state.selection == "ordered" and by in ("min", "max"):
        looks = sum(block.length for block in read_blocks(os.path.join(own.folder, BLOCKS_FILE)))
    weighed = state.selection == "staleness" or (worth and state.selection in ("prioritized", "uniform"))
    if state.dropped:  # of all rows it is looked which come back, and once more for each use of what they weigh
        looks += (1 + 2 * bool(weighed)) * _WHOSE * state.size
    if keys:
        looks += of("pool.keys", "pool.serials", "pool.at", "selector.order")
        if weighed:
            windows = -(-state.size // window_of(state.size))
            looks += windows * keys + (windows - 1) * (worth or versions)
    return sum(info.bytes for info in own.manifest.files) + 2 * worth + looks


def _nobody(count: int) -> None:
    """Nobody is told."""


def _read(
    layout: Layout,
    run_tag: int,
    own: Stored,
    options: ReplayOptions,
    state: BufferState,
    told: Callable[[int], None],
) -> ReadRows:
    storage = TransitionStorage(state.capacity, None, SparseMemory())
    if options.remove.by == "fifo" and not state.dropped:
        return read_state(layout, run_tag, own, LookedRing(storage), lazily=True, rows=LookedRows, unread=_UNREAD)
    in_pool = options.remove.by != "fifo"
    like: Ring = LookedPool(storage) if in_pool else LookedThinned(storage)
    rows: type[LookedRows] = LookedPoolRows if in_pool else ThinnedRows

    def find(ring: Ring, state: BufferState, blocks: Sequence[Block]) -> list[Block]:
        if isinstance(ring, LookedPool):
            return find_rows(ring, state, own, told)
        assert isinstance(ring, LookedThinned)
        check_sharing(state, options, own.folder)
        return keep_rows(ring, state, own, blocks)

    return read_state(layout, run_tag, own, like, lazily=True, rows=rows, unread=_UNREAD, find=find)


def _opened(own: Stored, found: ReadRows, told: Callable[[int], None] | None) -> ReadRows:
    """Have what was not read be read when it is wanted."""
    ring = found.ring
    assert isinstance(ring, LookedRing)
    values = Values(own)
    opened: dict[str, Any] = {}
    for name in values.names:
        if name.startswith((_SELECTOR, _NEXT_OBS)):
            of_selector = name.startswith(_SELECTOR)
            ring.files.append(file := values.file(name, told if of_selector else None))
            if of_selector:
                opened[name] = ring.selected(name.split(".")[1], file)
            else:
                opened[name] = file if name == KEYS_FILE else ValuesRows(file)
    if KEYS_FILE in opened:
        values.rising(KEYS_FILE)
    unread = ring.storage.unread
    if isinstance(unread, LookedRows):
        unread.changes = ring.changes(found.state, values)
        unread.told = told or unread.told
        ring.files.append(unread.changes)
        ring.ready()
    state = msgspec.structs.replace(ring.selection(found.state, own), written_columns=[])
    return found._replace(state=state, values={**found.values, **opened})


def _without_trainer(stored: Stored) -> Stored:
    files = [info for info in stored.manifest.files if not info.path.startswith(TRAINER_FOLDER + "/")]
    return Stored(stored.folder, msgspec.structs.replace(stored.manifest, files=files, attached=[]))


def _options(state: BufferState, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a buffer like the one that was saved. A pipeline's manifest has none of its buffer's.

    Raises:
        UsageError: of a pipeline's, which an earlier version wrote, they are not known.
    """
    of = state.options if kind == PIPELINE else options
    given = {name: of[name] for name in DRAWING if name in of}
    if kind == PIPELINE and state.selection and not given:
        given["select"] = {"select": state.selection}
        try:
            selection(given["select"])
        except ConfigError as error:
            raise UsageError(
                f"the generation does not say how the buffer draws, only that this is {state.selection!r}: an earlier "
                f"version wrote it. Resume the run, and save ({error})"
            ) from None
    given["remove"] = options.get("remove", "fifo") if kind != PIPELINE else "fifo"
    if state.columns is not None:
        given["share_next_obs"] = state.next_obs_columns is not None
    return given


def look_at_trajectories(
    layout: Layout, run_tag: int, stored: Stored, *, rank: int = 0, seed: int | None = None
) -> TrajectoryBuffer:
    """As :func:`look_at`, of a buffer of trajectories."""
    of_ranks = stored.manifest.kind == TRAJECTORY_SHARDS
    with _there(stored):
        own, room = _without_trainer(shard_of(stored, rank) if of_ranks else stored), Room(None, 0)
        if of_ranks:
            found = read_trajectory_shard(own, rank).read(Reading(layout, run_tag, room, "lazy"))
        else:
            found = read_trajectories(layout, run_tag, own, [], room, "lazy")
    window = own.manifest.options.get("sample_window_size", -1)
    buffer = TrajectoryBuffer(sample_window_size=window, strict=False, seed=seed or 0)
    with buffer.gate.lock:
        buffer._own.shelf, buffer._rows = found.shelf, SegmentRows(layout, lambda: run_tag)
        buffer._set_first()
    if seed is None and found.state.generator:
        try:
            set_generator(buffer._own.rng, found.state.generator)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{own.folder}: the buffer's state does not fit together ({error!r})") from None
    return buffer

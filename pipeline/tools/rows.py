"""What a generation of a buffer holds: its state, and what the marks and rewards of its rows come to.

Of each block only these are read, not the rows: a few bytes a row. They are not compared with checksums, as ``verify``
does that.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from pipeline.buffer.transitions.bodies import BODIES, places_said
from pipeline.buffer.transitions.columns import Column
from pipeline.buffer.transitions.layout import CUT, END, EPISODE, OPEN, PLACE, TERMINATED, TRUNCATED, VERSION
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import BLOCKS_FILE, SHARDS, TRAJECTORIES, TRAJECTORY_SHARDS
from pipeline.checkpoint.parts import shard_of
from pipeline.errors import Damaged, ForebayError, StoreError
from pipeline.replay.pool_files import PoolFiles
from pipeline.replay.state import LISTED, STATE_FILE, BufferState, Ends, read_buffer_state
from pipeline.replay.trajectory_loading import read_infos
from pipeline.replay.trajectory_state import STATE_FILE as TRAJECTORIES_FILE
from pipeline.replay.values import Values
from pipeline.store.blocks import Blocks
from pipeline.store.codec import bodies_of_head, read_layout, tensor_of
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout, SegmentKey
from pipeline.store.segments import Block, read_blocks
from pipeline.tools.figures import Figures, Gathered

Ints = np.ndarray
_MOST_HEAD = 64 << 20
_ENDS = {TERMINATED: "terminated", TRUNCATED: "truncated", CUT: "left where it was"}


class ColumnFacts(msgspec.Struct, frozen=True):
    """A column of a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class BufferFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a buffer, or a rank's part of one, holds."""

    rank: int | None
    """None: it is no shard."""
    rows: int
    added: int
    """Rows that were ever added."""
    capacity: int | None
    """None: no bound, as of trajectories."""
    columns: list[ColumnFacts]
    episodes: int
    """How many there have been; of trajectories, how many are there."""
    open_episodes: int
    ends: dict[str, int]
    """Rows that end an episode, by how it ended."""
    selection: str
    """How rows are sampled."""
    remove: str
    """Which rows go first."""
    blocks: int
    bytes: int
    """Of their payloads."""
    rewards: Figures
    lengths: Figures
    """Rows of each episode of which the end is there, or of each trajectory."""
    priorities: Figures
    versions: dict[str, int]
    """Rows by the version of weights that made them; trajectories by the name of the weights."""
    unread: int = 0
    """Blocks whose marks could not be read; their rows are in no figure."""


def bytes_of_rows(stored: Stored, rank: int | None) -> int:
    """Return how many bytes :func:`buffer_facts` will go through of blocks, at the most; 0: it holds no buffer."""
    with suppress(ForebayError, OSError):
        own = stored if rank is None else shard_of(stored, rank)
        if {STATE_FILE, TRAJECTORIES_FILE} & {info.path for info in own.manifest.files}:
            return 2 * sum(block.length for block in read_blocks(os.path.join(own.folder, BLOCKS_FILE)))
    return 0


def buffer_facts(
    layout: Layout, stored: Stored, rank: int | None = None, told: Callable[[int], None] = lambda count: None
) -> list[BufferFacts]:
    """Return what a generation holds of buffers: one, or one for each shard. Empty: it holds none.

    Args:
        layout: the run's paths.
        stored: the generation.
        rank: of shards, this one alone.
        told: told of the bytes of blocks that were gone through.

    Raises:
        Damaged, StoreError: the buffer's state cannot be read.
    """
    manifest = stored.manifest
    ranks = [each.rank for each in manifest.shards] if rank is None else [rank]
    if manifest.kind == TRAJECTORY_SHARDS:
        return [_trajectories(layout, shard_of(stored, each), each, told) for each in ranks]
    if manifest.kind == SHARDS:
        return [_transitions(layout, shard_of(stored, each), each, manifest.options, told) for each in ranks]
    names = {info.path for info in manifest.files}
    if manifest.kind == TRAJECTORIES and TRAJECTORIES_FILE in names:
        return [_trajectories(layout, stored, None, told)]
    if STATE_FILE in names:
        return [_transitions(layout, stored, None, manifest.options, told)]
    return []


def _transitions(
    layout: Layout, stored: Stored, rank: int | None, options: Mapping[str, object], told: Callable[[int], None]
) -> BufferFacts:
    state, _ = read_buffer_state(stored.folder)
    blocks = read_blocks(os.path.join(stored.folder, BLOCKS_FILE))
    fields = options.get("fields")
    reward = str(fields.get("reward", "reward")) if isinstance(fields, Mapping) else "reward"
    files = None if state.remove == "fifo" else PoolFiles(stored, state, stored.folder)
    rows = _Rows(layout, stored, state, blocks, reward, told, files)
    return BufferFacts(
        rank=rank,
        rows=state.held,
        added=state.added,
        capacity=state.capacity,
        columns=_columns(state.columns),
        episodes=state.next_episode,
        open_episodes=0 if state.dropped else len(state.open_episodes),
        ends={name: rows.ends[code] for code, name in _ENDS.items() if rows.ends[code]},
        selection=state.selection,
        remove=state.remove,
        blocks=len(blocks),
        bytes=sum(block.length for block in blocks),
        rewards=rows.rewards.figures(),
        lengths=rows.lengths.figures(),
        priorities=rows.priorities(),
        versions={str(number): rows.versions[number] for number in sorted(rows.versions)},
        unread=rows.unread,
    )


class _Rows:
    """What the rows of a buffer come to. They are read twice, block by block, as they need not fit into memory."""

    def __init__(
        self,
        layout: Layout,
        stored: Stored,
        state: BufferState,
        blocks: Sequence[Block],
        reward: str,
        told: Callable[[int], None],
        pool: PoolFiles | None,
    ) -> None:
        """Args:
        pool: where the rows of a pool lie: what is said of them by their keys is told by their places then.
        """
        self._told, self._pool = told, pool
        self._needed = [] if pool is None else pool.needed
        if pool is not None:
            blocks = [pool.blocks[number] for number in self._needed]
            cut, truncated = (pool.places_of(keys).tolist() for keys in (state.cut_keys, state.truncated_keys))
            state = msgspec.structs.replace(state, cut_keys=cut, truncated_keys=truncated, dropped={})
        self._layout, self._stored, self._state, self._blocks, self._reward = layout, stored, state, blocks, reward
        self._ends_of, self._first = Ends(state), _firsts(blocks)
        self._listed = _listed_of(stored, state)
        self._kept = np.zeros(state.size if state.dropped else 0, bool)
        self.rewards, self.lengths = Gathered(), Gathered()
        self.versions, self.ends = Counter[int](), Counter[int]()
        self.unread = 0
        for marks, ends in self._each():
            self._count(marks, ends)
        for marks, ends in self._each():
            self.rewards.spread(marks[self._reward])
            self.lengths.spread(_lengths(marks, ends))

    def _count(self, marks: Mapping[str, Ints], ends: Ints) -> None:
        self.rewards.bound(marks[self._reward])
        self.lengths.bound(_lengths(marks, ends))
        for counter, of in ((self.versions, marks[VERSION]), (self.ends, ends)):
            numbers, counts = np.unique(of, return_counts=True)
            counter.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        if len(self._kept):
            self._kept[marks["key"] - (self._state.added - self._state.size)] = True

    def _each(self) -> Iterator[tuple[dict[str, Ints], Ints]]:
        """Yield the marks, keys and rewards of rows that are there, and how these end an episode."""
        self.unread = 0
        names = (EPISODE, PLACE, VERSION, END, self._reward)
        for number, tensors in _tensors(self._layout, self._blocks, names, self._told):
            block = self._blocks[number]
            if any(not _is_mark(tensors.get(name), block.count) for name in names[:-1]):
                self.unread += 1
                continue
            given = tensors.get(self._reward, np.empty(0))
            tensors[self._reward] = given if given.shape == (block.count,) else np.full(block.count, np.nan)
            tensors["key"] = np.arange(block.first, block.first + block.count)
            there = self._there(tensors, self._first[number]) if self._pool is None else self._of_pool(number)
            marks = {name: each[there] for name, each in tensors.items()}
            yield marks, self._ends_of.of(marks["key"], marks[END])

    def _there(self, marks: Mapping[str, Ints], first: int) -> Ints:
        """Return which rows of a block a resume has, and no block before it."""
        keys, state = marks["key"], self._state
        there = (keys >= state.added - state.size) & (keys < state.added)
        there = there & (keys >= first) & state.coming_back(self._listed, marks[EPISODE])
        return np.asarray(there)

    def _of_pool(self, number: int) -> Ints:
        assert self._pool is not None
        return self._pool.there(self._needed[number])

    def priorities(self) -> Figures:
        """Return what the priorities of the rows that are there come to."""
        found, values = Gathered(), Values(self._stored)
        for take in (found.bound, found.spread):
            at = 0
            for piece in values.pieces("selector.priorities.float64"):  # they grow with the rows
                take(piece[self._kept[at : at + len(piece)]] if len(self._kept) else piece)
                at += len(piece)
        return found.figures()


def _listed_of(stored: Stored, state: BufferState) -> dict[str, Ints]:
    """Return the numbers of the episodes that come back, where a save has dropped some."""
    values = Values(stored)
    return {LISTED: values.all(LISTED)} if state.dropped and LISTED in values.names else {}


def _is_mark(values: Ints | None, count: int) -> bool:
    """Whether these are what a mark of so many rows can be: a damaged header may say anything."""
    return values is not None and values.shape == (count,) and values.dtype.kind in "iu"


def _lengths(marks: Mapping[str, Ints], ends: Ints) -> Ints:
    lengths: Ints = marks[PLACE][ends != OPEN] + 1.0
    return lengths


def _firsts(blocks: Sequence[Block]) -> list[int]:
    """Return the first key of each block that lies in none that begins before it: where they overlap, rows are the
    same."""
    found, end = [0] * len(blocks), 0
    for number in sorted(range(len(blocks)), key=lambda number: (blocks[number].first, number)):
        block = blocks[number]
        found[number] = max(block.first, end)
        end = max(end, block.first + block.count)
    return found


def _columns(columns: Sequence[Column] | None) -> list[ColumnFacts]:
    return [ColumnFacts(each.name, each.dtype, tuple(each.shape)) for each in columns or ()]


def _trajectories(layout: Layout, stored: Stored, rank: int | None, told: Callable[[int], None]) -> BufferFacts:
    state, _, infos = read_infos(stored)
    blocks = read_blocks(os.path.join(stored.folder, BLOCKS_FILE))
    rewards, unread = Gathered(), 0
    for take in (rewards.bound, rewards.spread):
        unread = 0
        for _, tensors in _tensors(layout, blocks, ("rewards",), told):
            if "rewards" in tensors:
                take(tensors["rewards"])
            else:
                unread += 1
    there = any(column.name == "rewards" for column in state.columns or ())
    return BufferFacts(
        rank=rank,
        rows=state.total_samples,
        added=state.trajectory_counter,
        capacity=None,
        columns=_columns(state.columns),
        episodes=state.size,
        open_episodes=0,
        ends={},
        selection=f"uniform over the newest {state.sample_window_size}" if state.sample_window_size > 0 else "uniform",
        remove="fifo",
        blocks=len(blocks),
        bytes=sum(block.length for block in blocks),
        rewards=rewards.figures(),
        lengths=Figures.of([each.shape[0] for each in infos]),
        priorities=Figures.of(()),
        versions=dict(Counter(each.model_weights_id for each in infos)),
        unread=unread if there else 0,
    )


# -- parts of payloads -------------------------------------------------------------------------------------------


def _tensors(
    layout: Layout, blocks: Sequence[Block], names: Sequence[str], told: Callable[[int], None]
) -> Iterator[tuple[int, dict[str, Ints]]]:
    """Yield the number of each block, and those of its tensors that have these names and that numpy knows; none if it
    cannot be read. File by file."""
    by_file: dict[SegmentKey, list[int]] = {}
    for number, block in enumerate(blocks):
        by_file.setdefault(block.segment_key, []).append(number)
    for key, own in sorted(by_file.items()):
        try:
            file = Blocks(layout.segment(*key))
        except OSError:
            yield from ((number, {}) for number in own)
            continue
        with file:
            for number in sorted(own, key=lambda number: blocks[number].offset):
                yield number, _parts(file, blocks[number], names)
                told(blocks[number].length)


def _parts(file: Blocks, block: Block, names: Sequence[str]) -> dict[str, Ints]:
    begin = block.offset + HEADER_BYTES
    try:
        length = int.from_bytes(file.exactly(begin, 8), "little")
        if length > min(_MOST_HEAD, block.length):
            return {}
        head = file.exactly(begin, 8 + length)
        laid = read_layout(head, block.length)
        found = {
            name: _array(each.dtype, each.shape, file.exactly(begin + each.begin, each.end - each.begin))
            for name, each in laid.items()
            if name in names
        }
        if BODIES in laid and (own := [each for each in places_said(bodies_of_head(head)) if each.name in names]):
            bodies = laid[BODIES]
            raw, (count, width) = file.exactly(begin + bodies.begin, bodies.end - bodies.begin), bodies.shape
            for each in own:
                found[each.name] = _array(each.dtype, (count, *each.shape), each.of(raw, width))
        return found
    except (Damaged, StoreError, LookupError, TypeError, ValueError, RuntimeError):
        return {}


def _array(dtype: str, shape: tuple[int, ...], raw: bytes) -> Ints:
    tensor = tensor_of(dtype, shape, np.frombuffer(bytearray(raw), np.uint8))
    if tensor.is_complex():  # such have no order, and no figures
        return np.full(tuple(shape), np.nan)
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()

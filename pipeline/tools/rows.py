"""What a generation of a buffer holds: its state, and what the marks and rewards of its rows come to.

Of each block only these are read, not the rows: a few bytes a row. They are not compared with checksums, as ``verify``
does that.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Column
from pipeline.buffer.transitions.layout import CUT, END, EPISODE, OPEN, PLACE, TERMINATED, TRUNCATED, VERSION
from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.manifest import BLOCKS_FILE, SHARDS, TRAJECTORIES
from pipeline.errors import Damaged, StoreError
from pipeline.replay.loading import read_values
from pipeline.replay.shards import shard_of
from pipeline.replay.state import STATE_FILE, BufferState, Ends, read_buffer_state
from pipeline.replay.trajectory_loading import read_infos
from pipeline.replay.trajectory_state import STATE_FILE as TRAJECTORIES_FILE
from pipeline.store.blocks import Blocks
from pipeline.store.codec import read_layout, tensor_of
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout, SegmentKey
from pipeline.store.segments import Block, read_blocks
from pipeline.tools.figures import Figures

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


def buffer_facts(layout: Layout, stored: Stored, rank: int | None = None) -> list[BufferFacts]:
    """Return what a generation holds of buffers: one, or one for each shard. Empty: it holds none.

    Args:
        layout: the run's paths.
        stored: the generation.
        rank: of shards, this one alone.

    Raises:
        Damaged, StoreError: the buffer's state cannot be read.
    """
    manifest = stored.manifest
    if manifest.kind == SHARDS:
        ranks = [each.rank for each in manifest.shards] if rank is None else [rank]
        return [_transitions(layout, shard_of(stored, each), each, manifest.options) for each in ranks]
    names = {info.path for info in manifest.files}
    if manifest.kind == TRAJECTORIES and TRAJECTORIES_FILE in names:
        return [_trajectories(layout, stored)]
    if STATE_FILE in names:
        return [_transitions(layout, stored, None, manifest.options)]
    return []


def _transitions(layout: Layout, stored: Stored, rank: int | None, options: Mapping[str, object]) -> BufferFacts:
    state, _ = read_buffer_state(stored.folder)
    values = read_values(stored)
    blocks = read_blocks(os.path.join(stored.folder, BLOCKS_FILE))
    fields = options.get("fields")
    reward = str(fields.get("reward", "reward")) if isinstance(fields, Mapping) else "reward"
    marks, unread = _marks(layout, blocks, reward)
    marks = {name: each[_there(state, values, blocks, marks)] for name, each in marks.items()}
    priorities = values.get("selector.priorities.float64", np.empty(0))
    if state.dropped and len(priorities) and marks:
        priorities = priorities[np.sort(marks["key"]) - (state.added - state.size)]
    ends = Ends(state).of(marks["key"], marks[END]) if marks else np.empty(0, np.uint8)
    return BufferFacts(
        rank=rank,
        rows=state.held,
        added=state.added,
        capacity=state.capacity,
        columns=_columns(state.columns),
        episodes=state.next_episode,
        open_episodes=0 if state.dropped else len(state.open_episodes),
        ends={name: int((ends == code).sum()) for code, name in _ENDS.items() if (ends == code).any()},
        selection=state.selection,
        remove=state.remove,
        blocks=len(blocks),
        bytes=sum(block.length for block in blocks),
        rewards=Figures.of(marks.get(reward, ())),
        lengths=Figures.of(marks[PLACE][ends != OPEN] + 1.0 if PLACE in marks else ()),
        priorities=Figures.of(priorities),
        versions=_versions(marks.get(VERSION, np.empty(0, np.int64))),
        unread=unread,
    )


def _columns(columns: Sequence[Column] | None) -> list[ColumnFacts]:
    return [ColumnFacts(each.name, each.dtype, tuple(each.shape)) for each in columns or ()]


def _versions(versions: Ints) -> dict[str, int]:
    numbers, counts = np.unique(versions, return_counts=True)
    return {str(number): count for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)}


def _there(state: BufferState, values: Mapping[str, Ints], blocks: Sequence[Block], marks: Mapping[str, Ints]) -> Ints:
    """Return which of the rows in blocks a resume has, each once."""
    keys = marks.get("key", np.empty(0, np.int64))
    places = values.get("pool.at.int64")
    there = np.isin(keys, places) if places is not None else (keys >= state.added - state.size) & (keys < state.added)
    there &= state.coming_back(values, marks.get(EPISODE, keys))
    last = {key: at for at, key in enumerate(keys.tolist())}  # of blocks that overlap the later one counts
    once = np.zeros(len(keys), bool)
    once[list(last.values())] = True
    return there & once if len(last) < len(keys) else there


def _marks(layout: Layout, blocks: Sequence[Block], reward: str) -> tuple[dict[str, Ints], int]:
    """Return the marks of all rows in some blocks, their keys, and their rewards, and how many blocks were not read."""
    names = (EPISODE, PLACE, VERSION, END, reward)
    found: dict[str, list[Ints]] = {}
    unread = 0
    for _, tensors, block in _tensors(layout, blocks, names):
        if any(name not in tensors or len(tensors[name]) != block.count for name in names[:-1]):
            unread += 1
            continue
        given = tensors.get(reward, np.empty(0))
        tensors[reward] = given if given.shape == (block.count,) else np.full(block.count, np.nan)
        tensors["key"] = np.arange(block.first, block.first + block.count)
        for name, each in tensors.items():
            found.setdefault(name, []).append(each)
    return {name: np.concatenate(each) for name, each in found.items()}, unread


def _trajectories(layout: Layout, stored: Stored) -> BufferFacts:
    state, _, infos = read_infos(stored)
    blocks = read_blocks(os.path.join(stored.folder, BLOCKS_FILE))
    rewards: list[Ints] = []
    unread = 0
    for _, tensors, _ in _tensors(layout, blocks, ("rewards",)):
        if "rewards" in tensors:
            rewards.append(tensors["rewards"].reshape(-1))
        else:
            unread += 1
    there = any(column.name == "rewards" for column in state.columns or ())
    return BufferFacts(
        rank=None,
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
        rewards=Figures.of(np.concatenate(rewards) if rewards else ()),
        lengths=Figures.of([each.shape[0] for each in infos]),
        priorities=Figures.of(()),
        versions=dict(Counter(each.model_weights_id for each in infos)),
        unread=unread if there else 0,
    )


# -- parts of payloads -------------------------------------------------------------------------------------------


def _tensors(
    layout: Layout, blocks: Sequence[Block], names: Sequence[str]
) -> Iterator[tuple[int, dict[str, Ints], Block]]:
    """Yield each block with those of its tensors that have these names and that numpy knows; none if it cannot be
    read. File by file."""
    by_file: dict[SegmentKey, list[Block]] = {}
    for block in blocks:
        by_file.setdefault(block.segment_key, []).append(block)
    for key, own in sorted(by_file.items()):
        try:
            file = Blocks(layout.segment(*key))
        except OSError:
            yield from ((0, {}, block) for block in own)
            continue
        with file:
            for block in sorted(own, key=lambda each: each.offset):
                yield block.offset, _parts(file, block, names), block


def _parts(file: Blocks, block: Block, names: Sequence[str]) -> dict[str, Ints]:
    begin = block.offset + HEADER_BYTES
    try:
        length = int.from_bytes(file.exactly(begin, 8), "little")
        if length > min(_MOST_HEAD, block.length):
            return {}
        head = file.exactly(begin, 8 + length)
        laid = read_layout(head, block.length)
        return {
            name: _array(each.dtype, each.shape, file.exactly(begin + each.begin, each.end - each.begin))
            for name, each in laid.items()
            if name in names
        }
    except (Damaged, StoreError, TypeError, ValueError, RuntimeError):
        return {}


def _array(dtype: str, shape: tuple[int, ...], raw: bytes) -> Ints:
    tensor = tensor_of(dtype, shape, np.frombuffer(bytearray(raw), np.uint8))
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()

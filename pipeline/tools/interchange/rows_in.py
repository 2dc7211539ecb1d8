"""A buffer's run out of transitions: ``ReplayBuffer(capacity, directory=...).resume()`` loads it.

Marks that the stream has are kept: keys where they follow each other, episodes, places, versions, ends, priorities.
Those that it lacks are made: an episode ends with a row that is terminated or truncated, and so does the last one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import BLOCK_BYTES, blob_head, stored_name
from pipeline.buffer.transitions.checked import SUMS, checksum_of, sums_of
from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.buffer.transitions.layout import BEHIND, MARKS
from pipeline.checkpoint.manifest import BLOCKS_FILE, REPLAY
from pipeline.replay.state import STATE_FILE, VALUES_FOLDER, BufferState, encode_state
from pipeline.store.segments import Block
from pipeline.tools.interchange.linking import Linker
from pipeline.tools.interchange.new_run import NewRun
from pipeline.tools.interchange.spooled import Spooled
from pipeline.tools.interchange.streams import (
    END,
    EPISODE,
    KEY,
    PLACE,
    PRIORITY,
    VERSION,
    Rows,
    Transitions,
    rechunked,
)

_KEPT = (EPISODE, PLACE, BEHIND, VERSION, END)
_PRIORITIES = "selector.priorities.float64"


def write_transitions(
    stream: Transitions, directory: str, *, step: int, progress: Callable[[int], None]
) -> tuple[str, int]:
    """Write a run into an empty folder; return its id, and how many rows it has.

    Raises:
        ConfigError, Damaged: the rows do not fit together.
        WriteFailed: it cannot be written.
    """
    run = NewRun(directory)
    spool = Spooled(os.path.join(directory, "scratch-priorities")) if PRIORITY in stream.marks else None
    try:
        linker = Linker(stream.about, stream.marks, stream.schema)
        blocks: list[Block] = []
        most = 0.0
        for rows in rechunked(stream.batches(), _most):
            marks = linker.marks_of(rows)
            first, count = int(marks[KEY][0]), len(rows)
            blob = _encoded(stream.schema, rows, marks)
            at = run.place(blob, first)
            blocks.append(msgspec.structs.replace(Block.at(first, count, at), sums=checksum_of(blob)))
            if spool is not None:
                spool.add(rows.marks[PRIORITY])
                most = max(most, float(rows.marks[PRIORITY].max()))
            progress(rows.nbytes)
        state = _state(stream, linker, most)
        files: dict[str, bytes | memoryview] = {
            STATE_FILE: encode_state(state, {}),
            BLOCKS_FILE: msgspec.msgpack.encode(blocks),
        }
        if spool is not None and state.size:
            files[f"{VALUES_FOLDER}/{_PRIORITIES}"] = spool.content()
        options = {"capacity": state.capacity, "imported": True}
        run_id = run.commit(REPLAY, files, step, options=options)
    except BaseException:
        run.abandon()
        raise
    finally:
        if spool is not None:
            spool.remove()
    return run_id, state.size


def _most(rows: Rows) -> int:
    """Return how many rows are to be a block, by the size of these."""
    return max(1, BLOCK_BYTES * len(rows) // max(1, rows.nbytes + 32 * len(rows)))


def _encoded(schema: Schema, rows: Rows, marks: dict[str, np.ndarray]) -> memoryview:
    """Return a block's payload."""
    count = len(rows)
    columns = [*schema.columns, *(Column(name, MARKS[name].name) for name in _KEPT)]
    columns.sort(key=lambda column: -column.bits.itemsize)
    data = sum(count * column.nbytes for column in columns)
    sizes: list[tuple[str, str, tuple[int, ...]]] = [
        (column.name, stored_name(column), (count, *column.shape)) for column in columns
    ]
    head, offsets = blob_head([*sizes, (SUMS, "U8", (4 * -(-data // (16 << 10)),))])
    blob = np.empty(len(head) + offsets[-1], np.uint8)
    blob[: len(head)] = np.frombuffer(head, np.uint8)
    for column, begin, end in zip(columns, offsets, offsets[1:], strict=False):
        source: Any = marks[column.name] if column.name in _KEPT else rows.columns[column.name]
        if begin < end:
            blob[len(head) + begin : len(head) + end].view(column.bits)[...] = source.reshape(-1)
    blob[len(head) + data :] = sums_of(blob[len(head) : len(head) + data])
    return memoryview(blob.data)


def _state(stream: Transitions, linker: Linker, most: float) -> BufferState:
    about, size = stream.about, linker.size
    state = BufferState(
        columns=list(stream.schema.columns),
        capacity=max(about.capacity, size, 1),
        added=linker.next_key,
        size=size,
        next_episode=linker.next_episode,
        open_episodes=linker.open_episodes(),
        cut_keys=linker.cut_keys(),
        limiter={"added": size, "sampled": 0},
    )
    if about.priority_alpha is not None and PRIORITY in stream.marks and size:
        state.selection = "prioritized"
        state.selector = {"batches": 0, "ever": most, "alpha": about.priority_alpha, "most": most}
    return state

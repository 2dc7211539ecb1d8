"""A buffer's run out of transitions: ``ReplayBuffer(capacity, directory=...).resume()`` loads it.

Marks that the stream has are kept: keys where they follow each other, episodes, places, versions, ends, priorities.
Those that it lacks are made: an episode ends with a row that is terminated or truncated, and so does the last one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec

from pipeline.buffer.transitions.blocks import BLOCK_BYTES, encode_arrays
from pipeline.buffer.transitions.layout import BEHIND
from pipeline.checkpoint.manifest import BLOCKS_FILE, REPLAY
from pipeline.replay.state import STATE_FILE, VALUES_FOLDER, BufferState, encode_state
from pipeline.store.block_sums import checksum_of
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
            blob = encode_arrays(stream.schema, {**rows.columns, **{name: marks[name] for name in _KEPT}}, len(rows))
            at = run.place(blob, first)
            blocks.append(msgspec.structs.replace(Block.at(first, count, at), sums=checksum_of(blob)))
            if spool is not None:
                spool.add(rows.marks[PRIORITY])
                most = max(most, float(rows.marks[PRIORITY].max()))
            progress(rows.nbytes)
        state = _state(stream, linker, most)
        files: dict[str, bytes | Iterator[bytes]] = {
            STATE_FILE: encode_state(state, {}),
            BLOCKS_FILE: msgspec.msgpack.encode(blocks),
        }
        if spool is not None and state.size:
            files[f"{VALUES_FOLDER}/{_PRIORITIES}"] = spool.pieces()
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

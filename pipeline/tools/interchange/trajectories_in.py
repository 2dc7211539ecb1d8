"""A run of trajectories: ``TrajectoryBuffer(directory=...).resume()`` loads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import blob_head
from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.checkpoint.manifest import BLOCKS_FILE, TRAJECTORIES
from pipeline.errors import Damaged
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.state import VALUES_FOLDER, encode_state
from pipeline.replay.trajectory_state import STATE_FILE, TrajectoryState
from pipeline.store.codec import ITEM_KEY
from pipeline.store.segments import Block
from pipeline.tools.interchange.columns import dtype_of_column
from pipeline.tools.interchange.new_run import NewRun
from pipeline.tools.interchange.streams import Record, Records, flat_bytes

_TABLE = ("steps", "envs", "max_episode_length", "model_weights_id")


def write_trajectories(
    stream: Records, directory: str, *, step: int, progress: Callable[[int], None]
) -> tuple[str, int]:
    """Write a run into an empty folder; return its id, and how many trajectories it has.

    Raises:
        Damaged: a record is no trajectory, or has other columns than the first.
        WriteFailed: it cannot be written.
    """
    run = NewRun(directory)
    try:
        written = _Written(run, stream.about.next_trajectory - (stream.total or 0))
        for record in stream.records():
            written.add(record)
            progress(record.nbytes)
        run_id = run.commit(TRAJECTORIES, written.files(), step, options={"imported": True})
    except BaseException:
        run.abandon()
        raise
    return run_id, len(written.blocks)


class _Written:
    """What was written so far."""

    def __init__(self, run: NewRun, first: int) -> None:
        self._run, self._first = run, max(0, first)
        self._schema: Schema | None = None
        self._rows: list[list[int]] = []
        self._weights: dict[str, int] = {}
        self.blocks: list[Block] = []

    def add(self, record: Record) -> None:
        fields = record.fields
        number = self._first + len(self.blocks)
        shape = (int(fields["steps"]), int(fields["envs"]))
        if min(shape) < 1:
            raise Damaged(f"trajectory {number}: its [T, B] is {list(shape)}, so no transition is in it")
        schema = self._columns(record, number, shape)
        if self._schema is None:
            self._schema = schema
        if schema != self._schema:
            raise Damaged(f"trajectory {number}: has the columns {schema.columns}, others have {self._schema.columns}")
        weights = str(fields.get("model_weights_id", ""))
        length = int(fields.get("max_episode_length", 0))
        info = TrajectoryInfo(number, shape[0] * shape[1], shape, length, weights)
        at = self._run.place(self._blob(record, info), number)
        self.blocks.append(Block.at(number, 1, at))
        self._rows.append([*shape, length, self._weights.setdefault(weights, len(self._weights))])

    @staticmethod
    def _columns(record: Record, number: int, shape: tuple[int, int]) -> Schema:
        columns = []
        for name, tensor in sorted(record.tensors.items()):
            if tensor.shape[:2] != shape:
                raise Damaged(f"trajectory {number}: {name} is {list(tensor.shape)}, where {list(shape)}... is needed")
            columns.append(Column(name, dtype_of_column(tensor.dtype), tensor.shape[2:]))
        if not columns:
            raise Damaged(f"trajectory {number}: it has no tensors")
        return Schema(tuple(columns))

    def _blob(self, record: Record, info: TrajectoryInfo) -> memoryview:
        assert self._schema is not None
        columns = sorted(self._schema.columns, key=lambda column: -column.bits.itemsize)
        item = np.frombuffer(msgspec.msgpack.encode(info), np.uint8)
        parts = [(each.name, record.tensors[each.name].dtype, record.tensors[each.name].shape) for each in columns]
        head, _ = blob_head([*parts, (ITEM_KEY, "U8", item.shape)])
        chunks: list[Any] = [head, *(flat_bytes(record.tensors[each.name]) for each in columns), item]
        return memoryview(b"".join(chunks))

    def files(self) -> dict[str, bytes]:
        """Return what the generation holds."""
        table = np.array(self._rows, np.int64).reshape(-1, len(_TABLE))
        state = TrajectoryState(
            columns=None if self._schema is None else list(self._schema.columns),
            size=len(self.blocks),
            trajectory_counter=self._first + len(self.blocks),
            total_samples=int((table[:, 0] * table[:, 1]).sum()),
            weights=list(self._weights),
        )
        files: dict[str, bytes] = {
            STATE_FILE: encode_state(state, {}),
            BLOCKS_FILE: msgspec.msgpack.encode(self.blocks),
        }
        for place, name in enumerate(_TABLE):
            files[f"{VALUES_FOLDER}/{name}.int64"] = np.ascontiguousarray(table[:, place]).tobytes()
        return files

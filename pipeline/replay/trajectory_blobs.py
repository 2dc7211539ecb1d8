"""A trajectory as a payload: a ``safetensors`` blob of its fields [T, B, ...] under their names, and ``__item__``.

Where a field begins follows from the schema and from how many rows there are: so single rows can be read.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.blocks import blob_head, decode_columns
from pipeline.buffer.transitions.bodies import stored_name
from pipeline.buffer.transitions.columns import LARGE, Arrays, Column, Schema
from pipeline.buffer.transitions.recycling import Recycler
from pipeline.errors import Damaged
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.shelf import Rows
from pipeline.store.codec import ITEM_KEY, TensorBytes, layout_of_head, read_bytes

_encode_info = msgspec.msgpack.Encoder().encode
_decode_info = msgspec.msgpack.Decoder(TrajectoryInfo).decode


class Run(NamedTuple):
    """Columns that lie next to each other, all small or one that is large.

    Attributes:
        columns: them, with the bytes of a row before each within the run.
        before: bytes of a row in the columns before the run.
        nbytes: bytes of a row in it.
        large: whether its rows are read one by one.
    """

    columns: tuple[tuple[Column, int], ...]
    before: int
    nbytes: int
    large: bool


class BlobLayout:
    """Where the columns of a schema lie in a blob: one after the other, wide types first, each [T, B, ...]."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.columns = sorted(schema.columns, key=lambda column: -column.bits.itemsize)

    @cached_property
    def runs(self) -> list[Run]:
        """Return what is read together, in the order of the blob."""
        runs: list[Run] = []
        before = 0
        for column in self.columns:
            large = column.nbytes >= LARGE
            last = runs[-1] if runs else None
            if last is not None and not large and not last.large:
                runs[-1] = Run((*last.columns, (column, last.nbytes)), last.before, last.nbytes + column.nbytes, False)
            else:
                runs.append(Run(((column, 0),), before, column.nbytes, large))
            before += column.nbytes
        return runs

    def encode(self, rows: Rows, memory: Recycler) -> memoryview:
        """Return a trajectory's blob, which is the caller's; in memory that others have given back, if there is
        such."""
        info = rows.info
        item = np.frombuffer(_encode_info(info), np.uint8)
        parts = [(each.name, stored_name(each), (*info.shape, *each.shape)) for each in self.columns]
        head, offsets = blob_head([*parts, (ITEM_KEY, "U8", item.shape)])
        blob = memory.array("trajectory", len(head) + offsets[-1], (), np.dtype(np.uint8))
        blob[: len(head)] = np.frombuffer(head, np.uint8)
        data = blob[len(head) :]
        for column, begin, end in zip(self.columns, offsets, offsets[1:], strict=False):
            out = data[begin:end].view(column.bits).reshape(info.num_samples, *column.shape)
            rows.copy_to(column.name, out)
        data[offsets[-2] :] = item
        return memoryview(blob.data)

    def decode(self, blob: Any, info: TrajectoryInfo, where: str) -> Arrays:
        """Return the rows of a trajectory [num_samples, ...], views of ``blob``.

        Raises:
            Damaged: it is another one, or none.
        """
        arrays = decode_columns(blob, self.columns, info.shape, where)
        self._check(read_bytes(blob, where), info, where)
        shapes = {each.name: each.shape for each in self.columns}
        return {name: array.reshape(info.num_samples, *shapes[name]) for name, array in arrays.items()}

    def check_head(self, head: bytes, info: TrajectoryInfo, where: str) -> None:
        """Compare the beginning of a blob, up to its data, with what it must be for single rows to be read.

        Raises:
            Damaged: it is that of another trajectory, or of none.
        """
        found, begin = layout_of_head(head, where), 0
        for column in self.columns:
            end = begin + info.num_samples * column.nbytes
            expected = (stored_name(column), (*info.shape, *column.shape), (begin, end))
            if found.get(column.name) != expected:
                raise Damaged(
                    f"{where}: {column.name!r} is {found.get(column.name)} there, {expected} was expected for "
                    f"trajectory {info.trajectory_id}. Restore the file from a copy."
                )
            begin = end

    @staticmethod
    def _check(found: dict[str, TensorBytes], info: TrajectoryInfo, where: str) -> None:
        item = found.get(ITEM_KEY)
        if item is None or decode_info(item.array.tobytes(), where) != info:
            raise Damaged(f"{where}: holds another trajectory than {info}. Restore the file from a copy")


def decode_info(raw: bytes, where: str) -> TrajectoryInfo:
    """Return what a payload says of its trajectory.

    Raises:
        Damaged: it says no such thing.
    """
    try:
        info = _decode_info(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"{where}: says nothing of a trajectory ({error})") from None
    if len(info.shape) != 2 or min(info.shape) < 1 or info.num_samples != info.shape[0] * info.shape[1]:
        raise Damaged(f"{where}: a trajectory is said to be {info}")
    return info

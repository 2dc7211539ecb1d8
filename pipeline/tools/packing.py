"""Writing rows that are packed as memory has them, as one buffer of a generation: the run's, or that of a rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Column, Schema
from pipeline.buffer.transitions.elsewhere import AT_ONCE
from pipeline.buffer.transitions.layout import CUT, END
from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.manifest import BLOCKS_FILE
from pipeline.replay.state import STATE_FILE, VALUES_FOLDER, BufferState, encode_state
from pipeline.store.files import FilesLike
from pipeline.tools.output import GrowingFile
from pipeline.tools.scattered import Packed
from pipeline.tools.writing import AsideWriter, BlockWriter, SegmentWriter, Wrote


class PackedWriter:
    """One buffer while it is written."""

    def __init__(
        self,
        files: FilesLike,
        generation: GenerationWriter,
        segments: SegmentWriter,
        prefix: str,
        extras: Sequence[str],
        nexts: Sequence[Column],
    ) -> None:
        """Args:
        files: the file layer.
        generation: that has begun.
        segments: where payloads go; they are closed here.
        prefix: what the paths of the buffer's files in the generation begin with.
        extras: names of the files of what the selection has of each row.
        nexts: columns of next observations that are kept aside.
        """
        self._files, self._generation, self._prefix, self._segments = files, generation, prefix, segments
        self._grown: list[GrowingFile] = []
        self._aside: AsideWriter | None = None
        self._blocks: BlockWriter | None = None
        folder = f"{prefix}{VALUES_FOLDER}/"
        try:
            self._aside = AsideWriter(files, generation, folder, nexts)
            for name in extras:
                self._grown.append(GrowingFile(files, generation, folder + name))
        except BaseException:
            self.close()
            raise
        self.cuts: list[int] = []
        """Keys of rows with which an episode was left where it was."""
        self.most = 0.0
        """The largest of the first extra."""

    @property
    def bytes(self) -> int:
        """Of payloads."""
        return self._segments.bytes

    def write(self, schema: Schema, first: int, rows: Iterator[Packed]) -> None:
        """Write rows, whose keys follow each other from ``first`` on."""
        self._blocks = BlockWriter(self._segments, schema, first)
        assert self._aside is not None
        for each in rows:
            self.cuts += (first + np.flatnonzero(each.records[END] == CUT)).tolist()
            self._aside.add(first + each.aside, each.nexts)
            first += len(each.records)
            self._blocks.add_records(each.records, each.large)
            for file, values in zip(self._grown, each.extras, strict=True):
                file.write(np.ascontiguousarray(values).tobytes())
            if each.extras:
                self.most = max(self.most, float(each.extras[0].max()))
        self._blocks.flush()

    def finish(
        self, state: BufferState, unknown: dict[str, Any], values: Mapping[str, Iterable[np.ndarray]], why: str
    ) -> Wrote:
        """Write the rest of it: the state, ``unknown`` fields of it, and ``values``, piece by piece, by the names of
        their files; the journal says ``why`` it ends."""
        generation, blocks = self._generation, [] if self._blocks is None else self._blocks.blocks
        generation.add(self._prefix + STATE_FILE, encode_state(state, unknown))
        generation.add(self._prefix + BLOCKS_FILE, msgspec.msgpack.encode(blocks))
        for name, pieces in values.items():
            self._grown.append(GrowingFile(self._files, generation, f"{self._prefix}{VALUES_FOLDER}/{name}"))
            for each in pieces:
                self._grown[-1].write(each.tobytes())
        assert self._aside is not None
        self._aside.finish()
        for file in self._grown:
            file.finish()
        return self._segments.finish(time.time(), why)

    def close(self) -> None:
        """Give files back, if it was not finished."""
        self._segments.close()
        for file in self._grown:
            file.close()
        if self._aside is not None:
            self._aside.close()


def places_of(added: int, size: int) -> dict[str, Iterable[np.ndarray]]:
    """Return what :func:`pipeline.replay.pooling.places_of` does, piece by piece."""

    def pieces(first: int) -> Iterator[np.ndarray]:
        for begin in range(0, size, AT_ONCE):
            yield first + np.arange(begin, min(size, begin + AT_ONCE))

    return {"pool.keys.int64": pieces(0), "pool.serials.int64": pieces(added - size), "pool.at.int64": pieces(0)}

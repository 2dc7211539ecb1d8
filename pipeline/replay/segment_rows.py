"""Reading single rows of trajectories that lie in segments.

No more than some files are open at a time. One that is read stays readable though its segment is removed meanwhile: so
rows may be read without a lock, once :meth:`SegmentRows.open` has the files. A file is read by ``pread``, not mapped: a
disk that fails is then an error, and not the end of the process.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pipeline.buffer.transitions.columns import Arrays, Column
from pipeline.errors import Damaged, StoreError
from pipeline.replay.flattening import TrajectoryInfo
from pipeline.replay.trajectory_blobs import BlobLayout, Run
from pipeline.store.files import plain_handle
from pipeline.store.frames import HEADER_BYTES, PAYLOAD, Header, crc32c_more, decode_header
from pipeline.store.layout import Layout, SegmentKey
from pipeline.store.segments import Block

MOST_OPEN = 64
_WHOLE = 64 << 10  # bytes up to which the small columns of a trajectory are read at once
_ALIGN = 64


class SegmentFile:
    """An open segment; closed when nobody holds it any more."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._handle = -1
        try:
            self._handle = plain_handle(path)
        except FileNotFoundError:
            raise Damaged(f"{path}: the segment is missing. Restore the file from a copy.") from None

    def read(self, into: memoryview, offset: int) -> None:
        """Fill memory with what lies at an offset.

        Raises:
            Damaged: the file ends before.
            StoreError: it cannot be read.
        """
        at = 0
        while at < len(into):
            try:
                got = os.preadv(self._handle, [into[at:]], offset + at)
            except OSError as error:
                raise StoreError(f"{self.path} at byte {offset + at}: cannot be read: {error}") from error
            if not got:
                raise Damaged(f"{self.path}: ends at byte {offset + at}, where rows should lie. Restore the file")
            at += got

    def take(self, offset: int, length: int) -> bytearray:
        """Return what lies at an offset; see :meth:`read`."""
        found = bytearray(length)
        self.read(memoryview(found), offset)
        return found

    def __del__(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class Chosen(NamedTuple):
    """Rows of one trajectory: where they lie, which, and where they are to go."""

    file: SegmentFile
    data: int
    """Where in the file its data begin."""
    num_samples: int
    """Rows that it has."""
    rows: np.ndarray
    targets: np.ndarray


class SegmentRows:
    """Reads the trajectories of one run. ``open`` and ``forget`` belong to whoever holds the buffer's lock."""

    def __init__(self, layout: Layout, run_tag: Callable[[], int]) -> None:
        self._layout, self._run_tag = layout, run_tag
        self._files: OrderedDict[SegmentKey, SegmentFile] = OrderedDict()

    def open(self, keys: Iterable[SegmentKey]) -> dict[SegmentKey, SegmentFile]:
        """Return segments, open.

        Raises:
            Damaged: one is not there.
            StoreError: one cannot be opened.
        """
        found = {}
        for key in keys:
            file = self._files.get(key)
            if file is None:
                file = self._files[key] = SegmentFile(self._layout.segment(*key))
                if len(self._files) > MOST_OPEN:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(key)
            found[key] = file
        return found

    def forget(self) -> None:
        """Close what nobody reads."""
        self._files.clear()

    def find_data(
        self, file: SegmentFile, block: Block, info: TrajectoryInfo, layout: BlobLayout, *, checked: bool = True
    ) -> int:
        """Return where the data of a payload begin, once its headers have been checked; unless it was ``checked``
        before, its checksum too.

        Raises:
            Damaged: another payload lies there, or none.
            StoreError: it cannot be read.
        """
        header = self._header(file, block)
        begin = block.offset + HEADER_BYTES
        length = 8 + int.from_bytes(file.take(begin, min(8, block.length)), "little")
        if length > block.length:
            raise _damaged(file, block)
        layout.check_head(bytes(file.take(begin, length)), info, f"{file.path} at byte {block.offset}")
        if not checked:
            self._payload(file, block, header)
        return begin + length

    def whole(self, file: SegmentFile, block: Block, info: TrajectoryInfo, layout: BlobLayout) -> Arrays:
        """Return all rows of a trajectory, and check its payload; see :meth:`find_data`."""
        payload = self._payload(file, block, self._header(file, block))
        return layout.decode(payload, info, f"{file.path} at byte {block.offset}")

    def _header(self, file: SegmentFile, block: Block) -> Header:
        header = decode_header(bytes(file.take(block.offset, HEADER_BYTES)), file.path)
        if header is None or header.kind != PAYLOAD or header.length != block.length:
            raise _damaged(file, block)
        if (header.run_tag, header.sequence) != (self._run_tag(), block.first):
            raise _damaged(file, block)
        return header

    @staticmethod
    def _payload(file: SegmentFile, block: Block, header: Header) -> bytearray:
        payload = file.take(block.offset + HEADER_BYTES, block.length)
        if crc32c_more(0, payload) != header.checksum:
            raise _damaged(file, block)
        return payload


def _damaged(file: SegmentFile, block: Block) -> Damaged:
    return Damaged(
        f"{file.path} at byte {block.offset}: trajectory {block.first} is damaged or missing. Restore the file from a "
        "copy, or resume() an older generation."
    )


def read_rows(layout: BlobLayout, chosen: Sequence[Chosen], into: Arrays) -> None:
    """Read rows [n, ...] of every column into their places.

    Raises:
        Damaged: a file ends too early.
        StoreError: one cannot be read.
    """
    for run in layout.runs:
        together = [each for each in chosen if not run.large and each.num_samples * run.nbytes <= _WHOLE]
        if together and run.nbytes:
            _read_together(run, together, into)
        if len(together) < len(chosen):
            for column, before in run.columns:
                others = chosen if not together else [each for each in chosen if each.num_samples * run.nbytes > _WHOLE]
                _read_singly(column, run.before + before, others, into)


def _read_together(run: Run, chosen: Sequence[Chosen], into: Arrays) -> None:
    """Read all rows of the run's columns, each trajectory at once, and take those out that were chosen."""
    sizes = np.array([each.num_samples * run.nbytes for each in chosen])
    rooms = -(-sizes // _ALIGN) * _ALIGN
    begins = np.cumsum(rooms) - rooms
    raw = np.empty(int(rooms.sum()) + _ALIGN, np.uint8)
    memory = memoryview(raw.data)
    for each, begin, size in zip(chosen, begins.tolist(), sizes.tolist(), strict=True):
        each.file.read(memory[begin : begin + size], each.data + each.num_samples * run.before)
    numbers = [len(each.rows) for each in chosen]
    rows, targets = np.concatenate([each.rows for each in chosen]), np.concatenate([each.targets for each in chosen])
    starts = np.repeat(begins, numbers)
    counts = np.repeat(np.array([each.num_samples for each in chosen]), numbers)
    for column, before in run.columns:
        if not column.nbytes:
            continue
        values = raw.view(column.bits)
        width, size = column.nbytes // values.itemsize, values.itemsize
        first = (starts + counts * before + rows * column.nbytes) // size
        windows = as_strided(values, (len(values) - width + 1, width), (size, size), writeable=False)
        into[column.name][targets] = windows[first].reshape(-1, *column.shape)


def _read_singly(column: Column, before: int, chosen: Sequence[Chosen], into: Arrays) -> None:
    if not column.nbytes:
        return
    array = into[column.name]
    raw = memoryview(array.reshape(len(array), -1).view(np.uint8).reshape(-1).data)
    size = column.nbytes
    for each in chosen:
        begin = each.data + each.num_samples * before
        for row, target in zip(each.rows.tolist(), each.targets.tolist(), strict=True):
            each.file.read(raw[target * size : (target + 1) * size], begin + row * size)

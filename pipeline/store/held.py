"""Payloads of segments that are read later: the files stay open, so that they can be read whoever removes them.

When they are opened, sizes and headers are checked; a payload is checked when it is read. Descriptors are few: beyond a
quarter of what the process may have, a file is opened again for each reading.
"""

from __future__ import annotations

import os
import resource
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from pipeline.errors import Damaged, StoreError
from pipeline.store.blocks import crc32c_more
from pipeline.store.files import plain_handle, size_of
from pipeline.store.frames import HEADER_BYTES, PAYLOAD, Header, decode_header
from pipeline.store.layout import Layout, SegmentKey, segment_key
from pipeline.store.memory import aligned_memory
from pipeline.store.segments import Block, SegmentInfo

LEAST_HELD = 16
"""So many files are kept open, whatever the limit is."""
_TAIL = 2048
"""Bytes at the end of a block that are soon wanted: the sums of what is before them."""
_HINTED = hasattr(os, "posix_fadvise")
RESTORE = "Restore the file from a copy, or resume an older generation."


class HeldSegments:
    """The segments of some blocks. Methods block, and belong to one thread at a time."""

    def __init__(
        self, layout: Layout, run_tag: int, blocks: Sequence[Block], promised: Iterable[SegmentInfo] = ()
    ) -> None:
        """Open them, and check what can be without reading payloads.

        Args:
            layout: the run's paths.
            run_tag: the run's tag.
            blocks: those that will be read, each once.
            promised: how long segments are at the least, those of others among them.

        Raises:
            Damaged: a segment is missing or too short, or a header is not that of its block.
            StoreError: one cannot be read now.
        """
        self._layout, self._run_tag = layout, run_tag
        self._handles: dict[SegmentKey, int] = {}
        self._close = weakref.finalize(self, _close, self._handles)
        self._memory = memoryview(b"")
        most = max(LEAST_HELD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        bytes_of = {segment_key(info.name): info.bytes for info in promised}
        by_file: dict[SegmentKey, list[Block]] = {}
        for block in blocks:
            by_file.setdefault(block.segment_key, []).append(block)
        self._waiting = {key: len(own) for key, own in by_file.items()}
        try:
            for key, own in by_file.items():
                self._open(key, own, bytes_of, keep=len(self._handles) < most)
        except BaseException:
            self._close()
            raise

    def _open(self, key: SegmentKey, blocks: Sequence[Block], promised: Mapping[SegmentKey, int], keep: bool) -> None:
        path = self._layout.segment(*key)
        handle = self._opened(path)
        try:
            size = size_of(handle, path)
            least = max(promised.get(key, 0), *(block.offset + HEADER_BYTES + block.length for block in blocks))
            if size < least:
                raise Damaged(f"{path}: has {size} bytes, where {least} were written. {RESTORE}")
            for block in blocks:
                _expect(handle, block.offset, HEADER_BYTES)
                _expect(handle, block.offset + HEADER_BYTES + block.length - _TAIL, _TAIL)
            for block in blocks:
                self._header(handle, path, block)
        except BaseException:
            os.close(handle)
            raise
        if keep:
            self._handles[key] = handle
        else:
            os.close(handle)

    def _opened(self, path: str) -> int:
        try:
            return plain_handle(path)
        except FileNotFoundError:
            raise Damaged(f"{path}: the segment is missing. {RESTORE}") from None

    def _header(self, handle: int, path: str, block: Block) -> Header:
        header = decode_header(_read(handle, path, block.offset, HEADER_BYTES), path)
        if (
            header is None
            or (header.kind, header.run_tag, header.sequence) != (PAYLOAD, self._run_tag, block.first)
            or (header.number, header.length) != (0, block.length)
        ):
            raise self.damaged(block)
        return header

    def damaged(self, block: Block, at: int = -HEADER_BYTES) -> Damaged:
        """Return the error for a block that is not whole, at a byte of its payload."""
        path = self._layout.segment(*block.segment_key)
        lies = f"there lie the {block.count} rows from number {block.first} on, or some of them"
        if block.count == 1:  # a trajectory, say
            lies = f"there lies number {block.first}"
        return Damaged(f"{path} at byte {block.offset + HEADER_BYTES + at}: damaged; {lies}. {RESTORE}")

    def where(self, block: Block) -> str:
        """Return where a block lies, for people."""
        return f"{self._layout.segment(*block.segment_key)} at byte {block.offset}"

    def expect(self, block: Block, parts: Iterable[tuple[int, int]] | None = None) -> None:
        """Let the disk begin with a block that is about to be read, or with parts of its payload, (begin, end)."""
        handle = self._handles.get(block.segment_key, -1)
        if handle >= 0:
            at = block.offset + HEADER_BYTES
            for begin, end in [(0, block.length)] if parts is None else parts:
                _expect(handle, at + begin, end - begin)

    def payload(self, block: Block) -> memoryview:
        """Return the payload of a block; valid until the next call.

        Raises:
            Damaged: it is not whole.
            StoreError: it cannot be read now.
        """
        size = HEADER_BYTES + block.length
        if len(self._memory) < size:
            self._memory = aligned_memory(size)
        with self._file(block) as handle:
            raw = self._memory[:size]
            path = self._layout.segment(*block.segment_key)
            if _read_into(handle, path, block.offset, raw) < size:
                raise self.damaged(block)
            header = decode_header(bytes(raw[:HEADER_BYTES]), path)
        payload = raw[HEADER_BYTES:]
        if header is None or header.sequence != block.first or crc32c_more(0, payload) != header.checksum:
            raise self.damaged(block)
        return payload

    def reader(self, block: Block) -> Callable[[int, int], bytes]:
        """Return what gives parts of a block's payload: from where on, how many bytes. They are not checked, and fewer
        at the file's end. It raises StoreError if they cannot be read now."""
        path, begin = self._layout.segment(*block.segment_key), block.offset + HEADER_BYTES
        handle = self._handles.get(block.segment_key, -1)
        if handle >= 0:
            return lambda at, length: _read(handle, path, begin + at, length)

        def read(at: int, length: int) -> bytes:
            with self._file(block) as opened:
                return _read(opened, path, begin + at, length)

        return read

    def _file(self, block: Block) -> _Handle:
        handle = self._handles.get(block.segment_key, -1)
        if handle >= 0:
            return _Handle(handle, own=False)
        return _Handle(self._opened(self._layout.segment(*block.segment_key)), own=True)

    def release(self, block: Block) -> None:
        """Take in that a block will not be read again."""
        key = block.segment_key
        self._waiting[key] -= 1
        if not self._waiting[key]:
            handle = self._handles.pop(key, -1)
            if handle >= 0:
                os.close(handle)

    def close(self) -> None:
        """Close all files."""
        self._close()


class _Handle:
    """A descriptor for a while."""

    def __init__(self, handle: int, *, own: bool) -> None:
        self._handle, self._own = handle, own

    def __enter__(self) -> int:
        return self._handle

    def __exit__(self, *_: object) -> None:
        if self._own:
            os.close(self._handle)


def _close(handles: dict[SegmentKey, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])


def _expect(handle: int, offset: int, length: int) -> None:
    if _HINTED:
        os.posix_fadvise(handle, offset, length, os.POSIX_FADV_WILLNEED)


def _read(handle: int, path: str, offset: int, length: int) -> bytes:
    try:
        return os.pread(handle, length, offset)
    except OSError as error:
        raise StoreError(f"{path} at byte {offset}: cannot be read: {error}") from error


def _read_into(handle: int, path: str, offset: int, memory: memoryview) -> int:
    """Fill memory; return how many bytes there were."""
    total = 0
    try:
        while total < len(memory):  # a call gives no more than 2 GB
            read = os.preadv(handle, [memory[total:]], offset + total)
            if not read:
                break
            total += read
    except OSError as error:
        raise StoreError(f"{path} at byte {offset}: cannot be read: {error}") from error
    return total

"""Frames: the unit in which journals and segments are written.

A frame is a header of 64 bytes, ``length`` bytes of payload, and zeros up to the next multiple of 64. Header
and payload have a crc32c each, so that a torn end is told from a whole frame, and a payload can be mapped
where it lies. ``docs/format.md`` has the layout as a table.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from pipeline.errors import Damaged, NewerFormat, OtherRun
from pipeline.store.blocks import LARGE_BLOCK, Blocks
from pipeline.store.blocks import crc32c as crc32c
from pipeline.store.blocks import crc32c_more as crc32c_more
from pipeline.store.blocks import crc32c_of_file as crc32c_of_file

MAGIC = b"FBAY"
FORMAT_VERSION = 1
ALIGN = 64
HEADER_BYTES = 64
EVENTS, PAYLOAD, SYNCED, FOOTER = 1, 2, 3, 4

# magic, format, kind, flags, incarnation, rank, sequence, length, number, life, run tag, reserved, payload crc
_HEADER = struct.Struct("<4sBBHIIQQIIQQI")
_CRC = struct.Struct("<I")
_ZEROS = bytes(ALIGN)
_LOOK = 1 << 16  # a multiple of ALIGN: no header lies across two pieces
_PIECE = 1 << 20  # bytes; the allocator keeps what was read in larger ones


class Header(NamedTuple):
    """A frame's header. ``sequence`` and ``number`` mean what the frame's kind says."""

    kind: int
    incarnation: int
    rank: int
    sequence: int
    length: int
    number: int
    life: int
    run_tag: int
    checksum: int


class Frame(NamedTuple):
    """A whole frame as read: where it begins, its header, its payload."""

    offset: int
    header: Header
    payload: bytes


def frame_bytes(length: int) -> int:
    """Return how many bytes a frame with ``length`` bytes of payload takes."""
    return HEADER_BYTES + (length + ALIGN - 1) // ALIGN * ALIGN


def encode_frame(
    kind: int,
    payload: bytes | memoryview,
    *,
    incarnation: int,
    rank: int,
    run_tag: int,
    sequence: int = 0,
    number: int = 0,
    life: int = 0,
) -> tuple[bytes, bytes | memoryview, bytes]:
    """Return header, payload and padding, to be written in this order; the payload is not copied."""
    length = len(payload)
    head = _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        kind,
        0,
        incarnation,
        rank,
        sequence,
        length,
        number,
        life,
        run_tag,
        0,
        crc32c(payload) if isinstance(payload, bytes) else crc32c_more(0, payload),
    )
    return head + _CRC.pack(crc32c(head)), payload, _ZEROS[: -length % ALIGN]


def decode_header(raw: bytes, where: str) -> Header | None:
    """Return the header in ``raw``, or None if there is none.

    Raises:
        NewerFormat: it is whole and of a format that this version does not know.
    """
    if len(raw) < HEADER_BYTES or raw[:4] != MAGIC:
        return None
    if _CRC.unpack_from(raw, HEADER_BYTES - 4)[0] != crc32c(raw[: HEADER_BYTES - 4]):
        return None
    _, version, kind, _, incarnation, rank, sequence, length, number, life, tag, _, checksum = _HEADER.unpack_from(raw)
    if version > FORMAT_VERSION:
        raise NewerFormat(
            f"{where}: written in format {version}; this version reads up to {FORMAT_VERSION}. Install a newer forebay."
        )
    return Header(kind, incarnation, rank, sequence, length, number, life, tag, checksum)


def read_frame(file: BinaryIO, offset: int, where: str) -> Frame | None:
    """Return the frame at ``offset`` of ``file``, or None if no whole one lies there."""
    file.seek(offset)
    header = decode_header(file.read(HEADER_BYTES), where)
    # The length is believed only as far as the file goes: a flipped bit must not ask for a terabyte.
    if header is None or header.length > os.fstat(file.fileno()).st_size - offset - HEADER_BYTES:
        return None
    payload = file.read(header.length)
    if len(payload) != header.length or crc32c(payload) != header.checksum:
        return None
    return Frame(offset, header, payload)


def _next_frame(blocks: Blocks, offset: int, where: str, keep: bool) -> Frame | None:
    """As :func:`read_frame`; without ``keep`` the payload is checked, and empty in what is returned."""
    begin = offset + HEADER_BYTES
    header = decode_header(blocks.take(offset, HEADER_BYTES), where)
    if header is None or not blocks.holds(begin + header.length):
        return None
    payload = blocks.take(begin, header.length) if keep else b""
    checksum = crc32c(payload) if keep else blocks.checksum(begin, header.length)
    return Frame(offset, header, payload) if checksum == header.checksum else None


def whole_bytes(path: str, run_tag: int) -> int:
    """Return where the whole frames of a file end that nobody writes any more. Blocks.

    Raises:
        FileNotFoundError: it is not there.
        OtherRun, NewerFormat: as :func:`scan`.
    """
    end = 0

    def at_end(offset: int, left: int) -> None:
        nonlocal end
        end = offset

    for _ in scan(path, run_tag=run_tag, ended=at_end, payloads=False):
        pass
    return end


def scan(
    path: str,
    *,
    run_tag: int,
    promised: int = 0,
    ended: Callable[[int, int], None] | None = None,
    payloads: bool = True,
    told: Callable[[int], None] | None = None,
) -> Iterator[Frame]:
    """Yield the whole frames of a file from its beginning to its end, or to the first that is torn.

    Args:
        path: the file.
        run_tag: frames of another run are refused.
        promised: bytes that a generation counts on; a torn frame before it is damage.
        ended: told at the end where the whole frames end, and how many bytes of a torn one follow.
        payloads: False leaves the payloads of the frames empty; they are checked all the same.
        told: told of bytes as they are read.

    Raises:
        Damaged: a frame is bad before ``promised``, or before a later synced mark.
        OtherRun: a frame carries another run's tag.
        NewerFormat: a frame is of a format that this version does not know.
    """
    offset = 0
    with _open(path, told) as blocks:
        size = blocks.size()
        while offset < size:
            frame = _next_frame(blocks, offset, path, payloads)
            if frame is None:
                break
            if frame.header.run_tag != run_tag:
                raise OtherRun(
                    f"{path} at byte {offset}: the record belongs to another run (tag "
                    f"{frame.header.run_tag:016x}, expected {run_tag:016x}). Was the file copied here?"
                )
            yield frame
            offset += frame_bytes(frame.header.length)
        if offset < promised or (offset < size and _synced_after(blocks, offset, size, path)):
            raise Damaged(
                f"{path} at byte {offset}: the record is damaged, though {max(promised, offset)} bytes of the "
                f"file were written and synced. Restore the file from a copy, or resume an older generation.",
                offset=offset,
            )
    if ended is not None:
        ended(offset, max(0, size - offset))  # of the last record, padding alone may be missing


def _open(path: str, told: Callable[[int], None] | None) -> Blocks:
    try:
        return Blocks(path, block=LARGE_BLOCK, told=told)
    except FileNotFoundError:
        raise Damaged(f"{path}: missing; restore it from a copy") from None


def _synced_after(blocks: Blocks, offset: int, size: int, where: str) -> bool:
    """Whether a synced mark lies beyond ``offset``: then what lies there was promised, and is damaged."""
    for start in range(offset + ALIGN, size, _LOOK):
        chunk = blocks.take(start, _LOOK)
        place = chunk.find(MAGIC)
        while place >= 0:
            header = decode_header(chunk[place : place + HEADER_BYTES], where) if place % ALIGN == 0 else None
            if header is not None and header.kind == SYNCED:
                return True
            place = chunk.find(MAGIC, place + 1)
    return False

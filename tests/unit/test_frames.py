"""Frames: whole or not there, of this run or refused, and a newer format named with both numbers."""

from __future__ import annotations

import io
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from pipeline.errors import Damaged, NewerFormat, OtherRun
from pipeline.store.frames import (
    EVENTS,
    FORMAT_VERSION,
    HEADER_BYTES,
    PAYLOAD,
    SYNCED,
    Frame,
    crc32c,
    crc32c_more,
    crc32c_of_file,
    decode_header,
    encode_frame,
    frame_bytes,
    scan,
)

RUN = 0xFEED_0000_0000_0001


def frame(kind: int = EVENTS, payload: bytes = b"payload", **more: Any) -> bytes:
    fields: dict[str, Any] = {
        "incarnation": 3,
        "rank": 1,
        "run_tag": RUN,
        "sequence": 5,
        "number": 2,
        "life": 4,
        **more,
    }
    return b"".join(encode_frame(kind, payload, **fields))


def forged(raw: bytes, offset: int, value: bytes) -> bytes:
    """``raw`` with bytes of its header replaced and the header's checksum made right again."""
    changed = bytearray(raw)
    changed[offset : offset + len(value)] = value
    changed[60:64] = struct.pack("<I", google_crc32c.value(bytes(changed[:60])))
    return bytes(changed)


def read(path: Path, content: bytes, *, run_tag: int = RUN, promised: int = 0) -> list[Frame]:
    path.write_bytes(content)
    return list(scan(str(path), run_tag=run_tag, promised=promised))


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
def test_a_frame_comes_back_and_takes_whole_lines_of_64_bytes(tmp_path: Path, length: int) -> None:
    payload = bytes(n % 251 for n in range(length))
    raw = frame(PAYLOAD, payload)
    assert len(raw) == frame_bytes(length)
    assert len(raw) % 64 == 0
    first, second = read(tmp_path / "f", raw + frame(SYNCED, b"", sequence=2**64 - 1, number=2**32 - 1, life=2**32 - 1))
    assert (first.offset, first.payload) == (0, payload)
    assert first.header[:7] == (PAYLOAD, 3, 1, 5, length, 2, 4)
    assert first.header.run_tag == RUN
    assert second.offset == len(raw)
    assert (second.header.sequence, second.header.number, second.header.life) == (2**64 - 1, 2**32 - 1, 2**32 - 1)


def test_the_layout_on_the_disk_is_that_of_the_documents() -> None:
    """docs/format.md gives it as a table; a byte that moves breaks every run there is."""
    raw = frame(EVENTS, b"xyz")
    assert raw[:4] == b"FBAY"
    assert raw[4:6] == bytes([1, 1])
    assert struct.unpack_from("<IIQQIIQ", raw, 8) == (3, 1, 5, 3, 2, 4, RUN)
    assert struct.unpack_from("<II", raw, 56) == (google_crc32c.value(b"xyz"), google_crc32c.value(raw[:60]))
    assert raw[64:67] == b"xyz"
    assert raw[67:] == bytes(61)


def test_a_newer_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    raw = frame() + forged(frame(), 4, bytes([FORMAT_VERSION + 6]))
    with pytest.raises(NewerFormat, match=rf"format {FORMAT_VERSION + 6}; .* up to {FORMAT_VERSION}\b") as caught:
        read(tmp_path / "newer", raw)
    assert str(tmp_path / "newer") in str(caught.value)


def test_a_record_of_another_run_is_refused_with_file_and_offset(tmp_path: Path) -> None:
    whole = frame()
    with pytest.raises(OtherRun, match=rf"two at byte {len(whole)}.*{RUN + 1:016x}.*{RUN:016x}"):
        read(tmp_path / "two", whole + frame(run_tag=RUN + 1))


def test_a_torn_end_ends_the_file_at_every_byte(tmp_path: Path) -> None:
    frames = [frame(payload=bytes([n]) * (30 * n)) for n in range(4)]
    raw = b"".join(frames)
    ends = [sum(map(len, frames[: n + 1])) for n in range(4)]
    last_bytes = [end - (-len(bytes([n]) * (30 * n)) % 64) for n, end in enumerate(ends)]
    for cut in range(len(raw) + 1):
        found = read(tmp_path / "cut", raw[:cut])
        assert len(found) == sum(needed <= cut for needed in last_bytes), cut


def test_a_last_record_without_all_of_its_padding_is_whole_and_nothing_is_torn(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    raw = frame(payload=b"x" * 30)
    for cut in range(len(raw) - 33, len(raw) + 1):
        (tmp_path / "cut").write_bytes(raw[:cut])
        found = list(scan(str(tmp_path / "cut"), run_tag=RUN, ended=lambda end, left: told.append((end, left))))
        assert told.pop() == ((len(raw), 0) if found else (0, cut))
    assert found


def test_garbage_after_the_last_frame_is_no_frame(tmp_path: Path) -> None:
    for tail in (b"\0" * 300, b"FBAY" + b"\xff" * 200, b"\xff", b"FBAY"):
        assert len(read(tmp_path / "tail", frame() + tail)) == 1
    assert read(tmp_path / "empty", b"") == []


def test_a_bad_record_before_a_synced_mark_is_damage_at_its_offset(tmp_path: Path) -> None:
    good, bad, mark = frame(), bytearray(frame(payload=b"x" * 100)), frame(SYNCED, b"")
    bad[70] ^= 1
    raw = good + bytes(bad)
    assert len(read(tmp_path / "tail", raw)) == 1
    assert len(read(tmp_path / "tail", raw + frame())) == 1, "what follows a bad record is not read"
    with pytest.raises(Damaged, match=f"tail at byte {len(good)}"):
        read(tmp_path / "tail", raw + frame() + mark)


def test_a_bad_record_in_what_was_promised_is_damage_at_its_offset(tmp_path: Path) -> None:
    raw = frame() + frame()
    half = len(raw) // 2
    assert len(read(tmp_path / "f", raw, promised=len(raw))) == 2
    for promised in (half + 1, len(raw)):
        with pytest.raises(Damaged, match=f"f at byte {half}"):
            read(tmp_path / "f", raw[:-70], promised=promised)
    assert len(read(tmp_path / "f", raw[:-70], promised=half)) == 1
    with pytest.raises(Damaged, match="f at byte 0"):
        read(tmp_path / "f", b"", promised=1)


def test_a_length_beyond_the_file_allocates_nothing(tmp_path: Path) -> None:
    raw = forged(frame(), 24, struct.pack("<Q", 2**62))
    tracemalloc.start()
    try:
        assert read(tmp_path / "huge", raw) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_short_or_foreign_header_is_none() -> None:
    raw = frame()[:HEADER_BYTES]
    assert decode_header(raw, "here") is not None
    assert decode_header(raw[:-1], "here") is None
    assert decode_header(b"", "here") is None
    assert decode_header(b"FBAX" + raw[4:], "here") is None
    assert decode_header(raw[:63] + bytes([raw[63] ^ 1]), "here") is None


def test_checksums_can_be_taken_in_pieces(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    checksum = 0
    for start in range(0, len(data), 777):
        checksum = crc32c_more(checksum, memoryview(data)[start : start + 777])
    assert checksum == crc32c(data)
    assert crc32c(b"123456789") == 0xE3069283, "the check value of CRC-32C in RFC 3720"
    (tmp_path / "f").write_bytes(data)
    assert crc32c_of_file(str(tmp_path / "f")) == (len(data), f"{crc32c(data):08x}")
    assert io.BytesIO(data).read() == data

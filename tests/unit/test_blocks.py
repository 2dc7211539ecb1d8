"""Reading a file through one block of memory gives what is in it, wherever the pieces begin and end."""

from __future__ import annotations

import importlib
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.store.blocks import LARGE_BLOCK, Blocks, crc32c, crc32c_joined, crc32c_more, crc32c_of_file
from pipeline.store.memory import aligned_memory

BLOCK = 256 << 10


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(5).randbytes(3 * BLOCK + 777)


@pytest.fixture
def blocks(data: bytes, tmp_path: Path) -> Iterator[Blocks]:
    (tmp_path / "f").write_bytes(data)
    with Blocks(str(tmp_path / "f")) as opened:
        yield opened


def test_pieces_are_what_the_file_holds_in_any_order(blocks: Blocks, data: bytes) -> None:
    rng = random.Random(6)
    borders = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, len(data) - 1]
    for _ in range(200):
        offset = rng.choice([*borders, rng.randrange(len(data))])
        length = rng.choice([0, 1, 64, BLOCK, rng.randrange(2 * BLOCK)])
        expected = data[offset : offset + length]
        assert blocks.take(offset, length) == expected
        assert blocks.exactly(offset, length) == expected
        assert blocks.checksum(offset, len(expected)) == crc32c(expected)


def test_beyond_the_end_there_is_nothing(blocks: Blocks, data: bytes) -> None:
    assert blocks.take(len(data), 10) == blocks.exactly(len(data), 10) == b""
    assert blocks.take(len(data) - 5, 10) == blocks.exactly(len(data) - 5, 10) == data[-5:]
    assert blocks.checksum(len(data) - 5, 10) is None
    assert (blocks.holds(len(data)), blocks.holds(len(data) + 1)) == (True, False)


def test_what_a_growing_file_gets_is_found(blocks: Blocks, data: bytes, tmp_path: Path) -> None:
    assert blocks.take(len(data) - 5, 10) == data[-5:]
    assert not blocks.holds(len(data) + 5)
    with open(tmp_path / "f", "ab") as file:
        file.write(b"later")
    assert blocks.holds(len(data) + 5)
    assert blocks.take(len(data) - 5, 10) == data[-5:] + b"later"


def test_a_file_of_any_size_is_checked_in_one_block(data: bytes, tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    data = data * (2 * LARGE_BLOCK // len(data) + 1)
    for size in (0, 1, 63, LARGE_BLOCK, LARGE_BLOCK + 1, len(data)):
        Path(path).write_bytes(data[:size])
        assert crc32c_of_file(path) == (size, f"{crc32c(data[:size]):08x}")
    tracemalloc.start()
    try:
        crc32c_of_file(path)
        assert tracemalloc.get_traced_memory()[1] < LARGE_BLOCK + (64 << 10)
    finally:
        tracemalloc.stop()


def test_a_checksum_goes_on_over_any_memory_and_copies_none_of_it(data: bytes) -> None:
    whole = crc32c(data)
    for kind in (bytes, bytearray, memoryview):
        assert crc32c_more(crc32c(data[:999]), kind(data)[999:]) == whole
    assert crc32c_more(7, b"") == 7
    tracemalloc.start()
    try:
        crc32c_more(0, memoryview(data))
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


def test_the_checksum_of_two_pieces_follows_from_theirs(data: bytes) -> None:
    for cut in (0, 1, 999, BLOCK, len(data)):
        assert crc32c_joined(crc32c(data[:cut]), crc32c(data[cut:]), len(data) - cut) == crc32c(data)
    zeros = 0
    for _ in range(1 << 12):
        zeros = crc32c_joined(zeros, crc32c(bytes(1 << 20)), 1 << 20)
    whole = 0
    block = bytes(1 << 24)
    for _ in range(1 << 8):
        whole = crc32c_more(whole, block)
    assert zeros == whole  # of 4 GB


def test_memory_for_files_begins_with_a_line_of_the_cache() -> None:
    for size in (1, 64, 65, BLOCK, LARGE_BLOCK):
        memory = aligned_memory(size)
        assert memory.nbytes == size
        assert np.frombuffer(memory, np.uint8).ctypes.data % 64 == 0


def test_bytes_are_told_once_as_they_are_read(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(data)
    told: list[int] = []
    with Blocks(str(tmp_path / "f"), block=1000, told=told.append) as blocks:
        assert blocks.checksum(0, len(data)) == crc32c(data)
    assert (max(told), sum(told)) == (1000, len(data))


def test_where_the_checksum_is_not_compiled_it_is_the_same(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = importlib.import_module("google_crc32c.python")
    monkeypatch.setattr("google_crc32c.extend", plain.extend)
    assert crc32c_more(crc32c(data[:999]), memoryview(data)[999:2000]) == crc32c(data[:2000])


def test_an_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Blocks(str(tmp_path / "absent"))
    assert os.listdir(tmp_path) == []

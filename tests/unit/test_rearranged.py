"""Records that come in one order are found in another, whatever the parts are in which they come and are read."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import StoreError, WriteFailed
from pipeline.store import rearranged as module
from pipeline.store.rearranged import Rearranged

FIELDS: list[tuple[str, Any]] = [("number", np.int64), ("mass", np.float32)]


def stable(places: np.ndarray, numbers: np.ndarray, begin: int, count: int) -> list[tuple[int, int]]:
    """What is to be found there: by place, and of one place as they came."""
    own = [pair for pair in zip(places.tolist(), numbers.tolist(), strict=True) if begin <= pair[0] < begin + count]
    return sorted(own, key=lambda pair: pair[0])


@pytest.mark.parametrize("window", [1, 3, 16, 1 << 18])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_came_is_found_by_its_place(
    tmp_path: Path, seed: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place once, some of them, or several records of one; read from anywhere, also between two that come."""
    monkeypatch.setattr(module, "_WINDOW", window)
    rng = np.random.default_rng(seed)
    count = 60
    every = rng.permutation(count)[: [60, 40, 60, 1][seed]] if seed != 2 else rng.integers(0, count, 90)
    records = Rearranged(str(tmp_path), count, FIELDS)
    came = 0
    while came < len(every):
        part = every[came : came + int(rng.integers(0, 13))]
        if seed == 3:
            part = np.sort(part)
        records.put(part, {"number": came + np.arange(len(part)), "mass": 0.5})
        came += len(part)
        begin, wide = int(rng.integers(0, count)), int(rng.integers(0, count))
        wide = min(wide, count - begin)
        found = records.read(begin, wide)
        assert found.dtype.names == ("place", "number", "mass")
        told = list(zip(found["place"].tolist(), found["number"].tolist(), strict=True))
        assert told == stable(every[:came], np.arange(came), begin, wide), seed
        assert (found["mass"] == 0.5).all()
    parts = [records.read(*each) for each in records.windows()]
    told = [pair for part in parts for pair in zip(part["place"].tolist(), part["number"].tolist(), strict=True)]
    assert told == stable(every, np.arange(len(every)), 0, count)
    assert os.listdir(tmp_path) == []
    records.close()
    records.close()


def test_so_many_windows_that_they_are_no_short_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WINDOW", 2)
    places = np.array([1 << 18, 0, 3, 1 << 17, 2, (1 << 17) + 2])
    records = Rearranged(str(tmp_path), (1 << 18) + 1, FIELDS)
    records.put(places, {"number": np.arange(6), "mass": np.arange(6) / 2})
    for place, number in zip(places.tolist(), range(6), strict=True):
        (found,) = records.read(place, 1)
        assert found.tolist() == (place, number, number / 2)
    assert len(records.read(4, 1 << 16)) == 0


def test_nothing_came(tmp_path: Path) -> None:
    records = Rearranged(str(tmp_path), 0, FIELDS)
    records.put(np.empty(0, np.int64), {"number": np.empty(0, np.int64), "mass": np.empty(0)})
    assert records.windows() == []
    assert len(records.read(0, 0)) == 0
    assert len(Rearranged(str(tmp_path), 5, FIELDS).read(0, 5)) == 0


def test_what_was_read_is_read_again_once_more_has_come(tmp_path: Path) -> None:
    records = Rearranged(str(tmp_path), 10, FIELDS)
    for number in range(3):
        records.put(np.array([4]), {"number": number, "mass": 0})
        assert records.read(4, 1)["number"].tolist() == list(range(number + 1))


def test_a_folder_that_is_not_there_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WriteFailed, match=f"{tmp_path}/none: no file"):
        Rearranged(str(tmp_path / "none"), 3, FIELDS)
    gc.collect()
    records = Rearranged(str(tmp_path), 30, FIELDS)
    records.put(np.arange(10), {"number": np.arange(10), "mass": 1})
    write, left = os.pwrite, [100]

    def pwrite(handle: int, raw: Any, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(handle, raw[: left[0]], offset)
        left[0] -= count
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(WriteFailed, match=r"could not be written: .*No space left"):
        records.put(np.arange(10, 20), {"number": np.arange(10), "mass": 1})
    assert records.read(0, 30)["place"].tolist() == list(range(10))  # of what failed nothing is there
    left[0] = 1 << 20
    records.put(np.arange(10, 20)[::-1], {"number": np.arange(10), "mass": 1})
    assert records.read(0, 30)["place"].tolist() == list(range(20))
    assert records.read(10, 20)["number"].tolist() == list(range(10))[::-1]


def test_a_disk_that_writes_and_reads_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda handle, raw, offset: write(handle, raw[:7], offset))
    monkeypatch.setattr(os, "pread", lambda handle, count, offset: read(handle, min(5, count), offset))
    records = Rearranged(str(tmp_path), 30, FIELDS)
    records.put(np.arange(30)[::-1], {"number": np.arange(30), "mass": 1})
    assert records.read(0, 30)["number"].tolist() == list(range(30))[::-1]


@pytest.mark.parametrize("end", [OSError(errno.EIO, os.strerror(errno.EIO)), None], ids=["unreadable", "short"])
def test_what_cannot_be_read_is_told(tmp_path: Path, end: OSError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Rearranged(str(tmp_path), 30, FIELDS)
    records.put(np.arange(30), {"number": np.arange(30), "mass": 1})

    def pread(handle: int, count: int, offset: int) -> bytes:
        if end is not None:
            raise end
        return b""

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(StoreError, match=f"{tmp_path}: "):
        records.read(0, 30)

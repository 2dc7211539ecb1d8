"""Rows in a file of the run's folder: the same buffer, on a disk that may be full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ConfigError, ReplayBuffer, WriteFailed
from pipeline.buffer.transitions import mapped
from pipeline.buffer.transitions.mapped import MappedStorage
from pipeline.checkpoint import verify
from tests.support.replay import everything
from tests.support.replaying import CAPACITY, contents, draws, fill, rows

OPTIONS: list[dict[str, Any]] = [
    {},
    {"select": "prioritized"},
    {"select": "without_replacement"},
    {"share_next_obs": True},
    {"remove": "stalest"},
    {"remove": {"by": "min", "field": "reward"}},
]


@pytest.fixture(params=[1, 20_000, 32 << 20], autouse=True)
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is asked for each row, for some, or for all at once."""
    monkeypatch.setattr(mapped, "STEP_BYTES", request.param)


def make(directory: Path, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, directory=directory, storage="mapped", **options)


def drawn(buffer: ReplayBuffer) -> Any:
    if buffer.ring.scattered:
        return [buffer.sample(8)["reward"].tolist() for _ in range(20)]
    return draws(buffer, 20)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_as_in_memory(tmp_path: Path, options: dict[str, Any]) -> None:
    mine = make(tmp_path / "a", seed=3, **options)
    other = ReplayBuffer(CAPACITY, directory=tmp_path / "b", seed=3, **options)
    with mine, other:
        for buffer in (mine, other):
            fill(buffer, 0, 100)
            for number in range(100, 107):
                buffer.extend(rows(number, 1), env=number % 2)
            buffer.write_back(buffer.ring.keys()[:9], {"reward": np.arange(9.0)})
            buffer.save(1, wait=True)
        assert drawn(mine) == drawn(other)
        assert contents(mine) == contents(other)
        assert mine.statistics() == other.statistics()
        assert mine.state_dict()["state"] == other.state_dict()["state"]
    assert verify(str(tmp_path / "a")).whole
    mine = make(tmp_path / "a", seed=3, **options)
    other = ReplayBuffer(CAPACITY, directory=tmp_path / "b", seed=3, **options)
    with mine, other:
        for buffer in (mine, other):
            buffer.resume()
        assert drawn(mine) == drawn(other)
        assert contents(mine) == contents(other)


def test_what_memory_saved_a_file_takes_over_and_the_reverse(tmp_path: Path) -> None:
    for life, storage in enumerate(["memory", "mapped", "memory"]):
        with ReplayBuffer(CAPACITY, directory=tmp_path, storage=storage) as buffer:
            buffer.resume()
            assert len(buffer) == min(CAPACITY, 25 * life)
            fill(buffer, 25 * life, 25)
            buffer.save(life, wait=True)
            assert contents(buffer)["obs.n"] == list(range(max(0, 25 * life - 35), 25 * life + 25))


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        str(kind): torch.tensor([0, 1, 1, 0]).to(kind)
        for kind in (torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.bool, torch.complex64)
    }
    columns |= {"empty": torch.zeros(4, 0, 3), "large": torch.full((4, 700), 2.5, dtype=torch.bfloat16)}
    for only in (columns, {"empty": columns["empty"]}, {"large": columns["large"]}):
        buffer = make(tmp_path, 4, select="fifo")
        buffer.extend(only)
        batch = buffer.sample(4)
        for name, tensor in only.items():
            assert torch.equal(batch[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def test_nothing_of_it_is_seen_in_the_folder(tmp_path: Path) -> None:
    with make(tmp_path) as buffer:
        fill(buffer, 0, 30)
        assert os.listdir(tmp_path) == []
        buffer.save(1, wait=True)
        assert sorted(os.listdir(tmp_path)) == ["generations", "journals", "lock", "run.json", "segments"]


def test_where_files_need_a_name_they_lose_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    made: list[str] = []
    unlink = os.unlink

    def noted(path: Any, *more: Any, **named: Any) -> None:
        made.append(os.path.basename(path))
        unlink(path, *more, **named)

    monkeypatch.setattr(os, "unlink", noted)
    buffer = make(tmp_path)
    fill(buffer, 0, 30)
    assert os.listdir(tmp_path) == []
    assert len(made) == 1
    # One that was killed in between leaves the name; who opens the folder removes it.
    for used in (False, True):
        (tmp_path / made[0]).touch()
        with ReplayBuffer(CAPACITY, directory=tmp_path) as other:
            assert other.resume().step == used
            assert made[0] not in os.listdir(tmp_path)
            fill(other, 0, 9)
            other.save(1, wait=True)


def test_it_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="directory="):
        ReplayBuffer(10, storage="mapped")


def test_what_the_disk_has_no_room_for_is_refused_with_its_bytes(tmp_path: Path) -> None:
    row = {"x": np.zeros((1, 1 << 30), np.uint8)}
    buffer = make(tmp_path / "new", 1_000_000)
    with pytest.raises(ConfigError, match=r"capacity=1000000: 1,073,741,824,000,000 bytes of disk are needed and"):
        buffer.extend(row)
    assert not (tmp_path / "new").exists()
    assert buffer.schema is None
    fill(buffer, 0, 5)
    assert len(buffer) == 5


class FullDisk:
    """A disk that has ``room`` bytes left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._real = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self.take)

    def take(self, handle: int, begin: int, length: int) -> None:
        if length > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= length
        self._real(handle, begin, length)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("verb", ["extend", "append", "many"])
def test_on_a_full_disk_nothing_is_added_and_later_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], verb: str
) -> None:
    monkeypatch.setattr(mapped, "STEP_BYTES", 1)
    disk = FullDisk(monkeypatch, 0)
    with make(tmp_path, **options) as buffer:
        for first, room in ((0, 0), (0, 4500), (20, 0), (20, 2200)):
            disk.room = room
            for _ in range(2):
                before = [everything(buffer)]
                with pytest.raises(WriteFailed, match="No space left"):
                    add_until_full(buffer, verb, first, before)
                assert everything(buffer) == before[-1]
            disk.room = 1 << 30
            if first == 0 and room:
                fill(buffer, len(buffer), 20 - len(buffer))
        fill(buffer, len(buffer), 100)
        assert len(buffer) == CAPACITY


def add_until_full(buffer: ReplayBuffer, verb: str, first: int, before: list[Any]) -> None:
    while True:
        if verb == "append":
            buffer.append({name: each[0] for name, each in _flat(rows(first, 1)).items()})
        else:
            buffer.extend(rows(first, {"extend": 5, "many": 200}[verb]))
        before.append(everything(buffer))


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    inner = {f"{group}.{name}": each for group in ("obs", "next_obs") for name, each in given[group].items()}
    return inner | {name: each for name, each in given.items() if name not in ("obs", "next_obs")}


def test_on_a_full_disk_a_resume_changes_nothing_and_a_lazy_one_draws_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "STEP_BYTES", 1)
    with make(tmp_path) as buffer:
        fill(buffer, 0, 60)
        buffer.save(1, wait=True)
    disk = FullDisk(monkeypatch, 50_000)
    with make(tmp_path, seed=1) as again:
        with pytest.raises(WriteFailed, match="No space left"):
            again.resume()
        assert (len(again), again.schema) == (0, None)
        disk.room = 0
        assert again.resume(verify="lazy").rows == 60
        random = again._rng.bit_generator.state
        with pytest.raises(WriteFailed, match="No space left"):
            again.sample(4)
        assert again._rng.bit_generator.state == random
        disk.room = 1 << 30
        assert len(again.sample(4)) == 4


def test_the_disk_is_taken_as_rows_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "STEP_BYTES", 1 << 20)
    with make(tmp_path, 100_000) as buffer:
        taken = []
        for begin in range(0, 3000, 600):
            buffer.extend(rows(begin, 600))
            storage = buffer.ring.storage
            assert isinstance(storage, MappedStorage)
            assert storage._file is not None, "rows are there"
            taken.append(os.fstat(storage._file._scratch._handle).st_blocks * 512)
        assert all(1e6 <= each <= 600 * 2200 * (at + 1) + (3 << 20) for at, each in enumerate(taken)), taken
        assert taken == sorted(taken)
        buffer.clear()
        assert len(buffer) == 0

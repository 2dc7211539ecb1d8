"""Rows and blocks whose records are put together first: what is there afterwards is what column by column gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ReplayBuffer
from pipeline.buffer.transitions.storage import TransitionStorage
from pipeline.errors import ConfigError

CAPACITY = 300


@pytest.fixture
def by_columns(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes buffers that write column by column."""

    def made(**options: Any) -> ReplayBuffer:
        shape = TransitionStorage.shape

        def plain(storage: TransitionStorage, schema: Any) -> None:
            shape(storage, schema)
            storage._packer = None

        with monkeypatch.context() as patch:
            patch.setattr(TransitionStorage, "shape", plain)
            buffer = ReplayBuffer(CAPACITY, **options)
            buffer.extend(steps(1, 4), envs=4)
        return buffer

    return made


def steps(count: int, envs: int, seed: int = 0) -> dict[str, Any]:
    """Columns of every width and shape, as the arrays that they are stored as."""
    rng, rows = np.random.default_rng(seed), count * envs
    return {
        "obs": rng.normal(size=(rows, 5)).astype(np.float32),
        "grid": rng.integers(0, 255, (rows, 3, 7), np.uint8),
        "image": rng.integers(0, 255, (rows, 40, 30), np.uint8),
        "wide": rng.normal(size=rows),
        "wave": rng.normal(size=(rows, 2)).astype(np.complex64),
        "count": rng.integers(-9, 9, rows),
        "small": rng.integers(0, 256, rows, np.uint8),
        "half": rng.normal(size=(rows, 3)).astype(np.float16),
        "nothing": np.zeros((rows, 0), np.float32),
        "reward": rng.normal(size=rows).astype(np.float32),
        "done": rng.random(rows) < 0.1,
    }


def held(buffer: ReplayBuffer) -> dict[str, Any]:
    """Every column and every mark of every row."""
    storage, slots = buffer.ring.storage, buffer.ring.slots(buffer.ring.keys())
    return {name: view[slots].tobytes() for name, view in storage.views.items()}


def one(rows: dict[str, Any], at: int) -> dict[str, Any]:
    """A row as most loops have it: arrays, and Python's own numbers."""
    row = {name: np.asarray(array[at]) for name, array in rows.items()}
    return row | {"wide": float(row["wide"]), "reward": float(row["reward"]), "done": bool(row["done"])}


@pytest.mark.parametrize("length", [1, 2, 16, 30])
def test_blocks(length: int, by_columns: Any) -> None:
    packed, plain = ReplayBuffer(CAPACITY), by_columns()
    packed.extend(steps(1, 4), envs=4)
    for number in range(40):
        block = steps(length, 4, number)
        assert list(packed.extend(block, envs=4)) == list(plain.extend(block, envs=4))
    assert packed.ring.storage._blocks is not None
    assert plain.ring.storage._blocks is None
    assert held(packed) == held(plain)


def test_blocks_that_are_laid_out_otherwise(by_columns: Any) -> None:
    packed, plain = ReplayBuffer(CAPACITY), by_columns()
    packed.extend(steps(1, 4), envs=4)
    for number in range(6):
        block = steps(32, 4, number)
        block["obs"] = np.asfortranarray(block["obs"])
        block["grid"] = block["grid"][:, ::-1]
        block["wide"] = block["wide"].astype(">f8")
        block["reward"] = torch.from_numpy(block["reward"])
        for buffer in (packed, plain):
            buffer.extend(block, envs=4)
    assert held(packed) == held(plain)


def test_a_block_that_is_too_large_to_be_put_together(monkeypatch: pytest.MonkeyPatch, by_columns: Any) -> None:
    monkeypatch.setattr("pipeline.buffer.transitions.storage.MOST_BYTES", 10_000)
    packed, plain = ReplayBuffer(CAPACITY), by_columns()
    packed.extend(steps(1, 4), envs=4)
    for number, length in enumerate([1, 1, 30, 30, 1, 1, 30, 30]):
        block = steps(length, 4, number)
        for buffer in (packed, plain):
            buffer.extend(block, envs=4)
    assert held(packed) == held(plain)


def test_rows(by_columns: Any) -> None:
    packed, plain = ReplayBuffer(CAPACITY), by_columns()
    packed.extend(steps(1, 4), envs=4)
    rows = steps(100, 4, 5)
    for at in range(400):
        row = one(rows, at)
        assert packed.ring.storage.packed(row) is not None
        for buffer in (packed, plain):
            buffer.append(row, env=at % 3, version=at // 50)
    assert held(packed) == held(plain)


ODD: list[dict[str, Any]] = [
    {"reward": np.float32(2.5)},
    {"reward": np.array(2.5, np.float32)},
    {"reward": float("nan")},
    {"reward": float("inf")},
    {"reward": 3},
    {"wide": 1e300},
    {"wide": torch.tensor(0.1, dtype=torch.float64)},
    {"done": np.True_},
    {"done": np.array(False)},
    {"obs": [1.0, 2.0, 3.0, 4.0, 5.0]},
    {"obs": torch.arange(5.0)},
    {"obs": np.arange(5, dtype=">f4")},
    {"obs": np.arange(10, dtype=np.float32)[::2]},
    {"grid": np.arange(21, dtype=np.uint8).reshape(7, 3).T},
    {"count": 7},
    {"count": np.int64(-7)},
    {"count": np.int32(7)},
    {"count": 2**63 - 1},
    {"small": 255},
    {"small": np.uint8(3)},
    {"small": True},
    {"count": False},
    {"reward": np.float32("nan")},
    {"reward": np.float32("-inf")},
    {"reward": np.float64(0.1)},
    {"wide": np.float32(0.1)},
    {"wide": np.float64("nan")},
]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_row_that_is_not_like_most(odd: dict[str, Any], by_columns: Any) -> None:
    packed, plain = ReplayBuffer(CAPACITY), by_columns()
    packed.extend(steps(1, 4), envs=4)
    row = one(steps(1, 4, 9), 0) | odd
    for buffer in (packed, plain):
        buffer.append(row)
    assert held(packed) == held(plain)


@pytest.mark.parametrize(
    "wrong",
    [{"obs": np.zeros(4, np.float32)}, {"obs": np.zeros((5, 1), np.float32)}, {"image": np.zeros((30, 40), np.uint8)}],
    ids=str,
)
def test_a_row_of_another_shape_is_refused(wrong: dict[str, Any]) -> None:
    buffer = ReplayBuffer(CAPACITY)
    buffer.extend(steps(1, 4), envs=4)
    row = one(steps(1, 4), 0)
    assert buffer.ring.storage.packed(row) is not None
    row |= wrong
    assert buffer.ring.storage.packed(row) is None
    before = held(buffer)
    with pytest.raises(Exception, match=next(iter(wrong))):
        buffer.append(row)
    assert held(buffer) == before


def test_a_number_that_float32_cannot_hold_is_looked_at_closer() -> None:
    buffer = ReplayBuffer(CAPACITY)
    buffer.extend(steps(1, 4), envs=4)
    row = one(steps(1, 4), 0) | {"reward": 3.3e38}
    assert buffer.ring.storage.packed(row | {"reward": 2.9e38}) is not None
    assert buffer.ring.storage.packed(row) is None
    buffer.append(row)
    assert buffer.sample(1)["obs"].shape == (1, 5)


@pytest.mark.parametrize(
    "usual",
    [
        {"count": 3, "small": 255, "reward": 0.5, "done": False},
        {"count": np.int64(3), "small": np.uint8(7), "reward": np.float32(0.5), "done": np.False_, "wide": 2.0},
        {"count": np.array(3), "reward": np.array(0.5, np.float32), "done": np.array(True), "wide": np.float64(1)},
    ],
    ids=["Python's numbers", "numpy's numbers", "arrays without an axis"],
)
def test_what_environments_and_policies_return_is_packed(usual: dict[str, Any], by_columns: Any) -> None:
    packed, plain = ReplayBuffer(CAPACITY), by_columns()
    packed.extend(steps(1, 4), envs=4)
    row = one(steps(1, 4, 3), 0) | usual
    assert packed.ring.storage.packed(row) is not None
    for buffer in (packed, plain):
        buffer.append(row)
    assert held(packed) == held(plain)


@pytest.mark.parametrize(
    "wrong", [{"small": 256}, {"small": -1}, {"count": 2**63}, {"count": 1.5}, {"done": 2}], ids=str
)
def test_a_number_that_a_column_cannot_hold_is_refused(wrong: dict[str, Any], by_columns: Any) -> None:
    packed, plain = ReplayBuffer(CAPACITY), by_columns()
    packed.extend(steps(1, 4), envs=4)
    for buffer in (packed, plain):
        before = held(buffer)
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            buffer.append(one(steps(1, 4, 3), 0) | wrong)
        assert held(buffer) == before

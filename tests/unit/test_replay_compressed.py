"""Compressed columns: what comes out is what went in, and memory and disk hold what is compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ConfigError, ReplayBuffer
from pipeline.buffer.transitions.compressed import CompressedColumn
from pipeline.checkpoint import verify
from tests.support.replaying import contents, draws, fill, rows

IMAGE = {"image": "zlib"}
KINDS: list[dict[str, Any]] = [
    {},
    {"select": "prioritized"},
    {"remove": {"by": "max", "field": "reward"}},
    {"share_next_obs": True},
]


def made(compress: Any = IMAGE, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(60, compress=compress, seed=3, **options)


@pytest.mark.parametrize("options", KINDS)
def test_a_compressed_buffer_is_like_one_that_is_not(options: dict[str, Any]) -> None:
    plain, packed = made(None, **options), made(**options)
    for buffer in (plain, packed):
        fill(buffer, 0, 75)
        buffer.append({name: _first(value) for name, value in rows(75, 1).items()})
        buffer.sample(3)
    assert contents(packed) == contents(plain)
    more: dict[str, Any] = {} if "remove" in options else {"stack": 3}
    for _ in range(10):
        left, right = plain.sample(16, **more), packed.sample(16, **more)
        assert left.keys.tolist() == right.keys.tolist()
        assert torch.equal(left["image"], right["image"])
        right["image"][:] = 7  # the caller's
    assert contents(packed) == contents(plain)
    if "remove" not in options:
        assert draws(packed, 5) == draws(plain, 5)


def _first(value: Any) -> Any:
    return {name: each[0] for name, each in value.items()} if isinstance(value, dict) else value[0]


@pytest.mark.parametrize("share", [False, True])
def test_frames_and_next_observations_are_those_of_a_buffer_that_is_not_compressed(share: bool) -> None:
    frames = np.arange(50)[:, None].repeat(1500, axis=1).astype(np.uint8)
    given = {
        "obs": frames[:-1],
        "next_obs": frames[1:],
        "reward": np.arange(49.0),
        "truncated": np.arange(49) % 11 == 10,
    }
    compress = {"obs": "zlib"} if share else {"obs": "zlib", "next_obs": "zlib"}
    buffers = [ReplayBuffer(30, seed=2, share_next_obs=share, compress=each) for each in (compress, None)]
    for buffer in buffers:
        for begin in range(0, 49, 7):
            buffer.extend({name: each[begin : begin + 7] for name, each in given.items()})
    for more in ({}, {"stack": 3}, {"n_step": 3, "gamma": 0.9}, {"slices": {"length": 4}}, {"columns": ["obs"]}):
        left, right = (buffer.sample(20, **more) for buffer in buffers)
        assert left.columns == right.columns
        for name in left.columns:
            assert torch.equal(left[name], right[name]), (name, more)


def test_what_is_said_of_memory_follows_what_is_held() -> None:
    buffer, random = made(), np.random.default_rng(4)
    fill(buffer, 0, 90)
    buffer.append({name: _first(value) for name, value in rows(90, 1).items()})
    keys = np.array([70, 71, 71, 89])  # one of them twice
    buffer.write_back(keys, {"image": random.integers(0, 255, (4, 32, 64)).astype(np.uint8)})
    column: Any = buffer.ring.storage.view("image")
    assert buffer.statistics().compressed_bytes == sum(map(len, column.packed(slice(None)))) > 3 * 2000


def test_memory_is_that_of_the_compressed_rows() -> None:
    buffer = made()
    fill(buffer, 0, 200)
    stats = buffer.statistics()
    assert isinstance(buffer.ring.storage.view("image"), CompressedColumn)
    assert 0 < stats.compressed_bytes < 60 * 2048 // 20
    assert made(None).statistics().compressed_bytes == 0
    buffer.clear()
    assert buffer.statistics().compressed_bytes == 0


def test_a_buffer_may_hold_more_than_memory_would_if_it_were_dense() -> None:
    image = {"image": np.zeros((2, 4096, 4096, 3), np.uint8)}
    with pytest.raises(ConfigError, match="bytes of memory are needed"):
        ReplayBuffer(10_000_000).extend(image)
    buffer = ReplayBuffer(10_000_000, compress=IMAGE)
    buffer.extend(image)
    assert buffer.sample(1)["image"].shape == (1, 4096, 4096, 3)


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("then", [IMAGE, None])
@pytest.mark.parametrize("first", [IMAGE, None])
def test_what_was_saved_compressed_or_not_is_resumed_either_way(
    tmp_path: Path, first: Any, then: Any, options: dict[str, Any]
) -> None:
    with made(first, directory=tmp_path, **options) as buffer:
        fill(buffer, 0, 75)
        buffer.save(1, wait=True)
        expected = contents(buffer)
    assert verify(str(tmp_path)).whole
    size = sum(path.stat().st_size for path in (tmp_path / "segments").iterdir())
    assert (size < 60 * 2048 // 2) == (first is not None)
    with made(then, directory=tmp_path, **options) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == expected
        assert (again.statistics().compressed_bytes > 0) == (then is not None)
        fill(again, 75, 20)
        again.save(2, wait=True)
        expected = contents(again)
    with made(first, directory=tmp_path, **options) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == expected


def test_rows_that_are_overwritten_while_they_are_saved_are_saved_as_they_were(tmp_path: Path) -> None:
    with made(directory=tmp_path, keep=None) as buffer:
        fill(buffer, 0, 60)
        expected = contents(buffer)
        buffer.save(1)
        fill(buffer, 60, 60)
        buffer.save(2, wait=True)
    with made(directory=tmp_path, keep=None) as again:
        again.resume(1, continue_episodes=True)
        assert contents(again) == expected


def test_values_are_written_back_into_a_compressed_column(tmp_path: Path) -> None:
    with made(directory=tmp_path) as buffer:
        fill(buffer, 0, 30)
        buffer.save(1, wait=True)
        keys = np.array([3, 4, 29])
        image = np.random.default_rng(1).integers(0, 255, (3, 32, 64)).astype(np.uint8)
        assert buffer.write_back(keys, {"image": image}).applied.all()
        held = buffer.ring.storage.view("image")[buffer.ring.slots(keys)]
        assert np.array_equal(held, image)
        buffer.save(2, wait=True)
        expected = contents(buffer)
    with made(directory=tmp_path) as again:
        again.resume(continue_episodes=True)
        assert contents(again) == expected


def test_states_in_memory_are_dense_and_fit_either_way() -> None:
    packed, plain = made(), made(None)
    fill(packed, 0, 75)
    plain.load_state_dict(packed.state_dict(), continue_episodes=True)
    assert contents(plain) == contents(packed)
    again = made()
    again.load_state_dict(plain.state_dict(), continue_episodes=True)
    assert contents(again) == contents(packed)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_any_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    value = torch.randn(5, 40, 40).mul(50).to(dtype)
    buffer = ReplayBuffer(8, compress={"deep": "zlib"})
    buffer.extend({"deep": {"x": value, "small": torch.zeros(5)}})
    batch = buffer.sample(20)
    for at, key in enumerate(batch.keys.tolist()):
        assert torch.equal(batch["deep"]["x"][at], value[key])
    assert buffer.statistics().compressed_bytes > 0


def test_a_block_that_does_not_fit_leaves_every_row_as_it_was() -> None:
    buffer = made()
    fill(buffer, 0, 75)
    before = contents(buffer)
    wrong = rows(75, 4) | {"image": np.zeros((4, 32, 63), np.uint8)}
    with pytest.raises(ConfigError, match="column image"):
        buffer.extend(wrong)
    assert contents(buffer) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compress": {"image": "lz4"}}, "compress="),
        ({"compress": "zlib"}, "compress="),
        ({"compress": IMAGE, "storage": "shared"}, "rows of any length; leave it out"),
        ({"compress": {"next_obs": "zlib"}, "share_next_obs": True}, "no row holds a next observation"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ReplayBuffer(9, **options)


@pytest.mark.parametrize(
    ("name", "match"), [("reward", "has 8 bytes a row.*: image"), ("img", "is no column.*: image")]
)
def test_columns_that_are_not_there_or_small_are_refused_and_nothing_is_added(
    tmp_path: Path, name: str, match: str
) -> None:
    buffer = made({name: "zlib"})
    with pytest.raises(ConfigError, match=match):
        fill(buffer, 0, 5)
    assert len(buffer) == 0
    with made(directory=tmp_path) as saved:
        fill(saved, 0, 5)
        saved.save(1, wait=True)
    with made({name: "zlib"}, directory=tmp_path) as again, pytest.raises(ConfigError, match=match):
        again.resume()

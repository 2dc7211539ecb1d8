"""Next observations that rows share are found where a condition, or a look at one row, asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ReplayBuffer
from pipeline.buffer.transitions import blocks as block_sizes
from pipeline.cli import main
from pipeline.errors import ConfigError, Damaged
from pipeline.tools import reshard, show_item, split
from tests.support.keeping import stored
from tests.support.salvaging import flip

WAYS: dict[str, dict[str, Any]] = {
    "shared": {"share_next_obs": True},
    "compressed": {"share_next_obs": True, "compress": {"obs": "zlib"}},
    "their own": {},
}
STEPS = 40


def observed(number: int) -> dict[str, Any]:
    return {
        "n": np.float64(number),
        "half": torch.tensor(number, dtype=torch.bfloat16),
        "image": np.full(1200, number % 251, np.uint8),
    }


def save(directory: Path, **options: Any) -> dict[int, int]:
    """Save episodes of three environments that end, are cut, and go on, some rows of which are followed by another
    observation than their next one; return the number of each row's next observation by its key."""
    wanted: dict[int, int] = {}
    with ReplayBuffer(30, directory=directory, seed=1, **options) as buffer:
        buffer.resume()
        for t in range(STEPS):
            env = (t * 7 // 3) % 3
            end, odd = t % 11 == 7, t % 13 == 4
            after = next((later for later in range(t + 1, STEPS) if (later * 7 // 3) % 3 == env), 0)
            wanted[t] = 1000 + t if end or odd or not after or t % 17 == 16 else after
            row = {"obs": observed(t), "next_obs": observed(wanted[t]), "t": t, "terminated": end}
            buffer.append(row, env=env)
            if t % 17 == 16:
                buffer.end_episode(env)
            if t % 9 == 8:
                buffer.save(t, wait=True)
        buffer.save(STEPS, wait=True)
    return {key: number for key, number in wanted.items() if key >= STEPS - 30}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sizes, "BLOCK_BYTES", 5 * 1200)


def rows(directory: Path, **options: Any) -> list[int]:
    with ReplayBuffer(100, directory=directory, seed=1, **options) as buffer:
        buffer.resume()
        if not len(buffer):
            return []
        return sorted(buffer.ring.storage.view("t")[buffer.ring.slots(buffer.ring.keys())].tolist())


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_one_row_is_shown_with_its_next_observation(tmp_path: Path, options: dict[str, Any]) -> None:
    wanted = save(tmp_path / "a", **options)
    assert len([key for key, number in wanted.items() if number < 1000]) > 15
    for key, number in wanted.items():
        shown = {each.name: each for each in show_item(tmp_path / "a", key).tensors}
        assert list(shown) == sorted(shown)
        assert (shown["obs.n"].first, shown["next_obs.n"].first) == ([key], [number])
        assert shown["next_obs.image"].first == [number % 251] * 8
        assert (shown["next_obs.half"].dtype, shown["next_obs.half"].shape) == ("bfloat16", ())
        assert shown["next_obs.half"].first == [float(torch.tensor(number, dtype=torch.bfloat16))]


def test_of_a_shard_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = save(tmp_path / "a", share_next_obs=True)
    reshard(tmp_path / "a", tmp_path / "r", 1)
    (shard,) = (tmp_path / "r" / "generations").glob("*/shards/0000")
    found = {}
    for key in range(STEPS - 30, STEPS):
        shown = {each.name: each.first[:1] for each in show_item(shard, key).tensors}
        found[shown["t"][0]] = shown["next_obs.n"][0]
    assert found == wanted
    assert main(["inspect", str(tmp_path / "a"), "--item", str(STEPS - 1)]) == 0
    assert "next_obs.image" in capsys.readouterr().out


def test_where_it_lay_is_damaged(tmp_path: Path) -> None:
    wanted = save(tmp_path / "a", share_next_obs=True)
    lying = {key: (path, block) for path, block, arrays in stored(tmp_path / "a") for key in arrays["t"].tolist()}
    key = next(key for key, number in wanted.items() if number < 1000 and lying[number] != lying[key])
    path, block = lying[wanted[key]]
    flip(path, block.offset + 100)
    with pytest.raises(Damaged, match=path.name):
        show_item(tmp_path / "a", key)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_condition_is_of_next_observations_too(tmp_path: Path, options: dict[str, Any]) -> None:
    wanted = save(tmp_path / "a", **options)
    of = episodes(tmp_path / "a")
    for at, low in enumerate([0, 15, 25, 38, 1000, 1030]):
        parts = [tmp_path / f"{at}x", tmp_path / f"{at}y"]
        split(tmp_path / "a", parts, where=f"next_obs.n >= {low} and next_obs.n < 1031")
        met = {of[key] for key, number in wanted.items() if low <= number < 1031}
        assert rows(parts[0], **options) == [key for key in wanted if of[key] in met]
        assert rows(parts[1], **options) == [key for key in wanted if of[key] not in met]
    dark = (lambda image, t: (image[:, 0] < 20) & (t > 20), ["next_obs.image", "t"])
    split(tmp_path / "a", [tmp_path / "dark"], where=dark)
    met = {of[key] for key, number in wanted.items() if number % 251 < 20 and key > 20}
    assert rows(tmp_path / "dark", **options) == [key for key in wanted if of[key] in met]
    with pytest.raises(ConfigError, match="next_obs"):
        split(tmp_path / "a", [tmp_path / "no"], where="next_obs > 0")


def episodes(directory: Path) -> dict[int, int]:
    return {
        t: number
        for _, _, arrays in stored(directory)
        for t, number in zip(arrays["t"].tolist(), arrays["#episode"].tolist(), strict=True)
    }

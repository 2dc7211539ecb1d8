"""Merging, splitting and resharding what a save has truncated or dropped, what is compressed, and what is refused."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import ReplayBuffer
from pipeline.checkpoint import verify
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError, UsageError
from pipeline.tools import merge, reshard, split
from tests.support.keeping import PRIORITIZED, digest, everything, load, odd_rows
from tests.support.ranks import fine, on_ranks

PACKED: dict[str, Any] = {"compress": {"image": "zlib"}}
GOLDEN = Path(__file__).parent.parent / "golden" / "v1f"


def save(directory: Path, ranks: Ranks | None = None, **options: Any) -> None:
    """Save episodes of which some are open, and, of the oldest, some have lost their start."""
    rank = 0 if ranks is None else ranks.rank
    with ReplayBuffer(60, directory=directory, ranks=ranks, seed=1, **options) as buffer:
        buffer.resume()
        for t in range(24):
            done = [(t + env) % (4 + 2 * rank) == 0 for env in range(3)]
            rows = {**odd_rows(rank, t, 3, done=done), "truncated": np.zeros(3, bool)}
            buffer.extend(rows, envs=3, version=t)
            if t == 10:
                buffer.save(1, wait=True)
        keys = buffer.ring.keys()
        buffer.write_back(keys[1::4], {"reward": np.full(len(keys[1::4]), -1.0)})
        if options.get("select") is PRIORITIZED:
            buffer.update_priorities(keys, 1 + keys % 7)
        buffer.save(2, wait=True)


def of_ranks(directory: Path, size: int, **options: Any) -> list[dict[str, Any]]:
    def live(ranks: Ranks) -> dict[str, Any]:
        with ReplayBuffer(500, directory=directory, ranks=ranks, seed=1, **options) as buffer:
            buffer.resume()
            draws = [buffer.sample(8).keys.tolist() for _ in range(3)]
            return {**everything(buffer), "draws": draws}

    return fine(on_ranks(size, live))


def rows_of(*found: dict[str, Any]) -> list[Any]:
    """What there is of each row wherever it lies, but for its place: that of one without a start is counted anew."""
    names = ("id", "reward", "bits", "half", "image", "terminated", "truncated", "mass", "#version", "#end")
    return sorted(row for each in found for row in zip(*(each[name] for name in names), strict=True))


UNLIKE = pytest.mark.parametrize(
    "options",
    [{"incomplete": "truncate"}, {"incomplete": "drop"}, {"incomplete": "drop", "select": PRIORITIZED}, PACKED],
    ids=["truncate", "drop", "drop by priority", "compress"],
)


@UNLIKE
def test_of_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path / "a", **options)
    was, select = digest(tmp_path / "a"), options.get("select", "uniform")
    made = merge([tmp_path / "a"], tmp_path / "m")
    parts = split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], where="t < 16")
    back = merge([tmp_path / "x", tmp_path / "y"], tmp_path / "back")
    anew = reshard(tmp_path / "a", tmp_path / "r", 2)
    assert digest(tmp_path / "a") == was
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    wanted = load(tmp_path / "copy", select=select)
    rows = len(wanted["keys"])
    assert (rows < 60) == (options.get("incomplete") == "drop")
    assert made.rows == back.rows == sum(each.rows for each in parts) == sum(anew.shards) == rows
    assert all(each.rows for each in parts)
    merged = load(tmp_path / "m", select=select)
    assert load(tmp_path / "back", select=select) == merged
    assert rows_of(merged) == rows_of(wanted)
    resharded = of_ranks(tmp_path / "r", 2, select=select)
    if options.get("incomplete"):  # else the ranks' loads cut the episodes that are open
        assert merged["open"][0] == []
        assert rows_of(*resharded) == rows_of(wanted)
    assert sorted(which for each in resharded for which in each["id"]) == sorted(wanted["id"])


@UNLIKE
def test_of_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    fine(on_ranks(2, partial(_save_rank, directory=tmp_path / "a", options=options)))
    select = options.get("select", "uniform")
    was = digest(tmp_path / "a")
    for size in (1, 2, 3):
        made = reshard(tmp_path / "a", tmp_path / f"r{size}", size)
        found = verify(str(tmp_path / f"r{size}"))
        assert found.whole, found.damages
        shutil.copytree(tmp_path / "a", tmp_path / f"copy{size}")
        wanted = of_ranks(tmp_path / f"copy{size}", size, select=select)
        assert of_ranks(tmp_path / f"r{size}", size, select=select) == wanted
        assert made.shards == [len(each["keys"]) for each in wanted]
    assert digest(tmp_path / "a") == was
    merge([tmp_path / "a"], tmp_path / "m")
    merged = load(tmp_path / "m", select=select)
    if options.get("incomplete"):  # else the ranks' loads cut the episodes that are open
        assert merged["open"][0] == []
        assert rows_of(merged) == rows_of(*wanted)
    assert len(merged["keys"]) == sum(made.shards)


def _save_rank(ranks: Ranks, directory: Path, options: dict[str, Any]) -> None:
    save(directory, ranks, **options)


def test_what_is_compressed_is_compressed_again(tmp_path: Path) -> None:
    save(tmp_path / "a", **PACKED)
    merge([tmp_path / "a"], tmp_path / "m")
    wanted = load(tmp_path / "a")
    with ReplayBuffer(60, directory=tmp_path / "m", seed=1, **PACKED) as buffer:
        buffer.resume()
        images = buffer.ring.storage.large["image"][buffer.ring.slots(buffer.ring.keys())]
        assert [each.tobytes() for each in images] == wanted["image"]
        buffer.save(3, wait=True)
    assert merge([tmp_path / "m"], tmp_path / "again").rows == 60
    assert load(tmp_path / "again")["image"] == wanted["image"]


def test_conditions_see_what_was_written_back(tmp_path: Path) -> None:
    """Rewards, and the flag that a save has set where it truncated an episode."""
    save(tmp_path / "a", incomplete="truncate")
    for where, column, value in (("reward < 0", "reward", -1.0), ("truncated == true", "truncated", True)):
        found = split(tmp_path / "a", [tmp_path / f"{column} x", tmp_path / f"{column} y"], where=where)
        assert all(each.rows for each in found)
        first, rest = (load(tmp_path / f"{column} {name}") for name in "xy")
        raw = np.array(value).tobytes()
        assert raw in first[column]
        assert raw not in rest[column]
    assert len(load(tmp_path / "truncated x")["open"][0]) == 0


def test_next_observations_that_rows_share_are_refused_by_name(tmp_path: Path) -> None:
    from tests.support.replaying import rows

    def live(ranks: Ranks | None, directory: Path) -> None:
        with ReplayBuffer(50, directory=directory, ranks=ranks, share_next_obs=True, seed=1) as buffer:
            buffer.resume()
            buffer.extend(rows(0, 10))
            buffer.save(1, wait=True)

    live(None, tmp_path / "one")
    fine(on_ranks(2, partial(live, directory=tmp_path / "two")))
    for name, size in (("one", 2), ("one", 1), ("two", 3)):
        with pytest.raises(ConfigError, match=r"share_next_obs=True.*cannot be merged, split or resharded"):
            reshard(tmp_path / name, tmp_path / "out", size)
        with pytest.raises(ConfigError, match="share_next_obs=True"):
            reshard(tmp_path / name, tmp_path / "out", size, dry_run=True)
        with pytest.raises(ConfigError, match="share_next_obs=True"):
            split(tmp_path / name, tmp_path / "out", count=1)
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]
    assert reshard(tmp_path / "two", tmp_path / "out", 2).shards == [10, 10]  # as they lie there
    assert verify(str(tmp_path / "out")).whole


def test_what_ranks_have_attached_for_themselves(tmp_path: Path) -> None:
    """As many ranks have it back; others do not, which is said."""
    from tests.support.replaying import Counter

    def live(ranks: Ranks, directory: Path, step: int) -> int:
        own = Counter()
        with ReplayBuffer(50, directory=directory, ranks=ranks, seed=1) as buffer:
            buffer.attach_own(env=own)
            buffer.resume()
            if step:
                own.step = step + ranks.rank
                buffer.extend(odd_rows(0, ranks.rank, 1, done=[True]))
                buffer.save(step, wait=True)
            return own.step

    fine(on_ranks(2, partial(live, directory=tmp_path / "a", step=5)))
    assert "own" not in str(reshard(tmp_path / "a", tmp_path / "same", 2).left_out)
    assert fine(on_ranks(2, partial(live, directory=tmp_path / "same", step=0))) == [5, 6]
    assert "own/env.safetensors" in reshard(tmp_path / "a", tmp_path / "anew", 3).left_out
    assert fine(on_ranks(3, partial(live, directory=tmp_path / "anew", step=0))) == [0, 0, 0]


def test_pipelines_of_ranks_are_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "run", ignore=shutil.ignore_patterns("every_event.fbj"))
    was = digest(tmp_path / "run")
    why = r"a pipeline of \d+ ranks.*only resume\(\)"
    with pytest.raises(UsageError, match=why):
        merge([tmp_path / "run"], tmp_path / "out")
    with pytest.raises(UsageError, match=why):
        split(tmp_path / "run", tmp_path / "out", count=1)
    with pytest.raises(UsageError, match=why):
        reshard(tmp_path / "run", tmp_path / "out", 2)
    assert os.listdir(tmp_path) == ["run"]
    assert digest(tmp_path / "run") == was

"""What a save dropped, or truncated, is so for every tool, as it is for a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.buffer.transitions.layout import TRUNCATED
from pipeline.checkpoint import verify
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError
from pipeline.replay import ReplayBuffer
from pipeline.replay.looking import look_at
from pipeline.tools import SalvagedRows, inspect, salvage_run, sample_run, show_item
from pipeline.tools.exporting import export
from pipeline.tools.importing import import_data
from pipeline.tools.target import find_target
from tests.support.ranks import fine, on_ranks
from tests.support.salvaging import flip
from tests.unit.test_replay_incomplete import CAPACITY, build, content, fill
from tests.unit.test_replay_own import Env

COUNT = 41


def saved(directory: Path, policy: str) -> dict[int, tuple[Any, ...]]:
    """A buffer of ragged episodes, saved; returns what a resume has of each row."""
    with build(directory, policy) as buffer:
        buffer.resume()
        fill(buffer, COUNT)
        buffer.save(1, wait=True)
    with build(directory, policy) as buffer:
        buffer.resume(continue_episodes=True)
        return content(buffer)


def resumed(directory: Path, **more: Any) -> tuple[dict[int, tuple[Any, ...]], ReplayBuffer]:
    with build(directory, **more) as buffer:
        buffer.resume(continue_episodes=True)
        return content(buffer), buffer


@pytest.mark.parametrize("policy", ["keep", "truncate", "drop"])
def test_every_tool_tells_what_a_resume_has(tmp_path: Path, policy: str) -> None:
    run = tmp_path / "run"
    there = saved(run, policy)
    ended = sum(row[-2] == TRUNCATED for row in there.values())
    (facts,) = inspect(run).buffers
    assert (facts.rows, facts.rewards.count, facts.priorities.count) == (len(there),) * 3
    assert facts.ends.get("truncated", 0) == ended
    assert facts.open_episodes == (3 if policy == "keep" else 0)
    assert sample_run(run, 8, seed=1).there == len(there)
    newest = inspect(run).status.newest  # type: ignore[union-attr]
    assert newest is not None
    assert newest.rows == len(there)

    export(run, tmp_path / "lines", to="jsonl")
    import_data(tmp_path / "lines", tmp_path / "again")
    assert resumed(tmp_path / "again")[0] == there

    found = salvage_run(run, tmp_path / "salvaged")
    assert isinstance(found, SalvagedRows)
    assert (found.rows_kept, found.rows_lost, found.losses) == (len(there), 0, [])
    assert verify(str(tmp_path / "salvaged")).whole
    assert resumed(tmp_path / "salvaged")[0] == there


def test_what_would_be_drawn_next_is_of_the_rows_that_come_back(tmp_path: Path) -> None:
    there = saved(tmp_path, "drop")
    target = find_target(tmp_path)
    assert target.stored is not None
    seen = look_at(target.layout, target.run.tag, target.stored)
    with build(tmp_path, "drop") as buffer:
        buffer.resume(continue_episodes=True)
        for _ in range(5):
            drawn, expected = (each.sample(16).numpy()["n"] for each in (seen, buffer))
            assert drawn.tolist() == expected.tolist()
            assert set(drawn.tolist()) <= set(there)


def test_one_row(tmp_path: Path) -> None:
    there = saved(tmp_path, "drop")
    for n in range(3 * COUNT - 60, 3 * COUNT):
        if n in there:
            assert "n" in [each.name for each in show_item(tmp_path, n).tensors]
        else:
            with pytest.raises(ConfigError, match="dropped its episode"):
                show_item(tmp_path, n)


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_a_block_is_gone(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.buffer.transitions.blocks.BLOCK_BYTES", 1200)
    there = saved(tmp_path / "run", policy)
    segments = sorted((tmp_path / "run" / "segments").iterdir())
    flip(segments[-1], segments[-1].stat().st_size // 2)
    found = salvage_run(tmp_path / "run", tmp_path / "salvaged")
    assert isinstance(found, SalvagedRows)
    assert 0 < found.rows_lost < len(there) == found.rows_lost + found.rows_kept
    now, buffer = resumed(tmp_path / "salvaged")
    assert len(now) == found.rows_kept
    assert set(now) <= set(there)
    for n, row in now.items():
        assert row[:-2] == there[n][:-2]
        assert row[-1] == there[n][-1]
        assert row[-2] == there[n][-2] or there[n][-2] != TRUNCATED  # what was truncated is so
    assert np.isin(list(now), list(there)).all()
    assert len(buffer) == len(now)


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_shards(tmp_path: Path, policy: str) -> None:
    run = tmp_path / "run"

    def save(ranks: Ranks) -> Any:
        with build(run, policy, ranks) as buffer:
            buffer.attach_own(env=Env(ranks.rank))
            buffer.resume()
            fill(buffer, 12 + 15 * ranks.rank, seed=ranks.rank)
            buffer.save(1, wait=True)
        with build(run, policy, ranks) as buffer:
            buffer.attach_own(env=Env(9))
            buffer.resume(continue_episodes=policy == "truncate")
            return content(buffer)

    there = fine(on_ranks(2, save))
    found = inspect(run)
    assert [each.rows for each in found.buffers] == [len(each) for each in there]
    assert [each.priorities.count for each in found.buffers] == [len(each) for each in there]
    for rank, rows in enumerate(there):
        assert sample_run(run, 4, seed=1, rank=rank).there == len(rows)
    export(run, tmp_path / "lines", to="jsonl")
    import_data(tmp_path / "lines", tmp_path / "again")
    # Without a limit of its own each shard has an order of its own; the buffer has room for both.
    again = resumed(tmp_path / "again", capacity=2 * CAPACITY)[0]
    assert again == there[0] | there[1]


def test_what_is_lost_with_a_ranks_own_state(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> None:
        with build(tmp_path, ranks=ranks) as buffer:
            buffer.attach_own(env=Env(ranks.rank))
            buffer.resume()
            fill(buffer, 9, seed=ranks.rank)
            buffer.save(1, wait=True)

    fine(on_ranks(2, save))
    (file,) = tmp_path.glob("generations/*/shards/0001/own/env.safetensors")
    flip(file, 9)
    (damage,) = verify(str(tmp_path)).damages
    assert damage.lost.startswith("the state of 'env' of rank 1 in generation")

"""The buffer of several ranks from which not the oldest rows go first, of which blocks or shards are gone: every other
row comes along, with its rank, and is what it was."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Damaged
from pipeline.checkpoint import verify
from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.cli import main
from pipeline.distributed import Ranks
from pipeline.replay.pooling import block_of
from pipeline.replay.shards import read_shards
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout
from pipeline.tools.salvaging import SalvagedShards, salvage_run
from tests.support.keeping import digest
from tests.support.pooled import CAPACITY, CHOICES, content, fill, held, made
from tests.support.ranks import fine, on_ranks
from tests.support.salvaging import flip
from tests.unit.test_tools_pools import resumed, save_ranks

SIZE = 3


def newest(directory: Path) -> Stored:
    layout = Layout(str(directory))
    run = layout.read_run()
    assert run is not None
    return find_generations(layout, run.run_id).complete[-1]


def hurt(directory: Path, rank: int, at: int) -> set[int]:
    """Flip a byte of one of a rank's blocks; return which of its rows lay there, oldest first."""
    shard = read_shards(newest(directory), pools=True)[rank]
    blocks = sorted(shard.blocks, key=lambda block: block.first)
    numbers = block_of(shard.pool["at"], blocks)
    block = blocks[sorted(set(numbers.tolist()))[at]]
    path = Path(Layout(str(directory)).segment(*block.segment_key))
    flip(path, block.offset + HEADER_BYTES + block.length // 2)
    return set(np.flatnonzero(block_of(shard.pool["at"], [block]) == 0).tolist())


def salvaged(directory: Path, target: Path, **more: Any) -> SalvagedShards:
    before = digest(directory)
    rehearsed = salvage_run(directory, target, rehearse=True, **more)
    assert not target.exists()
    found = salvage_run(directory, target, **more)
    assert digest(directory) == before
    assert isinstance(found, SalvagedShards)
    assert isinstance(rehearsed, SalvagedShards)
    assert (rehearsed.rows_kept, rehearsed.rows_lost, rehearsed.shards) == (
        found.rows_kept,
        found.rows_lost,
        found.shards,
    )
    whole = verify(str(target))
    assert whole.whole, whole.damages
    return found


def check(got: dict[str, Any], was: dict[str, Any], gone: set[int]) -> None:
    """What is left is what it was, in its order: columns, versions, priorities, how often it was drawn."""
    left = [which for at, which in enumerate(was["id"]) if at not in gone]
    assert got["id"] == left
    rows, before = content({**got, "#end": None}), content({**was, "#end": None})
    assert rows == {which: before[which] for which in left}


@pytest.mark.parametrize("name", ["min-uniform", "lowest_priority-prioritized", "lifo-uses", "stalest-prioritized"])
def test_every_row_of_whole_blocks_stays_with_its_rank(tmp_path: Path, name: str) -> None:
    options = CHOICES[name]
    saved = save_ranks(tmp_path / "a", SIZE, **options)
    gone = [hurt(tmp_path / "a", 0, 0), set[int](), hurt(tmp_path / "a", 2, -1)]
    found = salvaged(tmp_path / "a", tmp_path / "v")
    assert found.rows_lost == sum(map(len, gone)) > 0
    assert found.shards == [len(each["id"]) - len(lost) for each, lost in zip(saved, gone, strict=True)]
    assert (found.shards_lost, found.episodes_split, len(found.losses)) == ([], 0, 2)
    assert {loss.lost for loss in found.losses} == {
        f"{len(lost)} rows of rank {rank}" for rank, lost in enumerate(gone) if lost
    }
    got = resumed(tmp_path / "v", SIZE, CAPACITY, **options)
    for each, was, lost in zip(got, saved, gone, strict=True):
        check(each, was, lost)
        assert bool(each["draws"]) == bool(each["id"])


@pytest.mark.parametrize("name", ["min-uniform", "lowest_priority-prioritized"])
def test_of_what_is_whole_everything_comes_along(tmp_path: Path, name: str) -> None:
    options = CHOICES[name]
    saved = save_ranks(tmp_path / "a", SIZE, **options)
    found = salvaged(tmp_path / "a", tmp_path / "v")
    assert (found.whole, found.rows_lost) == (True, 0)
    for each, was in zip(resumed(tmp_path / "v", SIZE, CAPACITY, **options), saved, strict=True):
        check(each, was, set())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_shard_is_gone_begins_without_rows(tmp_path: Path, rank: int) -> None:
    options = CHOICES["min-uniform"]
    saved = save_ranks(tmp_path / "a", SIZE, keep=1, **options)
    shutil.rmtree(os.path.join(newest(tmp_path / "a").folder, "shards", f"{rank:04d}"))
    found = salvaged(tmp_path / "a", tmp_path / "v")
    assert found.shards_lost == [rank]
    assert found.rows_lost == len(saved[rank]["id"])
    got = resumed(tmp_path / "v", SIZE, CAPACITY, **options)
    for at, (each, was) in enumerate(zip(got, saved, strict=True)):
        check(each, was, set(range(len(was["id"]))) if at == rank else set())
    for at in {*range(SIZE)} - {rank}:
        shutil.rmtree(os.path.join(newest(tmp_path / "a").folder, "shards", f"{at:04d}"))
    with pytest.raises(Damaged):
        salvage_run(tmp_path / "a", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_as_one_process_does_by_itself(tmp_path: Path) -> None:
    """The rows of a rank are those that ``resume(allow_partial=True)`` has of a pool of one process; ranks go on with
    them, also as many others."""
    options = CHOICES["lowest_priority-prioritized"]

    def fill_pool(ranks: Ranks | None, directory: Path) -> dict[str, Any]:
        with made(directory, ranks=ranks, **options) as buffer:
            buffer.resume()
            for step in (1, 2):
                fill(buffer, 10, 12 * step, 12)
                buffer.save(step, wait=True)
            return held(buffer)

    (of_rank,) = fine(on_ranks(1, partial(fill_pool, directory=tmp_path / "a")))
    alone = fill_pool(None, tmp_path / "b")
    assert content(of_rank) == content(alone)
    assert hurt(tmp_path / "a", 0, 0)
    segment = next((tmp_path / "b" / "segments").iterdir())
    shards = read_shards(newest(tmp_path / "a"), pools=True)
    first = min(shards[0].blocks, key=lambda block: block.first)
    flip(segment, first.offset + HEADER_BYTES + first.length // 2)
    salvaged(tmp_path / "a", tmp_path / "v")
    with made(tmp_path / "b", **options) as buffer:
        assert buffer.resume(allow_partial=True).lost.rows
        expected = held(buffer)
    (got,) = resumed(tmp_path / "v", 1, CAPACITY, **options)
    assert got["id"] == expected["id"]
    assert content({**got, "#end": None}) == content({**expected, "#end": None})
    several = resumed(tmp_path / "v", 2, CAPACITY, **options)
    assert sorted(which for each in several for which in each["id"]) == sorted(expected["id"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_ranks(tmp_path / "a", 2, **CHOICES["min-uniform"])
    gone = hurt(tmp_path / "a", 1, 0)
    assert main(["salvage", str(tmp_path / "a"), str(tmp_path / "v")]) == 0
    shown = capsys.readouterr().out
    assert f"{len(gone)} are lost" in shown
    assert f"{len(gone)} rows of rank 1" in shown

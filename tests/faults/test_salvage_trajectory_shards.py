"""The trajectories of several ranks of which some, or shards, are gone: every other one comes along, with its rank."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline import ConfigError, Damaged, Ranks, StoreError
from pipeline.checkpoint import verify
from pipeline.checkpoint.manifest import TRAJECTORY_SHARDS
from pipeline.cli import main
from pipeline.replay.loading import Lost
from pipeline.replay.trajectory_shards import TrajectoriesOnDisk, read_trajectory_shards
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout
from pipeline.store.segments import Block
from pipeline.tools import merge, reshard
from pipeline.tools.salvaging import SalvagedTrajectoryShards, salvage_run
from pipeline.tools.salvaging_trajectories import salvage_trajectories
from tests.support.disk import ScriptedFiles, no_space, tree
from tests.support.ranks import fine, on_ranks
from tests.support.replaying import Counter
from tests.support.salvaging import flip
from tests.support.trajectories import draws
from tests.unit.test_trajectory_ranks import (
    DAMAGES,
    add,
    damage,
    held,
    made,
    newest,
    number_of,
    save_some,
    segment_of,
    shared,
)

SIZE = 3


def rows_of(numbers: list[int]) -> int:
    return sum((1 + number % 5) * (1 + number % 3) for number in numbers)


def on_disk(directory: Path) -> list[TrajectoriesOnDisk]:
    return read_trajectory_shards(newest(directory))


def hurt(directory: Path, block: Block) -> None:
    path = Path(Layout(str(directory)).segment(*block.segment_key))
    flip(path, block.offset + HEADER_BYTES + block.length // 2)


def salvaged(directory: Path, target: Path, **more: Any) -> SalvagedTrajectoryShards:
    before = tree(str(directory))
    found = salvage_run(directory, target, **more)
    assert tree(str(directory)) == before
    assert isinstance(found, SalvagedTrajectoryShards)
    return found


def loaded(directory: Path, size: int = SIZE, **how: Any) -> list[list[int]]:
    """What each of some ranks has of it; they go on, and save, and nothing has the name of something else."""

    def load(ranks: Ranks) -> list[int]:
        with made(directory, ranks) as buffer:
            buffer.attach(counter=(counter := Counter()))
            found = buffer.resume(**how)
            assert found.lost == Lost()
            assert counter.step == 10
            left = held(buffer)
            if left:
                draws(buffer, 3)
            add(buffer, 50 + ranks.rank, range(3))
            assert held(buffer)[:-3] == left
            buffer.save(9, wait=True)
            return left

    found = fine(on_ranks(size, load))
    shards = on_disk(directory)
    names = [uid for shard in shards for uid in shard.table.uid.tolist()]
    assert len(set(names)) == len(names)
    ages = [shard.table.age.tolist() for shard in shards]
    assert min(min(each[-3:]) for each in ages) > max([-1, *(age for each in ages for age in each[:-3])])
    assert verify(str(directory)).whole
    return found


def partly(directory: Path, size: int = SIZE) -> list[list[int]]:
    """What a resume has that goes on without what is damaged."""

    def load(ranks: Ranks) -> list[int]:
        with made(directory, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume(allow_partial=True)
            return held(buffer)

    return fine(on_ranks(size, load))


@pytest.mark.parametrize("other", [SIZE, 2])
@pytest.mark.parametrize("what", list(DAMAGES))
def test_what_is_whole_comes_along_with_its_rank(tmp_path: Path, what: str, other: int) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    before = save_some(run, SIZE)
    path = damage(what, run)
    rehearsed = salvaged(run, out, rehearse=True)
    assert not out.exists()
    found = salvaged(run, out)
    assert (rehearsed.shards, rehearsed.losses, rehearsed.rows_lost) == (found.shards, found.losses, found.rows_lost)
    assert (rehearsed.trajectories_kept, rehearsed.shards_lost) == (found.trajectories_kept, found.shards_lost)
    assert found.losses
    assert all(str(run / loss.path).startswith(str(path)) for loss in found.losses)
    assert verify(str(out)).whole
    whole = {number for each in partly(run) for number in each}
    left = [[number for number in each if number in whole] for each in before]
    gone = [number for each in before for number in each if number not in whole]
    assert gone
    assert (found.trajectories_kept, found.trajectories_lost) == (len(whole), len(gone))
    assert (found.rows_kept, found.rows_lost) == (rows_of(sorted(whole)), rows_of(gone))
    assert found.shards == [rows_of(each) for each in left]
    assert found.shards_lost == [rank for rank, each in enumerate(left) if not each and "segment" not in what]
    if other == SIZE:
        assert loaded(out) == left
    else:
        # Their ages stay, whatever is gone between them.
        aged = [[number if number in whole else -1 for number in each] for each in before]
        assert loaded(out, other) == shared(aged, other)


@pytest.mark.parametrize("gone", [[0], [8], [3, 4], [0, 2, 5], range(9)], ids=str)
def test_numbers_go_on_where_they_were(tmp_path: Path, gone: Any) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    before = save_some(run, SIZE)
    (_, _, last) = on_disk(run)
    for at in gone:
        hurt(run, last.blocks[at])
    found = salvaged(run, out)
    assert [(loss.offset, loss.bytes) for loss in found.losses] == [
        (last.blocks[at].offset, last.blocks[at].length) for at in gone
    ]
    assert found.losses[0].lost.startswith(f"trajectory {gone[0]} of rank 2, of ")
    shards = on_disk(out)
    assert [shard.added for shard in shards] == [7, 8, 9]
    left = [number for at, number in enumerate(before[2]) if at not in gone]
    assert [info.max_episode_length for info in shards[2].infos] == left
    kept = [at for at in range(9) if at not in gone]
    assert shards[2].table.uid.tolist() == [last.table.uid[at] for at in kept]
    assert shards[2].table.age.tolist() == [last.table.age[at] for at in kept]
    numbers = [block.first for block in shards[2].blocks]
    assert numbers == list(range(9 - len(left), 9))  # and payloads say these, too
    assert loaded(out) == [*before[:2], left]


def test_what_ranks_had_of_each_other(tmp_path: Path) -> None:
    """Payloads that say other numbers, of which two ranks need some out of one segment."""
    run, out = tmp_path / "run", tmp_path / "out"
    save_some(run, 2)

    def go_on(ranks: Ranks) -> list[int]:
        with made(run, ranks) as buffer:
            buffer.attach(counter=(counter := Counter()))
            buffer.resume()
            counter.step = 10
            add(buffer, 20 + ranks.rank, range(2))
            buffer.save(2, wait=True)
            return held(buffer)

    before = fine(on_ranks(SIZE, go_on))
    old = on_disk(run)
    one, other = ({block.segment_key for block in shard.blocks} for shard in old[:2])
    assert one & other
    hurt(run, old[0].blocks[1])
    hurt(run, old[1].blocks[0])
    found = salvaged(run, out)
    left = [[before[0][0], *before[0][2:]], before[1][1:], before[2]]
    assert (found.trajectories_lost, found.shards) == (2, [rows_of(each) for each in left])
    assert verify(str(out)).whole
    assert len(list((out / "segments").iterdir())) == SIZE
    assert loaded(out) == left


def test_of_whole_shards_everything_comes_along_to_the_next_draws(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"

    def train(ranks: Ranks) -> None:
        with made(run, ranks, capacity=5) as buffer:
            buffer.attach(counter=(counter := Counter()))
            buffer.attach_own(own=(own := Counter()))
            buffer.resume()
            counter.step, own.step = 10, 20 + ranks.rank
            add(buffer, ranks.rank, range(9))
            draws(buffer, 2)
            buffer.save(1, wait=True)

    def load(ranks: Ranks, directory: Path) -> Any:
        with made(directory, ranks) as buffer:
            buffer.attach(counter=(counter := Counter()))
            buffer.attach_own(own=(own := Counter()))
            buffer.resume()
            return buffer.state_dict()["state"], held(buffer), draws(buffer, 8), counter.step, own.step

    fine(on_ranks(SIZE, train))
    found = salvaged(run, out)
    assert (found.whole, found.rows_lost, found.trajectories_lost, found.shards_lost) == (True, 0, 0, [])
    theirs, mine = (fine(on_ranks(SIZE, partial(load, directory=directory))) for directory in (run, out))
    assert mine == theirs
    assert [own for *_, own in mine] == [20, 21, 22]
    manifest = newest(out).manifest
    assert (manifest.kind, manifest.reason, manifest.origin) == (TRAJECTORY_SHARDS, "salvage", found.origin)
    assert len({path.stat().st_nlink for path in (out / "segments").iterdir()} - {1}) == 0  # they are copies
    again = salvaged(out, tmp_path / "again")
    assert again.whole
    assert fine(on_ranks(SIZE, partial(load, directory=tmp_path / "again"))) == theirs


def test_an_older_generation_is_taken_where_it_has_all_shards(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def train(ranks: Ranks) -> None:
        with made(run, ranks) as buffer:
            buffer.attach(counter=(counter := Counter()))
            buffer.resume()
            counter.step = 10
            for step in (1, 2, 3):
                add(buffer, ranks.rank, range(3 * step, 3 * step + 3))
                buffer.save(step, wait=True)

    fine(on_ranks(SIZE, train))
    shutil.rmtree(Path(newest(run).folder) / "shards" / "0001")
    found = salvaged(run, tmp_path / "out")
    assert (found.step, found.shards_lost, found.trajectories_kept) == (2, [], 6 * SIZE)
    assert (found.generations_usable, found.generations_unusable) == (3, 0)
    newer = salvaged(run, tmp_path / "newer", step=3)
    assert (newer.step, newer.shards_lost, newer.shards[1]) == (3, [1], 0)
    assert (newer.trajectories_lost, newer.trajectories_kept) == (9, 18)
    flip(Path(newest(run).folder) / "manifest.json", 40)
    again = salvaged(run, tmp_path / "again")
    assert (again.step, again.generations_usable, again.generations_unusable) == (2, 2, 1)
    for name in ("out", "newer", "again"):
        assert sum(map(len, loaded(tmp_path / name))) == 18


def test_the_streams_of_draws_that_are_gone_begin_anew_and_numbers_do_not(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    save_some(run, 2)
    shutil.rmtree(Path(newest(run).folder) / "shards" / "0001")
    salvaged(run, out)
    shards = on_disk(out)
    assert [shard.added for shard in shards] == [7, 8]
    assert shards[1].state.generator
    assert shards[1].state.generator != shards[0].state.generator

    def first_number(ranks: Ranks) -> int:
        with made(out, ranks) as buffer:
            buffer.attach(counter=Counter())
            buffer.resume()
            add(buffer, 70 + ranks.rank, range(1))
            return buffer.infos()[-1].trajectory_id

    assert fine(on_ranks(2, first_number)) == [7, 8]


def test_without_any_shard_there_is_nothing(tmp_path: Path) -> None:
    save_some(tmp_path / "run", 2)
    shutil.rmtree(Path(newest(tmp_path / "run").folder) / "shards")
    with pytest.raises(Damaged, match="no generation says how the buffer stood"):
        salvage_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["nothing", "own", "model", "shard"])
def test_what_was_attached_comes_along_where_it_is_whole(tmp_path: Path, where: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"

    def live(ranks: Ranks, directory: Path, *, first: bool) -> Any:
        own, model = Counter(), Counter()
        with made(directory, ranks, keep=1) as buffer:
            buffer.attach_own(own=own)
            buffer.attach(**({"model": model} if first or where != "model" else {}))
            buffer.resume()
            if first:
                own.step, model.step = 10 + ranks.rank, 99
                add(buffer, ranks.rank, range(4))
                buffer.save(1, wait=True)
            return own.step, model.step, len(buffer)

    fine(on_ranks(2, partial(live, directory=run, first=True)))
    folder = Path(newest(run).folder)
    if where == "own":
        flip(folder / "shards" / "0001" / "own" / "own.safetensors", 70)
    elif where == "model":
        flip(folder / "trainer" / "model.safetensors", 70)
    elif where == "shard":
        flip(folder / "shards" / "0001" / "trajectories.json", 40)
    found = salvaged(run, out)
    assert found.trajectories_lost == (4 if where == "shard" else 0)
    assert found.shards_lost == ([1] if where == "shard" else [])
    there = fine(on_ranks(2, partial(live, directory=out, first=False)))
    assert [own for own, *_ in there] == ([0, 0] if where == "own" else [10, 11])
    assert {model for _, model, _ in there} == {0 if where == "model" else 99}
    assert [count for *_, count in there] == [4, 0 if where == "shard" else 4]


def test_a_run_that_cannot_be_read_now_is_no_reason_to_stop(tmp_path: Path) -> None:
    """What the disk refuses is lost for a salvage, and said."""
    run, out = tmp_path / "run", tmp_path / "out"
    before = save_some(run, 2)
    path = segment_of(run)
    path.unlink()
    path.mkdir()
    found = salvaged(run, out)
    assert (found.trajectories_lost, found.shards[0]) == (len(before[0]), 0)
    assert loaded(out, 2) == [[], before[1]]


def test_it_is_not_merged_with_what_it_was_made_of(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    save_some(run, 2)
    hurt(run, on_disk(run)[0].blocks[0])
    salvaged(run, out)
    reshard(out, tmp_path / "three", 3)
    for other in (run, tmp_path / "three"):
        with pytest.raises(ConfigError, match="would be there twice"):
            merge([out, other], tmp_path / "m", dry_run=True)
    with pytest.raises(ConfigError, match="would be there twice"):
        merge([run, tmp_path / "three"], tmp_path / "m", dry_run=True)
    assert merge([out], tmp_path / "m").units == 14
    marker = Layout(str(out)).read_run()
    assert marker is not None
    assert [(way.run_id, way.named) for way in marker.made_of] == [(newest(run).manifest.run_id, "")]


def test_a_write_that_fails_leaves_no_run_and_no_open_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_some(run, 2)
    hurt(run, on_disk(run)[0].blocks[2])
    before = tree(str(run))

    def write(target: Path, files: ScriptedFiles) -> None:
        how: dict[str, Any] = {"step": None, "called": str(target), "files": files, "rehearse": False}
        salvage_trajectories(Layout(str(run)), str(target), kind=TRAJECTORY_SHARDS, **how)

    counting = ScriptedFiles()
    write(tmp_path / "counted", counting)
    failed = 0
    for call in range(1, len(counting.calls) + 1):
        files = ScriptedFiles(call, no_space)
        try:
            write(tmp_path / str(call), files)
        except StoreError:
            failed += 1
            assert not (tmp_path / str(call) / "run.json").exists() or call > len(counting.calls) - 3
        assert not files.open, f"call {call}, {counting.calls[call - 1]}, left files open"
    assert failed > len(counting.calls) // 2
    assert tree(str(run)) == before


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    save_some(run, 2)
    hurt(run, on_disk(run)[1].blocks[3])
    assert main(["salvage", str(run), str(out), "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not out.exists()
    assert main(["salvage", str(run), str(out)]) == 0
    shown = capsys.readouterr().out
    number = number_of(1, 3)
    lost = (1 + number % 5) * (1 + number % 3)
    assert f"kept         14 trajectories with {told['rows_kept']} rows, and 1 with {lost} rows are lost\n" in shown
    assert f"ranks        0: {told['shards'][0]}, 1: {told['shards'][1]}\n" in shown
    assert "lost   trajectory 3 of rank 1, of " in shown
    assert not os.path.exists(f"{out}.part")
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == TRAJECTORY_SHARDS
    assert main(["salvage", str(out), str(tmp_path / "again")]) == 0
    assert "Nothing was lost." in capsys.readouterr().out

"""Merging, splitting and resharding pipelines of several ranks, as threads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import Context, Item, Pipeline, Ranks, Rollout, Task
from pipeline.checkpoint import status_of, verify
from pipeline.checkpoint.manifest import PIPELINE, PIPELINE_RANKS
from pipeline.errors import ConfigError, Damaged
from pipeline.sync_form import SyncPipeline
from pipeline.tools import merge, reshard, split
from pipeline.tools.groups import Groups
from pipeline.tools.sources import open_source
from tasks.prompts import DifficultyPool
from tests.faults.test_pipeline_ranks import on
from tests.support.disk import Killed, ScriptedFiles
from tests.support.keeping import digest
from tests.support.rank_runs import COUNTS, EVERY, Seen, found_by, killed, tasks, trained_to_the_end
from tests.support.ranked import manifests
from tests.support.ranks import fine
from tests.support.runs import numbers, solve
from tests.support.salvaging import flip


@pytest.fixture(scope="module", params=[(2,), (3, 2)], ids=str)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run whose ranks were killed; and how many these were."""
    return killed(tmp_path_factory.mktemp("kept"), *request.param), request.param[-1]


@pytest.fixture
def run(kept: tuple[Path, int], tmp_path: Path) -> tuple[Path, int]:
    """A copy of it."""
    return Path(shutil.copytree(kept[0], tmp_path / "run")), kept[1]


def finished(directory: Path, size: int) -> dict[int, Any]:
    """What is finished and not trained, as ranks find it: by uid, task, index and payloads."""
    copy = Path(shutil.copytree(directory, directory.parent / f"{directory.name} looked at"))
    found: dict[int, Any] = {}
    for each in found_by(copy, size):
        for uid in each["order"]:
            entry = each["entries"][uid]
            found[uid] = (entry["task"], entry["rewards"], [each["payloads"][uid, member] for member in (0, 1)])
    return found


def got(directory: Path, count: int) -> list[tuple[int, str, float, list[Any]]]:
    """What one process gets first of a new run: uid, task, reward and tensors of each group."""
    found = []
    assert verify(str(directory)).whole
    with Pipeline(tasks(), directory=str(directory), watchdog=None, seed=3, max_staleness=99).sync() as pipe:
        with pipe.weight_update(version=pipe.resume().version):
            pass
        pipe.ledger.check()
        pipe.start()
        for _ in range(count):
            batch = pipe.get_batch(1)
            (group,) = batch
            found.append((group.uid, group.task, group.reward_mean * len(group.rollouts), noises(group)))
            pipe.ack(batch.step)
    return found


def noises(group: Any) -> list[Any]:
    return [rollout["noise"].tolist() for rollout in group]


def test_the_groups_of_all_ranks_are_merged_into_the_run_of_one_process(run: tuple[Path, int], tmp_path: Path) -> None:
    directory, size = run
    there, was = finished(directory, size), digest(directory)
    rehearsed = merge([directory], tmp_path / "merged", dry_run=True)
    assert not (tmp_path / "merged").exists()
    made = merge([directory], tmp_path / "merged")
    assert digest(directory) == was
    assert (made.kind, made.units, made.rows, made.renumbered) == (PIPELINE, len(there), 2 * len(there), 0)
    assert (rehearsed.units, rehearsed.bytes) == (made.units, made.bytes)
    work = status_of(str(directory)).work
    assert work is not None
    assert made.units == work.buffered
    batches = got(tmp_path / "merged", made.units)
    assert {uid: (task, rewards) for uid, task, rewards, _ in batches} == {uid: each[:2] for uid, each in there.items()}
    assert len({str(noise) for *_, noise in batches}) == len(batches)


def test_they_stand_in_the_order_in_which_one_rank_would_have_them(run: tuple[Path, int], tmp_path: Path) -> None:
    directory, _ = run
    merge([directory], tmp_path / "merged")
    with Pipeline(tasks(), directory=str(tmp_path / "merged"), watchdog=None, seed=3).sync() as pipe:
        pipe.resume()
        merged = pipe.ledger.snapshot()["order"]
    (one,) = found_by(directory, 1)
    assert merged == one["order"]


def test_groups_of_a_batch_that_was_handed_out_stand_first(tmp_path: Path) -> None:
    async def run(item: Item, ctx: Context) -> Rollout:
        if item.uid == 1:
            ctx.park()
        return await solve(item, ctx)

    def trains(pipe: SyncPipeline, ranks: Ranks) -> list[int]:
        batch = pipe.get_batch(6)
        if ranks.rank == 1:
            pipe.reward(1, 2.0)  # the oldest of all that are finished, and in no batch
        return batch.uids

    given = Task("t", source=numbers(48), run=run, shuffle=False)
    batches = fine(on(2, tmp_path / "run", trains, given=given, concurrency=1))
    merge([tmp_path / "run"], tmp_path / "merged")
    with Pipeline(given, directory=str(tmp_path / "merged"), watchdog=None, seed=3).sync() as pipe:
        pipe.resume()
        stood = pipe.ledger.snapshot()["order"]
    first = sorted(uid for uids in batches for uid in uids)
    assert 1 not in first
    assert stood[:7] == [*first, 1]


def test_what_was_split_and_merged_is_what_it_was(run: tuple[Path, int], tmp_path: Path) -> None:
    directory, _ = run
    whole = merge([directory], tmp_path / "whole")
    parts = split(directory, [tmp_path / "x", tmp_path / "y"], count=2)
    assert [each.units for each in parts] == [2, whole.units - 2]
    by = split(directory, tmp_path / "by", by="task")
    assert {Path(each.directory).name for each in by} <= {f"task-{name}" for name in COUNTS}
    assert sum(each.units for each in by) == whole.units
    merge([tmp_path / "y", tmp_path / "x"], tmp_path / "again")
    assert got(tmp_path / "again", whole.units) == got(tmp_path / "whole", whole.units)
    with pytest.raises(ConfigError, match="in common"):
        merge([directory, tmp_path / "x"], tmp_path / "twice")


def test_it_is_merged_with_the_run_of_one_process(run: tuple[Path, int], tmp_path: Path) -> None:
    directory, _ = run
    with Pipeline(tasks(), directory=str(tmp_path / "one"), watchdog=None, seed=3).sync() as pipe:
        pipe.resume()
        pipe.start(weights_current=True)
        pipe.get_batch(3)
    others = Groups(open_source(tmp_path / "one")).entries
    mine = Groups(open_source(directory)).entries
    made = merge([tmp_path / "one", directory], tmp_path / "all")
    assert made.units == len(others) + len(mine)
    assert {part.kind for part in made.made_of} == {PIPELINE, PIPELINE_RANKS}


def test_what_is_damaged_is_not_merged(run: tuple[Path, int], tmp_path: Path) -> None:
    directory, _ = run
    journal = max(path for path in (directory / "journals").glob("*-0001.fbj"))
    flip(journal, 70)
    with pytest.raises(Damaged, match="salvage"):
        merge([directory], tmp_path / "merged")
    with pytest.raises(Damaged):
        reshard(directory, tmp_path / "resharded", 3)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("merged", "resharded"))]


@pytest.mark.parametrize("to", [1, 2, 3, 6])
@pytest.mark.parametrize("rebalance", [False, True])
def test_so_many_ranks_find_what_they_would_have_found_without_it(
    run: tuple[Path, int], tmp_path: Path, to: int, *, rebalance: bool
) -> None:
    directory, size = run
    was = digest(directory)
    rehearsed = reshard(directory, tmp_path / "out", to, rebalance=rebalance, dry_run=True)
    assert not (tmp_path / "out").exists()
    done: list[int] = []
    made = reshard(directory, tmp_path / "out", to, rebalance=rebalance, told=lambda count, _: done.append(count))
    assert digest(directory) == was
    assert (made.kind, len(made.shards), sum(made.shards)) == (PIPELINE_RANKS, to, made.units)
    assert made.bytes == rehearsed.bytes == done[-1] > 0
    assert verify(str(tmp_path / "out")).whole
    (manifest,) = manifests(tmp_path / "out")
    assert (manifest.reason, manifest.world_size, [each.rows for each in manifest.shards]) == (
        "reshard",
        to,
        made.shards,
    )
    again = {"rebalance": True} if rebalance and to == size else {}
    there, here = found_by(directory, to, **again), found_by(tmp_path / "out", to)
    for rank, (one, other) in enumerate(zip(there, here, strict=True)):
        for name in one:
            assert one[name] == other[name], (rank, name)
    assert trained_to_the_end(tmp_path / "out", to) == EVERY


def test_in_draw_order_ranks_train_of_it_what_they_would_have_trained(tmp_path: Path) -> None:
    directory = killed(tmp_path, 3, order="strict")
    reshard(directory, tmp_path / "out", 2)
    assert trained_to_the_end(directory, 2, order="strict") == EVERY
    assert trained_to_the_end(tmp_path / "out", 2, order="strict") == EVERY


def test_ranks_go_on_from_the_resharded_run_of_one_process(tmp_path: Path) -> None:
    seen = Seen()
    with Pipeline(tasks(), directory=str(tmp_path / "one"), watchdog=None, seed=3).sync() as pipe:
        pipe.attach(seen=seen)
        pipe.resume()
        pipe.start(weights_current=True)
        for batch in pipe.batches(6, until=3):
            seen.steps.append(sorted(group.uid for group in batch))
            pipe.save(batch.step).committed()
    made = reshard(tmp_path / "one", tmp_path / "out", 3)
    assert made.kind == PIPELINE_RANKS
    there, here = found_by(tmp_path / "one", 3), found_by(tmp_path / "out", 3)
    assert here == there
    assert trained_to_the_end(tmp_path / "out", 3) == EVERY


def test_ranks_go_on_from_the_resharded_run_of_one_process_that_was_saved_without_its_buffer(tmp_path: Path) -> None:
    seen = Seen()
    with Pipeline(tasks(), directory=str(tmp_path / "one"), watchdog=None, seed=3).sync() as pipe:
        pipe.attach(seen=seen)
        pipe.resume()
        pipe.start(weights_current=True)
        for batch in pipe.batches(6, until=3):
            seen.steps.append(sorted(group.uid for group in batch))
            pipe.ack(batch.step)
        pipe.save(3, replay_buffer=False).committed()
    reshard(tmp_path / "one", tmp_path / "out", 2)
    assert found_by(tmp_path / "one", 2) == found_by(tmp_path / "out", 2)
    assert trained_to_the_end(tmp_path / "out", 2) == EVERY


def test_what_cannot_be_is_refused_before_anything_is_written(run: tuple[Path, int], tmp_path: Path) -> None:
    directory, _ = run
    for more, option in (({"capacity": 100}, "capacity"), ({"evict_oldest": True}, "evict_oldest")):
        with pytest.raises(ConfigError) as caught:
            reshard(directory, tmp_path / "out", 3, **more)
        assert caught.value.option == option
    assert not list(tmp_path.glob("out*"))


def test_a_source_that_learns_is_refused_as_ranks_refuse_it(tmp_path: Path) -> None:
    task = Task("a", source=DifficultyPool(numbers(9)), run=solve, group_size=2, epochs=1)
    with Pipeline([task], directory=str(tmp_path / "one"), watchdog=None, seed=3).sync() as pipe:
        pipe.resume()
        pipe.start(weights_current=True)
        for batch in pipe.batches(2, until=1):
            pipe.save(batch.step).committed()
    for dry in (True, False):
        with pytest.raises(ConfigError, match="task 'a' has a source that learns"):
            reshard(tmp_path / "one", tmp_path / "out", 2, dry_run=dry)
    assert not list(tmp_path.glob("out*"))


def test_killed_at_any_call_it_leaves_no_run(run: tuple[Path, int], tmp_path: Path) -> None:
    directory, _ = run
    was = digest(directory)
    whole = ScriptedFiles()
    reshard(directory, tmp_path / "whole", 3, files=whole)
    for call in (1, 4, *range(9, len(whole.calls) - 4, 17), len(whole.calls) - 4):
        files = ScriptedFiles(call, Killed, stays=True)
        with pytest.raises(Killed):
            reshard(directory, tmp_path / "out", 3, files=files)
        files.end()
        assert not (tmp_path / "out").exists(), call
    assert digest(directory) == was
    reshard(directory, tmp_path / "out", 3)
    assert trained_to_the_end(tmp_path / "out", 3) == EVERY


def test_ids_are_kept_beside_the_groups(run: tuple[Path, int], tmp_path: Path) -> None:
    directory, _ = run
    made = merge([directory], tmp_path / "merged")
    ids = json.loads((tmp_path / "merged" / "ids.json").read_text())
    assert [row[0] for row in ids["groups"]] == [row[2] for row in ids["groups"]]
    assert [part["kind"] for part in ids["parts"]] == [PIPELINE_RANKS] == [part.kind for part in made.made_of]

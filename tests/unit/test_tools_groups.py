"""Merging and splitting the finished groups of pipelines: the trainer gets of a new run what it would have got."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Pipeline, ReplayBuffer, Rollout, Task
from pipeline.checkpoint import verify
from pipeline.errors import ConfigError, Damaged
from pipeline.tools import merge, reshard, split
from pipeline.tools.groups import Groups, every_group
from pipeline.tools.sources import open_source
from tests.support.crashes import begin, crashed_copy, inline_pipeline
from tests.support.keeping import digest
from tests.support.runs import numbers, pipeline, task

GOLDEN = Path(__file__).parents[1] / "golden"


async def solve(item: Item, ctx: Context) -> Rollout:
    return Rollout({"n": [item["n"]]}, reward=float(item["n"]))


def make(directory: Path, **options: Any) -> Pipeline:
    tasks = [Task(name, source=numbers(40), run=solve, shuffle=False) for name in ("one", "two")]
    return pipeline(tasks, directory=str(directory), max_staleness=9, concurrency=4, capacity=4, **options)


def save(directory: Path, begin: int, count: int) -> None:
    """Put some groups in, which are finished and not trained, and end; then be killed, as far as the folder tells."""
    with make(directory).sync() as pipe:
        with pipe.weight_update(version=pipe.resume().version):
            pass
        pipe.start()
        for number in range(begin, begin + count):
            group = [Rollout({"n": [number], "m": [[member, -0.0]]}, reward=float(number)) for member in range(2)]
            pipe.put("one" if number % 3 else "two", group, content={"n": number})


def got(directory: Path, count: int) -> list[Any]:
    """What the trainer gets first in a new life, and whether the run goes on after that."""
    found = verify(str(directory))
    assert found.whole, found.damages
    batches = []
    with make(directory).sync() as pipe:
        with pipe.weight_update(version=pipe.resume().version):
            pass
        pipe.ledger.check()
        pipe.start()
        for _ in range(count):
            batch = pipe.get_batch(1)
            batches.append(of_group(*batch))
            pipe.ack(batch.step)
        drawn = pipe.get_batch(2)
        assert all(len(group.rollouts) == 1 for group in drawn)  # the tasks' own items follow
        pipe.save(drawn.step).committed()
        pipe.ledger.check()
    return batches


def of_group(group: Any) -> Any:
    members = [
        (
            [{name: tensor.numpy().tobytes() for name, tensor in trace.tensors.items()} for trace in each.traces],
            each.reward,
        )
        for each in group.rollouts
    ]
    return group.task, group.reward_mean, group.oldest, group.newest, members


def numbers_of(batches: list[Any]) -> list[int]:
    return [int(mean) for _, mean, *_ in batches]


def put_in(made: Any) -> int:
    """How many groups were put into a run, of all that there are: others were drawn."""
    ids = json.loads((Path(made.directory) / "ids.json").read_text())["groups"]
    return len(ids)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    save(folder / "rank_2", 100, 4)
    save(folder / "rank_10", 200, 3)
    return folder


def test_each_group_once_in_the_order_of_uids(tmp_path: Path, two: Path) -> None:
    was = digest(two)
    made = merge([two / "rank_10", two / "rank_2"], tmp_path / "m")
    assert digest(two) == was
    ids = json.loads((tmp_path / "m" / "ids.json").read_text())["groups"]
    assert [row[0] for row in ids] == list(range(made.units))  # uids clash, so they are others
    assert [(row[2], row[1]) for row in ids] == sorted((row[2], row[1]) for row in ids)
    assert [Path(part.directory).name for part in made.made_of] == ["rank_2", "rank_10"]
    batches = got(tmp_path / "m", made.units)
    assert {number for number in numbers_of(batches) if number >= 100} == {100, 101, 102, 103, 200, 201, 202}
    assert all(len(members) == (2 if mean >= 100 else 1) for _, mean, _, _, members in batches)


def test_what_was_split_and_merged_is_what_it_was(tmp_path: Path, two: Path) -> None:
    whole = merge([two / "rank_2"], tmp_path / "whole")
    before = got_of_copy(tmp_path / "whole", whole.units)
    for name, how in (("count", {"count": 2}), ("where", {"where": "reward >= 102 and size == 2"})):
        parts = split(two / "rank_2", [tmp_path / f"{name} x", tmp_path / f"{name} y"], **how)
        assert sum(each.units for each in parts) == whole.units
        assert sum(each.renumbered for each in parts) == 0
        merge([each.directory for each in parts], tmp_path / name)
        assert got_of_copy(tmp_path / name, whole.units) == before
    by = split(two / "rank_2", tmp_path / "by", by="task")
    assert {Path(each.directory).name for each in by} == {"task-one", "task-two"}
    for each in by:
        tasks = {task for task, *_ in got_of_copy(Path(each.directory), each.units)}
        assert tasks == {Path(each.directory).name.removeprefix("task-")}


def got_of_copy(directory: Path, count: int) -> list[Any]:
    copy = directory.with_name(directory.name + " copy")
    shutil.copytree(directory, copy)
    return got(copy, count)


def test_the_grouping_does_not_matter(tmp_path: Path, two: Path) -> None:
    save(tmp_path / "rank_3", 300, 2)
    runs = [two / "rank_2", tmp_path / "rank_3", two / "rank_10"]
    units = merge(runs, tmp_path / "at once").units
    merge([merge(runs[:2], tmp_path / "ab").directory, runs[2]], tmp_path / "left")
    merge([merge(runs[1:], tmp_path / "bc").directory, runs[0]], tmp_path / "right")
    found = [got(tmp_path / name, units) for name in ("at once", "left", "right")]
    assert found[0] == found[1] == found[2]


def test_nor_where_only_some_have_groups_of_one_uid(tmp_path: Path, two: Path) -> None:
    save(tmp_path / "rank_3", 300, 40)
    units = split(tmp_path / "rank_3", [tmp_path / "old", tmp_path / "new"], fraction=0.9)[1].units
    assert units
    runs = [two / "rank_2", two / "rank_10", tmp_path / "new"]
    merge(runs, tmp_path / "at once")
    merge([merge(runs[:2], tmp_path / "ab").directory, runs[2]], tmp_path / "left")
    merge([merge(runs[1:], tmp_path / "bc").directory, runs[0]], tmp_path / "right")
    names = [tmp_path / name / "ids.json" for name in ("at once", "left", "right")]
    called = [[row[0] for row in json.loads(each.read_text())["groups"]] for each in names]
    assert called[0] == called[1] == called[2] == list(range(len(called[0])))


@pytest.mark.parametrize(("after_crash", "count"), [("reuse", 8), ("discard", 0)])
async def test_what_a_resume_would_set_aside_stays_behind(tmp_path: Path, after_crash: Any, count: int) -> None:
    run = str(tmp_path / "run")
    given = task(8, solve)
    async with inline_pipeline(given, directory=run, concurrency=1, capacity=8, after_crash=after_crash) as pipe:
        await begin(pipe)
        await pipe._run.state.changed.wait_for(lambda: pipe.ledger.totals["numbers"].produced == 8)
        crashed_copy(run, tmp_path / "dead")
    assert merge([tmp_path / "dead"], tmp_path / "m").units == count
    assert verify(str(tmp_path / "m")).whole


async def test_who_finished_first_is_handed_out_first(tmp_path: Path) -> None:
    """Of two parts too, and after two merges."""
    run, last = str(tmp_path / "run"), anyio.Event()

    async def late(item: Item, ctx: Context) -> Rollout:
        if item["n"] == 3:
            last.set()
        elif item["n"] == 0:
            await last.wait()
        return await solve(item, ctx)

    async with inline_pipeline(task(4, late), directory=run, concurrency=4, capacity=8) as pipe:
        await begin(pipe)
        await pipe._run.state.changed.wait_for(lambda: pipe.ledger.totals["numbers"].produced == 4)
        crashed_copy(run, tmp_path / "dead")
    before = stood(tmp_path / "dead")
    assert sorted(before) != before
    split(tmp_path / "dead", [tmp_path / "x", tmp_path / "y"], count=2)
    merge([tmp_path / "y", tmp_path / "x"], tmp_path / "m")
    merge([tmp_path / "m"], tmp_path / "again")
    for name in ("m", "again"):
        assert stood(tmp_path / name) == before
        held = Groups(open_source(tmp_path / name)).entries
        assert [entry.uid for entry in sorted(held, key=lambda entry: entry.order)] == before


def stood(directory: Path) -> list[int]:
    """The uids of a run's groups, which are what they were, in the order in which they had finished."""
    found = every_group([open_source(directory)])
    return [uid for _, uid in sorted(zip(found.order.tolist(), found.uid.tolist(), strict=True))]


@pytest.mark.parametrize("version", ["v1", "v1b", "v1c", "v1d"])
def test_runs_of_every_version(tmp_path: Path, version: str) -> None:
    """Streams, parked groups, partial rollouts: what is finished comes along, and the rest is counted."""
    made = merge([GOLDEN / version], tmp_path / "m")
    assert verify(str(tmp_path / "m")).whole
    again = merge([tmp_path / "m"], tmp_path / "again")
    assert (again.units, again.rows, again.renumbered) == (made.units, made.rows, 0)
    assert put_in(made) == made.units


def test_what_is_refused(tmp_path: Path, two: Path) -> None:
    with ReplayBuffer(10, directory=tmp_path / "buffer") as buffer:
        buffer.resume()
        buffer.save(0, wait=True)
    split(two / "rank_2", [tmp_path / "x"], count=1)
    before = sorted(tmp_path.iterdir())
    for runs, match in (
        ([two / "rank_2", tmp_path / "buffer"], "is the run of a replay buffer, and .* that of a pipeline"),
        ([two / "rank_2", tmp_path / "x"], "group 0 of run .* copies or parts"),
    ):
        with pytest.raises(ConfigError, match=match):
            merge(runs, tmp_path / "m")
    with pytest.raises(ConfigError, match="of groups there are reward, tokens"):
        split(two / "rank_2", tmp_path / "m", where="colour > 1")
    with pytest.raises(ConfigError, match="whose ranks hold all that was drawn"):
        reshard(two / "rank_2", tmp_path / "m", 2, capacity=100)
    shutil.copytree(two / "rank_2", tmp_path / "damaged")
    before = sorted(tmp_path.iterdir())
    path = next((tmp_path / "damaged" / "segments").iterdir())
    raw = bytearray(path.read_bytes())
    raw[70] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Damaged, match=str(path)):
        merge([tmp_path / "damaged"], tmp_path / "m")
    assert sorted(tmp_path.iterdir()) == before

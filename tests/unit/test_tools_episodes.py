"""Merging and splitting runs whose rollouts fill a replay buffer: an item and its rows go together."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Context, Item, Retry, Rollout, Task
from pipeline.checkpoint import verify
from pipeline.cli import main
from pipeline.errors import ConfigError, Damaged
from pipeline.store.frames import HEADER_BYTES
from pipeline.tools import inspect, merge, salvage_run, split
from tests.support.crashes import begin, crashed_copy, inline_pipeline
from tests.support.episodes import make, payloads, state_of, two_lives
from tests.support.experience import ROWS, Agent, block, contents, fed, filled, reaches, resumed, written
from tests.support.keeping import digest, play
from tests.support.runs import numbers, pipeline, task
from tests.support.salvaging import flip, frames

GOLDEN = Path(__file__).parents[1] / "golden"


def stumbling(gate: anyio.Event | None) -> Any:
    """Every third item fails once, and leaves rows of that attempt; the tenth never ends. From the fourth on they wait
    for the gate."""

    async def stumbles(item: Item, ctx: Context) -> Rollout:
        if item.index >= 4 and gate is not None:
            await gate.wait()
        await ctx.extend(block(item, 0))
        if item.index % 3 == 0 and ctx.attempt == 1:
            raise ValueError("stumbled")
        if item.index == 10:
            await anyio.sleep_forever()
        await ctx.extend(block(item, 1, ends=True))
        return Rollout()

    return stumbles


def tasks(count: int = 12, gate: anyio.Event | None = None) -> list[Task]:
    how: dict[str, Any] = {"run": stumbling(gate), "shuffle": False, "epochs": 1, "on_failure": Retry(3)}
    return [Task(name, source=numbers(count), **how) for name in ("left", "right")]


async def killed(folder: Path, name: str, count: int) -> Path:
    """A run of two tasks that was saved, went on with other weights, and was killed."""
    buffer, agent, gate = make(), Agent(), anyio.Event()
    directory = str(folder / f"alive {name}")
    async with pipeline(tasks(count, gate), buffer=buffer, directory=directory, concurrency=4) as pipe:
        pipe.attach(agent=agent)
        await pipe.start()
        await reaches(pipe, buffer, 15)
        batch = await pipe.sample(8)
        buffer.update_priorities(batch.keys, agent.train(batch))
        await (await pipe.save(1)).committed()
        async with pipe.weight_update(version=1):
            pass
        gate.set()
        await pipe._run.state.changed.wait_for(lambda: pipe.ledger.outstanding <= 2 * (count > 10))
        await written(pipe)
        crashed_copy(directory, folder / name)
    shutil.rmtree(directory)
    return folder / name


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    for number, count in ((1, 12), (2, 5), (10, 8)):
        anyio.run(partial(killed, folder, f"rank_{number}", count))
    return folder


def seen(run: Path, count: int = 12) -> Any:
    """All that a resume of a copy finds."""
    found = verify(str(run))
    assert found.whole, found.damages
    assert found.generations == 1
    copy = run.parent / f"{run.name} seen"
    shutil.copytree(run, copy)

    async def look() -> Any:
        buffer = make()
        async with pipeline(tasks(count), buffer=buffer, directory=str(copy)) as pipe:
            await resumed(pipe)
            pipe.ledger.check()
            ring = buffer.ring
            slots = ring.slots(ring.keys())
            names = ("#episode", "#place", "#behind", "#version", "#end")
            marks = {name: ring.storage.view(name)[slots].tolist() for name in names} if buffer.schema else {}
            mass = buffer.drawer.mass(ring.keys()).tolist()
            totals = {name: (each.claimed, each.retired, each.rows) for name, each in pipe.ledger.totals.items()}
            stats = buffer.statistics()
            return contents(buffer), marks, mass, totals, (stats.added, stats.sampled, stats.open_episodes)

    found = anyio.run(look)
    shutil.rmtree(copy)
    return found


def ids(made: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(made.directory) / "ids.json").read_text())
    return content


def test_a_merge_of_one_run_has_the_rows_that_a_resume_finds(three: Path, tmp_path: Path) -> None:
    before = digest(three)
    made = merge([three / "rank_1"], tmp_path / "m")
    assert digest(three) == before
    rows, marks, mass, totals, counts = seen(tmp_path / "m")
    shutil.copytree(three / "rank_1", tmp_path / "own")

    async def look() -> Any:
        buffer = make()
        async with pipeline(tasks(), buffer=buffer, directory=str(tmp_path / "own")) as pipe:
            pipe.attach(agent=Agent())
            await resumed(pipe)
            ring = buffer.ring
            slots = ring.slots(ring.keys())
            names = ("#episode", "#place", "#behind", "#version", "#end")
            there = {name: ring.storage.view(name)[slots].tolist() for name in names}
            return contents(buffer), there, buffer.drawer.mass(ring.keys()).tolist(), buffer.statistics().added

    own = anyio.run(look)
    assert (rows, marks, mass, counts[0]) == own
    assert made.kind == "pipeline"
    assert made.of_rows
    assert (made.rows, made.units) == (len(rows), 24)
    assert {name: each[:2] for name, each in totals.items()} == {"left": (12, 12), "right": (12, 12)}
    assert counts[2] == 0
    assert [part.directory for part in made.made_of] == [str(three / "rank_1")]


def test_merging_in_any_grouping_is_the_same(three: Path, tmp_path: Path) -> None:
    runs = [three / f"rank_{number}" for number in (1, 2, 10)]
    made = merge(runs, tmp_path / "all")
    whole = seen(tmp_path / "all")
    table = ids(made)
    assert made.renumbered > 0
    assert sorted(row[0] for row in table["items"]) == list(range(50)), "uids clash, so all have others"
    assert [Path(part["directory"]).name for part in table["parts"]] == ["rank_1", "rank_2", "rank_10"]
    for number, order in enumerate(permutations(runs)):
        first = merge(order[:2], tmp_path / f"two {number}")
        other = merge([order[2], first.directory], tmp_path / f"three {number}")
        assert seen(Path(other.directory)) == whole
        found = ids(other)
        assert [found[name] for name in ("episodes", "items")] == [table[name] for name in ("episodes", "items")]
        assert other.made_of == made.made_of


SPLITS: list[dict[str, Any]] = [
    {"count": 7},
    {"count": 0},
    {"fraction": 0.4},
    {"where": "reward >= 5"},
    {"by": "task"},
    {"by": "version"},
]


@pytest.mark.parametrize("how", SPLITS, ids=str)
def test_what_was_split_and_merged_is_what_it_was(three: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    whole = merge([three / "rank_1"], tmp_path / "whole")
    before = seen(tmp_path / "whole")
    out = [tmp_path / "x", tmp_path / "y"] if "by" not in how else tmp_path / "by"
    parts = split(three / "rank_1", out, **how)
    assert len(parts) == 2
    assert sum(each.units for each in parts) == whole.units
    assert sum(each.rows for each in parts) == whole.rows
    assert sum(each.renumbered for each in parts) == 0
    made = merge([each.directory for each in reversed(parts)], tmp_path / "back")
    assert seen(tmp_path / "back") == before
    assert ids(made)["items"] == ids(whole)["items"]
    again = split(tmp_path / "back", tmp_path / "by task", by="task")
    assert {Path(each.directory).name: each.units for each in again} == {"task-left": 12, "task-right": 12}


def test_an_item_goes_with_all_of_its_episodes(three: Path, tmp_path: Path) -> None:
    """Of one whose attempt had failed there are two."""
    parts = split(three / "rank_1", [tmp_path / "x", tmp_path / "y"], count=9)
    assert [each.units for each in parts] == [9, 15]
    for each in parts:
        of = defaultdict(list)
        table = ids(each)
        rows, marks, *_ = seen(Path(each.directory))
        for (index, place), episode in zip(rows, marks["#episode"], strict=True):
            of[episode].append((index, place))
        assert len(of) > each.units, "some items have several"
        assert len(table["episodes"]) == len(of)
        shared = Counter(index for (index, place) in rows if place == 0)
        assert all(count <= 4 for count in shared.values())
    there = [{(row[1], row[2]) for row in ids(each)["items"]} for each in parts]
    assert not there[0] & there[1]
    by_task = split(three / "rank_1", tmp_path / "t", by="task")
    for each in by_task:
        rows = seen(Path(each.directory))[0]
        starts = Counter(index for index, place in rows if place == 0)
        assert starts == {index: 2 if index % 3 == 0 else 1 for index in range(12)}
        assert {row[3] for row in ids(each)["items"]} == {Path(each.directory).name.removeprefix("task-")}


def test_a_dry_run_says_the_same(three: Path, tmp_path: Path) -> None:
    before = digest(three)
    runs = [three / "rank_1", three / "rank_2"]
    dry = merge(runs, tmp_path / "m", dry_run=True)
    parts = split(runs[0], [tmp_path / "x", tmp_path / "y"], fraction=0.5, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    made = merge(runs, tmp_path / "m")
    assert (dry.kind, dry.of_rows, dry.units, dry.rows, dry.step) == (
        made.kind,
        made.of_rows,
        made.units,
        made.rows,
        made.step,
    )
    assert dry.left_out == made.left_out
    written = split(runs[0], [tmp_path / "x", tmp_path / "y"], fraction=0.5)
    assert [(each.units, each.rows) for each in parts] == [(each.units, each.rows) for each in written]
    assert digest(three) == before


def test_what_is_left_out_is_told(three: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(three / "rank_1", copied)
    made = merge([copied], tmp_path / "m")
    assert set(made.left_out) == {"trainer/agent.safetensors"}
    assert "merged nor split" in made.left_out["trainer/agent.safetensors"]


def test_runs_of_other_kinds_are_refused_by_name(three: Path, tmp_path: Path) -> None:
    async def groups() -> None:
        async with inline_pipeline(task(3), directory=str(tmp_path / "groups")) as pipe:
            await begin(pipe)

    anyio.run(groups)
    with pytest.raises(ConfigError, match=r"fill a buffer of transitions, and those of .* are groups"):
        merge([three / "rank_1", tmp_path / "groups"], tmp_path / "m")
    play(tmp_path / "plain", 1, 3)
    with pytest.raises(ConfigError, match="what is merged is of one kind"):
        merge([three / "rank_1", tmp_path / "plain"], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_what_two_runs_have_in_common_is_refused(three: Path, tmp_path: Path) -> None:
    shutil.copytree(three / "rank_1", tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"the row 0 of run .* is in several of"):
        merge([three / "rank_1", tmp_path / "copy"], tmp_path / "m")
    split(three / "rank_1", [tmp_path / "x"], count=4)
    with pytest.raises(ConfigError, match="is in several of"):
        merge([three / "rank_1", tmp_path / "x"], tmp_path / "m")
    salvage_run(three / "rank_1", tmp_path / "salvaged")
    with pytest.raises(ConfigError, match=r"was made of .*rank_1"):
        merge([three / "rank_1", tmp_path / "salvaged"], tmp_path / "m")
    assert merge([three / "rank_1", tmp_path / "salvaged"], tmp_path / "m", allow_related=True).units > 24


def test_a_condition_is_of_columns(three: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        split(three / "rank_1", [tmp_path / "x"], where="tokens > 3")
    (made,) = split(three / "rank_1", [tmp_path / "x"], where="reward >= 4 and terminated == true")
    assert made.units == 22, "all but those that never ended"


async def test_with_damage_it_is_refused_and_the_salvage_is_merged(tmp_path: Path) -> None:
    run = Path(await two_lives(tmp_path))
    whole = merge([run], tmp_path / "whole")
    for number, (segment, offset, length) in enumerate(list(payloads(str(run)))[-3:]):
        damaged = tmp_path / f"damaged {number}"
        shutil.copytree(run, damaged)
        flip(damaged / segment, offset + HEADER_BYTES + length // 2)
        with pytest.raises(Damaged):
            merge([damaged], tmp_path / "m")
        assert not (tmp_path / "m").exists()
        salvage_run(damaged, tmp_path / f"salvaged {number}")
        made = merge([tmp_path / f"salvaged {number}"], tmp_path / f"merged {number}")
        assert 0 < made.rows < whole.rows
    journal = max((run / "journals").iterdir())
    flip(journal, frames(str(run), f"journals/{journal.name}")[2].offset + HEADER_BYTES + 1)
    with pytest.raises(Damaged, match="forebay salvage"):
        split(run, [tmp_path / "x"], count=1)


def test_after_a_salvage_items_are_known(three: Path, tmp_path: Path) -> None:
    """Whole or not, also of a salvage of that: a split by task has what the run's own has, but for lost rows."""
    salvage_run(three / "rank_1", tmp_path / "whole")
    salvage_run(tmp_path / "whole", tmp_path / "again")
    hurt = tmp_path / "hurt"
    shutil.copytree(three / "rank_1", hurt)
    segment, offset, length = list(payloads(str(hurt)))[-5]
    flip(hurt / segment, offset + HEADER_BYTES + length // 2)
    salvage_run(hurt, tmp_path / "left")
    own = {Path(each.directory).name: each for each in split(three / "rank_1", tmp_path / "own", by="task")}
    for name in ("whole", "again", "left"):
        parts = split(tmp_path / name, tmp_path / f"by {name}", by="task")
        assert {Path(each.directory).name for each in parts} == set(own)
        for each in parts:
            there, of = seen(Path(each.directory))[0], seen(Path(own[Path(each.directory).name].directory))[0]
            assert not Counter(there) - Counter(of)
            assert each.units == own[Path(each.directory).name].units
        lost = sum(each.rows for each in own.values()) - sum(each.rows for each in parts)
        assert lost == (ROWS if name == "left" else 0)


async def test_rows_of_which_nobody_knows_the_item_go_by_the_episode(tmp_path: Path) -> None:
    """A process has gone on with what a tool made: what it found there is of the one task that there is."""
    run = Path(await two_lives(tmp_path))
    made = merge([run], tmp_path / "m")
    agent, buffer = Agent(), make()
    async with fed(buffer, 20, directory=str(tmp_path / "m")) as pipe:
        await resumed(pipe)
        pipe.attach(agent=agent)
        await pipe.start()
        await filled(pipe)
        await (await pipe.save(made.step)).committed()
    whole = merge([tmp_path / "m"], tmp_path / "n")
    assert whole.units == made.units + 20
    assert [Path(each.directory).name for each in split(tmp_path / "m", tmp_path / "t", by="task")] == ["task-numbers"]
    table = ids(whole)["items"]
    assert [row[2] for row in table].count(-1) == made.units
    parts = split(tmp_path / "m", [tmp_path / "x", tmp_path / "y"], count=made.units)
    back = merge([each.directory for each in parts], tmp_path / "back")
    own = await state_of(tmp_path / "n", attach=False)
    assert await state_of(tmp_path / "back", attach=False) == own
    assert ids(back)["items"] == table


async def test_a_run_without_rows(run_directory: str, tmp_path: Path) -> None:
    async with fed(make(), 3, directory=run_directory) as pipe:
        await pipe.start()
        async with pipe.weight_update(version=0):
            pass
    made = merge([run_directory], tmp_path / "m", dry_run=True)
    assert made.rows <= 3 * 2 * ROWS
    assert merge([run_directory], tmp_path / "m").rows == made.rows
    assert verify(str(tmp_path / "m")).whole


def test_a_run_of_the_first_version_is_merged(tmp_path: Path) -> None:
    run = next(path.parent for path in (GOLDEN / "v1e").rglob("run.json"))
    made = merge([run], tmp_path / "m")
    assert made.rows > 0
    found = inspect(tmp_path / "m")
    assert sum(each.rows for each in found.buffers) == made.rows


def test_the_commands(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(three / "rank_1"), str(three / "rank_2"), "--out", str(tmp_path / "m")]) == 0
    told = capsys.readouterr().out
    assert "34 items," in told
    assert "rows," in told
    assert main(["split", str(three / "rank_1"), "--by", "task", "--out", str(tmp_path / "t")]) == 0
    assert "12 items," in capsys.readouterr().out

"""A run whose rollouts fill a replay buffer is damaged: what is whole comes along, and goes on as it would have."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Context, Damaged, Item, NotARun, ReplayBuffer, Retry, Rollout, Task, UsageError, WriteFailed
from pipeline.checkpoint import salvage, verify
from pipeline.cli import main
from pipeline.store.files import FilesLike
from pipeline.store.frames import EVENTS, HEADER_BYTES
from pipeline.store.layout import Layout
from pipeline.tools.salvaging import salvage_run
from pipeline.tools.salvaging_episodes import SalvagedEpisodes, salvage_episodes
from tests.faults.test_experience_resume import cut_everywhere, train
from tests.support.crashes import crashed_copy
from tests.support.disk import Killed, ScriptedFiles
from tests.support.episodes import ITEMS, Gate, added_later, goes_on, make, payloads, state_of, two_lives
from tests.support.experience import (
    ROWS,
    Agent,
    block,
    contents,
    fed,
    filled,
    reaches,
    resumed,
    walk_unevenly,
    written,
)
from tests.support.runs import numbers, pipeline
from tests.support.salvaging import fingerprint, flip, frames

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))


def salvaged(directory: str | Path, target: Path, **more: Any) -> SalvagedEpisodes:
    before = fingerprint(str(directory))
    found = salvage_run(directory, target, **more)
    assert fingerprint(str(directory)) == before
    assert isinstance(found, SalvagedEpisodes)
    if not more.get("rehearse"):
        seen = verify(str(target))
        assert seen.whole, seen.damages
    return found


@pytest.mark.parametrize("after_crash", ["reuse", "discard"])
async def test_wherever_the_cut_falls_it_goes_on_as_the_run_itself(
    run_directory: str, tmp_path: Path, after_crash: Any
) -> None:
    copies = await cut_everywhere(run_directory, tmp_path / "cut", after_crash=after_crash)
    assert len(copies) > 20
    for number, killed in enumerate(copies):
        target = tmp_path / f"salvaged {number}"
        assert salvaged(killed, target).whole
        again = tmp_path / f"again {number}"
        assert salvaged(target, again).whole, "of a run that a salvage made"
        own = await state_of(killed, 6, after_crash=after_crash)
        assert await state_of(target, 6, after_crash=after_crash) == own
        assert await state_of(again, 6, after_crash=after_crash) == own
        rows = await goes_on(target, 6, after_crash=after_crash)
        assert sorted(rows) == [(index, place) for index in range(6) for place in range(2 * ROWS)] or own[7]
        assert max(rows.values()) == 1


async def test_rows_that_were_never_written_are_played_again(run_directory: str, tmp_path: Path) -> None:
    """With ``durability="none"`` a save writes them, and what came after it is set aside."""
    buffer, agent = make(), Agent()
    async with fed(buffer, ITEMS, directory=run_directory, durability="none") as pipe:
        pipe.attach(agent=agent)
        await pipe.start()
        await reaches(pipe, buffer, 30)
        await train(pipe, buffer, agent, range(1))
        await (await pipe.save(1)).committed()
        await filled(pipe)
        await written(pipe)
        killed = crashed_copy(run_directory, tmp_path / "killed")
    found = salvaged(killed, tmp_path / "out")
    assert found.whole
    assert await state_of(tmp_path / "out", durability="none") == await state_of(killed, durability="none")
    rows = await goes_on(tmp_path / "out", durability="none")
    assert {index for index, _ in rows} == set(range(ITEMS))
    assert max(rows.values()) == 1


@pytest.fixture
async def run(tmp_path: Path) -> str:
    return await two_lives(tmp_path)


@pytest.mark.parametrize("capacity", [1000, 30])
async def test_the_rows_of_one_damaged_block_are_lost_and_no_others(tmp_path: Path, capacity: int) -> None:
    run = await two_lives(tmp_path, capacity=capacity)
    assert len(added_later(run)) >= 2
    assert salvaged(run, tmp_path / "whole").whole
    whole = await state_of(tmp_path / "whole", capacity=capacity)
    assert len(whole[3]) == min(capacity, len(whole[3]))
    shutil.copytree(run, tmp_path / "resumed")
    own = await state_of(tmp_path / "resumed", capacity=capacity)
    if capacity == 1000:
        assert whole == own
    else:  # rows that were changed are written anew, and parts of which the first rows are gone begin where they are
        assert whole[:4] == own[:4]
        assert whole[4]["#version"] == own[4]["#version"]
        assert [each > 0 for each in whole[4]["#end"]] == [each > 0 for each in own[4]["#end"]]
        assert whole[4]["mass"] == own[4]["mass"]
        assert whole[5:8] == own[5:8] or whole[6:8] == own[6:8]
    lost = 0
    for number, (segment, offset, length) in enumerate(payloads(run)):
        damaged, target = tmp_path / f"damaged {number}", tmp_path / f"out {number}"
        shutil.copytree(run, damaged)
        flip(damaged / segment, offset + HEADER_BYTES + length // 2)
        found = salvaged(damaged, target)
        assert found.rows_kept + found.rows_lost == len(whole[3])
        lost += found.rows_lost
        at = [loss for loss in found.losses if loss.path == segment and loss.offset == offset]
        assert bool(at) == bool(found.rows_lost)
        state = await state_of(target, capacity=capacity)
        rows = state[3]
        assert len(rows) == found.rows_kept
        assert rows == [row for row in whole[3] if row in set(rows)], "in their order, each once"
        assert state[6:8] == whole[6:8], "what is left to be played does not hang on rows"
        for row, following in zip(rows, state[4]["following"], strict=True):
            assert [(row[0], row[1] + more) in set(rows) for more in range(following)] == [True] * following
        if capacity == 1000:
            again = await goes_on(target, run=walk_unevenly)
            assert max(again.values()) == 1
            assert {index for index, _ in again} | {index for index, _ in whole[3]} == set(range(ITEMS))
    assert lost >= len(whole[3])


@pytest.mark.parametrize("width", [1, 4])
async def test_a_hole_in_a_journal_costs_what_lay_there_and_nothing_is_played_twice(
    run: str, tmp_path: Path, width: int
) -> None:
    whole = (await state_of(shutil.copytree(run, tmp_path / "copy")))[3]
    names = [path.name for path in sorted((Path(run) / "journals").iterdir())]
    assert len(names) == 2
    places = [(name, frame) for name in names for frame in frames(run, f"journals/{name}")]
    places = [(name, frame) for name, frame in places if frame.header.kind == EVENTS]
    again = 0
    for number, (name, frame) in enumerate(places):
        damaged, target = tmp_path / f"damaged {number}", tmp_path / f"out {number}"
        shutil.copytree(run, damaged)
        for other, each in places[number : number + width]:
            flip(damaged / "journals" / other, each.offset + HEADER_BYTES + 1)
        found = salvaged(damaged, target)
        again += found.items_again
        if number + width < len(places):  # at the end it is as if it had not been written
            assert any(loss.path == f"journals/{name}" for loss in found.losses)
        rows = (await state_of(shutil.copytree(target, tmp_path / f"seen {number}")))[3]
        assert set(rows) <= set(whole)
        assert len(rows) == found.rows_kept
        after = await goes_on(target, run=walk_unevenly)
        assert max(after.values()) == 1, (name, frame.offset)
    assert bool(again) == (width > 1), "what was claimed in a hole that no generation covers, and left no rows"


@pytest.mark.parametrize("gone", ["journals/000001-0000.fbj", "journals/000002-0000.fbj"])
async def test_without_a_journal_the_rows_of_the_generation_come_along(run: str, tmp_path: Path, gone: str) -> None:
    os.unlink(Path(run) / gone)
    found = salvaged(run, tmp_path / "out")
    assert not found.whole
    assert found.rows_kept >= 48
    after = await goes_on(tmp_path / "out", run=walk_unevenly)
    assert max(after.values()) == 1


@pytest.mark.parametrize("name", ["replay.json", "blocks.msgpack", "consumer.json", "manifest.json", "values"])
async def test_an_older_generation_is_taken_if_the_newest_does_not_say_how_the_buffer_stood(
    run: str, tmp_path: Path, name: str
) -> None:
    whole = salvaged(run, tmp_path / "whole")
    newest = max((Path(run) / "generations").iterdir())
    path = next((newest / name).glob("selector.*")) if name == "values" else newest / name
    flip(path, path.stat().st_size // 2)
    found = salvaged(run, tmp_path / "out")
    assert found.generations_unusable == 1
    assert found.step < whole.step
    assert any(loss.path.startswith(f"generations/{newest.name}/") for loss in found.losses)
    after = await goes_on(tmp_path / "out", run=walk_unevenly)
    assert max(after.values()) == 1
    assert {index for index, _ in after} == set(range(ITEMS))


async def test_the_trainers_file_is_left_out_if_no_generation_has_it_whole(run: str, tmp_path: Path) -> None:
    for path in Path(run).glob("generations/*/trainer/agent.safetensors"):
        flip(path, path.stat().st_size - 1)
    found = salvaged(run, tmp_path / "out")
    assert list(found.left_out) == ["trainer/agent.safetensors"]
    async with fed(make(), ITEMS, directory=str(tmp_path / "out")) as pipe:
        pipe.attach(agent=Agent())
        with pytest.raises(UsageError, match="agent is damaged"):
            await pipe.resume()
    async with fed(make(), ITEMS, directory=str(tmp_path / "out")) as pipe:
        assert (await pipe.resume()).step == found.step


async def test_without_any_state_of_the_buffer_it_is_refused(run: str, tmp_path: Path) -> None:
    for path in Path(run).glob("generations/*/replay.json"):
        flip(path, 10)
    with pytest.raises(Damaged, match=r"replay\.json"):
        salvage_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_the_salvage_of_groups_names_the_one_that_takes_rows(run: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="salvage_run takes what is whole"):
        salvage(run, tmp_path / "out")


async def test_an_item_of_which_an_attempt_failed_is_tried_again(run_directory: str, tmp_path: Path) -> None:
    """Its rows stay, and the next attempt is another episode: as a recovery has it."""

    async def stumbles(item: Item, ctx: Context) -> Rollout:
        await ctx.extend(block(item, 0))
        if item.index == 1 and ctx.attempt == 1:
            raise ValueError("stumbled")
        if item.index == 2:
            await anyio.sleep_forever()
        await ctx.extend(block(item, 1, ends=True))
        return Rollout()

    buffer = make()
    async with fed(buffer, 3, run=stumbles, directory=run_directory, on_failure=Retry(3)) as pipe:
        pipe.attach(agent=Agent())
        await pipe.start()
        await reaches(pipe, buffer, 6 * ROWS)
        await pipe._run.state.changed.wait_for(lambda: pipe.ledger.totals["numbers"].retired == 2)
        await written(pipe)
        killed = crashed_copy(run_directory, tmp_path / "killed")
    assert salvaged(killed, tmp_path / "out").whole
    own = await state_of(killed, 3)
    assert await state_of(tmp_path / "out", 3) == own
    assert own[7]["numbers"][1:3] == (3, 1)


async def test_what_the_selection_begins_anew_is_told(run_directory: str, tmp_path: Path) -> None:
    """An order without replacement holds as long as no row is lost."""
    select: Any = {"select": "without_replacement"}
    buffer = ReplayBuffer(1000, select=select, seed=3)
    async with fed(buffer, directory=run_directory) as pipe:
        await pipe.start()
        await reaches(pipe, buffer, 36)
        buffer.sample(10)
        await (await pipe.save(0)).committed()
        await filled(pipe)
        await written(pipe)
        killed = crashed_copy(run_directory, tmp_path / "killed")
    assert salvaged(killed, tmp_path / "out").whole
    expected = buffer.sample(26).keys.tolist()
    again = ReplayBuffer(1000, select=select, seed=3)
    async with fed(again, directory=str(tmp_path / "out")) as pipe:
        await resumed(pipe)
        assert again.sample(26).keys.tolist() == expected
    segment, offset, length = list(payloads(killed))[-1]
    flip(Path(killed) / segment, offset + HEADER_BYTES + length // 2)
    found = salvaged(killed, tmp_path / "other")
    assert [loss.lost for loss in found.losses if "begins anew" in loss.lost]


async def test_a_dry_run_says_the_same_and_writes_nothing(run: str, tmp_path: Path) -> None:
    segment, offset, length = list(payloads(run))[-1]
    flip(Path(run) / segment, offset + HEADER_BYTES + length // 2)
    dry = salvaged(run, tmp_path / "out", rehearse=True)
    assert not (tmp_path / "out").exists()
    made = salvaged(run, tmp_path / "out")
    assert made.run_id
    assert dry == type(dry)(**{name: getattr(made, name) for name in dry.__struct_fields__} | {"run_id": ""})


async def test_the_command(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment, offset, length = list(payloads(run))[-1]
    flip(Path(run) / segment, offset + HEADER_BYTES + length // 2)
    assert main(["salvage", run, str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "rows, and" in told
    assert "are lost" in told
    assert f"{segment} at byte {offset}" in told
    assert verify(str(tmp_path / "out")).whole


class CopyingFiles(ScriptedFiles):
    """Without links, as a salvage has it: they would share the fate of the damaged run's disk."""

    def link(self, old: str, new: str) -> None:
        raise OSError(errno.EXDEV, "not linked", new)


def salvage_into(source: str, target: Path, files: FilesLike) -> None:
    salvage_episodes(Layout(source), str(target), step=None, called=str(target), files=files, rehearse=False)


async def opens(directory: Path) -> bool:
    try:
        async with fed(make(), ITEMS, directory=str(directory)) as pipe:
            return bool((await pipe.resume()).step)
    except NotARun:
        return False


@pytest.mark.parametrize("after", [False, True])
async def test_killed_at_any_call_it_leaves_no_run(run: str, tmp_path: Path, after: bool) -> None:
    before, whole, written_out = fingerprint(run), CopyingFiles(), 0
    salvage_into(run, tmp_path / "whole", whole)
    own = await state_of(tmp_path / "whole")
    assert len(whole.calls) > 30
    for call in range(1, len(whole.calls) + 1):
        target = tmp_path / f"target{call}"
        files = CopyingFiles(call, Killed, after=after, stays=True)
        with pytest.raises(Killed):
            salvage_into(run, target, files)
        files.end()
        if (target / "run.json").exists():  # all is written: of the last calls only a sync is missing
            written_out += 1
            assert call > len(whole.calls) - 4
            assert await state_of(target) == own
        elif target.exists():
            assert not await opens(target)
    assert written_out < 4
    assert fingerprint(run) == before


async def test_a_full_disk_is_said_and_leaves_no_run(run: str, tmp_path: Path) -> None:
    before, whole = fingerprint(run), CopyingFiles()
    salvage_into(run, tmp_path / "whole", whole)
    for call in range(1, len(whole.calls)):
        target = tmp_path / f"target{call}"
        files = CopyingFiles(call, stays=True)
        with pytest.raises(WriteFailed):
            salvage_into(run, target, files)
        assert not files.open
        assert not (target / "run.json").exists() or call > len(whole.calls) - 3
    assert fingerprint(run) == before


def hurt(run: Path, rng: random.Random) -> None:
    """Change a few bytes anywhere, cut a file, or remove one."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    for path in rng.sample(files, rng.randint(1, 4)):
        how = rng.random()
        if how < 0.1:
            path.unlink()
        elif how < 0.25:
            os.truncate(path, rng.randrange(path.stat().st_size))
        else:
            flip(path, rng.randrange(path.stat().st_size))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_damaged_what_is_salvaged_goes_on(run: str, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(4 * SOAK):
        damaged, target = tmp_path / f"damaged {number}", tmp_path / f"out {number}"
        shutil.copytree(run, damaged)
        hurt(damaged, rng)
        try:
            found = salvaged(damaged, target)
        except Damaged:
            continue
        copy = shutil.copytree(target, tmp_path / f"copy {number}")
        assert len((await state_of(copy, attach=not found.left_out))[3]) == found.rows_kept
        if not found.left_out:
            after = await goes_on(target, run=walk_unevenly)
            assert max(after.values()) == 1, (seed, number)


def test_a_run_of_the_first_version_is_salvaged(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[1] / "golden" / "v1e", tmp_path / "run")
    folder = next(path.parent for path in (tmp_path / "run").rglob("run.json"))
    found = salvaged(folder, tmp_path / "out")
    assert found.rows_kept
    assert found.whole


class TwoTasks(Gate):
    """Items of either task, which are told apart by their rows."""

    def tasks(self) -> list[Task]:
        return [Task(name, source=numbers(10), run=self.play, shuffle=True, epochs=1) for name in ("left", "right")]

    async def play(self, item: Item, ctx: Context) -> Rollout:
        parts = 1 + item.index % 3
        for part in range(parts):
            await self.changed.wait_for(lambda: self.left > 0)
            self.left -= 1
            rows = block(item, part, ends=part == parts - 1)
            rows["obs"][:, 0] += 100 * (item.task == "right")
            await ctx.extend(rows)
        return Rollout()


async def of_two_tasks(folder: Path) -> Path:
    for directory, target in (("life 1", "life 2"), ("life 2", "run")):
        buffer, agent, gate = make(), Agent(), TwoTasks()
        async with pipeline(gate.tasks(), buffer=buffer, directory=str(folder / directory), concurrency=4) as pipe:
            pipe.attach(agent=agent)
            await resumed(pipe)
            await pipe.start()
            await gate.let_in(pipe, buffer, 7)
            batch = await pipe.sample(8)
            buffer.update_priorities(batch.keys, agent.train(batch))
            await (await pipe.save(len(agent.seen))).committed()
            await gate.let_in(pipe, buffer, 6)
            crashed_copy(str(folder / directory), folder / target)
    return folder / "run"


async def test_nothing_of_several_tasks_is_played_twice_whatever_is_missing(tmp_path: Path) -> None:
    """Nobody knows of which task an item is whose claim is lost; and no source has more than one epoch."""
    run, rng = await of_two_tasks(tmp_path), random.Random(1)
    names = sorted(path.name for path in (run / "journals").iterdir())
    places = [(name, frame) for name in names for frame in frames(str(run), f"journals/{name}")]
    places = [(name, frame) for name, frame in places if frame.header.kind == EVENTS]
    cases = [list(range(at, min(at + 4, len(places)))) for at in range(0, len(places), 2)]
    cases += [rng.sample(range(len(places)), 3) for _ in range(12 * SOAK)]
    for number, case in enumerate(cases):
        damaged, target = tmp_path / f"damaged {number}", tmp_path / f"out {number}"
        shutil.copytree(run, damaged)
        for name, frame in (places[at] for at in case):
            flip(damaged / "journals" / name, frame.offset + HEADER_BYTES + 1)
        salvaged(damaged, target)
        buffer, gate = make(), TwoTasks()
        gate.left = 1000
        async with pipeline(gate.tasks(), buffer=buffer, directory=str(target)) as pipe:
            pipe.attach(agent=Agent())
            await resumed(pipe)
            await pipe.start()
            await filled(pipe)
            pipe.ledger.check()
        assert max(Counter(contents(buffer)).values()) == 1, case

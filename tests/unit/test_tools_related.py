"""Merging runs of which one was made of another: refused where something would be there twice, and only there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import ReplayBuffer, Rollout, TrajectoryBuffer
from pipeline.checkpoint import salvage, verify
from pipeline.cli import main
from pipeline.distributed import Ranks
from pipeline.errors import ConfigError
from pipeline.store.frames import HEADER_BYTES
from pipeline.store.layout import Layout
from pipeline.tools import merge, reshard, salvage_run, split
from tests.support.keeping import stored
from tests.support.ranks import fine, on_ranks
from tests.support.salvaging import flip
from tests.unit.test_tools_groups import got, make


def begin(directory: Path, number: int) -> Path:
    """Save a buffer of four episodes."""
    with ReplayBuffer(100, directory=directory, seed=number) as buffer:
        buffer.resume()
        add(buffer, number)
        buffer.save(1, wait=True)
    return directory


def add(buffer: ReplayBuffer, number: int) -> None:
    n = 100 * number + np.arange(12)
    buffer.extend({"n": n, "terminated": n % 3 == 2})


def go_on(directory: Path, number: int) -> Path:
    """Have a process go on with a buffer, add to it and save it."""
    with ReplayBuffer(100, directory=directory, seed=1) as buffer:
        buffer.resume()
        add(buffer, number)
        buffer.save(2, wait=True)
    return directory


def held(directory: Path) -> list[int]:
    with ReplayBuffer(1000, directory=directory, seed=1) as buffer:
        buffer.resume()
        found: list[int] = buffer.ring.storage.view("n")[buffer.ring.slots(buffer.ring.keys())].tolist()
        return found


class World:
    """Runs A and B, and what is made of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.a, self.b = begin(folder / "a", 1), begin(folder / "b", 2)

    def merged(self, name: str, *runs: Path) -> Path:
        return Path(merge(runs, self.folder / name).directory)

    def split(self, name: str, run: Path) -> tuple[Path, Path]:
        parts = [self.folder / f"{name}{at}" for at in (1, 2)]
        split(run, parts, count=2)
        return parts[0], parts[1]

    def resharded(self, name: str, run: Path, to: int = 2, **how: Any) -> Path:
        return Path(reshard(run, self.folder / name, to, **how).directory)

    def salvaged(self, name: str, run: Path) -> Path:
        salvage_run(run, self.folder / name)
        return self.folder / name

    def refused(self, *runs: Path, match: str) -> None:
        """Both ways round, before anything is written; a dry run too; and allowed where it is said."""
        before = sorted(path.name for path in self.folder.iterdir())
        for order in (runs, runs[::-1]):
            for dry in (True, False):
                with pytest.raises(ConfigError, match=match):
                    merge(order, self.folder / "out", dry_run=dry)
        assert sorted(path.name for path in self.folder.iterdir()) == before

    def related(self, one: Path, other: Path, *, match: str = "") -> None:
        """Refused by what is known of where they came from, and allowed where that is said."""
        self.refused(one, other, match=match or r"would be there twice\. Leave one of them out; or, .*--allow-related")
        rows = sum(merge([run], self.folder / f"{run.name} alone", dry_run=True).rows for run in (one, other))
        assert merge([one, other], self.folder / "twice", allow_related=True).rows == rows
        shutil.rmtree(self.folder / "twice")

    def apart(self, *runs: Path) -> None:
        """Allowed: nothing in common."""
        found = held(self.merged("together", *runs))
        assert len(found) == len(set(found)) > 0
        shutil.rmtree(self.folder / "together")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_and_its_reshard(world: World) -> None:
    r = world.resharded("r", world.a)
    world.related(r, world.a, match=rf"runs: {r} was made of {world.a} \(run \w+\), so that what they have in common")
    world.apart(r, world.b)
    world.related(r, world.resharded("r3", world.a, 3), match=rf"were both made of {world.a}")
    again = world.resharded("again", r, 3)
    world.related(again, world.a)
    world.related(again, r)
    as_it_was = world.resharded("as it was", r, 2)
    world.related(as_it_was, world.a)
    world.related(as_it_was, r)


def test_a_run_and_its_salvage(world: World) -> None:
    v = world.salvaged("v", world.a)
    world.related(v, world.a, match=rf"runs: {v} was made of {world.a}")
    world.apart(v, world.b)
    world.related(v, world.resharded("r", world.a), match="were both made of")
    world.related(world.salvaged("w", v), world.a)
    shards = world.salvaged("shards", world.folder / "r")
    world.related(shards, world.a)
    world.related(shards, world.folder / "r")


def test_parts_of_one_split_have_nothing_in_common_whatever_becomes_of_them(world: World) -> None:
    one, other = world.split("a", world.a)
    world.apart(one, other)
    world.refused(one, world.a, match="are copies or parts of one run")
    v, r = world.salvaged("v", one), world.resharded("r", other)
    world.apart(v, other)
    world.apart(one, r)
    world.apart(v, r)
    world.related(v, one)
    world.related(v, world.a)
    world.related(r, world.a)
    world.related(r, world.salvaged("other v", other))
    go_on(one, 3)
    world.apart(one, other)
    world.apart(one, r)
    go_on(other, 4)
    world.apart(one, other)
    world.related(one, world.a)
    world.related(one, v, match="was made of")


def test_a_part_without_anything_has_nothing_in_common(world: World) -> None:
    one, other = world.folder / "x", world.folder / "y"
    split(world.a, [one, other], where="n < 0")
    assert held(other) == held(world.a)
    r = world.resharded("r", other)
    world.apart(one, r)
    world.apart(world.salvaged("v", one), other)


def test_parts_of_two_splits_may_have(world: World) -> None:
    one, _ = world.split("a", world.a)
    parts = [world.folder / name for name in ("x", "y")]
    split(world.a, parts, count=1)
    v = world.salvaged("v", one)
    for part in parts:  # nobody knows what of it went which way
        world.related(v, part)


def test_a_part_of_a_part(world: World) -> None:
    one, other = world.split("a", world.a)
    parts = [world.folder / name for name in ("x", "y")]
    split(one, parts, count=1)
    v = world.salvaged("v", parts[0])
    world.apart(v, parts[1], other)
    world.apart(v, world.resharded("r", parts[1]), world.resharded("s", other))
    world.related(v, one)
    world.related(v, world.a)


def test_a_merge_and_what_it_was_made_of(world: World) -> None:
    m = world.merged("m", world.a, world.b)
    world.refused(m, world.a, match="are copies or parts of one run")
    world.related(world.salvaged("v", m), world.b)
    world.related(world.folder / "v", m)
    c = begin(world.folder / "c", 5)
    world.apart(m, c)
    one, other = world.split("m", m)
    world.apart(one, other)
    world.related(world.resharded("r", one), world.a)
    world.apart(world.folder / "r", other)
    go_on(m, 6)  # what it had is now its own
    world.related(m, world.a, match=rf"runs: {m} was made of {world.a}")
    world.apart(m, c)
    world.related(m, one)
    world.related(world.merged("mc", m, c), world.b)


def test_what_is_not_in_a_part_plays_no_role_in_it(world: World) -> None:
    m = world.merged("m", world.a, world.b)
    parts = [world.folder / name for name in ("from a", "from b")]
    split(m, parts, where="n < 200")
    assert set(held(parts[0])) == set(range(100, 112))
    go_on(parts[0], 7)
    world.apart(parts[0], world.b)
    world.related(parts[0], world.a)


def test_a_run_that_goes_on_is_still_the_same(world: World) -> None:
    one, other = world.split("a", world.a)
    go_on(world.a, 8)
    world.refused(world.a, one, match="are copies or parts of one run")
    world.related(world.salvaged("v", world.a), other)


def test_ranks_that_went_on_with_a_reshard(world: World) -> None:
    r = world.resharded("r", world.a)

    def more(ranks: Ranks) -> None:
        with ReplayBuffer(100, directory=r, ranks=ranks, seed=1) as buffer:
            buffer.resume()
            add(buffer, 20 + ranks.rank)
            buffer.save(3, wait=True)

    fine(on_ranks(2, more))
    world.related(r, world.a)
    world.apart(r, world.b)


def lose(run: Path, at: int) -> None:
    """Hurt a block, and have a process go on with the rest."""
    path, block, _ = list(stored(run))[at]
    flip(path, block.offset + HEADER_BYTES + block.length // 2)
    with ReplayBuffer(100, directory=run, seed=1) as buffer:
        assert buffer.resume(allow_partial=True).lost.rows
        buffer.save(9, wait=True)


def test_what_was_split_off_before_rows_were_lost(world: World) -> None:
    """The rows that are left have other keys then, under which others had lain."""
    run = go_on(world.a, 3)
    old, rest = world.split("old", run)
    copy = world.folder / "copy"
    shutil.copytree(run, copy)
    lose(run, 1)
    for each in (old, rest, copy):
        world.related(each, run)
    with pytest.raises(ConfigError, match=rf"(?s){copy} and .* are both run \w+, whose rows a resume has given other"):
        merge([copy, run], world.folder / "out")
    new, more = world.split("new", run)
    world.apart(new, more)
    world.refused(new, run, match="are copies or parts of one run")
    world.related(new, old)
    world.apart(go_on(new, 4), go_on(more, 5))
    world.related(new, old)
    world.related(world.merged("m", run, world.b), copy)
    go_on(run, 6)
    world.related(old, run)
    world.related(new, run)


def go_back(run: Path, step: int, number: int) -> None:
    """Have a process go on from an older generation, add to that and save it."""
    with ReplayBuffer(100, directory=run, seed=1, keep=None) as buffer:
        buffer.resume(step=step)
        add(buffer, number)
        buffer.save(step + 1, wait=True)


def kept(directory: Path) -> Path:
    """Two generations, both of which stay."""
    with ReplayBuffer(100, directory=directory, seed=1, keep=None) as buffer:
        buffer.resume()
        for number in (1, 2):
            add(buffer, number)
            buffer.save(number, wait=True)
    return directory


def test_what_was_split_off_before_the_run_went_back(world: World) -> None:
    """The keys of what the old line had after that are those of other rows now."""
    run = kept(world.folder / "run")
    old, rest = world.split("old", run)
    copy = world.folder / "copy"
    shutil.copytree(run, copy)
    go_back(run, 1, 3)
    for each in (old, rest, copy):
        world.related(each, run)
    both = merge([rest, run], world.folder / "both", allow_related=True)
    found = held(Path(both.directory))
    assert set(found) >= {*range(200, 212), *range(300, 312)}
    new, more = world.split("new", run)
    world.apart(new, more)
    world.refused(new, run, match="are copies or parts of one run")
    go_back(run, 1, 4)
    world.related(more, run)  # once more


def test_going_on_from_the_newest_is_not_going_back(world: World) -> None:
    run = kept(world.folder / "run")
    old, _ = world.split("old", run)
    go_back(run, 2, 3)
    world.refused(old, run, match="are copies or parts of one run")


def test_what_was_split_off_before_ranks_went_back(world: World) -> None:
    r = world.resharded("r", world.a)

    def more(number: int, step: int | None) -> Callable[[Ranks], None]:
        def play(ranks: Ranks) -> None:
            with ReplayBuffer(100, directory=r, ranks=ranks, seed=1, keep=None) as buffer:
                buffer.resume(step=step)
                add(buffer, number + ranks.rank)
                buffer.save(number, wait=True)

        return play

    fine(on_ranks(2, more(20, None)))
    fine(on_ranks(2, more(30, None)))
    old, rest = world.split("old", r)
    fine(on_ranks(2, more(40, 20)))
    world.related(old, r)
    world.related(rest, r)
    new, more_of_it = world.split("new", r)
    world.apart(new, more_of_it)
    world.refused(new, r, match="are copies or parts of one run")


def test_what_an_earlier_version_had_not_noted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a run has gone back: what the message says to do helps."""
    run = kept(world.folder / "run")
    _, rest = world.split("old", run)
    monkeypatch.setattr("pipeline.replay.saving.left_behind", lambda stored, found: "")
    go_back(run, 1, 3)
    world.refused(
        rest, run, match=r"are copies or parts of one run .*resume\(step=\).* salvage one of them, which gives"
    )
    v = world.salvaged("v", rest)
    world.related(v, run)
    merge([v, run], world.folder / "both", allow_related=True)
    assert set(held(world.folder / "both")) >= {*range(200, 212), *range(300, 312)}


def test_what_was_split_off_before_a_resume_dropped_rows(world: World) -> None:
    def live(number: int) -> None:
        with ReplayBuffer(100, directory=world.a, seed=1, incomplete="drop") as buffer:
            buffer.resume()
            n = 100 * number + np.arange(12)
            buffer.extend({"n": n, "terminated": n % 100 % 3 == 2})
            buffer.extend({"n": 1000 * number + np.arange(5), "terminated": np.zeros(5, bool)}, env=1)
            buffer.save(number, wait=True)

    live(3)
    old, _ = world.split("old", world.a)
    live(4)
    assert set(held(old)) <= set(held(world.a))
    world.related(old, world.a)


def test_what_was_split_off_before_other_ranks_went_on(world: World) -> None:
    r = world.resharded("r", world.a)

    def more(number: int) -> Callable[[Ranks], None]:
        def play(ranks: Ranks) -> None:
            with ReplayBuffer(100, directory=r, ranks=ranks, seed=1) as buffer:
                buffer.resume()
                add(buffer, number + ranks.rank)
                buffer.save(number, wait=True)

        return play

    fine(on_ranks(2, more(20)))
    old, rest = world.split("old", r)
    fine(on_ranks(2, more(30)))
    world.refused(old, r, match="are copies or parts of one run")  # as many ranks: every row has the key that it had
    fine(on_ranks(3, more(40)))
    world.related(old, r)
    world.related(rest, r)
    new, more_of_it = world.split("new", r)
    world.apart(new, more_of_it)
    world.refused(new, r, match="are copies or parts of one run")


def test_what_an_earlier_version_made(world: World) -> None:
    """Its marker says nothing; the generation does, as long as it is the newest."""
    v, r = world.salvaged("v", world.a), world.resharded("r", world.a)
    one, other = world.split("a", world.a)
    for each in (v, r, one, other):
        marker = json.loads((each / "run.json").read_text())
        assert marker.pop("made_of")
        (each / "run.json").write_text(json.dumps(marker))
        assert verify(str(each)).whole
    world.related(v, world.a)
    world.related(r, world.a)
    world.related(r, v)
    world.apart(one, other)


@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_a_salvage_of_a_run_whose_marker_is_gone(world: World, harm: str) -> None:
    """What the marker said is in the manifest of the first generation, though a process has gone on since."""
    m = world.merged("m", world.a, world.b)
    go_on(m, 6)
    if harm == "damaged":
        (m / "run.json").write_text("{")
    else:
        (m / "run.json").unlink()
    v = world.salvaged("v", m)
    marker = Layout(str(v)).read_run()
    assert marker is not None
    assert [way.directory for way in marker.made_of] == [str(m), str(world.a), str(world.b)]
    world.related(v, world.a, match=rf"runs: {v} was made of {world.a}")
    world.related(v, world.b)
    world.apart(v, begin(world.folder / "c", 5))


def test_a_salvage_of_a_pipeline_whose_marker_is_gone(tmp_path: Path) -> None:
    a, m, v = (tmp_path / name for name in "amv")
    with make(a).sync() as pipe:
        with pipe.weight_update(version=pipe.resume().version):
            pass
        pipe.start()
        for number in range(3):
            pipe.put("one", [Rollout({"n": [number]}, reward=float(number)) for _ in range(2)])
    merge([a], m)
    with make(m, keep=None).sync() as pipe:  # a process goes on with it
        pipe.resume()
    (m / "run.json").unlink()
    salvage_run(m, v)
    with pytest.raises(ConfigError, match=f"{v} was made of {a}"):
        merge([v, a], tmp_path / "out")


def test_a_marker_of_a_run_that_no_tool_made_is_as_ever(world: World) -> None:
    assert list(json.loads((world.a / "run.json").read_text())) == ["kind", "format_version", "run_id"]
    (way,) = Layout(str(world.merged("m", world.a))).read_run().made_of  # type: ignore[union-attr]
    assert (way.directory, way.named, way.splits) == (str(world.a), way.run_id, ())


def test_by_command(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    r = world.resharded("r", world.a)
    command = ["merge", str(r), str(world.a), "--out", str(world.folder / "out")]
    assert main(command) == 2
    assert "--allow-related" in capsys.readouterr().err
    assert main([*command, "--allow-related"]) == 0
    assert sorted(held(world.folder / "out")) == sorted(2 * held(world.a))


def test_trajectories(tmp_path: Path) -> None:
    for name in "ab":
        with TrajectoryBuffer(directory=tmp_path / name) as buffer:
            buffer.resume()
            buffer.add_trajectories([{"rewards": torch.full((3, 2), float(number))} for number in range(4)])
            buffer.save(1, wait=True)
    salvage_run(tmp_path / "a", tmp_path / "v")
    world = World.__new__(World)
    world.folder = tmp_path
    world.related(tmp_path / "v", tmp_path / "a")
    assert merge([tmp_path / "v", tmp_path / "b"], tmp_path / "m").units == 8
    split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=2)
    world.related(tmp_path / "v", tmp_path / "x")
    salvage_run(tmp_path / "x", tmp_path / "w")
    assert merge([tmp_path / "w", tmp_path / "y"], tmp_path / "n").units == 4
    world.related(tmp_path / "w", tmp_path / "x")


def test_pipelines(tmp_path: Path) -> None:
    for name, first in (("a", 100), ("b", 200)):
        with make(tmp_path / name).sync() as pipe:
            with pipe.weight_update(version=pipe.resume().version):
                pass
            pipe.start()
            for number in range(first, first + 3):
                pipe.put("one", [Rollout({"n": [number]}, reward=float(number)) for _ in range(2)])
    world = World.__new__(World)
    world.folder = tmp_path
    salvage(tmp_path / "a", tmp_path / "v")
    reshard(tmp_path / "a", tmp_path / "r", 2)
    for made in ("v", "r"):
        world.related(tmp_path / made, tmp_path / "a")
        merge([tmp_path / made, tmp_path / "b"], tmp_path / f"{made}b")
        world.related(tmp_path / f"{made}b", tmp_path / "a")
    world.related(tmp_path / "v", tmp_path / "r")
    salvage_run(tmp_path / "r", tmp_path / "w")
    world.related(tmp_path / "w", tmp_path / "a")
    split(tmp_path / "a", [tmp_path / "x", tmp_path / "y"], count=2)
    got(tmp_path / "x", 2)  # a process has gone on with it
    merge([tmp_path / "x", tmp_path / "y"], tmp_path / "xy")
    world.related(tmp_path / "x", tmp_path / "a")

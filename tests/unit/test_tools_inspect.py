"""What is said of runs of every kind, and of their parts, is what they hold; and looking changes nothing."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import Context, ForebayError, Item, NotARun, ReplayBuffer, Rollout
from pipeline.cli import main
from pipeline.tools import inspect, rows, sample_run, show_item
from pipeline.tools.figures import BINS, Figures
from tests.support import kept
from tests.support.crashes import Trained, begin, crashed_copy, inline_pipeline
from tests.support.kept import fingerprint
from tests.support.runs import task

GOLDEN = Path(__file__).parents[1] / "golden"
ROLLOUTS = ["v1", "v1b", "v1c", "v1d", "v1e"]
RUNS = [
    *ROLLOUTS,
    "replay_v1/shared",
    "replay_v1/prioritized",
    "replay_v1b/run",
    "trajectories_v1/run",
    "shards_v1/run",
    "trajectory_shards_v1/run",
]
ROUNDS = 12 * int(os.environ.get("FOREBAY_SOAK", "1"))


def looked(path: str | os.PathLike[str], **more: Any) -> Any:
    """What is there, of a folder that nobody changes: by looking least of all."""
    root = path if os.path.isdir(path) else os.path.dirname(path)
    before = fingerprint(root)
    found = inspect(path, **more)
    assert fingerprint(root) == before
    return found


class TestRollouts:
    pytestmark = pytest.mark.virtual_time

    async def test_counts_figures_and_versions(self, run_directory: str) -> None:
        found = looked(await kept.rollouts(run_directory))
        (task,) = found.tasks
        assert (found.what, found.kind, found.attached) == ("run", "pipeline", ["trained"])
        assert (task.claimed, task.states["buffered"], task.states["trained"]) == (8, 4, 4)
        assert (task.epoch, task.drawn, task.length, task.finished, task.failed) == (0, 8, 8, 8, 2)
        assert (task.rewards.count, task.rewards.mean, task.rewards.least, task.rewards.most) == (8, 3.5 / 8, 0, 7 / 8)
        assert (task.lengths.count, task.lengths.mean, task.lengths.most, task.tokens) == (8, 3.5, 7, 28)
        assert sum(task.versions.values()) == 4
        assert task.errors == {"ValueError: no answer to 0": 1, "ValueError: no answer to 4": 1}
        assert [each.step for each in found.generations] == [0, 2]
        assert [(life.incarnation, life.ended) for life in found.lives] == [(1, "closed")]
        files = [path for path in Path(run_directory).rglob("*") if path.is_file()]
        assert found.space.total == sum(path.stat().st_size for path in files)
        assert 0 < found.space.trainer < found.space.generations
        assert 0 < found.space.journals + found.space.segments < found.space.total
        assert found.status.state == "to be continued"
        assert not found.notes

    async def test_what_runs_runs_as_long_as_a_process_has_the_run(self, run_directory: str, tmp_path: Path) -> None:
        async def never(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep_forever()
            raise AssertionError

        async with inline_pipeline(task(2, never), directory=run_directory, concurrency=1) as pipe:
            await begin(pipe, trained=Trained())
            await anyio.wait_all_tasks_blocked()
            crashed_copy(run_directory, tmp_path / "dead")
            (alive,), (dead,) = inspect(run_directory).tasks, looked(tmp_path / "dead").tasks
        assert (alive.states["running"], alive.states["waiting"]) == (1, 0)
        assert (dead.states["running"], dead.states["waiting"]) == (0, 1)

    async def test_an_older_generation_is_described_as_a_resume_would_find_it(self, run_directory: str) -> None:
        await kept.rollouts(run_directory)
        for found in (
            looked(run_directory, step=0),
            looked(f"{run_directory}/generations/00000000"),
            looked(f"{run_directory}/generations/00000000/manifest.json"),
        ):
            (task,) = found.tasks
            assert (found.generation.step, task.states["trained"]) == (0, 0)
            assert task.states["buffered"] + task.states["leased"] == 8

    async def test_a_generation_without_its_buffer_lists_what_is_drawn_again(self, run_directory: str) -> None:
        from tests.support.crashes import Trained, begin, inline_pipeline, train
        from tests.support.runs import task

        async with inline_pipeline(task(8, kept.talk), directory=run_directory, concurrency=1) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            await train(pipe, trained, await pipe.get_batch(2))
            await (await pipe.save(1, replay_buffer=False)).committed()
        found = looked(run_directory)
        assert found.generation.without == ["replay_buffer"]
        assert found.tasks[0].states["trained"] == 2
        assert found.tasks[0].states["buffered"] == 0

    async def test_of_a_damaged_run_is_said_what_can_be(self, run_directory: str) -> None:
        await kept.rollouts(run_directory)
        Path(run_directory, "generations/00000001/consumer.json").write_text("{")
        found = looked(run_directory)
        assert any("consumer.json" in each.what for each in found.status.damages)
        assert any("consumer half is damaged" in note for note in found.notes)
        assert found.generations


class TestBuffers:
    def test_transitions(self, run_directory: str) -> None:
        found = looked(kept.transitions(run_directory, select={"select": "prioritized"}))
        (buffer,) = found.buffers
        assert (found.kind, buffer.rank, buffer.rows, buffer.added, buffer.capacity) == ("replay", None, 100, 150, 100)
        assert [(each.name, each.dtype, each.shape) for each in buffer.columns] == [
            ("obs", "float32", (2,)),
            ("reward", "float32", ()),
            ("terminated", "bool", ()),
        ]
        assert (buffer.rewards.count, buffer.rewards.least, buffer.rewards.most) == (100, 50, 149)
        assert buffer.rewards.mean == pytest.approx(99.5)
        assert (buffer.lengths.count, buffer.lengths.least, buffer.lengths.most) == (10, 10, 10)
        assert (buffer.versions, buffer.ends) == ({"3": 90, "4": 10}, {"terminated": 10})
        assert (buffer.selection, buffer.remove, buffer.unread) == ("prioritized", "fifo", 0)
        assert buffer.priorities.count == 100

    def test_what_is_removed_by_another_rule_is_not_counted(self, run_directory: str) -> None:
        found = looked(kept.transitions(run_directory, remove={"by": "min", "field": "reward"}))
        (buffer,) = found.buffers
        assert (buffer.rows, buffer.remove) == (100, "min")
        assert (buffer.rewards.count, buffer.rewards.least, buffer.rewards.most) == (100, 50, 149)

    def test_trajectories(self, run_directory: str) -> None:
        found = looked(kept.trajectories(run_directory))
        (buffer,) = found.buffers
        assert (found.kind, buffer.episodes, buffer.rows, buffer.capacity) == ("trajectories", 6, 72, None)
        assert (buffer.rewards.count, buffer.rewards.least, buffer.rewards.most) == (72, 0, 5032)
        assert (buffer.lengths.count, buffer.lengths.mean) == (6, 4)

    def test_shards_and_one_of_them(self, run_directory: str) -> None:
        found = looked(kept.shards(run_directory))
        assert (found.kind, found.world_size) == ("replay shards", 2)
        assert [(each.rank, each.rows, each.rewards.least) for each in found.buffers] == [(0, 20, 0), (1, 20, 100)]
        shard = looked(f"{run_directory}/generations/00000000/shards/0001")
        assert (shard.what, [each.rank for each in shard.buffers]) == ("shard", [1])

    def test_rows_that_cannot_be_read_are_said_to_be_missing(self, run_directory: str) -> None:
        kept.transitions(run_directory)
        for path in Path(run_directory, "segments").iterdir():
            path.unlink()
        found = looked(run_directory)
        (buffer,) = found.buffers
        assert (buffer.rows, buffer.rewards.count, buffer.unread) == (100, 0, buffer.blocks)
        assert "could not be read" in found.notes[0]

    @pytest.mark.parametrize(
        ("said", "instead"),
        [
            (b'\\"F32\\"', b'\\"G32\\"'),  # of a column in bodies: a dtype that there is none of
            (b'\\"F32\\"', b'\\"U32\\"'),
            (b'"I64"', b'"F64"'),  # of a mark: none is a float
            (b'"I64"', b'"J64"'),
            (b"[100,16]", b"[1600  ]"),  # bodies of no width
            (b"[100,16]", b"[100,-2]"),
            (b'"dtype"', b'"dtypd"'),
            (b'"shape":[100]', b'"shape":[   ]'),
            (b"bodies", b"bodiez"),
        ],
    )
    def test_blocks_whose_headers_say_what_cannot_be(self, run_directory: str, said: bytes, instead: bytes) -> None:
        with ReplayBuffer(100, directory=run_directory) as made:
            made.extend(kept.rows(100))
            made.save(1, wait=True)
        (path,) = Path(run_directory, "segments").iterdir()
        raw = path.read_bytes()
        for at in [each.start() for each in re.finditer(re.escape(said), raw)]:
            path.write_bytes(raw[:at] + instead + raw[at + len(said) :])
            (buffer,) = looked(run_directory).buffers
            assert buffer.rows == 100
            assert buffer.unread in (0, buffer.blocks)
        assert said in raw

    @pytest.mark.virtual_time
    async def test_a_buffer_that_rollouts_fill(self) -> None:
        found = looked(GOLDEN / "v1e")
        assert (found.tasks[0].states["retired"], found.buffers[0].rows) == (21, 100)


class TestFiles:
    pytestmark = pytest.mark.virtual_time

    async def test_a_journal_and_a_segment_with_and_without_their_run(self, run_directory: str, tmp_path: Path) -> None:
        await kept.rollouts(run_directory)
        journal = Path(run_directory, "journals/000001-0000.fbj")
        segment = Path(run_directory, "segments/000001-0000-000001.fbs")
        for path in (journal, Path(shutil.copy(journal, tmp_path / "lone.fbj"))):
            found = looked(path)
            assert found.journal is not None
            assert (found.journal.by_kind["claim"], found.journal.by_kind["done"]) == (8, 8)
            assert found.journal.ended.startswith("closed")
        for path in (segment, Path(shutil.copy(segment, tmp_path / "lone.fbs"))):
            found = looked(path)
            assert (found.segment.payloads, found.segment.uids, found.segment.sealed) == (8, 8, True)
        cut = journal.read_bytes()[:-100]
        (tmp_path / "cut.fbj").write_bytes(cut)
        assert looked(tmp_path / "cut.fbj").journal.left > 0

    async def test_what_is_nothing_of_a_run(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        there = {"no": "is absent", "": "holds no run", "file": "is nothing"}
        for path, why in ((tmp_path / name, why) for name, why in there.items()):
            with pytest.raises(NotARun, match=why):
                inspect(path)


class TestFigures:
    def test_of_nothing_of_one_and_of_many(self) -> None:
        assert Figures.of([]) == Figures(count=0)
        assert Figures.of([2.0]).spread == [1]
        many = Figures.of(np.arange(200))
        assert (many.count, many.mean, many.spread) == (200, 99.5, [10] * BINS)
        assert many.line == "█" * BINS
        assert Figures.of([0, 0, 0, 1]).line == "█" + " " * (BINS - 2) + "▃"

    def test_what_is_no_number_is_counted_apart(self) -> None:
        found = Figures.of([1.0, float("nan"), float("inf"), 3.0])
        assert (found.count, found.mean, found.not_finite) == (2, 2.0, 2)
        assert Figures.of([1e308, -1e308]).count == 2
        assert Figures.of([1.0, np.nextafter(1.0, 2)]).count == 2


@pytest.mark.parametrize("name", RUNS)
def test_every_run_that_was_ever_written_can_be_looked_at(name: str, capsys: Any) -> None:
    path = GOLDEN / name
    before = fingerprint(path)
    found = looked(path)
    assert found.generations
    for arguments in (["inspect"], ["inspect", "--json"], ["sample", "-n", "4"], ["sample", "--json"], ["verify"]):
        assert main([arguments[0], str(path), *arguments[1:]]) == 0, capsys.readouterr().err
    assert fingerprint(path) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["v1c", "v1e", "replay_v1/shared", "trajectories_v1/run", "shards_v1/run", "trajectory_shards_v1/run"]
)
def test_whatever_is_damaged_the_error_is_a_clear_one(name: str, tmp_path: Path) -> None:
    """A byte of one file after the other is changed, or its end is cut off."""
    rng = random.Random(7)
    source = GOLDEN / name
    files = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    looks: list[Callable[[str], Any]] = [inspect, lambda path: show_item(path, 5), lambda path: sample_run(path, 4)]
    for number in range(ROUNDS):
        copy = Path(shutil.copytree(source, tmp_path / str(number)))
        path = copy / rng.choice(files)
        content = bytearray(path.read_bytes())
        if content and rng.random() < 0.7:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        else:
            del content[rng.randrange(len(content) + 1) :]
        path.write_bytes(content)
        for look in looks:
            with suppress(ForebayError):
                look(str(copy))
        shutil.rmtree(copy)


def test_rows_that_lie_in_two_blocks_are_counted_once(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = inspect(kept.transitions(run_directory)).buffers
    blocks: Any = getattr(rows, "read_blocks")  # noqa: B009
    monkeypatch.setattr(rows, "read_blocks", lambda path: [*blocks(path), *blocks(path)])
    (after,) = inspect(run_directory).buffers
    assert after.blocks == 2 * before.blocks
    for name in ("rewards", "lengths", "priorities", "versions", "ends"):
        assert getattr(after, name) == getattr(before, name), name


def test_numbers_in_parts_come_to_what_they_come_to_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = np.random.default_rng(3).normal(size=1000)
    given[::50] = np.nan
    at_once = Figures.of(given)
    assert sum(at_once.spread) == at_once.count == 980
    monkeypatch.setattr("pipeline.tools.figures._AT_ONCE", 7)
    in_parts = Figures.of(given)
    assert in_parts.spread == at_once.spread
    assert (in_parts.least, in_parts.most, in_parts.not_finite) == (at_once.least, at_once.most, 20)
    assert in_parts.mean == pytest.approx(at_once.mean)


@pytest.mark.parametrize("make", [kept.transitions, kept.shards, kept.trajectories, None])
def test_what_is_read_is_told(run_directory: str, make: Any) -> None:
    if make is None:
        shutil.copytree(Path(__file__).parents[1] / "golden/v1", run_directory)
    else:
        make(run_directory)
    told: list[tuple[int, int]] = []
    assert inspect(run_directory, told=lambda *each: told.append(each)) == inspect(run_directory)
    done, totals = zip(*told, strict=True)
    assert len(set(totals)) == 1
    assert sorted(done) == list(done)
    assert 0.9 * totals[0] < done[-1] <= totals[0]


def test_rows_that_a_pool_has_removed_are_in_no_figure(run_directory: str) -> None:
    rng = np.random.default_rng(4)
    with ReplayBuffer(50, directory=run_directory, remove={"by": "min", "field": "reward"}) as buffer:
        buffer.resume()
        for version, count in enumerate((50, 3, 3, 3)):  # a block of which few rows have gone stays as it is
            buffer.extend({"reward": rng.permutation(count) + 20.0 * version}, version=version)
            buffer.save(version, wait=True)
        batch = buffer.ring.mark("reward", buffer.ring.keys())
        versions = buffer.ring.mark("#version", buffer.ring.keys()).tolist()
    (found,) = inspect(run_directory).buffers
    assert (found.rewards.count, found.rewards.least, found.rewards.most) == (50, batch.min(), batch.max())
    assert found.versions == {str(version): versions.count(version) for version in sorted(set(versions))}

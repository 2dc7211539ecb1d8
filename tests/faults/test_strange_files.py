"""Whole files that lie where others belong: a generation of another run, the segment of another rank. They are told by
name, nothing of them is taken for what it is not, and what is whole beside them comes along."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pipeline import Damaged, OtherRun, Prioritized, Ranks, ReplayBuffer, UsageError
from pipeline.checkpoint import salvage, verify
from pipeline.cli import main
from pipeline.store.layout import Layout
from pipeline.tools import inspect, merge
from pipeline.tools.salvaging import salvage_run
from tests.support.experience import fed, filled, resumed, written
from tests.support.kept_runs import pipeline_run, replay_run, trajectory_run
from tests.support.ranks import fine, on_ranks


def experience_run(directory: Path) -> str:
    """A pipeline's run, whose rollouts fill a buffer."""

    async def live() -> None:
        async with fed(ReplayBuffer(200, select=Prioritized(), seed=1), 6, directory=str(directory)) as pipe:
            await resumed(pipe)
            await pipe.start()
            await filled(pipe)
            await written(pipe)
            await (await pipe.save(1)).committed()

    anyio.run(live)
    return str(directory)


def rollouts_run(directory: Path) -> str:
    """A pipeline's run."""
    return anyio.run(pipeline_run, directory)


RUNS: dict[str, Any] = {
    "replay": replay_run,
    "trajectories": trajectory_run,
    "experience": experience_run,
    "rollouts": rollouts_run,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: make(folder / name) for name, make in RUNS.items()}


@pytest.mark.parametrize("theirs", RUNS)
@pytest.mark.parametrize("ours", RUNS)
def test_a_generation_of_another_run_is_named_and_what_is_ours_comes_along(
    runs: dict[str, str], tmp_path: Path, ours: str, theirs: str
) -> None:
    run = shutil.copytree(runs[ours], tmp_path / "run")
    kept = salvage_run(run, tmp_path / "kept")
    other = runs[theirs] if theirs != ours else RUNS[theirs](tmp_path / "other")
    shutil.copytree(next(Path(other, "generations").iterdir()), run / "generations" / "00000077")
    (told,) = verify(str(run)).damages
    assert (told.path, "belongs to run" in told.what) == ("generations/00000077/manifest.json", True)
    assert inspect(run).kind == inspect(runs[ours]).kind
    found = salvage_run(run, tmp_path / "out")
    assert [loss.path for loss in found.losses] == ["generations/00000077/manifest.json"]
    assert found.step == kept.step
    assert verify(found.directory).whole
    assert [main(["verify", str(run)]), main(["salvage", str(run), str(tmp_path / "more")])] == [1, 0]
    if ours == "replay":
        with ReplayBuffer(60, directory=str(run)) as buffer, pytest.raises(OtherRun, match="00000077"):
            buffer.resume()


@pytest.mark.parametrize("kind", ["replay", "trajectories", "experience"])
def test_salvage_of_pipelines_says_who_takes_what_is_whole_of_a_buffer(
    runs: dict[str, str], tmp_path: Path, kind: str
) -> None:
    with pytest.raises(UsageError, match="salvage_run takes what is whole of it"):
        salvage(runs[kind], str(tmp_path / "out"))


def of_ranks(directory: Path, **how: Any) -> list[Any]:
    """Go on with a buffer of two ranks, whose rows lie alike; return whose rows each has, or what it raised."""

    def live(ranks: Ranks) -> set[int]:
        with ReplayBuffer(200, directory=str(directory), seed=3, ranks=ranks, returns="numpy") as buffer:
            step = buffer.resume(**how).step
            if not step:
                for _ in range(10):
                    obs = np.full((8, 600), ranks.rank, np.float32)
                    buffer.extend({"obs": obs, "terminated": np.arange(8) % 4 == 3})
                buffer.save(1, wait=True)
            return {int(each) for each in buffer.sample(64)["obs"][:, 0]} if len(buffer) else set()

    return on_ranks(2, live)


def segment_of(directory: Path, rank: int) -> str:
    return Layout(str(directory)).segment(1, rank, 1)


class TestSegmentsOfRanks:
    """Ranks give their rows the same keys, and a frame is whole under any name."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        fine(of_ranks(tmp_path / "run"))
        return tmp_path / "run"

    @pytest.fixture
    def swapped(self, run: Path) -> Path:
        first, second, aside = segment_of(run, 0), segment_of(run, 1), str(run / "aside")
        for now, then in ((first, aside), (second, first), (aside, second)):
            os.rename(now, then)
        return run

    def test_each_that_was_swapped_is_named(self, swapped: Path) -> None:
        found = verify(str(swapped))
        names = ["segments/000001-0000-000001.fbs", "segments/000001-0001-000001.fbs"]
        assert sorted({each.path for each in found.damages}) == names
        assert all("another one's name" in each.what for each in found.damages)

    @pytest.mark.parametrize("how", [{}, {"verify": "lazy"}])
    def test_no_rank_goes_on_with_rows_of_the_other(self, swapped: Path, how: dict[str, Any]) -> None:
        found = of_ranks(swapped, **how)
        assert [(type(each), "another one's name" in str(each)) for each in found] == [(Damaged, True)] * 2

    def test_a_copy_over_the_other_costs_the_rows_of_one_rank(self, run: Path, tmp_path: Path) -> None:
        shutil.copyfile(segment_of(run, 1), segment_of(run, 0))
        found = salvage_run(run, tmp_path / "out")
        assert {loss.path for loss in found.losses} == {"segments/000001-0000-000001.fbs"}
        assert fine(of_ranks(tmp_path / "out")) == [set(), {1}]
        assert fine(of_ranks(run, allow_partial=True)) == [set(), {1}]

    def test_merges_are_refused(self, swapped: Path, tmp_path: Path) -> None:
        with pytest.raises(Damaged):
            merge([swapped], tmp_path / "out")

    def test_under_their_own_names_all_is_whole_again(self, swapped: Path) -> None:
        first, second, aside = segment_of(swapped, 0), segment_of(swapped, 1), str(swapped / "aside")
        for now, then in ((first, aside), (second, first), (aside, second)):
            os.rename(now, then)
        assert verify(str(swapped)).whole
        assert fine(of_ranks(swapped)) == [{0}, {1}]


def test_of_a_journal_that_is_not_needed_a_salvage_says_that_nothing_was_lost(
    runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A buffer's rows do not lie there: verify calls it damaged, so a salvage must not say that nothing is."""
    run = shutil.copytree(runs["replay"], tmp_path / "run")
    os.unlink(next((run / "journals").iterdir()))
    assert [main(["verify", str(run)]), main(["salvage", str(run), str(tmp_path / "out")])] == [1, 0]
    said = capsys.readouterr().out
    assert "Nothing was lost." in said
    assert "Nothing was damaged" not in said

"""Which generation a salvage takes, and what a resume says of the trainer's files that did not come along."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from pipeline import StoreError, UsageError
from pipeline.checkpoint import salvage
from tests.support.crashes import Trained, finish, train
from tests.support.salvaging import EVERY, GROUPS, flip, goes_on, make, salvaged, two_lives

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    return Path(await two_lives(tmp_path))


def damage(run: Path, name: str, *numbers: int) -> None:
    for number in numbers:
        flip(run / f"generations/{number:08d}" / name, 60)


TRAINER = "trainer/trained.safetensors"


async def test_the_newest_with_a_whole_trainer_is_taken(run: Path, tmp_path: Path) -> None:
    damage(run, TRAINER, 4)
    found = salvaged(str(run), str(tmp_path / "salvaged"))
    assert found.step == 2
    assert found.origin.endswith("/3")
    assert found.left_out == {}
    (loss,) = found.losses
    assert "generation 3 (step 2) was taken, and not generation 4 (step 4)" in loss.lost
    assert await goes_on(str(tmp_path / "salvaged")) == EVERY


@pytest.mark.parametrize("step", [0, 1, 2, 4])
async def test_any_step_can_be_asked_for(run: Path, tmp_path: Path, step: int) -> None:
    found = salvaged(str(run), str(tmp_path / "salvaged"), step=step)
    assert (found.step, found.whole) == (step, True)
    assert await goes_on(str(tmp_path / "salvaged")) == EVERY


async def test_a_step_that_is_not_there_is_refused_with_those_that_are(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no generation of step 3.*\[0, 1, 2, 4\]"):
        salvage(str(run), str(tmp_path / "salvaged"), step=3)
    assert not (tmp_path / "salvaged").exists()


async def test_a_trainer_that_is_damaged_everywhere_is_left_out_and_resume_says_so(run: Path, tmp_path: Path) -> None:
    damage(run, TRAINER, 0, 1, 2, 3, 4)
    target = str(tmp_path / "salvaged")
    found = salvaged(str(run), target)
    assert (found.step, list(found.left_out)) == (4, [TRAINER])
    assert found.generations_usable == 5
    async with make(7, target) as pipe:
        pipe.attach(trained=Trained())
        with pytest.raises(UsageError, match=r"trained is damaged when the run was salvaged.*crc32c.*without trained"):
            await pipe.resume()
    # Its weights come from somewhere else, and from then on they are part of every generation.
    elsewhere = Trained(begun=4)
    async with make(8, target) as pipe:
        with structlog.testing.capture_logs() as logs:
            resumed = await pipe.resume()
        (line,) = [line for line in logs if line["event"] == "generation.incomplete"]
        assert line["file"] == TRAINER
        assert resumed.step == 4
        pipe.attach(trained=elsewhere)
        await pipe.start(weights_current=True)
        await train(pipe, elsewhere, await pipe.get_batch(GROUPS))
        await (await pipe.save(5)).committed()
    async with make(9, target) as pipe:
        again = Trained(begun=4)
        pipe.attach(trained=again)
        assert (await pipe.resume()).step == 5
        assert again.batches == elsewhere.batches
        await pipe.start(weights_current=True)
        await finish(pipe, again, GROUPS)
        assert len(again.items) == sum(EVERY.values()) - 4 * GROUPS


async def test_a_step_whose_trainer_is_damaged_can_be_asked_for(run: Path, tmp_path: Path) -> None:
    damage(run, TRAINER, 4)
    found = salvaged(str(run), str(tmp_path / "salvaged"), step=4)
    assert (found.step, list(found.left_out)) == (4, [TRAINER])

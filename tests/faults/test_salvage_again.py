"""A run that was salvaged, and went on, is damaged and salvaged again, and again: no item is trained once too often,
and what is trained too seldom was listed."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import anyio
import pytest

from pipeline import ForebayError
from pipeline.checkpoint import salvage, verify
from pipeline.store.frames import HEADER_BYTES
from tests.support.crashes import Trained, begin, crashed_copy, train
from tests.support.salvaging import EPOCHS, ITEMS, flip, goes_on, make, two_lives

pytestmark = pytest.mark.virtual_time
SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
SEEDS = range(5 + 50 * (SOAK - 1))
KINDS = (".fbj", ".fbs", ".json", ".safetensors")


def damage(directory: str, chance: random.Random) -> None:
    """Flip, cut, blank or remove one to four files."""
    files = [path for path in sorted(Path(directory).rglob("*")) if path.suffix in KINDS and path.name != "run.json"]
    for _ in range(chance.randrange(1, 5)):
        path = chance.choice([each for each in files if each.exists() and each.stat().st_size])
        raw, how = bytearray(path.read_bytes()), chance.random()
        if how < 0.6:
            flip(path, chance.randrange(len(raw)))
        elif how < 0.75:
            path.write_bytes(raw[: chance.randrange(len(raw))])
        elif how < 0.85:
            path.unlink()
        else:
            start = chance.randrange(len(raw))
            count = min(len(raw) - start, chance.randrange(1, 300))
            raw[start : start + count] = bytes(count)
            path.write_bytes(raw)


async def go_on_a_little(directory: str, seed: int) -> str:
    """Train one batch, and die."""
    async with make(seed, directory) as pipe:
        trained = Trained()
        step = (await begin(pipe, trained=trained)).step
        pipe.ledger.check()
        async for batch in pipe.batches(2, until=step + 1):
            await train(pipe, trained, batch)
            await (await pipe.save(batch.step)).committed()
        await anyio.sleep(2)
        return crashed_copy(directory, directory + " crashed")


@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_is_trained_once_too_often_however_often_a_run_is_salvaged(tmp_path: Path, seed: int) -> None:
    chance, listed = random.Random(seed), set[int]()
    directory = await two_lives(tmp_path)
    try:
        for life in range(3):
            damage(directory, chance)
            target = str(tmp_path / f"salvaged {life}")
            losses = salvage(directory, target).losses
            listed |= {int(index) for loss in losses for index in re.findall(r"(?:index |, )(\d+)[ ,:]", loss.lost)}
            assert verify(target).whole
            directory = await go_on_a_little(target, 50 + life) if life < 2 else target
        trained = await goes_on(directory)
    except ForebayError as error:  # nothing says what the weights have seen, or they are damaged themselves
        if seed < 5 or not re.search(
            "no generation says what the weights|damaged when the run was salvaged", str(error)
        ):
            raise  # the first seeds all come to the end
        return
    assert max(trained.values()) <= EPOCHS
    assert {index for index in range(ITEMS) if trained.get(index, 0) < EPOCHS} <= listed


@pytest.mark.parametrize("seed", range(4))
async def test_uids_of_items_that_were_claimed_again_say_nothing_of_the_draws(tmp_path: Path, seed: int) -> None:
    """The record that says which uid is whose is lost twice: what may have been trained is given up, and listed."""
    directory, listed = await two_lives(tmp_path), set[int]()
    for life in range(3):
        target = str(tmp_path / f"salvaged {life}")
        found = salvage(directory, target)
        listed |= {int(index) for loss in found.losses for index in re.findall(r"(?:index |, )(\d+)[ ,:]", loss.lost)}
        if life < 2:
            directory = await go_on_a_little(target, 50 + seed + life)
            flip(Path(directory) / "journals/000001-0000.fbj", HEADER_BYTES)
            for segment in (Path(directory) / "segments").iterdir():
                segment.unlink()
    trained = await goes_on(target)
    assert max(trained.values()) <= EPOCHS
    assert {index for index in range(ITEMS) if trained.get(index, 0) < EPOCHS} <= listed

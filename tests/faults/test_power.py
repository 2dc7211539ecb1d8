"""What a loss of power takes: with ``durability="power"`` what was written within the last second, and no more."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import Context, Damaged, Item, Pipeline, Rollout, Task, WriteFailed
from tests.support.crashes import Trained, begin, finish, inline_pipeline, train
from tests.support.disk import ScriptedFiles
from tests.support.power import VolatileFiles
from tests.support.runs import numbers

pytestmark = pytest.mark.virtual_time

SECONDS = 1.0


class Clocked:
    """Says when each of its rollouts ended."""

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}

    async def __call__(self, item: Item, ctx: Context) -> Rollout:
        await anyio.sleep(0.1 + float(ctx.rng.random()))
        self.ended[item["n"]] = anyio.current_time()
        return Rollout({"n": [item["n"]]}, reward=1.0)


def make(directory: str, run: Any, files: Any, durability: Any = "power", size: int = 1) -> Pipeline:
    given = Task("numbers", source=numbers(60), run=run, shuffle=False, group_size=size)
    options: dict[str, Any] = {"concurrency": 3, "capacity": 60, "durability": durability, "segment_bytes": 3000}
    return inline_pipeline(given, directory=directory, files=files, max_deaths=99, **options)


def journals_alone(name: str) -> bool:
    """The disk has written the journals in time, and the segments not."""
    return name.endswith(".fbj")


def segments_alone(name: str) -> bool:
    return name.endswith(".fbs")


def nothing(name: str) -> bool:
    return False


Lucky = Callable[[str], bool]


async def until_the_power_goes(
    directory: str, target: str, when: float, durability: str, lucky: Lucky, size: int = 1
) -> set[int]:
    """Live for a while. Returns what had ended more than a second before the end, or was in the last checkpoint."""
    run, files, trained = Clocked(), VolatileFiles(), Trained()
    async with make(directory, run, files, durability, size) as pipe:
        await begin(pipe, trained=trained)
        began, saved = anyio.current_time(), set[int]()
        while anyio.current_time() < began + when:
            with anyio.move_on_at(began + when):
                await train(pipe, trained, await pipe.get_batch(2))
                await anyio.sleep(0.7)
                if len(trained.batches) % 4 == 0:
                    known = set(run.ended)
                    await (await pipe.save(len(trained.batches))).committed()
                    saved = known
        files.after_power_loss(directory, target, lucky=lucky)
        now = anyio.current_time()
    files.end()
    return saved | {n for n, at in run.ended.items() if durability == "power" and at < now - SECONDS - 1e-6}


@pytest.mark.parametrize("durability", ["power", "kill"])
@pytest.mark.parametrize("lucky", [nothing, journals_alone, segments_alone])
@pytest.mark.parametrize("seed", range(12))
async def test_what_is_promised_is_there(tmp_path: Path, durability: str, lucky: Lucky, seed: int) -> None:
    when = random.Random(seed).uniform(0.5, 12.0)
    target = str(tmp_path / "left")
    promised = await until_the_power_goes(str(tmp_path / "run"), target, when, durability, lucky)
    again = Clocked()
    async with make(target, again, ScriptedFiles()) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        await finish(pipe, trained, 2)
    assert trained.items == list(range(60))
    assert not promised & set(again.ended), "run again, though it was promised to be there"
    assert durability == "kill" or when < 2 or promised


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("lucky", [nothing, journals_alone, segments_alone])
@pytest.mark.parametrize("seed", range(12))
async def test_again_and_again_every_item_is_trained_once(tmp_path: Path, lucky: Lucky, seed: int, size: int) -> None:
    chance = random.Random(seed)
    directory = str(tmp_path / "0")
    for loss in range(1, 5):
        durability, target = chance.choice(["power", "kill"]), str(tmp_path / str(loss))
        await until_the_power_goes(directory, target, chance.uniform(0.2, 5.0), durability, lucky, size)
        directory = target
    for _ in range(2):  # what was left out stays left out
        async with make(directory, Clocked(), ScriptedFiles(), size=size) as pipe:
            trained = Trained()
            await begin(pipe, trained=trained)
            await finish(pipe, trained, 2)
            pipe.ledger.check()
            assert pipe.ledger.claimed == 60
            await pipe.save(len(trained.batches))
        assert trained.items == list(range(60))


async def test_what_was_synced_and_is_gone_is_damage(tmp_path: Path) -> None:
    target = str(tmp_path / "left")
    await until_the_power_goes(str(tmp_path / "run"), target, 6.0, "power", lambda name: True)
    first = min(Path(target, "segments").iterdir())
    first.write_bytes(first.read_bytes()[:-300])
    async with make(target, Clocked(), ScriptedFiles()) as pipe:
        pipe.attach(trained=Trained())
        with pytest.raises(Damaged, match=r"000001-0000-000001\.fbs at byte"):
            await pipe.resume()


async def test_the_log_says_what_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = str(tmp_path / "left")
    await until_the_power_goes(str(tmp_path / "run"), target, 0.95, "kill", journals_alone)
    async with make(target, Clocked(), ScriptedFiles()) as pipe:
        pipe.attach(trained=Trained())
        resumed = await pipe.resume()
    assert resumed.set_aside > 0
    (line,) = [record.getMessage() for record in caplog.records if "journal.unwritten" in record.getMessage()]
    assert "000001-0000.fbj" in line
    assert "uid=" in line


async def test_a_quiet_run_is_synced_once_and_a_closed_one_is_whole(tmp_path: Path) -> None:
    directory, files, run = str(tmp_path / "run"), VolatileFiles(), Clocked()
    async with make(directory, run, files) as pipe:
        await begin(pipe)
        await anyio.sleep(50)
        before = files.syncs
        await anyio.sleep(1000)
        assert files.syncs == before, "nothing was written, and it was synced all the same"
        await pipe.put("numbers", Rollout({"n": [60]}, reward=1.0))
    left = files.after_power_loss(directory, str(tmp_path / "left"))
    files.end()
    async with make(left, again := Clocked(), ScriptedFiles()) as pipe:
        await begin(pipe)
        assert pipe.ledger.count(3) == 61
    assert not again.ended


async def test_a_sync_that_fails_is_told(tmp_path: Path) -> None:
    class Broken(VolatileFiles):
        broken = False

        def sync(self, handle: int) -> None:
            if self.broken:
                raise OSError(errno.EIO, "the disk is gone")
            super().sync(handle)

    files = Broken()

    async def live() -> None:
        async with make(str(tmp_path / "run"), Clocked(), files) as pipe:
            await begin(pipe)
            files.broken = True
            await pipe.get_batch(60)

    with pytest.raises(WriteFailed, match=r"could not sync .* the disk is gone"):
        await live()
    files.end()

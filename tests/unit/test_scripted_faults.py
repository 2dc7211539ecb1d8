"""Faults by script strike where they are told to, and the pipeline deals with each as with a real one."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import (
    ConfigError,
    Context,
    FailFast,
    Item,
    Pipeline,
    Retry,
    Rollout,
    RolloutFailed,
    RolloutInvalid,
    StoreError,
    Task,
)
from pipeline.testing import (
    Cancel,
    Fail,
    FailingFiles,
    Hang,
    Numbers,
    Return,
    ScriptedFault,
    Slow,
    faulty,
)
from tests.support.crashes import begin, inline_pipeline

ROOT = Path(__file__).parents[2]


async def second(item: Item, ctx: Context) -> Rollout:
    """A rollout of one second."""
    await anyio.sleep(1)
    return Rollout({"n": [item["n"]]}, reward=1.0)


def numbers(*faults: Any, count: int = 8, **how: Any) -> Task:
    how.setdefault("on_failure", Retry(attempts=3))
    return Task("numbers", source=Numbers(count), run=faulty(second, *faults), shuffle=False, **how)


async def train(pipe: Pipeline) -> None:
    async for batch in pipe.batches(groups=4):
        async with pipe.weight_update(version=batch.step):
            pass


async def outcome(task: Task) -> tuple[float, int, int, dict[str, int]]:
    """Train it all, and return the time that it took, and what was trained, failed and dropped."""
    async with inline_pipeline(task, concurrency=8) as pipe:
        began = anyio.current_time()
        await begin(pipe)
        await train(pipe)
        totals = pipe.ledger.totals["numbers"]
        return anyio.current_time() - began, totals.trained, totals.failed, totals.dropped


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("fault", "how", "expected"),
    [
        (Fail(index=3), {}, (1, 8, 1, {})),
        (Fail(index=3, late=True), {}, (2, 8, 1, {})),
        (Fail(index=3, attempt=None), {}, (1, 7, 3, {"failed": 1})),
        (Fail(index=3, attempt=2), {}, (1, 8, 0, {})),
        (Fail(index=3, member=1), {}, (1, 8, 0, {})),
        (Fail(index=3, epoch=1), {"epochs": 2}, (2, 16, 1, {})),
        (Fail(task="others", attempt=None), {}, (1, 8, 0, {})),
        (Fail(), {}, (1, 8, 8, {})),
        (Hang(index=0), {"timeout": 5}, (6, 8, 1, {})),
        (Slow(index=7, seconds=9), {}, (10, 8, 0, {})),
        (Cancel(index=2), {}, (1, 8, 1, {})),
        (Return(index=1, value=Rollout(reward=float("nan"))), {}, (1, 8, 1, {})),
    ],
    ids=str,
)
async def test_each_strikes_where_it_is_told_to(fault: Any, how: dict[str, Any], expected: tuple[Any, ...]) -> None:
    seconds, *counts = await outcome(numbers(fault, **how))
    assert (round(seconds), *counts) == expected


@pytest.mark.virtual_time
async def test_the_first_of_several_counts() -> None:
    seconds, *counts = await outcome(numbers(Slow(index=3, seconds=4), Fail(index=3, attempt=None)))
    assert (round(seconds), *counts) == (5, 8, 0, {})


@pytest.mark.virtual_time
async def test_the_error_says_which_attempt_it_is() -> None:
    with pytest.raises(RolloutFailed, match="member 0, attempt 1: ScriptedFault") as raised:
        await outcome(numbers(Fail(index=3), on_failure=FailFast()))
    assert isinstance(raised.value.__cause__, ScriptedFault)


@pytest.mark.virtual_time
async def test_what_is_no_rollout_ends_the_run() -> None:
    with pytest.raises(RolloutInvalid, match="the runner returned str 'text'"):
        await outcome(numbers(Return(index=1, value="text")))


@pytest.mark.parametrize("wrong", [{"attempt": 0}, {"index": -1}, {"member": True}, {"epoch": "1"}], ids=str)
def test_one_that_could_never_strike_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Fail(**wrong)


@pytest.mark.virtual_time
async def test_a_disk_that_is_full_is_told_and_what_was_written_before_is_there(run_directory: str) -> None:
    files = FailingFiles(after=60, error=OSError(errno.ENOSPC, "the disk is full"))

    async def live() -> int:
        async with inline_pipeline(numbers(count=500), directory=run_directory, files=files, concurrency=8) as pipe:
            await begin(pipe)
            await train(pipe)
            return pipe.ledger.totals["numbers"].trained

    with pytest.raises(StoreError, match="the disk is full"):
        await live()
    files.mended = True
    assert await live() == 500


SCRIPT = """
    import sys
    import anyio
    from pipeline import Pipeline, Rollout, Task
    from pipeline.testing import FakeTrainer, KillingFiles, Numbers

    async def run(item, ctx):
        await anyio.sleep(0)
        return Rollout(reward=1.0)

    async def main(directory, after):
        trainer = FakeTrainer()
        files = KillingFiles(after=after)
        task = Task("numbers", source=Numbers(60), run=run)
        async with Pipeline(task, directory=directory, files=files, concurrency=4) as pipe:
            pipe.attach(trainer=trainer)
            resumed = await pipe.resume()
            async with pipe.weight_update(version=resumed.version):
                pass
            await pipe.start()
            async for batch in pipe.batches(groups=4):
                trainer.step(batch)
                async with pipe.weight_update(version=batch.step):
                    pass
                if batch.step % 5 == 0:
                    await pipe.save(batch.step)
        print(sorted(index for _, _, index in trainer.groups) == list(range(60)))

    anyio.run(main, sys.argv[1], int(sys.argv[2]))
"""


def test_a_process_dies_at_the_change_that_it_is_told_and_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ended: list[int] = []
    for after in (0, 3, 12, 25, 10**6):
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path / "run"), str(after)],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            timeout=60,
        )
        ended.append(done.returncode)
    assert ended == [-9, -9, -9, -9, 0], done.stderr
    assert done.stdout == "True\n"

"""The pytest plugin in a suite of somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = 'pytest_plugins = ["pipeline.testing.plugin"]\n'
SUITE = """
import asyncio
import time

import anyio
import pytest

from forebay import Pipeline, Rollout, SequenceSource, Task
from pipeline.testing import FakeTrainer, VirtualClockLoop, assert_exact_resume


async def solve(item, ctx):
    await anyio.sleep(600 * (1 + ctx.rng.random()))
    return Rollout({"answer": [item["n"]]}, reward=1.0)


def task():
    return Task("mine", source=SequenceSource([{"n": n} for n in range(6)]), run=solve)


@pytest.mark.virtual_time
async def test_hours_pass_at_once():
    began = time.monotonic()
    await anyio.sleep(36_000)
    assert time.monotonic() - began < 60
    assert isinstance(asyncio.get_running_loop(), VirtualClockLoop)


async def test_others_have_the_usual_loop():
    assert not isinstance(asyncio.get_running_loop(), VirtualClockLoop)


@pytest.mark.virtual_time
async def test_a_pipeline_in_memory():
    async with Pipeline(task(), watchdog=None) as pipe:
        await pipe.start()
        batch = await pipe.get_batch(6)
        assert len(batch) == 6


@pytest.mark.virtual_time
async def test_my_task_survives():
    report = await assert_exact_resume(lambda **how: Pipeline(task(), order="strict", **how), groups=2, most=25)
    assert report.exact and report.cuts == 25


@pytest.mark.virtual_time
async def test_what_differs_is_told():
    lives = iter(range(100))

    def make(**how):
        offset = next(lives)
        source = SequenceSource([{"n": n} for n in range(6 + (offset > 0))])
        return Pipeline(Task("mine", source=source, run=solve), order="strict", **how)

    with pytest.raises(AssertionError, match="cut after change"):
        await assert_exact_resume(make, groups=2, most=10)
"""


def test_a_suite_of_a_users_own(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    scope = ["-o", "asyncio_default_fixture_loop_scope=function"]
    strict = ["--strict-markers", "-W", "error", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, *scope, *strict],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

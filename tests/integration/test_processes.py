"""Worker processes of real scripts: killed with their parent, started from scripts, on either event loop."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import ProcessEngine
from pipeline.engines.naming import Named
from pipeline.engines.worker import loading
from tests.support import in_workers, killed_workers
from tests.support.bells import bell_in
from tests.support.children import Ended, child
from tests.support.runs import pipeline, task
from tests.support.workers import end_of, gone, items, rollouts

ROOT = Path(__file__).parents[2]
SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))
COUNT = 60


def trained_through_kills(directory: str, kills: int, rng: random.Random) -> tuple[list[int], set[int]]:
    """Kill a trainer ``kills`` times, each after a few steps, and let it finish. Returns what it trained, and the pids
    of the workers that were left."""
    left: set[int] = set()
    while True:
        with child(killed_workers.trainer, directory, COUNT) as process:
            steps = rng.randrange(1, 4) if kills else 10**6
            try:
                while steps:
                    said = process.hear()
                    if said[0] == "seen":
                        return said[1], left
                    assert said[0] != "raised", said[1]
                    steps -= 1
                    left |= set(said[1])
            except Ended:
                raise AssertionError("the trainer left early") from None
            process.kill()
        kills -= 1


@pytest.mark.parametrize("seed", range(SOAK))
def test_a_trainer_that_is_killed_goes_on_and_its_workers_end_with_it(tmp_path: Path, seed: int) -> None:
    seen, pids = trained_through_kills(str(tmp_path / "run"), 3, random.Random(seed))
    assert seen == [1] * COUNT
    assert len(pids) > 2
    for pid in pids:
        anyio.run(end_of, pid)
    # What a run in this process finds there is the same: nothing is left to be trained.
    assert anyio.run(killed_workers.train, str(tmp_path / "run"), COUNT, None, print).seen.tolist() == seen


def test_workers_that_hear_nothing_and_what_they_started_end_with_a_killed_parent(tmp_path: Path) -> None:
    async def hear(count: int) -> list[int]:
        return [int(word) for _ in range(count) for word in await bell.hear()]

    with bell_in(tmp_path) as bell, child(killed_workers.waits, str(tmp_path)) as process:
        assert process.hear() == process.process.pid
        pids = anyio.run(hear, 2)
        assert len(pids) == 3
        assert not any(map(gone, pids))
        process.send(signal.SIGKILL)
        for pid in pids:
            anyio.run(end_of, pid)


@pytest.fixture
def as_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a text what a worker takes for the script of the process that started it."""
    before = set(sys.modules)

    def make(text: str, package: str = "") -> None:
        folder = tmp_path / package
        folder.mkdir(exist_ok=True)
        (folder / "script.py").write_text(text)
        monkeypatch.setattr(loading, "script", {"path": str(folder / "script.py"), "package": package})

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in set(sys.modules) - before:
        del sys.modules[name]


UNGUARDED = """
import anyio
from forebay import ProcessEngine

def double(value):
    return 2 * value

async def main():
    async with ProcessEngine(workers=1) as engine:
        await engine.call(double, 4)

anyio.run(main)
"""


def test_a_script_without_a_guard_is_told_so(as_script: Callable[..., None]) -> None:
    as_script(UNGUARDED)
    with pytest.raises(loading.NotLoaded, match=r"UsageError: this script is being imported by a worker .* under `if"):
        loading.load(Named("__main__", "double"))


def test_a_module_that_is_run_by_name_may_import_its_neighbours(as_script: Callable[..., None], tmp_path: Path) -> None:
    as_script("from .near import value\n\ndef give():\n    return value, __name__\n", "forebay_test_package")
    (tmp_path / "forebay_test_package" / "__init__.py").touch()
    (tmp_path / "forebay_test_package" / "near.py").write_text("value = 5\n")
    assert loading.load(Named("__main__", "give"))() == (5, "forebay_test_package.__forebay_main__")
    assert loading.load(Named("__main__", "give")) is loading.load(Named("__main__", "give"))


def test_an_engine_runs_under_trio_as_well() -> None:
    async def main() -> None:
        tasks = [
            task(20, in_workers.number, "plain"),
            task(20, in_workers.number_async, "async"),
            task(1, "tests.support.in_workers:dies", "dies"),
        ]
        tasks[2].source = items({"how": "segfault"})
        where: Any = ProcessEngine(workers=1, per_worker=4, grace_s=0.1)
        async with pipeline(tasks, engine=where) as pipe:
            await pipe.start()
            found = await rollouts(pipe)
            assert len(found) == 41
            assert sum(rollout.reward for rollout in found) == 2 * sum(range(20)) + 1
            assert pipe.ledger.totals["dies"].interrupted == 1
            assert await where.call(in_workers.add, 1) == 2
            with pytest.raises(TimeoutError):
                await where.call(in_workers.stuck, timeout=0.05)
            assert await where.call(in_workers.add, 1) == 2
        assert where.processes == 0

    anyio.run(main, backend="trio")


def test_the_example_with_simulators_ends_with_every_throw() -> None:
    done = subprocess.run(
        [sys.executable, "examples/simulators.py"], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("100 throws, ")
    assert 0 < int(first.split()[2]) < 40
    assert second.startswith("the farthest: ")

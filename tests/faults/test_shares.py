"""Shares that change while a run goes on: from the next draw, and after a resume as the words of set_share say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import ConfigError, Pipeline, Task, UsageError
from pipeline.observe import events
from tests.support.crashes import Trained, begin, crashed_copy, inline_pipeline, lasting, train
from tests.support.runs import task

pytestmark = pytest.mark.virtual_time


def both(a: float = 1.0, b: float = 1.0) -> list[Task]:
    return [task(400, lasting({}), name="a", share=a), task(400, lasting({}), name="b", share=b)]


def make(tasks: Any, **options: Any) -> Pipeline:
    return inline_pipeline(tasks, concurrency=1, capacity=800, **options)


def claimed(pipe: Pipeline) -> tuple[int, int]:
    return pipe.ledger.totals["a"].claimed, pipe.ledger.totals["b"].claimed


async def drawn(pipe: Pipeline, count: int) -> tuple[int, int]:
    """How many the next draws are of each."""
    before = claimed(pipe)
    await anyio.sleep(1.05 * count)  # each takes a little longer than a second
    after = claimed(pipe)
    return after[0] - before[0], after[1] - before[1]


async def test_another_share_counts_from_the_next_draw() -> None:
    async with make(both()) as pipe:
        await pipe.start()
        await anyio.sleep(10)
        a, b = await drawn(pipe, 40)
        assert abs(a - b) <= 1
        await pipe.set_share("a", 3)
        a, b = await drawn(pipe, 40)
        assert abs(a - 3 * b) <= 4, "it does not have to catch up"
        await pipe.set_share(pipe._tasks[0], 1e-9)
        a, b = await drawn(pipe, 40)
        assert a == 0


@pytest.mark.parametrize(
    ("given", "expected", "told"),
    [
        ({}, {"a": 3.0, "b": 1.0}, []),
        ({"a": 2.0}, {"a": 2.0, "b": 1.0}, [("a", 3.0, 2.0)]),
        ({"b": 5.0}, {"a": 3.0, "b": 5.0}, [("b", 1.0, 5.0)]),
        ({"a": 3.0}, {"a": 3.0, "b": 1.0}, [("a", 3.0, 3.0)]),
    ],
)
async def test_after_a_resume_it_stays_unless_the_task_says_another(
    run_directory: str, tmp_path: Path, given: Any, expected: Any, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make(both(), directory=run_directory) as pipe:
        trained = Trained()
        await begin(pipe, trained=trained)
        batch = await pipe.get_batch(1)
        await train(pipe, trained, batch)
        await (await pipe.save(1)).committed()
        await pipe.set_share("a", 3.0)
        copy = crashed_copy(run_directory, tmp_path / "copy")
    for life in range(3):
        logged: list[tuple[Any, ...]] = []
        async with make(both(**given), directory=copy) as pipe:
            log = pipe._run.state.log

            class Log:
                def __getattr__(self, name: str, log: Any = log) -> Any:
                    return getattr(log, name)

                def info(self, event: str, logged: Any = logged, log: Any = log, **fields: Any) -> None:
                    if event == events.SHARE_CHANGED:
                        logged.append((fields["task"], fields["before"], fields["after"]))
                    log.info(event, **fields)

            monkeypatch.setattr(pipe._run.state, "log", Log())
            await begin(pipe, trained=Trained())
            assert pipe._run.state.sampler.mixture.shares == expected
            assert logged == (told if life == 0 else []), "and from then on it is what the run has"
            await anyio.sleep(0.1)
            again = crashed_copy(copy, tmp_path / f"copy {life}")
        copy = again


async def test_one_that_a_task_was_set_to_outlives_a_life_without_the_task(run_directory: str, tmp_path: Path) -> None:
    async with make(both(), directory=run_directory) as pipe:
        await begin(pipe)
        await pipe.set_share("a", 3.0)
        copy = crashed_copy(run_directory, tmp_path / "copy")
    async with make(both()[1], directory=copy) as pipe:
        await begin(pipe)
        assert pipe._run.state.sampler.mixture.shares == {"b": 1.0}
        again = crashed_copy(copy, tmp_path / "again")
    async with make(both(), directory=again) as pipe:
        await begin(pipe)
        assert pipe._run.state.sampler.mixture.shares == {"a": 3.0, "b": 1.0}


async def test_the_draws_after_a_crash_are_those_of_an_unbroken_run(tmp_path: Path) -> None:
    async def order(directory: Path, cut: bool) -> list[tuple[str, int]]:
        path = str(directory / "run")
        async with make(both(), directory=path, order="strict") as pipe:
            await begin(pipe, trained=Trained())
            await anyio.sleep(5.5)
            await pipe.set_share("a", 2.5)
            await anyio.sleep(7.3)
            if cut:
                path = crashed_copy(path, directory / "copy")
            else:
                return [(g.task, g.index) for g in await pipe.get_batch(40)]
        async with make(both(), directory=path, order="strict") as pipe:
            await begin(pipe, trained=Trained())
            return [(g.task, g.index) for g in await pipe.get_batch(40)]

    assert await order(tmp_path / "a", cut=True) == await order(tmp_path / "b", cut=False)


@pytest.mark.parametrize("share", [0, -1.0, float("nan"), float("inf"), "2", True, None])
async def test_a_share_that_cannot_be_is_refused_and_changes_nothing(share: Any) -> None:
    async with make(both()) as pipe:
        await pipe.start()
        with pytest.raises(ConfigError, match="share="):
            await pipe.set_share("a", share)
        with pytest.raises(ConfigError, match="task='c': the run's tasks are a, b"):
            await pipe.set_share("c", 1.0)
        assert pipe._run.state.sampler.mixture.shares == {"a": 1.0, "b": 1.0}


async def test_before_start_the_tasks_say_it() -> None:
    async with make(both()) as pipe:
        with pytest.raises(UsageError, match=r"comes after start\(\)"):
            await pipe.set_share("a", 1.0)

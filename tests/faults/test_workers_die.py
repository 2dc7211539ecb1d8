"""A worker process that dies costs its attempts, and nothing else; what is cut ends there too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import (
    Context,
    FailFast,
    Item,
    Limiter,
    Pipeline,
    ProcessEngine,
    ReplayBuffer,
    Rollout,
    RolloutFailed,
    RunnerRaised,
    Task,
    WorkerDied,
)
from tests.support import in_workers
from tests.support.bells import Bell, bell_in
from tests.support.runs import ids, numbers, pipeline, task
from tests.support.workers import end_of, engine, gone, items, one, rollouts, run_all, runner

KINDS = [pytest.param(None, "", id="plain"), pytest.param(2, "_async", id="async")]


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Bell]:
    with bell_in(tmp_path) as made:
        yield made


# -- deaths --------------------------------------------------------------------------------------------------------


async def test_a_death_says_how_it_came_and_what_was_said_last(capfd: pytest.CaptureFixture[str]) -> None:
    async with engine() as where:
        for how, name, code, said in (
            ("kill", "SIGKILL", None, "the last words"),
            ("segfault", "SIGSEGV", None, "in end\n"),
            ("exit", None, 7, ""),
        ):
            with pytest.raises(WorkerDied) as caught:
                await one(where, in_workers.dies, {"how": how})
            error, text = caught.value, str(caught.value)
            assert (error.signal, error.code, error.planned) == (name, code, False)
            assert said in error.stderr
            assert text.startswith(f"worker process {error.pid} {'left with exit code 7' if code else 'was killed by'}")
            assert "while it ran item 0 of epoch 0 of task 'one' (uid 0)" in text
            assert (said or "said nothing on stderr") in text
            assert said in capfd.readouterr().err
        # One that says what is no message is killed, and nobody else is hurt.
        with pytest.raises(WorkerDied, match="killed by SIGKILL"):
            await where.call(in_workers.babbles)
        # One that dies while it has nothing to do is replaced.
        pid = await where.call(in_workers.sleeps, 0)
        os.kill(pid, signal.SIGKILL)
        await end_of(pid)
        assert await where.call(in_workers.sleeps, 0) != pid


async def test_a_lost_attempt_is_run_again_and_is_no_failure() -> None:
    given = Task("t", source=items({"how": "kill"}, {"how": "exit"}), run=in_workers.dies, on_failure=FailFast())
    async with pipeline(given, engine=engine()) as pipe:
        await pipe.start()
        assert [rollout["n"].item() for rollout in await rollouts(pipe)] == [2, 2]
        totals = pipe.ledger.totals["t"]
        assert (totals.finished, totals.failed, totals.interrupted) == (2, 0, 2)


async def test_an_item_that_kills_every_worker_is_quarantined_and_the_rest_of_its_group_cut(run_directory: str) -> None:
    given = task(6, in_workers.poison, group_size=2, on_failure="fail_fast")
    async with pipeline(given, engine=engine(2), directory=run_directory, max_deaths=2) as pipe:
        await pipe.start()
        found = []
        async for batch in pipe.batches(groups=2):
            found += ids(batch)
        assert sorted(found) == [0, 2, 3, 4, 5]
        totals = pipe.ledger.totals["numbers"]
        assert (totals.failed, totals.dropped) == (0, {"quarantined": 1})
        assert 3 <= totals.interrupted <= 4
        pipe.ledger.check()
    async with pipeline(given, engine=engine(), directory=run_directory, max_deaths=2) as pipe:
        async with pipe.weight_update(version=(await pipe.resume()).version):
            pass
        await pipe.start()
        assert sorted([number async for batch in pipe.batches(groups=2) for number in ids(batch)]) == [0, 2, 3, 4, 5]
        assert pipe.ledger.totals["numbers"].dropped == {"quarantined": 1}


async def test_deaths_are_remembered_by_the_journal(run_directory: str) -> None:
    """Two deaths in one life and two in the next are four."""

    async def life(max_deaths: int) -> dict[str, int]:
        async with pipeline(
            task(2, in_workers.poison), engine=engine(), directory=run_directory, max_deaths=max_deaths
        ) as pipe:
            async with pipe.weight_update(version=(await pipe.resume()).version):
                pass
            await pipe.start()
            async for _ in pipe.batches(groups=1, until=1):
                pass
            await pipe._run.state.changed.wait_for(lambda: deaths(pipe) >= 2)
            return dict(pipe.ledger.totals["numbers"].dropped)

    def deaths(pipe: Pipeline) -> int:
        entry = pipe.ledger.entries.get(1)
        return 99 if entry is None else entry.deaths

    assert await life(10) == {}
    async with pipeline(task(2, in_workers.poison), engine=engine(), directory=run_directory, max_deaths=1) as pipe:
        await pipe.resume()
        assert pipe.ledger.totals["numbers"].dropped == {"quarantined": 1}


async def test_whoever_died_with_another_is_run_again_alone() -> None:
    """The poison's neighbours die once, though it takes three workers with it, and one death is all that they may."""
    async with pipeline(task(9, in_workers.poison_async), engine=engine(1, per_worker=3), max_deaths=2) as pipe:
        await pipe.start()
        found = []
        async for batch in pipe.batches(groups=1):
            found += ids(batch)
        assert sorted(found) == [0, 2, 3, 4, 5, 6, 7, 8]
        totals = pipe.ledger.totals["numbers"]
        assert totals.dropped == {"quarantined": 1}
        assert totals.interrupted == 5, "three at first, and the poison twice"


async def test_where_every_item_kills_its_worker_the_run_ends() -> None:
    given = task(50, in_workers.always_dies, epochs=None, max_failures=2)
    async with pipeline(given, engine=engine(), max_deaths=0) as pipe:
        await pipe.start()
        with pytest.raises(RolloutFailed, match=r"(?s)WorkerDied: .*number 2 that was given up in a row") as caught:
            await pipe.get_batch(1)
        assert isinstance(caught.value.__cause__, WorkerDied)


async def test_an_evaluation_gives_up_an_item_that_kills_every_worker() -> None:
    async with pipeline(task(1, in_workers.number), engine=engine(), max_deaths=1) as pipe:
        await pipe.start()
        result = await pipe.evaluate(task(3, in_workers.poison, "exam"))
        assert [(each.index, each.error is None) for each in result.outcomes] == [(0, True), (1, False), (2, True)]
        assert "was killed by SIGKILL" in (result.outcomes[1].error or "")


@pytest.mark.parametrize("missing", [["pidfd_open"], ["pidfd_open", "waitid"]], ids=str)
async def test_ends_are_seen_where_the_system_has_fewer_ways(
    missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing:
        monkeypatch.delattr(os, name, raising=False)
    async with engine() as where:
        with pytest.raises(WorkerDied):
            await where.call(in_workers.end, "kill")


async def test_three_hundred_rollouts_with_a_worker_killed_five_times_are_those_of_this_process() -> None:
    def trained(found: list[Rollout]) -> list[tuple[int, list[float], float]]:
        return sorted((each["n"].item(), each["noise"].tolist(), each.reward) for each in found)

    found: list[Rollout] = []
    given = task(150, in_workers.number_and_pid, group_size=2)
    seen: set[int] = set()
    async with pipeline(given, engine=engine(3), capacity=40, max_deaths=5) as pipe:
        await pipe.start()
        async for batch in pipe.batches(groups=5):
            found += batch.rollouts
            pids = {rollout.info["pid"] for rollout in batch.rollouts} - seen
            if len(seen) < 5 and pids:
                seen.add(min(pids))
                os.kill(min(pids), signal.SIGKILL)
        pipe.ledger.check()
        assert pipe.ledger.totals["numbers"].dropped == {}
        assert pipe.ledger.totals["numbers"].failed == 0
    assert len(seen) == 5
    assert trained(found) == trained(await run_all(task(150, in_workers.number_async, group_size=2), None))


# -- cuts ----------------------------------------------------------------------------------------------------------


def hanging(bell: Bell, kind: str = "", count: int = 2, *, seconds: float | None = None, **more: Any) -> Task:
    """A task whose first item hangs at its first try."""
    contents = [{"n": n, "bell": bell.path, "seconds": seconds, "deaf": seconds is None} for n in range(count)]
    return Task("t", source=items(*contents), run=runner("hangs", kind), shuffle=False, **more)


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize(("per_worker", "kind"), KINDS)
async def test_a_cut_attempt_keeps_its_worker_if_it_ends_within_the_grace_and_else_it_is_killed(
    per_worker: int | None, kind: str, deaf: bool, bell: Bell
) -> None:
    given = hanging(bell, kind, seconds=None if deaf else 0.05)
    where = engine(1, per_worker, grace_s=0.05 if deaf else 30)
    async with pipeline(given, engine=where, concurrency=1) as pipe:
        await pipe.start()
        assert await bell.hear() == ["began"]
        first = {worker.pid for crew in where._crews for worker in crew._workers}
        async with pipe.weight_update(version=1, running="abort"):
            assert pipe.statistics().rollouts.in_flight == 0
        found = await rollouts(pipe)
        assert [rollout.info["attempt"] for rollout in found] == [2, 1]
        assert ({rollout.info["pid"] for rollout in found} == first) is not deaf
        assert bell.heard() == ([["cut"]] if kind and not deaf else [])
        totals = pipe.ledger.totals["t"]
        assert (totals.failed, totals.interrupted) == (0, 1)


async def test_a_timeout_ends_the_attempt_and_its_worker_and_counts_as_a_failure(bell: Bell) -> None:
    async with pipeline(hanging(bell, timeout=0.5), engine=engine(grace_s=0.05)) as pipe:
        await pipe.start()
        found = await rollouts(pipe)
        assert [rollout.info["attempt"] for rollout in found] == [2, 1]
        totals = pipe.ledger.totals["t"]
        assert (totals.failed, totals.interrupted) == (1, 0)


async def test_who_shares_a_worker_that_is_killed_for_another_has_not_died(bell: Bell) -> None:
    given = [hanging(bell, "_async", 1, timeout=0.3), task(1, in_workers.waits_async, "other")]
    async with pipeline(given, engine=engine(1, per_worker=2, grace_s=0.05), max_deaths=0) as pipe:
        await pipe.start()
        assert len(await rollouts(pipe)) == 2
        assert pipe.ledger.totals["other"].dropped == {}


async def test_a_timeout_does_not_run_while_an_attempt_waits_for_a_worker(bell: Bell) -> None:
    """An attempt waits for the only worker for longer than it may take."""
    given = [
        Task("long", source=numbers(3), run=in_workers.sleeps_a_while),
        Task("short", source=numbers(3), run=in_workers.number, timeout=0.3, on_failure="fail_fast"),
        task(1, name="here"),
    ]
    async with pipeline(given, engine=engine(), concurrency=7) as pipe:
        await pipe.start()
        assert len(await rollouts(pipe, 1)) == 7


async def test_closing_leaves_no_process_neither_a_workers_own(bell: Bell) -> None:
    given = Task("t", source=items(*[{"bell": bell.path}] * 2), run=in_workers.never_ends)
    other = Task("u", source=items({"bell": bell.path}), run=in_workers.never_ends_async)
    where = engine(2, per_worker=1, grace_s=0.05)
    async with pipeline([given, other], engine=where) as pipe:
        await pipe.start()
        pids = [int(word) for _ in range(3) for word in await bell.hear()]
        assert len(pids) == 5
        assert not any(map(gone, pids))
        guardian = where._guardian._process
        assert guardian is not None
    assert where.processes == 0
    assert gone(guardian.pid)
    assert all(map(gone, pids))


async def test_a_pipeline_may_be_closed_while_its_workers_start() -> None:
    where = engine(2)
    async with pipeline(task(5, in_workers.number), engine=where) as pipe:
        await pipe.start()
        with anyio.move_on_after(0.02):
            await pipe.get_batch(5)
        assert where.processes == 2
        pids = [worker.pid for worker in where._plain._workers]
    assert all(map(gone, pids))


async def test_an_evaluation_has_a_worker_though_all_wait_for_the_limiter() -> None:
    """The trainer waits for the evaluation, and rows for the trainer."""
    limits = Limiter(min_size=1, ratio=1.0, error_buffer=1.0)
    where = engine(1)
    async with Pipeline(
        task(50, in_workers.plays), engine=where, buffer=ReplayBuffer(1000, limiter=limits), watchdog=None
    ) as pipe:
        await pipe.start()
        await pipe._run.state.changed.wait_for(lambda: pipe._run.state.experience.held > 0)  # type: ignore[union-attr]
        with anyio.fail_after(30):
            result = await pipe.evaluate(task(2, in_workers.number, "exam"))
        assert [each.reward for each in result.outcomes] == [0.0, 1.0]


# -- functions -----------------------------------------------------------------------------------------------------


async def test_functions_are_called_in_workers() -> None:
    async with engine(2, grace_s=0.05) as where:
        assert await where.call(in_workers.add, 1, 2) == 3
        assert await where.call("tests.support.in_workers:add", [1], [(2,)]) == [1, (2,)]
        assert await where.call(in_workers.number_of, 1) == 101
        big = await where.call(in_workers.big_array, 5)
        assert (big.nbytes, big[0], big.flags.writeable) == (in_workers.BIG, 5, True)
        with pytest.raises(RunnerRaised, match=r"^OwnError: x\n"):
            await where.call(in_workers.raises, "x")
        with pytest.raises(RunnerRaised, match="returned what cannot go to another process: a Strange"):
            await where.call(in_workers.returns_strange)
        with pytest.raises(ValueError, match=r"call\(.*:add\): an argument cannot go to a worker process: a Strange"):
            await where.call(in_workers.add, in_workers.Strange())
        with pytest.raises(WorkerDied, match=r"while it ran tests.support.in_workers:end\(\)"):
            await where.call(in_workers.end, "exit")
        with pytest.raises(TimeoutError, match=r"stuck\): the function took longer than timeout=0.05 s"):
            await where.call(in_workers.stuck, timeout=0.05)
        pids: set[int] = set()

        async def note() -> None:
            pids.add(await where.call(in_workers.sleeps, 0.2, timeout=60))

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(note)
        assert len(pids) == 2
        with anyio.move_on_after(0.05) as scope:
            await where.call(in_workers.stuck)
        assert scope.cancelled_caught
        assert await where.call(in_workers.add, 1) == 2


async def test_a_grader_that_dies_under_a_runner_of_this_process_costs_that_attempt() -> None:
    where, tries = ProcessEngine(workers=1), []

    async def graded(item: Item, ctx: Context) -> Rollout:
        tries.append(ctx.attempt)
        if ctx.attempt == 1:
            await where.call(in_workers.end, "kill")
        return Rollout(reward=await where.call(in_workers.add, 0.5))

    async with pipeline(task(1, graded, on_failure="fail_fast"), engine=where) as pipe:
        await pipe.start()
        batch = await pipe.get_batch(1)
        assert (tries, batch.rewards.tolist()) == ([1, 2], [1.5])

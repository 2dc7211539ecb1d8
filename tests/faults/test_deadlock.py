"""What goes wrong among the rollouts reaches the trainer: nobody waits for ever, nor is told that all is well."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from pipeline import (
    Context,
    FailFast,
    ForebayError,
    Item,
    Retry,
    Rollout,
    RolloutFailed,
    Skip,
    SourceMark,
    Starved,
    Task,
    WriteFailed,
)
from tests.support.crashes import Trained, begin, crashed_copy, finish, inline_pipeline, lasting
from tests.support.disk import ScriptedFiles
from tests.support.runs import ids, numbers, pipeline, task

virtual = pytest.mark.virtual_time


class Boom(BaseException):
    """What is no Exception, as ``pytest.fail`` and some libraries raise it."""


async def failing(item: Item, ctx: Context) -> Rollout:
    await anyio.sleep(1.0 + 1e-4 * item["n"])
    if item["n"] == 3:
        raise ValueError("x")
    return Rollout({"n": [item["n"]]}, reward=0.0)


class TestProducerDies:
    """CASES 92."""

    @virtual
    async def test_fail_fast_raises_the_original_error_in_the_waiting_verb_at_once(self) -> None:
        before = asyncio.all_tasks()
        began = anyio.current_time()

        async def run() -> None:
            async with inline_pipeline(task(8, failing, on_failure=FailFast()), concurrency=8) as pipe:
                await pipe.start()
                await pipe.get_batch(8)

        with pytest.raises(RolloutFailed, match=r"item 3 .*'numbers'.*ValueError: x") as caught:
            await run()
        assert isinstance(caught.value.__cause__, ValueError)
        assert anyio.current_time() - began < 2
        assert asyncio.all_tasks() == before

    @virtual
    async def test_it_is_raised_within_one_turn_of_the_loop(self) -> None:
        failed_at: list[int] = []
        turns = 0

        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(1.0)
            failed_at.append(turns)
            raise ValueError("x")

        async def count() -> None:
            nonlocal turns
            while True:
                await anyio.sleep(0.01)
                for _ in range(20):
                    turns += 1
                    await anyio.lowlevel.checkpoint()

        async with inline_pipeline(task(1, run, on_failure="fail_fast")) as pipe, anyio.create_task_group() as group:
            group.start_soon(count)
            await pipe.start()
            with pytest.raises(RolloutFailed):
                await pipe.get_batch(1)
            assert turns - failed_at[0] <= 1
            group.cancel_scope.cancel()

    @virtual
    async def test_skip_counts_one_failure_and_trains_the_rest(self) -> None:
        async with inline_pipeline(task(8, failing, on_failure=Skip())) as pipe:
            await pipe.start()
            trained = await finish(pipe, Trained(), 2)
            totals = pipe.ledger.totals["numbers"]
        assert trained.items == [0, 1, 2, 4, 5, 6, 7]
        assert (totals.failed, totals.dropped) == (1, {"failed": 1})

    @virtual
    @pytest.mark.parametrize("error", [SystemExit(0), SystemExit("stop"), Boom("boom"), asyncio.CancelledError()])
    @pytest.mark.parametrize("policy", ["skip", "fail_fast"])
    async def test_a_runner_that_lets_out_what_is_no_exception_has_failed_and_nothing_else(
        self, error: BaseException, policy: str
    ) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(0.1)
            if item["n"] % 3 == 1:
                raise error
            return Rollout(reward=0.0)

        async with inline_pipeline(task(9, run, on_failure=policy), concurrency=2) as pipe:
            await pipe.start()
            if policy == "skip":
                assert (await finish(pipe, Trained(), 2)).items == [0, 2, 3, 5, 6, 8]
            else:
                with pytest.raises(RolloutFailed, match=type(error).__name__) as caught:
                    await pipe.get_batch(9)
                assert caught.value.__cause__ is error

    @virtual
    async def test_a_runner_that_awaits_something_cancelled_has_failed_also_after_an_abort(self) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            await anyio.sleep(1)
            if ctx.attempt == 2:
                future = asyncio.get_running_loop().create_future()
                future.cancel()
                await future
            return Rollout(reward=0.0)

        async with inline_pipeline(task(4, run), concurrency=2) as pipe:
            await pipe.start()
            await anyio.sleep(0.5)
            async with pipe.weight_update(version=1, running="abort"):
                pass
            assert len(await pipe.get_batch(4)) == 4
            assert pipe.ledger.totals["numbers"].failed == 2

    @virtual
    async def test_an_error_that_no_verb_has_raised_is_raised_on_closing(self) -> None:
        async def run() -> None:
            async with inline_pipeline(task(8, failing, on_failure=FailFast()), concurrency=1) as pipe:
                await pipe.start()
                batch = await pipe.get_batch(2)
                await pipe.ack(batch.step)
                await anyio.sleep(100)

        with pytest.raises(RolloutFailed, match="ValueError: x"):
            await run()

    @virtual
    async def test_one_that_was_raised_is_not_raised_again_on_closing(self) -> None:
        async with inline_pipeline(task(8, failing, on_failure=FailFast())) as pipe:
            await pipe.start()
            for _ in range(2):
                with pytest.raises(RolloutFailed):
                    await pipe.get_batch(8)


class Breaking:
    """A source that fails where it is told to."""

    def __init__(self, where: str) -> None:
        self.where, self.asked = where, 0

    def item(self, index: int) -> Any:
        if self.where == "item" and index == 5:
            raise OSError("the disk with the data is away")
        return {"n": index}

    def length(self) -> int:
        self.asked += 1
        if self.where == "length" and self.asked > 1:
            raise OSError("the disk with the data is away")
        return 6

    def mark(self) -> SourceMark:
        return SourceMark("breaking", 6)


@virtual
@pytest.mark.parametrize("where", ["item", "length"])
async def test_a_source_that_fails_ends_the_run_with_its_error(where: str) -> None:
    given = Task("numbers", source=Breaking(where), run=lasting({}), epochs=3, shuffle=False)
    async with inline_pipeline(given, concurrency=2) as pipe:
        await pipe.start()
        with anyio.fail_after(1000), pytest.raises((ForebayError, OSError), match="the disk with the data is away"):
            await finish(pipe, Trained(), 2)


class TestCrashIsNotTheEnd:
    """CASES 93: a process whose rollout fails does not exit with 0, and what was trained counts."""

    SCRIPT = """
import sys, anyio
from pipeline import Rollout
from tests.support.runs import pipeline, task
async def run(item, ctx):
    if item["n"] == 5:
        raise ValueError("x")
    return Rollout(reward=0.0)
async def main(directory):
    given = task(10, run, on_failure="fail_fast")
    async with pipeline(given, directory=directory, strategy="synchronous") as pipe:
        await pipe.start()
        async for batch in pipe.batches(groups=1):
            await (await pipe.save(batch.step)).committed()
anyio.run(main, sys.argv[1])
"""

    def test_the_exit_code_is_not_zero_and_a_resume_trains_the_rest(self, run_directory: str) -> None:
        root = str(Path(__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", self.SCRIPT, run_directory], cwd=root, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 1
        assert "RolloutFailed: item 5" in done.stderr

        async def rest() -> list[int]:
            async with pipeline(task(10), directory=run_directory, strategy="synchronous") as pipe:
                assert (await begin(pipe)).step == 5
                assert pipe.ledger.totals["numbers"].trained == 5
                return [n for each in [ids(batch) async for batch in pipe.batches(groups=1)] for n in each]

        assert anyio.run(rest) == [5, 6, 7, 8, 9]


class TestDiskDies:
    """What cannot be written any more is told by the next verb, whichever it is, and not hidden behind others."""

    @virtual
    @pytest.mark.parametrize("verb", ["get_batch", "ack", "save", "weight_update", "aclose"])
    async def test_a_writer_that_failed_in_the_background(self, run_directory: str, verb: str) -> None:
        files = ScriptedFiles()
        pipe = inline_pipeline(task(40, lasting({})), directory=run_directory, files=files)

        async def update() -> None:
            async with pipe.weight_update(version=0):
                pass

        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "get_batch": lambda: pipe.get_batch(1),
            "ack": lambda: pipe.ack(0),
            "save": lambda: pipe.save(0),
            "weight_update": update,
            "aclose": pipe.aclose,
        }
        await pipe.__aenter__()
        await begin(pipe)
        files._fail_at, files._stays = len(files.calls) + 5, True
        await anyio.sleep(1000)
        with anyio.fail_after(10), pytest.raises(WriteFailed, match="No space left"):
            await calls[verb]()
        if verb != "aclose":
            with pytest.raises(WriteFailed):
                await calls["get_batch"]()
        await pipe.aclose()
        async with inline_pipeline(task(40, lasting({})), directory=run_directory) as again:
            await begin(again)
            assert (await finish(again, Trained(), 4)).items == list(range(40))

    async def test_a_writer_that_fails_while_a_batch_is_waited_for(self, run_directory: str) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if item["n"] == 9:
                files._fail_at, files._stays = len(files.calls) + 1, True
            await anyio.sleep(0.001)
            return Rollout(reward=0.0)

        files = ScriptedFiles()
        async with pipeline(task(40, run), directory=run_directory, files=files, concurrency=1) as pipe:
            await begin(pipe)
            with pytest.raises(WriteFailed, match="No space left"):
                await pipe.get_batch(40)


class TestItemThatAlwaysFails:
    """CASES 98."""

    @staticmethod
    def given(tries: list[tuple[int, int]], size: int) -> Task:
        async def run(item: Item, ctx: Context) -> Rollout:
            if item["n"] == 2 and ctx.member == 0:
                tries.append((ctx.attempt, ctx.uid))
            await anyio.sleep(1.0)
            if item["n"] == 2 and ctx.member == 0:
                raise ValueError("never")
            return Rollout(reward=0.0)

        return Task("numbers", source=numbers(8), run=run, on_failure=Retry(3), shuffle=False, group_size=size)

    @virtual
    @pytest.mark.parametrize("size", [1, 4])
    @pytest.mark.parametrize("options", [{}, {"strategy": "synchronous"}, {"order": "strict"}, {"capacity": 4}])
    async def test_the_run_ends_without_it_after_its_tries(self, size: int, options: dict[str, Any]) -> None:
        tries: list[tuple[int, int]] = []
        async with inline_pipeline(self.given(tries, size), concurrency=4, **options) as pipe:
            await pipe.start()
            trained = await finish(pipe, Trained(), 4)
            assert pipe.ledger.totals["numbers"].dropped == {"failed": 1}
        assert trained.items == [0, 1, 3, 4, 5, 6, 7]
        assert [attempt for attempt, _ in tries] == [1, 2, 3]

    @virtual
    @pytest.mark.parametrize("moment", [0.5, 1.5, 2.5, 3.5])
    @pytest.mark.parametrize("closed", [True, False])
    async def test_its_tries_are_counted_across_a_resume(self, tmp_path: Path, moment: float, closed: bool) -> None:
        tries: list[tuple[int, int]] = []
        given, directory = self.given(tries, 2), str(tmp_path / "run")
        async with inline_pipeline(given, directory=directory, concurrency=16, capacity=8) as pipe:
            await begin(pipe)
            await anyio.sleep(moment)
            copy = crashed_copy(directory, tmp_path / "copy")
            failed = min(3, int(moment))
            tries.clear()
        async with inline_pipeline(given, directory=directory if closed else copy, concurrency=16) as pipe:
            await begin(pipe)
            trained = await finish(pipe, Trained(), 4)
            totals = pipe.ledger.totals["numbers"]
            assert (totals.failed, totals.dropped) == (3, {"failed": 1})
        assert trained.items == [0, 1, 3, 4, 5, 6, 7]
        assert len(tries) == 3 - failed


@virtual
async def test_full_concurrency_is_back_within_one_turn_after_a_pause() -> None:
    """CASES 100: 32 slots, nothing runs while weights are pushed, then 32 run at once."""
    running = peak = 0

    async def run(item: Item, ctx: Context) -> Rollout:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        try:
            await anyio.sleep(1 + item["n"] % 7)
        finally:
            running -= 1
        return Rollout(reward=0.0)

    async with inline_pipeline(task(1000, run), concurrency=32, capacity=1000) as pipe:
        await pipe.start()
        for version in range(1, 5):
            await anyio.sleep(10.5)
            assert running == 32
            async with pipe.weight_update(version=version, running="finish"):
                assert running == 0
            await anyio.lowlevel.checkpoint()
            assert running == 32
    assert (peak, running) == (32, 0)


@virtual
class TestPushIsRepeated:
    """A trainer elsewhere waits for its batch while a push that failed is tried again."""

    @pytest.mark.parametrize("ends", ["well", "badly", "cancelled"])
    async def test_it_is_told_only_when_nothing_can_come(self, ends: str) -> None:
        found: list[str] = []

        async def wait() -> None:
            try:
                found.append(repr((await pipe.get_batch(2)).step))
            except Starved:
                found.append("starved")

        async def push(fails: bool) -> None:
            with suppress(ConnectionError):
                async with pipe.weight_update(version=0, running="finish"):
                    await anyio.sleep(1)
                    if fails:
                        raise ConnectionError("no server")

        async with inline_pipeline(task(8, lasting(dict.fromkeys(range(8), 4.0))), concurrency=1) as pipe:
            await pipe.start()
            async with anyio.create_task_group() as group:
                with suppress(ConnectionError):
                    async with pipe.weight_update(version=0, running="keep"):
                        raise ConnectionError("no server")
                group.start_soon(wait)
                await anyio.sleep(0.1)
                with anyio.move_on_after(5.0 if ends != "cancelled" else 2.0):
                    await push(fails=ends == "badly")  # waits for the attempt in flight first
                if ends == "well":
                    assert not found
            assert found == ["1" if ends == "well" else "starved"]

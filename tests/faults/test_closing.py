"""Closed from anywhere, at any time, by whatever leaves the body: everything ends, and the folder is free."""

from __future__ import annotations

import _thread
import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from pipeline import ClosedError, Context, ForebayError, Item, Locked, Pipeline, Rollout
from tests.support.crashes import Trained, begin, finish, inline_pipeline
from tests.support.gates import Gate, turn
from tests.support.runs import ids, pipeline, task

virtual = pytest.mark.virtual_time


@pytest.fixture
async def fixture_pipe(tmp_path: Path) -> AsyncIterator[Pipeline]:
    """Opened in one task and closed in another, as pytest-asyncio does it."""
    async with pipeline(task(40), directory=str(tmp_path / "fixture"), capacity=8) as pipe:
        await begin(pipe)
        yield pipe


@virtual
async def test_a_save_that_the_end_of_the_run_overtakes_is_told_so(run_directory: str) -> None:
    """The run ends while the trainer's files are written: there is nobody left to commit them."""
    pipe = inline_pipeline(task(12), directory=run_directory)
    async with pipe:
        await begin(pipe)
        batch = await pipe.get_batch(4)
        run = pipe._run
        assert await run.saves.acquire()
        capture = run.saves.begin(batch.step, "save", run.saves.capture_states())
        capture.write_trainer()
        assert run._group is not None
        run._group.cancel_scope.cancel()
        while not run.consumer.closed:
            await turn()
        with pytest.raises(ClosedError):
            run.commit_later(capture)
    assert [path.name for path in Path(run_directory, "generations").iterdir()] == ["00000000"]
    async with inline_pipeline(task(12), directory=run_directory) as again:
        await begin(again)
        assert (await finish(again, Trained(), 4)).items == list(range(12))


class TestClosing:
    @pytest.mark.parametrize("round_", range(2))
    async def test_a_pipeline_can_live_in_an_async_fixture(self, fixture_pipe: Pipeline, round_: int) -> None:
        batch = await fixture_pipe.get_batch(4)
        await fixture_pipe.ack(batch.step)
        await fixture_pipe.get_batch(4)  # leased, and others in flight, when the fixture closes it

    async def test_closing_from_another_task_lets_a_waiting_trainer_go(self, run_directory: str) -> None:
        gate = Gate()
        pipe = pipeline(task(4, gate.run), directory=run_directory)
        await pipe.__aenter__()
        await begin(pipe)
        ended: list[type[BaseException]] = []

        async def wait() -> None:
            try:
                await pipe.get_batch(4)
            except ForebayError as error:
                ended.append(type(error))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            while not pipe.statistics().buffer.waiters:
                await turn()
            group.start_soon(pipe.aclose)
        assert ended == [ClosedError]
        async with pipeline(task(4), directory=run_directory) as again:
            await begin(again)
            assert (await finish(again, Trained(), 4)).items == [0, 1, 2, 3]

    @pytest.mark.parametrize("opened", [True, False])
    async def test_closing_twice_does_nothing(self, run_directory: str, opened: bool) -> None:
        pipe = pipeline(task(4), directory=run_directory)
        if opened:
            await pipe.__aenter__()
            await begin(pipe)
        for _ in range(3):
            await pipe.aclose()
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(pipe.aclose)
        async with pipeline(task(4), directory=run_directory) as again:
            await begin(again)

    async def test_closing_at_once_from_several_tasks(self, run_directory: str) -> None:
        pipe = pipeline(task(40), directory=run_directory)
        await pipe.__aenter__()
        await begin(pipe)
        await pipe.get_batch(4)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(pipe.aclose)
        async with pipeline(task(40), directory=run_directory) as again:
            await begin(again)

    @virtual
    async def test_no_task_is_left_and_every_attempt_was_ended(self) -> None:
        before = asyncio.all_tasks()
        ended: list[str] = []

        async def run(item: Item, ctx: Context) -> Rollout:
            try:
                await anyio.sleep(1000)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(1)
                ended.append("cleaned up")
            return Rollout(reward=0.0)

        async with inline_pipeline(task(40, run), concurrency=5, capacity=40) as pipe:
            await pipe.start()
            await anyio.sleep(5)
        assert ended == ["cleaned up"] * 5
        assert asyncio.all_tasks() == before
        pipe.ledger.check()
        assert pipe.ledger.totals["numbers"].interrupted == 5

    async def test_in_a_scope_that_is_cancelled_from_outside(self, run_directory: str) -> None:
        gate = Gate()
        for verb in ("get_batch", "weight_update", "save", "body"):
            with anyio.CancelScope() as scope:
                async with pipeline(task(4, gate.run), directory=run_directory, concurrency=4) as pipe:
                    await begin(pipe)
                    asyncio.get_running_loop().call_soon(scope.cancel)
                    if verb == "get_batch":
                        await pipe.get_batch(4)
                    elif verb == "weight_update":
                        async with pipe.weight_update(version=0, running="finish"):
                            pytest.fail("nothing finishes")
                    elif verb == "save":
                        while True:
                            await pipe.save(0)
                    else:
                        await anyio.sleep_forever()
            assert scope.cancelled_caught, verb
        async with pipeline(task(4), directory=run_directory) as again:
            await begin(again)
            assert (await finish(again, Trained(), 4)).items == [0, 1, 2, 3]

    @pytest.mark.parametrize("turns", range(12))
    async def test_cancelled_while_it_opens_or_begins(self, run_directory: str, turns: int) -> None:
        before = asyncio.all_tasks()
        with anyio.CancelScope() as scope:

            async def cancel_later() -> None:
                for _ in range(turns * turns):
                    await turn()
                scope.cancel()

            canceller = asyncio.get_running_loop().create_task(cancel_later())
            async with pipeline(task(4), directory=run_directory) as pipe:
                await begin(pipe)
                await anyio.sleep_forever()
        await canceller
        assert asyncio.all_tasks() == before
        async with pipeline(task(4), directory=run_directory) as again:
            await begin(again)
            assert (await finish(again, Trained(), 4)).items == [0, 1, 2, 3]

    async def test_a_loop_that_ends_without_closing_ends(self) -> None:
        async def forgets() -> None:
            pipe = pipeline(task(4, Gate().run))
            await pipe.__aenter__()
            await pipe.start()
            await turn()

        await anyio.to_thread.run_sync(lambda: asyncio.run(asyncio.wait_for(forgets(), 50)))

    async def test_the_lock_is_held_until_the_end_and_free_afterwards(self, run_directory: str) -> None:
        async with pipeline(task(4), directory=run_directory):
            with pytest.raises(Locked):
                async with pipeline(task(4), directory=run_directory):
                    pass
        async with pipeline(task(4), directory=run_directory):
            pass


class TestSynchronousForm:
    """What a notebook does: interrupt the cell and go on."""

    @staticmethod
    def opens_again(directory: str) -> None:
        with Pipeline(task(12), directory=directory, watchdog=None).sync() as pipe:
            pipe.resume()
            pipe.start(weights_current=True)
            assert sorted(n for batch in pipe.batches(groups=4) for n in ids(batch)) == list(range(12))

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
    def test_whatever_leaves_the_body_the_lock_is_free(self, run_directory: str, error: type[BaseException]) -> None:
        def body() -> None:
            with Pipeline(task(12), directory=run_directory, watchdog=None).sync() as pipe:
                pipe.start()
                for _ in pipe.batches(groups=4):
                    raise error

        with pytest.raises(error):
            body()
        self.opens_again(run_directory)

    def test_an_interrupt_while_a_batch_is_waited_for(self, run_directory: str) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if ctx.uid == 3:
                _thread.interrupt_main()
            await anyio.sleep_forever()
            raise AssertionError

        def body() -> None:
            with Pipeline(task(12, run), directory=run_directory, watchdog=None).sync() as pipe:
                pipe.start()
                pipe.get_batch(4)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs aside
        try:
            with pytest.raises(KeyboardInterrupt):
                body()
        finally:
            signal.signal(signal.SIGINT, before)
        self.opens_again(run_directory)

    def test_a_runner_that_exits_the_process_is_a_failed_rollout(self, run_directory: str) -> None:
        async def run(item: Item, ctx: Context) -> Rollout:
            if item["n"] == 3:
                raise SystemExit(0)
            return Rollout(reward=0.0)

        with Pipeline(task(12, run, on_failure="skip"), directory=run_directory, watchdog=None).sync() as pipe:
            pipe.start()
            trained: list[Any] = [n for batch in pipe.batches(groups=4) for n in ids(batch)]
        assert sorted(trained) == [n for n in range(12) if n != 3]

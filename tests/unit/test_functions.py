"""Plain functions as runners."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from pipeline.errors import ConfigError
from pipeline.records import Item, Rollout
from tasks import threaded

ITEM = Item("sums", 0, 3, 7, {"n": 3})


async def test_a_plain_function_runs_in_another_thread_and_its_rollout_comes_back() -> None:
    seen: list[Any] = []

    @threaded
    def solve(item: Item, ctx: Any) -> Rollout:
        seen.extend([threading.get_ident(), ctx])
        return Rollout(reward=float(item["n"]))

    assert (await solve(ITEM, "ctx")).reward == 3.0
    assert seen[0] != threading.get_ident()
    assert seen[1] == "ctx"
    assert inspect.iscoroutinefunction(solve)
    assert getattr(solve, "__name__", "") == "solve"


async def test_more_run_at_once_than_anyio_has_threads_by_default() -> None:
    together = threading.Barrier(60)
    finished = []

    def solve(item: Item, ctx: Any) -> Rollout:
        together.wait(timeout=60)
        return Rollout(reward=1.0)

    async def one() -> None:
        finished.append(await threaded(solve)(ITEM, None))

    async with anyio.create_task_group() as group:
        for _ in range(60):
            group.start_soon(one)
    assert len(finished) == 60


@pytest.mark.parametrize("error", [ValueError("mine"), StopIteration("mine")])
async def test_its_error_is_the_attempts_error(error: Exception) -> None:
    def solve(item: Item, ctx: Any) -> Rollout:
        raise error

    with pytest.raises((ValueError, RuntimeError)) as caught:
        await threaded(solve)(ITEM, None)
    assert error in (caught.value, caught.value.__cause__, caught.value.__context__)


async def test_the_loop_goes_on_while_it_works_and_can_be_called_from_it() -> None:
    turned = anyio.Event()

    def solve(item: Item, ctx: Any) -> Rollout:
        anyio.from_thread.run(turned.wait)
        return Rollout(reward=2.0)

    async with anyio.create_task_group() as group:
        group.start_soon(threaded(solve), ITEM, None)
        await anyio.lowlevel.checkpoint()
        turned.set()


@pytest.mark.parametrize("abandon", [False, True])
async def test_a_cut_attempt_waits_for_its_thread_unless_told_to_abandon_it(abandon: bool) -> None:
    begun, release, done = threading.Event(), threading.Event(), threading.Event()

    def solve(item: Item, ctx: Any) -> Rollout:
        begun.set()
        release.wait(60)
        done.set()
        return Rollout()

    async with anyio.create_task_group() as group:
        group.start_soon(threaded(solve, abandon_on_cancel=abandon), ITEM, None)
        assert await anyio.to_thread.run_sync(begun.wait, 60)
        group.cancel_scope.cancel()
        if not abandon:
            release.set()
    assert done.is_set() is not abandon
    release.set()
    assert done.wait(60)


def test_what_is_asynchronous_already_is_refused() -> None:
    async def solve(item: Item, ctx: Any) -> Rollout:
        return Rollout()

    class Solver:
        async def __call__(self, item: Item, ctx: Any) -> Rollout:
            return Rollout()

    for function in (solve, Solver()):
        with pytest.raises(ConfigError, match="asynchronous already"):
            threaded(function)  # type: ignore[arg-type]

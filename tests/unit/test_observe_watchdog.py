"""Whoever holds the event loop is named, and nobody else."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
import trio

from pipeline.errors import ConfigError
from pipeline.observe import Held, RunContext, Watchdog
from pipeline.observe.stacks import holder
from pipeline.observe.watchdog import log_held

Main = Callable[[], Awaitable[None]]


def on_asyncio(main: Main) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


def on_trio(main: Main) -> None:
    trio.run(main)


def on_another_thread(main: Main) -> None:
    failed: list[BaseException] = []

    def target() -> None:
        try:
            on_asyncio(main)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert failed == []


loops = pytest.mark.parametrize("run", [on_asyncio, on_trio, on_another_thread])


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """A full collection in a large test process holds the loop as well, and is reported."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def nap(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251


def long_call() -> Callable[[], object]:
    """Return a call that keeps the interpreter's lock and computes for about 0.8 s."""
    count, took = 100_000, 0.0
    while took < 0.6:
        began = time.thread_time()
        sum(range(count))
        took = time.thread_time() - began
        count = count if took >= 0.6 else int(count * min(10, max(1.5, 0.8 / max(took, 1e-4))))
    return lambda: sum(range(count))


@loops
def test_a_blocking_call_in_a_coroutine_is_named_once(run: Callable[[Main], None]) -> None:
    reports: list[Held] = []

    async def main() -> None:
        await anyio.sleep(0.001)  # the first use of anyio imports a backend, which holds the loop too
        async with Watchdog(0.1, reports.append):
            await anyio.sleep(0.2)
            await nap(0.3)
            await anyio.sleep(0.3)

    run(main)
    assert len(reports) == 1, reports
    (held,) = reports
    assert held.function == "nap"
    assert held.file == __file__
    assert Path(__file__).read_text().splitlines()[held.line - 1].strip().startswith("time.sleep")
    assert held.where == f"nap ({__file__}:{held.line})"
    assert held.seconds >= 0.2
    assert (held.task != "") == (run is not on_trio)


@loops
def test_a_call_that_keeps_the_interpreters_lock_is_named(run: Callable[[Main], None]) -> None:
    reports: list[Held] = []
    hog = long_call()

    async def crunch() -> None:
        hog()

    async def main() -> None:
        await anyio.sleep(0.001)
        async with Watchdog(0.1, reports.append):
            for phase in (0.21, 0.23, 0.25):  # wherever it falls between two looks
                await anyio.sleep(phase)
                await crunch()
            await anyio.sleep(0.2)

    run(main)
    assert len(reports) == 3, reports
    assert all("crunch" in held.where or "lambda" in held.where for held in reports)


@loops
def test_a_call_that_begins_in_the_moment_of_a_look_is_named(run: Callable[[Main], None]) -> None:
    reports: list[Held] = []
    both = threading.Event()
    hog = long_call()
    calls = 0

    def report(held: Held) -> None:
        reports.append(held)
        if len(reports) == 2:
            both.set()

    def crunch() -> None:
        hog()

    async def main() -> None:
        await anyio.sleep(0.001)
        async with Watchdog(0.1, report) as watchdog:
            ask = watchdog._loop.call

            def crunch_before_the_answer(answer: Callable[[], None]) -> None:
                nonlocal calls
                # A third thread, of which a test's process has some, may take the lock where a call ends, and the loop
                # go on before the watchdog has it: such a call is not named, and another follows.
                if not both.is_set() and calls < 20:
                    calls += 1
                    ask(crunch)
                ask(answer)

            watchdog._loop = watchdog._loop._replace(call=crunch_before_the_answer)
            assert await anyio.to_thread.run_sync(both.wait, 60)  # however long others keep the processor
            await anyio.sleep(0.3)  # some looks more

    run(main)
    assert 2 <= len(reports) <= calls, reports
    assert all("crunch" in held.where or "lambda" in held.where for held in reports), reports


@loops
def test_a_quiet_loop_and_a_long_sleep_report_nothing(run: Callable[[Main], None]) -> None:
    reports: list[Held] = []

    async def main() -> None:
        await anyio.sleep(0.001)
        async with Watchdog(0.05, reports.append):
            await anyio.sleep(0.5)
            for _ in range(20):
                await anyio.sleep(0.005)

    run(main)
    assert reports == []


async def test_the_running_task_is_named() -> None:
    reports: list[Held] = []

    async def solve() -> None:
        await nap(0.25)

    async with Watchdog(0.1, reports.append):
        await asyncio.create_task(solve(), name="solve uid 7")
        await anyio.sleep(0.15)
    assert [held.task for held in reports] == ["solve uid 7"]


async def test_a_hold_that_lasts_until_the_end_is_reported() -> None:
    reports: list[Held] = []
    async with Watchdog(0.1, reports.append):
        await nap(0.3)
    assert [held.function for held in reports] == ["nap"]


async def test_a_standard_library_call_is_charged_to_its_caller() -> None:
    reports: list[Held] = []

    async def shell_out() -> None:
        subprocess.run(["sleep", "0.3"], check=True)  # noqa: ASYNC221

    async with Watchdog(0.1, reports.append):
        await shell_out()
    assert [held.function.rpartition(".")[2] for held in reports] == ["shell_out"]


@pytest.fixture
def no_other_callbacks() -> Iterator[None]:
    """Other tools (hypothesis, once loaded) hang callbacks on collections, which then are the innermost frame."""
    others = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:0] = others


@pytest.mark.usefixtures("no_other_callbacks")
async def test_a_garbage_collection_is_told_apart() -> None:
    reports: list[Held] = []
    keep: list[Any] = [[] for _ in range(500_000)]

    def collect() -> None:
        began = time.monotonic()
        while time.monotonic() - began < 0.3:
            gc.collect()

    async with Watchdog(0.1, reports.append):
        await anyio.sleep(0.15)
        collect()
        await anyio.sleep(0.15)
        await nap(0.3)
        await anyio.sleep(0.15)
    assert [(held.function.rpartition(".")[2], held.collected) for held in reports] == [
        ("collect", True),
        ("nap", False),
    ]
    del keep


async def test_the_end_is_prompt_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    began = time.monotonic()
    async with Watchdog(20.0):
        (watching,) = set(threading.enumerate()) - before
        assert watching.daemon
    assert time.monotonic() - began < 1.0
    assert not watching.is_alive()


async def test_nothing_waits_on_the_loop() -> None:
    tasks = len(asyncio.all_tasks())
    async with Watchdog(0.1):
        assert len(asyncio.all_tasks()) == tasks


async def test_it_can_be_entered_again() -> None:
    reports: list[Held] = []
    watchdog = Watchdog(0.1, reports.append)
    for _ in range(2):
        async with watchdog:
            await nap(0.25)
    assert len(reports) == 2


def test_a_loop_that_closes_under_it_ends_it() -> None:
    loop = asyncio.new_event_loop()
    watchdog = Watchdog(0.02)
    loop.run_until_complete(watchdog.__aenter__())
    loop.close()
    watchdog._thread.join(timeout=5)
    assert not watchdog._thread.is_alive()


def test_a_loop_that_stopped_with_a_question_open_is_held_by_nobody() -> None:
    reports: list[Held] = []
    loop = asyncio.new_event_loop()
    watchdog = Watchdog(0.02, reports.append)
    loop.run_until_complete(watchdog.__aenter__())
    asyncio.run(nap(0.2))  # another loop of the same thread
    assert reports == []
    loop.close()
    watchdog._thread.join(timeout=5)
    assert not watchdog._thread.is_alive()


def test_a_finished_trio_run_ends_it() -> None:
    watchdog = Watchdog(0.02)
    trio.run(watchdog.__aenter__)
    watchdog._thread.join(timeout=5)
    assert not watchdog._thread.is_alive()


def test_an_abandoned_coroutine_ends_it() -> None:
    watchdog = Watchdog(0.02)

    async def main() -> None:
        async with watchdog:
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    coroutine = main()
    loop.call_later(0.05, loop.stop)
    task = loop.create_task(coroutine)
    loop.run_forever()
    loop.call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    del task
    gc.collect()
    assert not watchdog._thread.is_alive()


def test_it_does_not_keep_the_process_alive() -> None:
    script = (
        "import asyncio\n"
        "from pipeline.observe import Watchdog\n"
        "loop = asyncio.new_event_loop()\n"
        "loop.run_until_complete(Watchdog(100.0).__aenter__())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")


async def test_a_report_that_raises_is_logged_and_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Held] = []

    def report(held: Held) -> None:
        calls.append(held)
        raise RuntimeError("no such dashboard")

    async with Watchdog(0.1, report):
        for _ in range(2):
            await nap(0.25)
            await anyio.sleep(0.15)
    assert len(calls) == 2
    assert [record.getMessage().split()[0] for record in caplog.records] == ["loop.held"] * 2
    assert "no such dashboard" in caplog.text


async def test_the_default_report_is_an_event_with_the_runs_context() -> None:
    try:
        with structlog.testing.capture_logs() as events, RunContext(run="a", rank=0).active():
            async with Watchdog(0.1):
                await nap(0.25)
    finally:
        structlog.reset_defaults()
    (event,) = events
    assert event["event"] == "loop.held"
    assert event["log_level"] == "warning"
    assert (event["run"], event["function"], event["file"]) == ("a", "nap", __file__)
    json.dumps(event)


def test_the_default_report_says_less_of_what_comes_often() -> None:
    report = log_held()
    held = [Held(0.2, "f (a.py:1)", "f", "a.py", 1), Held(0.2, "g (a.py:9)", "g", "a.py", 9)]
    try:
        with structlog.testing.capture_logs() as events:
            for _ in range(100):
                report(held[0])
            report(held[1])
    finally:
        structlog.reset_defaults()
    assert [event["times"] for event in events] == [1, 2, 4, 8, 16, 32, 64, 1]


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_time_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="limit="):
        Watchdog(limit)


def test_who_waits_outside_of_any_loop_holds_nothing() -> None:
    assert holder(sys._getframe()) is None
    assert holder(None) is None


async def test_our_own_code_is_named_when_nobody_else_is_there() -> None:
    found: list[Any] = []
    code = compile("found.append(holder(sys._getframe()))", str(Path(holder.__code__.co_filename)), "exec")
    asyncio.get_running_loop().call_soon(
        eval, code, {"found": found, "holder": holder, "sys": sys, "__name__": "pipeline.x"}
    )
    await anyio.sleep(0.001)
    assert found[0].file == holder.__code__.co_filename

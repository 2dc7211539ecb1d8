"""Real signals to real processes: they save, and leave by the code that launchers know."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from pipeline import Stopped, UsageError
from pipeline.checkpoint.triggers import exit_by_code
from tests.faults.test_triggers import manifests
from tests.support import signalled
from tests.support.children import insist
from tests.support.crashes import Trained, begin
from tests.support.runs import pipeline, task


class Child:
    """A training process; ``said`` waits for what it says."""

    def __init__(self, body: Callable[[str, signalled.Say], None], directory: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.signalled"])
        self._pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=signalled.run, args=(body, directory, theirs))
        self.process.start()
        theirs.close()
        self.log: list[str] = []

    def said(self, what: str) -> None:
        """Return when it has said ``what``."""
        while what not in self.log:
            assert self._pipe.poll(60), f"{what!r} did not come; it said {self.log}"
            self.log.append(self._pipe.recv())

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self, within: float = 60.0) -> int:
        """Return its exit code; negative for a signal."""
        self.process.join(within)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        assert code is not None, f"still running after {within} s; it said {self.log}"
        while self._pipe.poll():
            try:
                self.log.append(self._pipe.recv())
            except EOFError:
                break
        return code


@contextmanager
def child(body: Callable[[str, signalled.Say], None], directory: str) -> Iterator[Child]:
    process = Child(body, directory)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.join()


def goes_on(directory: str, stopped_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume here, with rollouts that end, and check that each item is trained once."""
    monkeypatch.setenv("FOREBAY_TEST_ENDS", "1")
    trained = Trained()
    with signalled.made(directory).sync() as pipe:
        pipe.attach(trained=trained)
        resumed = pipe.resume()
        assert resumed.step == stopped_at
        with pipe.weight_update(version=resumed.version):
            pass
        pipe.start()
        for batch in pipe.batches(groups=4):
            trained.step(batch)
    assert trained.items == list(range(signalled.COUNT))


def test_in_the_middle_of_a_step(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with child(signalled.steps, run_directory) as process:
        process.said("step 2")
        process.send(signal.SIGTERM)
        assert process.end() == 143
    last = manifests(run_directory)[-1]
    assert (last.step, last.reason) == (2, "SIGTERM")
    goes_on(run_directory, 2, monkeypatch)


@pytest.mark.parametrize("body", [signalled.waits, signalled.waits_async])
def test_while_a_batch_is_waited_for(
    run_directory: str, body: Callable[[str, signalled.Say], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(body, run_directory) as process:
        process.said("step 5")
        time.sleep(0.1)  # into the wait for what never ends; too early would be heard as well
        process.send(signal.SIGTERM)
        assert process.end() == 143
    goes_on(run_directory, 5, monkeypatch)


def test_before_the_start(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with child(signalled.steps, run_directory) as process:
        process.said("resumed")
        process.send(signal.SIGTERM)
        assert process.end() == 143
        assert "step 1" not in process.log or "started" in process.log
    assert os.path.isdir(run_directory)


def test_twice_leaves_at_once_and_the_last_generation_stands(
    run_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(signalled.long_step, run_directory) as process:
        process.said("step 1")
        insist(process.process, signal.SIGTERM)
        assert process.end() == -signal.SIGTERM  # what shells and launchers call 143
    goes_on(run_directory, 0, monkeypatch)


def test_two_at_once_are_one(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it comes where the launcher and what it started both send it."""
    with child(signalled.steps, run_directory) as process:
        process.said("step 2")
        process.send(signal.SIGTERM)
        time.sleep(0.02)
        process.send(signal.SIGTERM)
        assert process.end() == 143
    goes_on(run_directory, 2, monkeypatch)


def test_the_scripts_own_handler_is_called_and_comes_back(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with child(signalled.flagged, run_directory) as process:
        process.said("step 5")
        process.send(signal.SIGTERM)
        assert process.end() == 143
        assert process.log[-2:] == ["told", "restored"]
    goes_on(run_directory, 5, monkeypatch)


def test_the_scripts_own_handler_leaves_by_its_own_code_when_it_is_saved(
    run_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(signalled.leaving, run_directory) as process:
        process.said("step 5")
        process.send(signal.SIGTERM)
        assert process.end() == 7
    goes_on(run_directory, 5, monkeypatch)


def test_signals_by_choice(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with child(signalled.by_choice, run_directory) as process:
        process.said("step 1")
        process.send(signal.SIGUSR1)
        process.said("step 2")
        process.said("step 3")
        process.send(signal.SIGINT)
        assert process.end() == 130
    assert [(m.step, m.reason) for m in manifests(run_directory)] == [(0, "start"), (1, "SIGUSR1"), (3, "SIGINT")]
    goes_on(run_directory, 3, monkeypatch)


def test_one_that_no_verb_heard_is_not_swallowed(run_directory: str) -> None:
    with child(signalled.unheard, run_directory) as process:
        process.said("leased")
        process.send(signal.SIGTERM)
        assert process.end() == -signal.SIGTERM
        assert process.log == ["leased"]


def test_an_error_leaves_by_its_own_code(run_directory: str) -> None:
    with child(signalled.failing, run_directory) as process:
        process.said("leased")
        process.send(signal.SIGTERM)
        assert process.end() == 1


def test_a_forked_child_is_not_kept_alive(run_directory: str) -> None:
    with child(signalled.forks, run_directory) as process:
        process.said(f"child {int(signal.SIGTERM)}")
        assert process.end() == 0


SHAPES = ["plain", "gather", "asyncio group", "anyio group", "inside", "trio", "trio group"]


@pytest.mark.parametrize("shape", SHAPES)
def test_in_whichever_task_the_trainer_runs(run_directory: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script ends, by the code, and says nothing about it."""
    given = [sys.executable, "-m", "tests.support.stop_shapes", shape, run_directory]
    done = subprocess.run(given, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (143, "")
    assert manifests(run_directory)[-1].reason == "SIGTERM"
    goes_on(run_directory, 2, monkeypatch)


def test_other_errors_are_printed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    exit_by_code()
    exit_by_code()  # once is enough
    mixed = BaseExceptionGroup("both", [Stopped(143), ValueError("x")])
    for error in (ValueError("y"), mixed):
        sys.excepthook(type(error), error, None)
    assert [type(each) for each in seen] == [ValueError, BaseExceptionGroup]
    wrapped = BaseExceptionGroup("outer", [BaseExceptionGroup("inner", [Stopped(143)])])
    with pytest.raises(SystemExit) as left:
        sys.excepthook(type(wrapped), wrapped, None)
    assert left.value.code == 143


class TestHandlers:
    async def test_they_are_given_back(self, run_directory: str) -> None:
        before = signal.getsignal(signal.SIGTERM)
        async with pipeline(task(), directory=run_directory):
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before

    async def test_somebody_who_took_them_over_meanwhile_keeps_them(self, run_directory: str) -> None:
        heard: list[int] = []

        def theirs(number: int, frame: Any) -> None:
            heard.append(number)
            ours(number, frame)

        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(-number))
        try:
            async with pipeline(task(), directory=run_directory):
                ours: Any = signal.getsignal(signal.SIGTERM)
                signal.signal(signal.SIGTERM, theirs)
            assert signal.getsignal(signal.SIGTERM) is theirs
            os.kill(os.getpid(), signal.SIGTERM)  # through theirs and ours to who had it first
            assert heard == [signal.SIGTERM, -signal.SIGTERM]
        finally:
            signal.signal(signal.SIGTERM, before)

    async def test_one_that_was_taken_over_is_told_once(self, run_directory: str) -> None:
        before = signal.getsignal(signal.SIGTERM)
        try:
            with capture_logs() as logs:
                async with pipeline(task(), directory=run_directory) as pipe:
                    await begin(pipe)
                    await pipe.ack((await pipe.get_batch(4)).step)
                    signal.signal(signal.SIGTERM, lambda number, frame: None)
                    for _ in range(2):
                        await pipe.ack((await pipe.get_batch(4)).step)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert [line["signal"] for line in logs if line["event"] == "signal.taken"] == ["SIGTERM"]

    async def test_without_a_directory_nothing_is_taken_over(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        async with pipeline(task()):
            assert signal.getsignal(signal.SIGTERM) is before

    @pytest.mark.parametrize("signals", [None, ["SIGTERM"]])
    def test_outside_the_main_thread(self, tmp_path: Path, signals: list[str] | None) -> None:
        ended: list[BaseException | None] = []

        async def main() -> None:
            async with pipeline(task(), directory=str(tmp_path / "run"), signals=signals):
                pass

        def body() -> None:
            try:
                ended.append(anyio.run(main))
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if signals is None:
            assert ended == [None]
        else:
            assert isinstance(ended[0], UsageError)
            assert "main thread" in str(ended[0])

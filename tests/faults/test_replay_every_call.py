"""Every call to the file system that a buffer's life makes, from its resume to its last commit: failing, done and
failing all the same, for good, and with a loss of power. One whole state is there afterwards, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import Prioritized, ReplayBuffer, StoreError
from pipeline.checkpoint import verify
from pipeline.store.files import FilesLike, OsFiles
from tests.support.disk import Killed, ScriptedFiles
from tests.support.power import VolatileFiles
from tests.support.replaying import Counter, contents, fill

VERBS = {name for name in vars(FilesLike) if not name.startswith("_")} - {"start_writing"}
OPTIONS: dict[str, Any] = {"select": Prioritized(), "seed": 2, "keep": 1}
CAPACITY = 30
SOAK = int(os.environ.get("FOREBAY_SOAK", "1")) > 1


def made(directory: Path, files: OsFiles | None = None) -> tuple[ReplayBuffer, Counter]:
    buffer, counter = ReplayBuffer(CAPACITY, directory=directory, files=files, **OPTIONS), Counter()
    buffer.attach(counter=counter)
    return buffer, counter


def live(buffer: ReplayBuffer, counter: Counter, states: dict[int, Any], until: int = 4) -> None:
    """Save at each step; ``states`` gets what each step's generation is to hold."""
    begin = buffer.resume(continue_episodes=True).step
    for step in range(begin + 1, until + 1):
        fill(buffer, 12 * step, 12)
        counter.step = step
        states[step] = contents(buffer)
        buffer.save(step, wait=True)


def the_states(directory: Path) -> dict[int, Any]:
    states: dict[int, Any] = {}
    buffer, counter = made(directory)
    with buffer:
        live(buffer, counter, states, 6)
    return states


def calls_of_a_life(tmp_path: Path, before: Path) -> list[str]:
    shutil.copytree(before, tmp_path / "counted")
    files = ScriptedFiles()
    buffer, counter = made(tmp_path / "counted", files)
    with buffer:
        live(buffer, counter, {})
    return files.calls


@pytest.fixture(scope="module", params=["fifo", "max"])
def begun(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, list[str], dict[int, Any]]:
    """A run that was saved once, the calls of a life that goes on from it, and what each of its steps holds."""
    OPTIONS["remove"] = "fifo" if request.param == "fifo" else {"by": request.param, "field": "reward"}
    folder = tmp_path_factory.mktemp("begun")
    states = the_states(folder / "whole")
    buffer, counter = made(folder / "run")
    with buffer:
        live(buffer, counter, {}, 1)
    return folder / "run", calls_of_a_life(folder, folder / "run"), states


def some(calls: list[str], how: str) -> range:
    """Numbers of calls, from 1: every third one, another third for each ``how``; all of them in a soak."""
    return range(1, len(calls) + 1) if SOAK else range(1 + len(how) % 3, len(calls) + 1, 3)


def look(directory: Path, states: dict[int, Any], least: int) -> int:
    """Resume; what is there must be one whole state, of step ``least`` or a later one."""
    buffer, counter = made(directory)
    with buffer:
        step = buffer.resume(continue_episodes=True).step
        assert least <= step <= 6
        assert contents(buffer) == states[step]
        assert counter.step == step
        live_on(buffer, counter, step, states)
    assert verify(str(directory)).whole
    return step


def live_on(buffer: ReplayBuffer, counter: Counter, step: int, states: dict[int, Any]) -> None:
    fill(buffer, 12 * (step + 1), 12)
    counter.step = step + 1
    buffer.save(step + 1, wait=True)
    if step + 1 in states:
        assert contents(buffer) == states[step + 1]


@pytest.mark.parametrize("how", ["failing", "done but failing", "torn"])
def test_after_a_call_that_fails_the_same_process_tries_again(
    tmp_path: Path, begun: tuple[Path, list[str], dict[int, Any]], how: str
) -> None:
    before, calls, states = begun
    for number in some(calls, how):
        directory = tmp_path / str(number)
        shutil.copytree(before, directory)
        files = ScriptedFiles(number, after=how == "done but failing", torn=how == "torn")
        buffer, counter = made(directory, files)
        with contextlib.suppress(StoreError), buffer:  # a last segment may stay open; nothing is lost by that
            failures = 0
            while True:
                try:
                    if not buffer.ring.added:
                        buffer.resume(continue_episodes=True)
                    for step in range(max(counter.step, 1), 5):
                        if step != counter.step:
                            fill(buffer, 12 * step, 12)
                            counter.step = step
                        if step > 1:
                            buffer.save(step, wait=True)
                        assert contents(buffer) == states[step], (number, calls[number - 1])
                    break
                except StoreError:
                    failures += 1
                    assert failures < 3, (number, calls[number - 1])
        assert look(directory, states, 4) == 4, (number, calls[number - 1])
        shutil.rmtree(directory)


@pytest.mark.parametrize("how", ["killed", "killed after", "killed torn"])
def test_killed_at_any_call_one_whole_state_is_there(
    tmp_path: Path, begun: tuple[Path, list[str], dict[int, Any]], how: str
) -> None:
    before, calls, states = begun
    for number in some(calls, how):
        directory = tmp_path / str(number)
        shutil.copytree(before, directory)
        files = ScriptedFiles(number, Killed, after=how == "killed after", torn=how == "killed torn", stays=True)
        buffer, counter = made(directory, files)
        reached: dict[int, Any] = {}
        with contextlib.suppress(Killed, StoreError):
            live(buffer, counter, reached)
        with contextlib.suppress(Killed, StoreError):
            buffer.close()
        files.end()
        # The last step may or may not have been committed; the one before it was.
        look(directory, states, max(1, max(reached, default=1) - 1))
        shutil.rmtree(directory)


class PowerCuts(VolatileFiles):
    """Notes what would be there, were the power to go right before each call."""

    def __init__(self, directory: Path, target: Path) -> None:
        super().__init__()
        self._directory, self._target = str(directory), target
        self.count = self.committed = 0
        self.cuts: list[tuple[Path, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in VERBS:
            self._comes()
        return super().__getattribute__(name)

    def _comes(self) -> None:
        self.count += 1
        if self.committed:
            left = self._target / str(self.count)
            self.after_power_loss(self._directory, str(left))
            self.cuts.append((left, self.committed))


def test_with_the_power_gone_at_any_call_what_was_committed_is_there(tmp_path: Path) -> None:
    states = the_states(tmp_path / "whole")
    directory = tmp_path / "run"
    files = PowerCuts(directory, tmp_path / "cuts")
    buffer, counter = made(directory, files)
    with buffer:
        buffer.resume()
        for step in range(1, 5):
            fill(buffer, 12 * step, 12)
            counter.step = step
            buffer.save(step, wait=True)
            files.committed = step
    files.end()
    assert {committed for _, committed in files.cuts} == {1, 2, 3, 4}
    for left, committed in files.cuts if SOAK else files.cuts[::3]:
        look(left, states, committed)

"""Every call to the file system that the life of a buffer of trajectories makes: failing, torn, and as the last one
before a kill. One whole state is there afterwards, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import StoreError, TrajectoryBuffer
from pipeline.checkpoint import verify
from pipeline.replay import shelving
from pipeline.store.files import OsFiles
from tests.support.disk import Killed, ScriptedFiles
from tests.support.replaying import Counter
from tests.support.trajectories import contents, trajectory

OPTIONS: dict[str, Any] = {"cache_size": 2, "capacity": 7, "sample_window_size": 0, "auto_save": True, "keep": 1}
SOAK = int(os.environ.get("FOREBAY_SOAK", "1")) > 1
LAST = 4


@pytest.fixture(autouse=True)
def _synced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelving, "_LEAST_SYNC", 1)


def made(directory: Path, files: OsFiles | None = None) -> tuple[TrajectoryBuffer, Counter]:
    buffer, counter = TrajectoryBuffer(directory=directory, files=files, **OPTIONS), Counter()
    buffer.attach(counter=counter)
    return buffer, counter


def step_of(buffer: TrajectoryBuffer, counter: Counter, step: int) -> None:
    """Add what belongs to a step, unless it is there; what is written beside the training is waited for."""
    while buffer.trajectory_counter < 3 * step:
        number = buffer.trajectory_counter
        buffer.add_trajectories([trajectory(number, 1 + number % 4, 1 + number % 3)])
        buffer._shelving.join()
    counter.step = step


def live(buffer: TrajectoryBuffer, counter: Counter, states: dict[int, Any], until: int = LAST) -> None:
    """Save at each step; ``states`` gets what each step's generation is to hold."""
    for step in range(buffer.resume().step + 1, until + 1):
        step_of(buffer, counter, step)
        states[step] = contents(buffer)
        buffer.save(step, wait=True)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict[int, Any]]:
    """A run that was saved once, the calls of a life that goes on from it, and what each of its steps holds."""
    folder = tmp_path_factory.mktemp("begun")
    states: dict[int, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelving, "_LEAST_SYNC", 1)
        for name, until in (("whole", LAST + 1), ("run", 1)):
            buffer, counter = made(folder / name)
            with buffer:
                live(buffer, counter, states if name == "whole" else {}, until)
        shutil.copytree(folder / "run", folder / "counted")
        files = ScriptedFiles()
        buffer, counter = made(folder / "counted", files)
        with buffer:
            live(buffer, counter, {})
    assert {"create", "write", "sync", "rename", "unlink"} <= set(files.calls)
    return folder / "run", files.calls, states


def some(calls: list[str], how: str) -> range:
    """Numbers of calls, from 1: every third one, another third for each ``how``; all of them in a soak."""
    return range(1, len(calls) + 1) if SOAK else range(1 + len(how) % 3, len(calls) + 1, 3)


def look(directory: Path, states: dict[int, Any], least: int) -> int:
    """Resume; what is there must be one whole state, of step ``least`` or a later one, and go on."""
    buffer, counter = made(directory, ScriptedFiles())  # which does not wait for the disk
    with buffer:
        step = buffer.resume().step
        assert least <= step <= LAST
        assert contents(buffer) == states[step]
        assert counter.step == step
        step_of(buffer, counter, step + 1)
        assert contents(buffer) == states[step + 1]
        buffer.save(step + 1, wait=True)
    assert verify(str(directory)).whole
    return step


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
            failures, saved = 0, 1
            while saved < LAST:
                try:
                    if not buffer.trajectory_counter:
                        buffer.resume()
                    step_of(buffer, counter, saved + 1)
                    assert contents(buffer) == states[saved + 1], (number, calls[number - 1])
                    buffer.save(saved + 1, wait=True)
                    saved += 1
                except StoreError:
                    failures += 1
                    assert failures < 3, (number, calls[number - 1])
        assert look(directory, states, LAST) == LAST, (number, calls[number - 1])
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

"""A disk or a network that does not give what it holds, for a moment: an error that says where, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import ForebayError, ReplayBuffer
from pipeline.checkpoint import salvage, verify
from pipeline.checkpoint.generations import find_generations
from pipeline.store.layout import Layout
from tests.support.disk import tree
from tests.support.replaying import Counter, contents, fill
from tests.support.runs import pipeline, task

CALLS = ("open", "pread", "preadv", "fstat")


class Stale:
    """Lets the k-th call of the library that reads fail with ESTALE."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        for name in CALLS:
            patch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **more: Any) -> Any:
            writes = len(args) > 1 and call.__name__ == "open" and args[1] & (os.O_WRONLY | os.O_RDWR)
            if os.sep + "pipeline" + os.sep in sys._getframe(1).f_code.co_filename and not writes:
                self.left -= 1
                if self.left == 0:
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return call(*args, **more)

        return read


def each_read(act: Callable[[], object], every: int = 1) -> int:
    """Let each read fail in turn; what ``act`` raises must be the library's. Return how many reads there are."""
    number = 1
    while True:
        with pytest.MonkeyPatch.context() as patch:
            stale = Stale(patch, number)
            with contextlib.suppress(ForebayError):
                act()
        if stale.left > 0:
            return number
        number += every


def resume_buffer(directory: Path) -> None:
    with ReplayBuffer(60, directory=directory) as buffer:
        buffer.attach(counter=Counter())
        buffer.resume()


def test_a_buffer_whose_files_cannot_be_read_says_so(tmp_path: Path) -> None:
    with ReplayBuffer(60, directory=tmp_path) as buffer:
        buffer.attach(counter=Counter())
        buffer.resume()
        for step in (1, 2, 3):
            fill(buffer, 9 * step, 9)
            buffer.save(step, wait=True)
        expected = contents(buffer)
    before = tree(tmp_path / "generations")
    assert each_read(lambda: resume_buffer(tmp_path)) > 20
    assert each_read(lambda: verify(str(tmp_path))) > 40
    assert tree(tmp_path / "generations") == before
    with ReplayBuffer(60, directory=tmp_path) as buffer:
        buffer.attach(counter=Counter())
        buffer.resume(continue_episodes=True)
        assert contents(buffer) == expected


def test_a_payload_that_cannot_be_read_now_ends_no_journal(tmp_path: Path) -> None:
    """What a kill left is not synced: a resume that took an unreadable payload for one that the power took would let
    go of the rollout."""
    with pipeline(task(12), directory=tmp_path / "run").sync() as pipe:
        pipe.start()
        for _ in pipe.batches(groups=12, until=1):
            break
        pipe.submit("numbers", {"n": 12})  # returns when all before it is written as well
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    resumed: list[tuple[int, int, int]] = []

    def resume() -> None:
        directory = tmp_path / str(len(os.listdir(tmp_path)))
        shutil.copytree(tmp_path / "killed", directory)
        with pipeline(task(12), directory=directory).sync() as pipe:
            found = pipe.resume()
            resumed.append((found.set_aside, found.buffered, found.repeated))

    assert each_read(resume, every=2) > 40
    assert set(resumed) == {resumed[-1]}
    assert resumed[-1][0] == 0
    assert resumed[-1][1] + resumed[-1][2] > 0


def test_no_segment_goes_while_a_manifest_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def live(steps: range) -> None:
        with ReplayBuffer(9, directory=tmp_path, keep=1, keep_every=1) as buffer:
            buffer.resume()
            for step in steps:
                fill(buffer, 9 * step, 9)
                buffer.save(step, wait=True)

    live(range(1, 2))
    real = os.open

    def refused(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith("00000000/manifest.json"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real(path, *args, **more)

    live(range(2, 3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        live(range(3, 6))
    layout = Layout(str(tmp_path))
    run = layout.read_run()
    assert run is not None
    found = find_generations(layout, run.run_id)
    assert [each.manifest.step for each in found.complete] == [1, 2, 3, 4, 5]
    assert verify(str(tmp_path)).whole
    with ReplayBuffer(9, directory=tmp_path) as buffer:
        assert buffer.resume(1).rows == 9


def test_salvage_takes_what_cannot_be_read_for_damaged(tmp_path: Path) -> None:
    with pipeline(task(4), directory=tmp_path / "run").sync() as pipe:
        pipe.start()
        for batch in pipe.batches(groups=1, until=2):
            pipe.save(batch.step)
    numbers = iter(range(10**6))
    assert each_read(lambda: salvage(tmp_path / "run", tmp_path / f"new{next(numbers)}"), every=5) > 20

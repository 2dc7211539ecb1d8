"""A folder that another process takes over while a generation is being written: what that one committed stays, and the
generation that was being written does not come to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Locked, ReplayBuffer, Rollout
from pipeline.checkpoint import verify
from pipeline.records import EXTERNAL
from pipeline.store.files import OsFiles
from tests.support import locked
from tests.support.children import child
from tests.support.replaying import Counter
from tests.support.runs import ids, pipeline, task

MOMENTS = [("makedirs", ".part"), ("create", "manifest.json.part"), ("sync_directory", "generations")]


class Pauses(OsFiles):
    """Calls ``happens`` once, before the first call of ``verb`` on a path with that end, when it is armed."""

    def __init__(self, verb: str, end: str) -> None:
        self.verb, self.end = verb, end
        self.happens: Callable[[], None] | None = None

    def _enter(self, verb: str, path: str) -> None:
        happens = self.happens
        if happens is not None and verb == self.verb and path.endswith(self.end):
            self.happens = None
            happens()

    def makedirs(self, path: str) -> None:
        self._enter("makedirs", path)
        super().makedirs(path)

    def create(self, path: str) -> int:
        self._enter("create", path)
        return super().create(path)

    def sync_directory(self, path: str) -> None:
        self._enter("sync_directory", path)
        super().sync_directory(path)


def taken_over(directory: str, body: Callable[..., None]) -> None:
    """Lose the lock, by a copy of the folder, to a process that goes on and commits."""
    shutil.copytree(directory, directory + "-copy")
    with child(body, directory) as taker:
        assert taker.hear() == "saved"
        taker.pipe.send("end")
        assert taker.rest() == []


def generations(directory: str) -> set[str]:
    return {path.parent.name for path in Path(directory, "generations").glob("*/manifest.json")}


@pytest.mark.parametrize(("verb", "end"), MOMENTS)
def test_a_pipeline_that_is_overtaken_while_it_saves_commits_nothing(run_directory: str, verb: str, end: str) -> None:
    files, there = Pauses(verb, end), set[str]()

    def happens() -> None:
        taken_over(run_directory, locked.train)
        there.update(generations(run_directory))

    with pipeline(task(40), directory=run_directory, files=files).sync() as pipe:
        pipe.start()
        step = pipe.get_batch(2).step
        files.happens = happens
        with pytest.raises(Locked, match="has written in this folder meanwhile"):
            pipe.save(step).committed()
        assert generations(run_directory) == there
        assert len(there) > 2
    with pipeline(task(40), directory=run_directory).sync() as again:
        assert again.resume().step == 2
    assert verify(run_directory).whole


def opens(pipe: Connection, directory: str) -> None:
    with pipeline(task(40), directory=directory).sync():
        pipe.send("saved")
        pipe.recv()


@pytest.mark.parametrize(("verb", "end"), MOMENTS)
def test_one_that_only_looked_in_is_enough(run_directory: str, verb: str, end: str) -> None:
    """It has made nothing yet, and may go on from what it saw at any time."""
    files = Pauses(verb, end)
    with pipeline(task(40), directory=run_directory, files=files).sync() as pipe:
        pipe.start()
        step = pipe.get_batch(2).step
        files.happens = lambda: taken_over(run_directory, opens)
        with pytest.raises(Locked, match="has written in this folder meanwhile, as incarnation 2"):
            pipe.save(step).committed()
    assert generations(run_directory) == {"00000000"}
    with pipeline(task(40), directory=run_directory).sync() as again:
        assert again.resume().step == 0
    assert verify(run_directory).whole


def fill(pipe: Connection, directory: str) -> None:
    """Go on with a buffer, add rows and save them."""
    with ReplayBuffer(50, directory=directory) as buffer:
        buffer.attach(counter=Counter())
        buffer.resume()
        buffer.extend({"reward": np.arange(7.0)})
        buffer.save(9, wait=True)
        pipe.send("saved")
        pipe.recv()


@pytest.mark.parametrize(("verb", "end"), MOMENTS)
def test_a_buffer_that_is_overtaken_while_it_saves_commits_nothing(run_directory: str, verb: str, end: str) -> None:
    files, there = Pauses(verb, end), set[str]()

    def happens() -> None:
        taken_over(run_directory, fill)
        there.update(generations(run_directory))

    options: dict[str, Any] = {"directory": run_directory, "files": files}
    with ReplayBuffer(50, **options) as buffer:
        buffer.attach(counter=Counter())
        buffer.extend({"reward": np.arange(5.0)})
        buffer.save(1, wait=True)
        buffer.extend({"reward": np.arange(3.0)})
        files.happens = happens
        with pytest.raises(Locked, match="has written in this folder meanwhile"):
            buffer.save(2, wait=True)
        assert generations(run_directory) == there
        assert len(there) == 2
    with ReplayBuffer(50, directory=run_directory) as again:
        again.attach(counter=Counter())
        assert (again.resume().step, len(again)) == (9, 12)
    assert verify(run_directory).whole


def goes_on(pipe: Connection, directory: str) -> None:
    """One more step; everything is kept."""
    with pipeline(task(40), directory=directory, keep=None).sync() as run:
        with run.weight_update(version=run.resume().version):
            pass
        run.start()
        run.save(run.get_batch(2).step).committed()
        pipe.send("saved")
        pipe.recv()


def test_a_pipeline_that_is_overtaken_as_it_commits_removes_nothing(run_directory: str) -> None:
    """The last call of a commit: what it keeps no more would go next, and the other may have gone on from there."""
    files, there = Pauses("sync_directory", "00000001"), set[str]()

    def happens() -> None:
        taken_over(run_directory, goes_on)
        there.update(generations(run_directory))

    with pipeline(task(40), directory=run_directory, keep=1, files=files).sync() as pipe:
        pipe.start()
        step = pipe.get_batch(2).step
        files.happens = happens
        pipe.save(step).committed()
        step = pipe.get_batch(2).step
        with pytest.raises(Locked, match="has written in this folder meanwhile"):
            pipe.save(step).committed()
    assert generations(run_directory) == there
    assert len(there) == 4
    with pipeline(task(40), directory=run_directory).sync() as again:
        assert again.resume().step == 2
    assert verify(run_directory).whole


def fill_back(pipe: Connection, directory: str) -> None:
    """Go on from the first step, and save; everything is kept."""
    with ReplayBuffer(50, directory=directory, keep=None) as buffer:
        buffer.attach(counter=Counter())
        buffer.resume(1)
        buffer.extend({"reward": np.arange(7.0)})
        buffer.save(9, wait=True)
        pipe.send("saved")
        pipe.recv()


def test_a_buffer_that_is_overtaken_as_it_commits_removes_nothing(run_directory: str) -> None:
    files, there = Pauses("sync_directory", "00000001"), set[str]()

    def happens() -> None:
        taken_over(run_directory, fill_back)
        there.update(generations(run_directory))

    with ReplayBuffer(50, directory=run_directory, keep=1, files=files) as buffer:
        buffer.attach(counter=Counter())
        buffer.extend({"reward": np.arange(5.0)})
        buffer.save(1, wait=True)
        files.happens = happens
        buffer.save(2, wait=True)
        with pytest.raises(Locked, match="has written in this folder meanwhile"):
            buffer.save(3, wait=True)
    assert generations(run_directory) == there
    assert {"00000000", "00000001"} < there
    with ReplayBuffer(50, directory=run_directory) as again:
        again.attach(counter=Counter())
        assert (again.resume().step, len(again)) == (9, 12)
    assert verify(run_directory).whole


def test_what_an_overtaken_pipeline_still_writes_does_not_count(run_directory: str) -> None:
    """It does not know yet, and goes on until its next save: its uids are the other's uids by now."""
    with pipeline(task(40), directory=run_directory).sync() as pipe:
        pipe.start()
        pipe.get_batch(2)
        taken_over(run_directory, goes_on)
        late = [pipe.put("numbers", Rollout(reward=float(number))) for number in range(20)]
        with pytest.raises(Locked, match="has written in this folder meanwhile"):
            pipe.save(pipe.get_batch(2).step).committed()
    for _ in range(2):  # the first resume says so, the second heeds both
        with pipeline(task(40), directory=run_directory).sync() as again:
            resumed = again.resume()
            assert resumed.step == 1
            assert resumed.set_aside >= len(late)
            assert all(again.ledger.entries[uid].kind != EXTERNAL for uid in late if uid in again.ledger.entries)
            with again.weight_update(version=1):
                pass
            again.start()
            trained = [index for batch in again.batches(groups=2) for index in ids(batch)]
            assert sorted(trained) == list(range(2, 40))
    assert verify(run_directory).whole

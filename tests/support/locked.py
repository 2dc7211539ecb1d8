"""Processes that hold a run's folder, or try to."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

from pipeline import Rollout
from pipeline.store.files import OsFiles
from tests.support.runs import pipeline, task


class Stuck(OsFiles):
    """The third manifest is never put under its name."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._seen = pipe, 0

    def rename(self, old: str, new: str) -> None:
        if new.endswith("manifest.json"):
            self._seen += 1
            if self._seen == 3:
                self._pipe.send("busy")
                self._pipe.recv()
        super().rename(old, new)


def train(pipe: Connection, directory: str, disk: OsFiles | None = None) -> None:
    """A run of two steps, each saved, and put to whatever the test says."""
    with pipeline(task(40), directory=directory, files=disk).sync() as run:
        with run.weight_update(version=run.resume().version):
            pass
        run.start()
        for batch in run.batches(groups=2, until=2):
            run.save(batch.step).committed()
        pipe.send("saved")
        while (word := pipe.recv()) != "end":
            pipe.send(run.put("numbers", Rollout(reward=float(word))))


def stuck(pipe: Connection, directory: str) -> None:
    """The commit of step 2 lasts for ever."""
    train(pipe, directory, disk=Stuck(pipe))


def forks(pipe: Connection, directory: str) -> None:
    """Fork with the folder open, and die; the child lives on, with every descriptor that it got."""
    with pipeline(task(40), directory=directory).sync() as run:
        run.start()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            pipe.send(("child", os.getpid(), attempt(directory)))
            pipe.recv()  # the parent is dead now
            pipe.send(("child", os.getpid(), attempt(directory)))
            pipe.recv()
            os._exit(0)
        pipe.send(("parent", parent, ""))
        os.waitpid(child, 0)


def attempt(directory: str) -> str:
    """Try to open the folder; return what that raised."""
    try:
        with pipeline(task(40), directory=directory).sync():
            return ""
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def attempts(pipe: Connection, directory: str) -> None:
    """Try to open the folder, whenever asked."""
    while True:
        word: Any = pipe.recv()
        if word == "end":
            return
        pipe.send(attempt(directory))

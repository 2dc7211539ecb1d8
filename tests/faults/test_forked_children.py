"""A process that is forked while a run is open: the child neither waits nor writes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import UsageError, WriteFailed
from pipeline.checkpoint import verify
from pipeline.records import Dropped
from pipeline.store.files import OsFiles
from pipeline.store.writer import StoreWriter
from tests.support.disk import new_run
from tests.support.runs import pipeline, task


def in_a_fork(act: Callable[[], object]) -> None:
    """Run ``act`` in a forked child, which must end well, and soon."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(20)
            act()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_verbs_of_a_synchronous_pipeline_are_refused_in_a_child_and_its_end_changes_nothing(tmp_path: Path) -> None:
    def act() -> None:
        for verb in (lambda: pipe.save(9), lambda: next(iter(pipe.batches(groups=1))), pipe.statistics):
            with pytest.raises(UsageError, match="fork"):
                verb()
        pipe.close()

    with pipeline(task(12), directory=tmp_path).sync() as pipe:
        pipe.start()
        for batch in pipe.batches(groups=1, until=6):
            pipe.save(batch.step)
            if batch.step == 3:
                in_a_fork(act)
    assert verify(str(tmp_path)).whole
    with pipeline(task(12), directory=tmp_path).sync() as pipe:
        assert pipe.resume().step == 6


def test_a_writer_in_a_child_writes_nothing(tmp_path: Path) -> None:
    layout, run = new_run(tmp_path)
    writer = StoreWriter(layout, OsFiles(), run_tag=run.tag, incarnation=1)

    def act() -> None:
        writer.append(Dropped(1, "x"))
        for verb in (lambda: writer.write(writer.take()), writer.sync):
            with pytest.raises(WriteFailed, match="fork"):
                verb()
        writer.close()

    writer.place(b"payload", 1, 0, 0)
    writer.write(writer.take())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.fb?")}
    in_a_fork(act)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.fb?")} == before
    writer.close()

"""The processes that tests start."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from tests.support.children import ChildProcess
from tests.support.ranks import at_once, fine

EACH = 40


def dies(pipe: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_how_each_ended_is_known_however_many_threads_start_and_join_others() -> None:
    def codes() -> list[int | None]:
        found = []
        for _ in range(EACH):
            child = ChildProcess(dies)
            child.process.join()
            child.pipe.close()
            found.append(child.process.exitcode)
        return found

    assert fine(at_once([codes] * 4)) == [[-signal.SIGKILL] * EACH] * 4

"""Processes for tests, run by a fork server, so that starting one takes milliseconds, and talked to through a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 60.0


def insist(process: Any, number: int) -> None:
    """Send a process a signal again and again until it has ended: two that come close to each other count as one, and
    on a machine with other work nobody knows when the first one has come."""
    until = time.monotonic() + SECONDS
    while process.is_alive() and time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        process.join(0.3)


class Ended(Exception):
    """The process said nothing more."""


_STARTS = threading.Lock()


class ChildProcess:
    """A process that runs ``body(pipe, *args)``."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([body.__module__])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(body, theirs, *args))
        with _STARTS:
            self.process.start()
            # A start asks all children that it knows whether they have ended. One that a thread is joining at the same
            # time would be told to one of the two alone, and the other take it for lost (255).
            multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]
        theirs.close()

    def hear(self) -> Any:
        """Return the next that it says.

        Raises:
            Ended: it is gone and has said all.
        """
        assert self.pipe.poll(SECONDS), "nothing came"
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise Ended from None

    def rest(self) -> list[Any]:
        """Return all that it still says, to its end."""
        said = []
        while True:
            try:
                said.append(self.hear())
            except Ended:
                return said

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def child(body: Callable[..., None], *args: Any) -> Iterator[ChildProcess]:
    """A process that is gone afterwards."""
    process = ChildProcess(body, *args)
    try:
        yield process
    finally:
        process.kill()
        process.pipe.close()


def _run(body: Callable[..., None], pipe: Connection, *args: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)  # what a test's output goes to may be a file, with a limit on its size
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        body(pipe, *args)
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
        raise

"""One worker process, seen from the process that started it."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec

from pipeline.config import ProcessOptions
from pipeline.engines.calls import Worker
from pipeline.engines.ending import Tail, death_of, ended, has_ended, kill_all
from pipeline.engines.guardian import Guardian
from pipeline.engines.link import Link
from pipeline.engines.naming import main_script
from pipeline.engines.values import Packer
from pipeline.engines.wire import AnyMessage, Stop
from pipeline.errors import WorkerDied

_START = str(Path(__file__).parent / "worker" / "start.py")


class WorkerProcess(Worker):
    """A worker from its start to its end. :meth:`live` is a task of the owner's."""

    def __init__(
        self,
        options: ProcessOptions,
        guardian: Guardian,
        *,
        backend: str,
        on_ready: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        """Start the process.

        Args:
            options: of the engine.
            guardian: of the engine.
            backend: what runs the event loop of a worker for asynchronous runners; empty: it is for plain ones.
            on_ready: called when it can be given work.
            on_room: called when a call has ended.

        Raises:
            OSError: the system starts no process.
        """
        super().__init__(on_ready, on_room)
        self._guardian = guardian
        guardian.start()
        ours, theirs = socket.socketpair()
        said, says = os.pipe()
        try:
            with theirs:
                self._process = _spawn(options, theirs.fileno(), says)
        except BaseException:
            ours.close()
            os.close(said)
            raise
        finally:
            os.close(says)
        guardian.add(self.pid)
        self.name = f"worker process {self.pid}"
        self._tail = Tail(said, _to_stderr())
        with contextlib.suppress(OSError):  # it has ended already, which is noticed below
            ours.sendall(_setup(backend))
        self.link = Link(ours)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended; one that has takes no work any more."""
        if not self.stopping:
            self.stopping = has_ended(self._process)
        return not self.stopping

    def send(self, message: AnyMessage, packer: Packer | None = None) -> None:
        self.link.send(message, packer)

    async def live(self) -> None:
        """Return when the process has ended and everybody who waits for it has been told."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._read, name="forebay worker's messages")
                group.start_soon(self.link.write, name="forebay messages to a worker")
                group.start_soon(self._tail.follow, name="forebay worker's stderr")
                await ended(self._process)
                group.cancel_scope.cancel("the worker has ended")
        finally:
            with anyio.CancelScope(shield=True):
                kill_all(self._process)  # one that has left by itself may have left others behind
                await ended(self._process)
            self._bury()

    def _bury(self) -> None:
        self.stopping = True
        self._guardian.remove(self.pid)
        self._process.wait()
        with contextlib.suppress(msgspec.MsgspecError, OSError):
            self.link.drain(self._took)
        self._tail.drain()
        self.link.close()
        self._tail.close()
        self._lose_calls()

    def death(self, when: str) -> WorkerDied:
        """Return the error that says how it ended."""
        return death_of(self._process, when, self._tail.text, planned=self._planned)

    def stop(self) -> None:
        """Tell it to leave."""
        self.stopping = True
        self.link.send(Stop())

    def kill(self) -> None:
        """End it, on purpose."""
        self._planned = self.stopping = True
        kill_all(self._process)

    async def _read(self) -> None:
        try:
            await self.link.read(self._took)
        except (msgspec.MsgspecError, OSError):  # somebody in there has written what is no message
            kill_all(self._process)


def _spawn(options: ProcessOptions, sock: int, stderr: int) -> subprocess.Popen[bytes]:
    # A fresh interpreter, not a fork. Started in this thread, since a worker ends with the thread that started it.
    flags = [f"-W{each}" for each in sys.warnoptions]
    return subprocess.Popen(
        [sys.executable, "-P", *flags, _START, str(sock)],
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(sock,),
        env={**os.environ, **options.env},
        process_group=0,
    )


def _setup(backend: str) -> bytes:
    script = main_script()
    path = [os.path.abspath(each) for each in sys.path if isinstance(each, str)]
    setup = {
        "parent": os.getpid(),
        "path": path,
        "argv": sys.argv,
        "script": None if script is None else {"path": script.path, "package": script.package},
        "backend": backend,
    }
    data = json.dumps(setup).encode()
    return len(data).to_bytes(8, "little") + data


def _to_stderr() -> Callable[[bytes], None]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(data: bytes) -> None:
        stream = sys.stderr
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.write(decoder.decode(data))

    return write

"""A worker that runs plain functions: in its main thread, one at a time, with no event loop around them.

Some simulators insist on the main thread, and some functions run an event loop of their own. While one runs, nobody
reads the socket but the function's own questions.
"""

from __future__ import annotations

import inspect
import os
import socket
import time
from collections import deque
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from pipeline.engines.values import Packer, Unpacker
from pipeline.engines.wire import (
    Answer,
    AnyMessage,
    Ask,
    Attempt,
    Done,
    Frame,
    Invoke,
    Load,
    Outgoing,
    Ready,
    Receiver,
    Stop,
    Tell,
)
from pipeline.engines.worker.context import WorkerContext, answered
from pipeline.engines.worker.loading import NotLoaded, load
from pipeline.engines.worker.raising import raised
from pipeline.errors import RunnerError
from pipeline.records import Item, Rollout
from pipeline.store.plain import PlainValueError


def serve(sock: socket.socket) -> None:
    """Serve until told to stop; without whoever tells, end at once."""
    with ExitStack() as resources:
        line = SocketLine(sock)
        try:
            line.say(Ready())
            PlainWorker(line, resources).serve()
        except (EOFError, ConnectionError):
            os._exit(1)


class _Loaded(NamedTuple):
    name: str
    run: Any
    resource: Any


class PlainLine(Protocol):
    """How a worker for plain functions talks to the process that started it."""

    def say(self, message: AnyMessage, packer: Packer | None = None) -> None: ...

    def hear(self) -> Frame:
        """Return the next message to the worker; waits for it."""
        ...


class SocketLine:
    """Over the socket of a worker process."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._receiver = sock, Receiver(sock)
        self._frames: deque[Frame] = deque()

    def say(self, message: AnyMessage, packer: Packer | None = None) -> None:
        Outgoing(message, packer).send(self._sock)

    def hear(self) -> Frame:
        while not self._frames:
            self._frames += self._receiver.receive()
        return self._frames.popleft()


class PlainWorker:
    """Runs what it hears of, one at a time, until it is told to stop."""

    def __init__(self, line: PlainLine, resources: ExitStack) -> None:
        self._line, self._resources = line, resources
        self.say = line.say
        self._tasks: dict[int, Load] = {}
        self._loaded: dict[int, _Loaded] = {}
        self._opened: dict[int, Any] = {}
        self._asked = 0

    def serve(self) -> None:
        """Return when told to stop."""
        while True:
            message, body = self._line.hear()
            if isinstance(message, Attempt):
                self._attempt(message, body)
            elif isinstance(message, Invoke):
                self._invoke(message, body)
            elif isinstance(message, Load):
                self._tasks[message.task] = message
            elif isinstance(message, Stop):
                return

    def tell(self, message: Tell, packer: Packer) -> None:
        self.say(message, packer)

    def ask(self, call: int, verb: str, value: Any = None) -> Any:
        packer = Packer(lenient=True)
        self._asked += 1
        self.say(Ask(call, self._asked, verb, packer.plain(value)), packer)
        while True:
            message, body = self._line.hear()
            if isinstance(message, Answer) and message.ask == self._asked:
                return answered(message, body)

    def _attempt(self, attempt: Attempt, body: Any) -> None:
        try:
            task = self._load(attempt.task)
            item = Item(task.name, *attempt.item, Unpacker(body).value(attempt.content))
            ctx = PlainContext(self, attempt, item, time.monotonic())
            ctx.resource = self._resource(attempt.task, task)
            returned = task.run(item, ctx)
            packer = Packer(lenient=True)
            done = Done(attempt.call, packer.plain(returned), ctx.parked)
        except BaseException as error:
            self.say(raised(attempt.call, error))
        else:
            self.say(done, packer)

    def _load(self, number: int) -> _Loaded:
        task = self._loaded.get(number)
        if task is None:
            given = self._tasks[number]
            run = load(given.run)
            if inspect.iscoroutinefunction(run):
                raise NotLoaded(f"{given.run} is an async function: give the function itself to the task, not its name")
            resource = None if given.resource is None else load(given.resource)
            task = self._loaded[number] = _Loaded(given.name, run, resource)
        return task

    def _resource(self, number: int, task: _Loaded) -> Any:
        if task.resource is None:
            return None
        if number not in self._opened:
            manager = task.resource()
            if not hasattr(manager, "__enter__"):
                raise RunnerError(
                    f"task {task.name!r}: resource() returned {manager!r}, which is no context manager; a plain runner "
                    "in a worker process needs a plain one, as @contextmanager makes it"
                )
            self._opened[number] = self._resources.enter_context(manager)
        return self._opened[number]

    def _invoke(self, invoke: Invoke, body: Any) -> None:
        try:
            function = load(invoke.function)
            returned = function(*Unpacker(body).value(invoke.args))
            packer = Packer()
            try:
                done = Done(invoke.call, packer.plain(returned))
            except PlainValueError as error:
                raise RunnerError(f"{invoke.function} returned what cannot go to another process: {error}") from None
        except BaseException as error:
            self.say(raised(invoke.call, error))
        else:
            self.say(done, packer)


class PlainContext(WorkerContext):
    """One attempt of a plain runner: ``def play(item, ctx)``."""

    _line: PlainWorker

    @property
    def version_changed(self) -> bool:
        """Whether the weights have been updated since this attempt started; asks each time."""
        changed: bool = self._line.ask(self._call, "version_changed")
        return changed

    def save_partial(self, rollout: Rollout) -> None:
        """Keep what there is so far; as in :class:`pipeline.Context`."""
        self._line.ask(self._call, "save_partial", rollout)

    def extend(self, rows: Any) -> int:
        """Add rows to the buffer of transitions that the pipeline was given; waits, and returns how many they are."""
        count: int = self._line.ask(self._call, "extend", rows)
        return count

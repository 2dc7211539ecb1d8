"""A worker that runs ``async def`` runners, several at once, on an event loop in its main thread."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import anyio.abc

from pipeline.engines.link import Link
from pipeline.engines.local import LocalEngine
from pipeline.engines.values import Packer, Unpacker
from pipeline.engines.wire import Answer, Ask, Attempt, Cancel, Done, Frame, Load, Ready, Stop, Tell
from pipeline.engines.worker.context import WorkerContext, answered
from pipeline.engines.worker.loading import load
from pipeline.engines.worker.raising import raised
from pipeline.errors import UsageError
from pipeline.records import Item, Rollout


def serve(sock: socket.socket, backend: str) -> None:
    """Serve until told to stop; without whoever tells, end at once."""
    anyio.run(_serve, sock, backend=backend)


async def _serve(sock: socket.socket) -> None:
    async with LocalEngine() as engine, anyio.create_task_group() as group:
        link = Link(sock)
        worker = AsyncWorker(link.send, engine, group)
        group.start_soon(link.write)
        link.send(Ready())
        group.start_soon(_read, link, worker)
        await worker.stopped.wait()
        group.cancel_scope.cancel("the worker was told to stop")


async def _read(link: Link, worker: AsyncWorker) -> None:
    await link.read(worker.take)
    os._exit(1)  # nobody is there any more


class _Loaded(NamedTuple):
    """What :class:`LocalEngine` wants of a task."""

    name: str
    run: Any
    resource: Any


class _Question:
    def __init__(self) -> None:
        self.event = anyio.Event()
        self.answer: Answer | None = None
        self.body: Any = None


class AsyncWorker:
    """Runs what it is given in tasks of ``group``, and says what comes of it by ``send``, which waits for nothing."""

    def __init__(self, send: Callable[..., None], engine: LocalEngine, group: anyio.abc.TaskGroup) -> None:
        self._send, self._engine, self._group = send, engine, group
        self.stopped = anyio.Event()
        self._tasks: dict[int, Load] = {}
        self._loaded: dict[int, _Loaded] = {}
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._questions: dict[int, _Question] = {}
        self._asked = 0

    def take(self, frame: Frame) -> None:
        """Take in a message."""
        message, body = frame
        if isinstance(message, Attempt):
            self._scopes[message.call] = anyio.CancelScope()
            self._group.start_soon(self._attempt, message, body, name=f"forebay attempt {message.facts.key}")
        elif isinstance(message, Load):
            self._tasks[message.task] = message
        elif isinstance(message, Answer):
            question = self._questions.pop(message.ask, None)
            if question is not None:
                question.answer, question.body = message, body
                question.event.set()
        elif isinstance(message, Cancel):
            scope = self._scopes.get(message.call)
            if scope is not None:
                scope.cancel("the attempt was cut")
        elif isinstance(message, Stop):
            self.stopped.set()

    def tell(self, message: Tell, packer: Packer) -> None:
        self._send(message, packer)

    async def ask(self, call: int, verb: str, value: Any = None) -> Any:
        packer, question = Packer(lenient=True), _Question()
        self._asked += 1
        number = self._asked
        self._questions[number] = question
        self._send(Ask(call, number, verb, packer.plain(value)), packer)
        try:
            await question.event.wait()
        finally:
            self._questions.pop(number, None)
        assert question.answer is not None
        return answered(question.answer, question.body)

    async def _attempt(self, attempt: Attempt, body: Any) -> None:
        call, packer = attempt.call, Packer(lenient=True)
        scope = self._scopes[call]
        try:
            with scope:
                task = self._load(attempt.task)
                item = Item(task.name, *attempt.item, Unpacker(body).value(attempt.content))
                ctx = AsyncContext(self, attempt, item, anyio.current_time())
                returned = await self._engine.run(task, item, ctx)  # type: ignore[arg-type]  # as much of a task as it wants
                self._send(Done(call, packer.plain(returned), ctx.parked), packer)
                return
        except BaseException as error:  # its own scope's cancellation has ended above
            self._send(raised(call, error))
            if isinstance(error, anyio.get_cancelled_exc_class()) and self.stopped.is_set():
                raise
        else:
            self._send(raised(call, TimeoutError("the attempt was cut")))
        finally:
            del self._scopes[call]

    def _load(self, number: int) -> _Loaded:
        task = self._loaded.get(number)
        if task is None:
            given = self._tasks[number]
            resource = None if given.resource is None else load(given.resource)
            task = self._loaded[number] = _Loaded(given.name, load(given.run), resource)
        return task


class AsyncContext(WorkerContext):
    """One attempt of an asynchronous runner in a worker: ``async def solve(item, ctx)``."""

    _line: AsyncWorker

    @property
    def version_changed(self) -> bool:
        """Not offered: it would have to be awaited."""
        raise UsageError("ctx.version_changed is not offered to an async runner in a worker process")

    def save_partial(self, rollout: Rollout) -> None:
        """Keep what there is so far; what cannot be kept fails the attempt at its end."""
        packer = Packer(lenient=True)
        self._line.tell(Tell(self._call, "save_partial", packer.plain(rollout)), packer)

    async def extend(self, rows: Any) -> int:
        """Add rows to the buffer of transitions that the pipeline was given; waits, and returns how many they are."""
        count: int = await self._line.ask(self._call, "extend", rows)
        return count

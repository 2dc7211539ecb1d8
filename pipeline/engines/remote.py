"""What engines have in common that run attempts elsewhere: in worker processes, or in actors of a cluster.

A plain ``def`` runner runs alone in its worker; an ``async def`` one beside others, or in this process where there are
no workers for such. Workers import what they run by its name.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import anyio

from pipeline.engines.calls import Call
from pipeline.engines.crew import Crew
from pipeline.engines.local import LocalEngine, is_async
from pipeline.engines.naming import Named, name_of
from pipeline.engines.values import Packer, Unpacker
from pipeline.engines.wire import Ask, Attempt, Done, Invoke, Load, Raised, Tell, kept
from pipeline.engines.worker import loading
from pipeline.errors import (
    ConfigError,
    RolloutTooDeep,
    RunnerRaised,
    SourceError,
    UsageError,
    WorkerDied,
    WorkerFailed,
)
from pipeline.records import EVALUATION, Item, Rollout
from pipeline.store.plain import PlainValueError
from pipeline.task import Task


class _Plan(NamedTuple):
    """How the attempts of a task run in workers."""

    crew: Crew
    load: Load


class RemoteEngine:
    """Base of engines with workers; implements :class:`pipeline.interfaces.Engine`."""

    def __init__(self, plain: Crew, asynchronous: Crew | None, *, most: int) -> None:
        """Start nothing yet.

        Args:
            plain: workers for plain functions.
            asynchronous: workers for ``async def`` runners; None: these run in this process.
            most: how many workers a crew may have at any time.
        """
        self._local, self._plain, self._async, self._most = LocalEngine(), plain, asynchronous, most
        self._plans: dict[Task, _Plan | None] = {}
        self._suspects: set[tuple[Any, ...]] = set()
        self._stack = AsyncExitStack()
        self._entered = False

    @property
    def _crews(self) -> list[Crew]:
        return [each for each in (self._plain, self._async) if each is not None]

    async def _open(self) -> None:
        if loading.loading:
            raise UsageError(
                "this script is being imported by a worker process, to find what it defines, and would start workers "
                "of its own: put what starts the pipeline under `if __name__ == '__main__':`"
            )
        if self._entered:
            raise UsageError("this engine was opened before; make a new one for each pipeline")
        self._entered = True
        await self._stack.enter_async_context(self._local)
        for crew in self._crews:
            await self._stack.enter_async_context(crew)

    async def _close(self, *exc: Any) -> bool | None:
        return await self._stack.__aexit__(*exc)

    # -- the engine --------------------------------------------------------------------------------------------

    def check(self, task: Task) -> None:
        """Find the names of what ``task`` runs in workers.

        Raises:
            ConfigError: it cannot be imported by name.
        """
        self._plan(task)

    def slots(self, tasks: Sequence[Task]) -> int | None:
        """Return how many attempts the workers can run at once; None if some of them run in this process."""
        crews = {None if plan is None else plan.crew for plan in map(self._plan, tasks)}
        if None in crews:
            return None
        return sum(self._most * crew.places for crew in crews if crew is not None)

    def run(self, task: Task, item: Item, ctx: Any) -> Awaitable[Rollout]:
        """Run one attempt, in a worker or in the calling task."""
        plan = self._plan(task)
        return self._local.run(task, item, ctx) if plan is None else self._attempt(plan, item, ctx)

    def _plan(self, task: Task) -> _Plan | None:
        if task not in self._plans:
            self._plans[task] = self._make_plan(task)
        return self._plans[task]

    def _make_plan(self, task: Task) -> _Plan | None:
        asynchronous = is_async(task.run)
        if asynchronous and self._async is None:
            self._local.check(task)
            return None
        where, given = f"task {task.name!r}", task.resource
        # What @asynccontextmanager makes is callable too, as a decorator.
        if any(hasattr(given, enter) for enter in ("__aenter__", "__enter__")) and not isinstance(given, type):
            raise ConfigError(
                f"{where}: resource={given!r} is open in one process and cannot go to another; give a function that "
                "makes one: each worker calls it",
                option="resource",
            )
        run = name_of(task.run, f"{where}: run", "run")
        resource = None if given is None else name_of(given, f"{where}: resource", "resource")
        load = Load(len(self._plans), task.name, run, resource)
        return _Plan(self._async if asynchronous and self._async else self._plain, load)

    async def _attempt(self, plan: _Plan, item: Item, ctx: Any) -> Any:
        packer = Packer()
        try:
            content = packer.plain(item.content)
        except PlainValueError as error:
            raise SourceError(f"{item}: its content goes to a worker process, and {error}") from None
        key = (item.task, item.index, ctx.member, ctx.kind, 0 if ctx.kind == EVALUATION else item.uid)
        try:
            call = await self._place(plan.crew, item, ctx, alone=key in self._suspects)
        except WorkerFailed as error:
            return error  # no attempt could run: the run ends with it
        try:
            self._send_attempt(call, plan, item, ctx, content, packer)
            returned = await self._converse(call, item, ctx, plan.crew)
        except WorkerDied as error:
            # Run it again alone, where it is not known whose death it was: none of the others is to die of it twice.
            if call.company > 1 and not error.planned:
                self._suspects.add(key)
            raise
        except BaseException:
            plan.crew.cut(call)
            raise
        self._suspects.discard(key)
        return returned

    async def _place(self, crew: Crew, item: Item, ctx: Any, *, alone: bool) -> Call:
        call = crew.call_nowait(item, alone=alone)
        if call is None:
            ctx.queued()
            call = await crew.call(item, alone=alone, urgent=ctx.kind == EVALUATION)
            ctx.begun()
        return call

    def _send_attempt(self, call: Call, plan: _Plan, item: Item, ctx: Any, content: Any, packer: Packer) -> None:
        load = plan.load
        if load.task not in call.worker.knows:
            call.worker.knows.add(load.task)
            call.send(load)
        left = None if ctx.deadline == math.inf else ctx.deadline - anyio.current_time()
        place = (item.epoch, item.index, item.uid)
        call.send(Attempt(call.number, load.task, place, content, ctx.facts(), left), packer)

    async def _converse(self, call: Call, item: Item, ctx: Any, crew: Crew) -> Any:
        refused: BaseException | None = None
        while True:
            message, body = await call.hear()
            values = Unpacker(body)
            if isinstance(message, Ask):
                await self._answer(call, message, values, ctx, crew)
            elif isinstance(message, Tell):
                try:
                    self._told(message, values, ctx)
                except Exception as error:
                    refused = refused or error
            elif isinstance(message, Raised):
                return self._raised(message, call, item)
            elif isinstance(message, Done):
                if refused is not None:
                    raise refused
                if message.parked:
                    ctx.park()
                return values.value(message.value)

    async def _answer(self, call: Call, ask: Ask, values: Unpacker, ctx: Any, crew: Crew) -> None:
        value: Any = None
        try:
            if ask.verb == "extend":
                crew.hold(1)
                try:
                    value = await ctx.extend(values.value(ask.value))
                finally:
                    crew.hold(-1)
            elif ask.verb == "save_partial":
                ctx.save_partial(values.value(ask.value))
            elif ask.verb == "version_changed":
                value = ctx.version_changed
        except Exception as error:
            call.answer(ask.ask, error=error)
        else:
            call.answer(ask.ask, value)

    def _told(self, tell: Tell, values: Unpacker, ctx: Any) -> None:
        if tell.verb == "save_partial":
            ctx.save_partial(values.value(tell.value))
        elif tell.verb == "log":
            level, event, fields = values.value(tell.value)
            getattr(ctx.log, level)(event, **fields)

    def _raised(self, raised: Raised, call: Call, item: Item) -> Any:
        if raised.why == "too deep":
            return RolloutTooDeep(f"{item}: field info: {raised.text}")
        if raised.why == "unloadable":
            return WorkerFailed(f"task {item.task!r}: {raised.text}\n{raised.traceback}")
        raise _error_of(raised, call)

    # -- single functions --------------------------------------------------------------------------------------

    async def call(self, function: Callable[..., Any] | str, *args: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        """Call a plain function in a worker, and return what it returns.

        ::

            async def solve(item, ctx):
                code = await write_code(item["task"])
                try:
                    reward = await engine.call(run_tests, code, timeout=10)
                except (WorkerDied, TimeoutError):
                    reward = 0.0

        Arguments and what is returned are plain values, arrays, tensors, items and rollouts; ``functools.partial``
        gives it arguments by name.

        Args:
            function: at the top level of a module, or ``"module:function"``.
            args: its arguments.
            timeout: seconds that the function may take, once a worker has begun it; then the worker is killed.

        Raises:
            ConfigError: the function cannot be imported by name, or an argument cannot travel.
            RunnerRaised: the function raised.
            TimeoutError: it took longer than ``timeout``.
            WorkerDied: its worker ended under it. A runner that lets this out is run again.
            WorkerFailed: no worker can be started, or none can import the function.
        """
        if not self._entered:
            raise UsageError("call() comes inside `async with engine`, or while a pipeline with this engine is open")
        named, packer = name_of(function, "call()"), Packer()
        try:
            given = packer.plain(list(args))
        except PlainValueError as error:
            raise ConfigError(f"call({named}): an argument cannot go to a worker process: {error}") from None
        call = self._plain.call_nowait(f"{named}()") or await self._plain.call(f"{named}()")
        try:
            with anyio.move_on_after(timeout):
                call.send(Invoke(call.number, named, given), packer)
                message, body = await call.hear()
                return _returned(message, body, call, named)
            raise TimeoutError(f"call({named}): the function took longer than timeout={timeout} s")
        finally:
            self._plain.cut(call)


def _returned(message: Any, body: Any, call: Call, named: Named) -> Any:
    if isinstance(message, Raised):
        if message.why == "unloadable":
            raise WorkerFailed(f"call(): {message.text}\n{message.traceback}")
        raise _error_of(message, call)
    assert isinstance(message, Done), f"{named}: a worker said {message!r}"
    return Unpacker(kept(body)).value(message.value)


def _error_of(raised: Raised, call: Call) -> RunnerRaised:
    error = RunnerRaised(f"{raised.type_name}: {raised.text}", type_name=raised.type_name, traceback=raised.traceback)
    error.add_note(f"In {call.worker.name}:\n{raised.traceback}")
    return error

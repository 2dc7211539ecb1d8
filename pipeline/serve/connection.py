"""One client, as the producer sees it: its requests, what it holds, and what becomes of that when it is gone."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.abc
import msgspec

from pipeline.errors import ClosedError, NotServed, PeerLost, Stopped, UsageError
from pipeline.observe import events
from pipeline.serve.leases import Held
from pipeline.serve.memory import share
from pipeline.serve.notes import batch_note, evaluation_note, note_of, rollout_of
from pipeline.serve.wire import FAREWELL, PROTOCOL, Answer, Now, Request, Wire, close_all
from pipeline.store.contents import decode_content
from pipeline.wiring.saving import OWN_FILES, Saving

if TYPE_CHECKING:
    from pipeline.serve.server import Serving

_MOST_REQUESTS = 256
_PLAIN = ("start", "reward", "discard", "set_share", "request_save", "save_due", "metrics")
"""Verbs of the pipeline whose arguments and results are plain values."""
_decode = msgspec.msgpack.Decoder(Request).decode


class Connection:
    """A client, from its first word to its last."""

    def __init__(self, serving: Serving, stream: anyio.abc.UNIXSocketStream) -> None:
        self._serving, self._pipe, self._run = serving, serving.pipe, serving.run
        self._stream, self._wire = stream, Wire(stream)
        self.part: tuple[int, int] | None = None
        self.process = 0
        self.trains = False
        """Whether it has asked for a batch."""
        self.acked = -1
        """The last step that was trained by its word."""
        self.pushed = -1
        """The last version whose weights it pushed."""
        self.content = False
        """Whether it has left, and not for an error."""
        self._waiting = self._over = False
        self._group: anyio.abc.TaskGroup | None = None
        self._running: dict[int, anyio.CancelScope] = {}
        self._given: dict[int, Held] = {}
        self._open: dict[int, _Body] = {}
        self._savings: dict[int, Saving] = {}
        self._verbs: dict[str, Callable[..., Awaitable[Any]]] = {
            "get_batch": self._get_batch,
            "ack": self._ack,
            "save": self._save,
            "committed": self._committed,
            "weight_update": self._weight_update,
            "checkpoint": self._checkpoint,
            "leave": self._leave_body,
            "put": self._put,
            "submit": self._submit,
            "evaluate": self._evaluate,
            "resume": self._resume,
            "statistics": self._statistics,
            "progress": self._progress,
            **{name: partial(self._plain, name) for name in _PLAIN},
        }

    async def talk(self) -> None:
        """Serve the client until it is gone, or the pipeline is closed."""
        cut = True
        try:
            async with self._stream:
                try:
                    with suppress(PeerLost):
                        if await self._greet():
                            await self._serve()
                    cut = False
                finally:
                    if cut:  # the pipeline is being closed
                        self._wire.send_now(Answer(FAREWELL, error=note_of(ClosedError("the pipeline is closed"))))
                    self._wire.close()
        finally:
            await self._let_go()
        await self._serving.gone(self)

    def leaving(self) -> bool:
        """Whether it has gone, or said so, and what it held is about to be given back."""
        return self._over or self._wire.hung_up()

    async def _greet(self) -> bool:
        """Hear who it is. Returns whether it may stay."""
        self.process, user = self._wire.peer()
        if user != os.geteuid():
            return False
        body, _ = await self._wire.read()
        try:
            await self._check(_decode(body))
            stored = await self._serving.newest()
        except Exception as error:  # the client's to hear, whatever it is
            self._wire.send_now(Answer(FAREWELL, error=note_of(error)))
            return False
        told: dict[str, Any] = {"run_id": self._serving.run_id, "incarnation": self._run.state.incarnation}
        told["started"] = self._run.started
        if stored is not None:
            manifest = stored.manifest
            told |= {"generation": manifest.generation, "saved_step": manifest.step, "external": manifest.external}
            if any(info.path.startswith(OWN_FILES + "/") for info in manifest.files):
                told["files"] = os.path.join(stored.folder, OWN_FILES)
        self._wire.send(Answer(FAREWELL, told, now=self._now()))
        self._run.state.log.info(events.TRAINER_JOINED, process=self.process, part=self.part)
        return True

    async def _check(self, hello: Request) -> None:
        protocol, run = hello.args.get("protocol"), hello.args.get("run")
        if hello.verb != "hello" or protocol != PROTOCOL:
            raise NotServed(
                f"the producer speaks protocol {PROTOCOL}, this client {protocol}: use one version of forebay in both"
            )
        if run not in ("", self._serving.run_id):
            raise NotServed(f"this address serves run {self._serving.run_id}, and run {run} was asked for")
        part = hello.args.get("part")
        self.part = None if part is None else (part[0], part[1])
        await self._serving.admit(self, hello.args.get("step"))

    async def _serve(self) -> None:
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._wire.write)
            try:
                while not self._over:
                    body, fds = await self._wire.read()
                    for fd in fds:  # no request has any
                        os.close(fd)
                    self._hear(_decode(body), group)
            except (PeerLost, msgspec.MsgspecError, KeyError):
                pass  # it was killed, or is not one of ours
            group.cancel_scope.cancel("the client is gone")

    def _hear(self, request: Request, group: anyio.abc.TaskGroup) -> None:
        # What must not be overtaken is done here and now; the rest has a task each.
        if request.verb == "goodbye":
            self._over, self.content = True, not request.args["failed"]
        elif request.verb == "cancel":
            self._cancel(request.args["of"])
        elif request.verb == "release":
            held = self._given.pop(request.args["of"], None)
            if held is not None:
                held.batch.release()
                self._run.state.changed.notify()
        elif len(self._running) >= _MOST_REQUESTS:
            error = UsageError(f"{_MOST_REQUESTS} requests wait already; await some of them first")
            self._wire.send(Answer(request.id, error=note_of(error), now=self._now()))
        else:
            scope = self._running[request.id] = anyio.CancelScope()
            group.start_soon(self._answer, request, scope)

    def _cancel(self, of: int) -> None:
        if of in self._open and self._group is not None:  # its body will never be
            self._group.start_soon(self._leave_body, of, of, "cancelled")
        scope = self._running.get(of)
        if scope is not None:
            scope.cancel("the client does not wait any more")
        held = self._given.pop(of, None)
        if held is not None:  # it was on its way
            held.batch.release()
            self._run.state.changed.notify()

    async def _answer(self, request: Request, scope: anyio.CancelScope) -> None:
        value: Any = None
        error: BaseException | None = None
        fds: list[int] = []
        size = 0
        try:
            with scope:
                verb = self._verbs.get(request.verb)
                if verb is None:
                    raise UsageError(f"a served pipeline has no verb {request.verb!r}")
                value = await verb(request.id, **request.args)
                if isinstance(value, _Payloads):
                    fd, size = await value.into_memory(self._run.in_thread)
                    fds.append(fd)
                    value = value.note
        except Stopped as stopped:
            error = stopped
            self._serving.stopped(stopped)
        except Exception as failed:  # the client's to hear, whatever it is
            error = failed
        finally:
            del self._running[request.id]
        if scope.cancelled_caught:
            self._cancel(request.id)
            error = ClosedError("cancelled")
        if error is None:
            try:
                self._wire.send(Answer(request.id, value, None, self._now(), size), fds)
            except (TypeError, ValueError, OverflowError) as failed:  # somebody's own object among the figures
                error = failed
        if error is not None:
            close_all(fds)
            self._wire.send(Answer(request.id, None, note_of(error), self._now()))

    def _now(self) -> Now:
        state = self._run.state
        return Now(state.version, state.ledger.step, state.ledger.next_step)

    async def _let_go(self) -> None:
        """What the client had open has failed, and what it held is given back."""
        gone = PeerLost("the trainer's connection ended")
        with anyio.CancelScope(shield=True):
            for body in self._open.values():
                with suppress(Exception):
                    await body.context.__aexit__(PeerLost, gone, None)
        self._open.clear()
        self._serving.leases.leave(self, content=self.content)
        self._run.state.changed.notify()

    # -- verbs ---------------------------------------------------------------------------------------------------------

    async def _plain(self, name: str, of: int, **args: Any) -> Any:
        result = getattr(self._pipe, name)(**args)
        return await result if isawaitable(result) else result

    async def _get_batch(self, of: int, groups: int, until: int | None = None) -> Any:
        if self._waiting:
            raise UsageError("get_batch is being waited for already; one trainer takes one batch at a time")
        self._waiting = self.trains = True
        try:
            found = await self._serving.get_batch(self, groups, until)
        finally:
            self._waiting = False
        if found is None:
            return None
        held, part = found
        self._given[of] = held
        return _Payloads(*batch_note(held.batch, part))

    async def _ack(self, of: int, step: int, if_leased: bool = False) -> None:
        self._run.require_open()
        if self._serving.leases.ack(self, step, if_leased=if_leased):
            self._trained()
        await self._pipe._honour(known=not if_leased)

    def _trained(self) -> None:
        self.acked = self._run.state.ledger.step
        self._serving.leases.settle()
        leases = self._run.state.ledger.leases
        self._given = {of: held for of, held in self._given.items() if held.batch.step in leases}

    async def _save(self, of: int, step: int, replay_buffer: bool, external: str | None) -> list[int | None]:
        version = self._run.state.version
        try:
            saving = await self._pipe.save(step, replay_buffer=replay_buffer, external=external)
        finally:
            if self._run.state.ledger.step == step:
                self._trained()
        self._serving.saved_version = version
        self._savings = {of: each for of, each in self._savings.items() if not each._done.is_set()}
        self._savings[of] = saving
        return [saving.generation, saving.step]

    async def _committed(self, of: int, saving: int) -> None:
        if saving in self._savings:
            await self._savings[saving].committed()

    async def _weight_update(self, of: int, version: int, running: Any = None) -> None:
        def ended() -> None:
            self.pushed = version

        await self._enter(of, self._pipe.weight_update(version, running), ended)

    async def _checkpoint(self, of: int, step: int) -> str:
        version = self._run.state.version

        def ended() -> None:
            self._serving.saved_version = version

        try:
            return str(await self._enter(of, self._pipe.checkpoint(step), ended))
        finally:
            if self._run.state.ledger.step == step:
                self._trained()

    async def _enter(self, of: int, context: AbstractAsyncContextManager[Any], ended: Callable[[], None]) -> Any:
        entered = await context.__aenter__()
        self._open[of] = _Body(context, ended)
        return entered

    async def _leave_body(self, of: int, body: int, failed: str | None) -> None:
        entered = self._open.pop(body, None)
        if entered is None:
            raise UsageError("what is to end was not begun, or has ended")
        if failed is None:
            await entered.context.__aexit__(None, None, None)
            entered.ended()
            return
        error = PeerLost(f"the body of the trainer's `async with` raised {failed}")
        with suppress(PeerLost):
            await entered.context.__aexit__(PeerLost, error, None)

    async def _submit(self, of: int, task: str, content: bytes) -> int:
        return await self._pipe.submit(task, decode_content(content))

    async def _put(self, of: int, task: str, rollouts: Any, content: bytes | None, several: bool) -> int:
        group = [rollout_of(each) for each in rollouts]
        about = None if content is None else decode_content(content)
        return await self._pipe.put(task, group if several else group[0], about)

    async def _evaluate(self, of: int, **args: Any) -> Any:
        return evaluation_note(await self._pipe.evaluate(**args))

    async def _resume(self, of: int, **args: Any) -> Any:
        resumed = await self._pipe.resume(**args)
        self._serving.saved_version = self._run.state.version
        return msgspec.to_builtins(resumed)

    async def _statistics(self, of: int) -> Any:
        return msgspec.to_builtins(self._pipe.statistics())

    async def _progress(self, of: int) -> Any:
        return msgspec.to_builtins(self._pipe.progress)


class _Body(NamedTuple):
    """What a client is in the body of, and what it means that the body has ended well."""

    context: AbstractAsyncContextManager[Any]
    ended: Callable[[], None]


class _Payloads:
    """A value with payloads, which go through memory."""

    def __init__(self, note: Any, payloads: list[bytes | memoryview]) -> None:
        self.note, self._payloads = note, payloads

    async def into_memory(self, in_thread: Any) -> tuple[int, int]:
        """Copy them, once, off the loop."""
        shared: tuple[int, int] = await in_thread(partial(share, self._payloads))
        return shared

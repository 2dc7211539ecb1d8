"""The side of the trainer: the verbs of a pipeline that another process of this machine holds.

::

    async with connect("runs/a") as pipe:
        async for batch in pipe.batches(groups=64, until=1000):
            train_step(model, batch.padded())
            async with pipe.weight_update(version=batch.step):
                push(model)
            if batch.step % 20 == 0:
                async with pipe.checkpoint(batch.step) as folder:
                    torch.save(model.state_dict(), f"{folder}/model.pt")

Each verb is a message; the errors are those of the pipeline. ``connect(...).sync()`` has the same for scripts that do
not await.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
import msgspec

from pipeline.buffer import Batch
from pipeline.checkpoint.triggers import Then, exit_by_code
from pipeline.errors import ClosedError, ConfigError, EndOfSource, Stopped
from pipeline.records import Rollout
from pipeline.sampler import Progress
from pipeline.serve.link import Link, Reply
from pipeline.serve.memory import view
from pipeline.serve.notes import batch_of, evaluation_of, lengths_of, rollout_note
from pipeline.serve.where import find
from pipeline.store.contents import encode_content
from pipeline.supervisor import Supervisor
from pipeline.task import Task
from pipeline.wiring.evaluations import Evaluation
from pipeline.wiring.resuming import Resumed
from pipeline.wiring.statistics import Statistics
from pipeline.wiring.weights import Running

if TYPE_CHECKING:
    from pipeline.serve.blocking import SyncClient


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """What a run told when this client came: where it stands, and what its newest generation holds of the trainer.

    ``saved_step`` is the step whose weights a trainer should hold now, unless it kept newer ones elsewhere.
    """

    run_id: str
    incarnation: int
    step: int = 0
    """Last step trained."""
    version: int = 0
    started: bool = False
    """Whether rollouts run, or would, if the weights were pushed."""
    generation: int | None = None
    saved_step: int = 0
    external: str = ""
    """Path that the generation was saved with: ``save(step, external=path)``."""
    files: str = ""
    """Folder of the files that the body of ``checkpoint`` wrote; empty if there are none."""


class RemoteSaving:
    """A generation that the producer commits."""

    def __init__(self, client: Client, request: int, generation: int | None, step: int) -> None:
        self._client, self._request = client, request
        self.generation, self.step = generation, step

    async def committed(self) -> None:
        """Return once it is on the disk.

        Raises:
            WriteFailed: it could not be written.
        """
        await self._client._ask("committed", saving=self._request)

    def __repr__(self) -> str:
        return f"RemoteSaving(generation={self.generation}, step={self.step})"


def connect(
    run: str | os.PathLike[str],
    *,
    part: tuple[int, int] | None = None,
    step: int | None = None,
    via: Literal["ray"] | None = None,
) -> Client:
    """Return the verbs of a pipeline that another process of this machine serves (``await pipe.serve()``), or one of
    another machine, over Ray.

    Use it with ``async with``, or ``connect(run).sync()`` with ``with``. What is leased is given back when the
    connection ends, however it does.

    Args:
        run: the folder of the run, or the address that ``serve`` returned, or ``"ray://NAME"``.
        part: ``(rank, size)``: every batch is shared out to ``size`` clients, which all ask for the same. It counts as
            trained once all of them have acked it.
        step: the step whose weights this trainer holds; the run must have trained just as much. Left out, a run is
            refused that a killed trainer had brought further than its newest generation.
        via: ``"ray"``: the run in this folder, which other machines see as well, is served with
            ``serve(via="ray")``.
    """
    return Client(run, part, step, via)


class Client:
    """A pipeline of another process. Made by :func:`connect`."""

    def __init__(
        self, run: str | os.PathLike[str], part: tuple[int, int] | None, step: int | None, via: str | None = None
    ) -> None:
        if part is not None:
            whole = isinstance(part, Sequence) and len(part) == 2 and all(type(each) is int for each in part)
            if not whole or not 0 <= part[0] < part[1]:
                raise ConfigError.of("part", part, "a rank and how many there are: (0, 2), or (1, 2)")
        if step is not None and (type(step) is not int or step < 0):
            raise ConfigError.of("step", step, "a whole number of at least 0 is needed")
        if via not in (None, "ray"):
            raise ConfigError.of("via", via, "'ray' is allowed, or None for the processes of this machine")
        self._run, self._part, self._step, self._far = os.fspath(run), part, step, via == "ray"
        self._link: Link | None = None
        self._supervisor: Supervisor | None = None
        self._joined: Joined | None = None

    # -- opening and closing -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose(failed=exc[1] is not None)

    async def open(self) -> None:
        """Connect.

        Raises:
            ClosedError: it was opened before.
            NotServed: nobody serves the run here, or with another version of this library.
            UsageError: the trainer's weights are not those of the run; see ``step`` of :func:`connect`.
        """
        if self._supervisor is not None:
            raise ClosedError("this client was opened before; connect() again makes a new one")
        place = await anyio.to_thread.run_sync(partial(find, self._run, far=self._far))
        link = Link(place)
        self._supervisor = Supervisor("forebay client")
        await link.open(part=self._part, step=self._step)
        await self._supervisor.start(link.body)
        self._link = link
        now = link.now
        self._joined = msgspec.convert({**link.told, "step": now.step, "version": now.version}, Joined)

    async def aclose(self, *, failed: bool = False) -> None:
        """Give back what is leased, and end the connection. The pipeline goes on."""
        link, supervisor = self._link, self._supervisor
        if link is not None and supervisor is not None:
            link.say_goodbye(failed=failed)
            await supervisor.stop()

    def sync(self) -> SyncClient:
        """Return the same client for scripts that do not await: ``with connect(run).sync() as pipe:``."""
        from pipeline.serve.blocking import SyncClient

        return SyncClient(self)

    @property
    def joined(self) -> Joined:
        """What the run told when this client came."""
        if self._joined is None:
            raise ClosedError("the client is not open; use `async with connect(run) as pipe:`")
        return self._joined

    def _opened(self) -> Link:
        if self._link is None:
            raise ClosedError("the client is not open; use `async with connect(run) as pipe:`")
        return self._link

    async def _reply(self, verb: str, **args: Any) -> Reply:
        try:
            return await self._opened().ask(verb, args)
        except Stopped:
            exit_by_code()
            raise

    async def _ask(self, verb: str, **args: Any) -> Any:
        reply = await self._reply(verb, **args)
        reply.close()
        return reply.value

    # -- before the first rollout ------------------------------------------------------------------------------------

    async def resume(
        self,
        step: int | None = None,
        *,
        from_: str | os.PathLike[str] | None = None,
        external: str | os.PathLike[str] | None = None,
        restart: Sequence[str] = (),
    ) -> Resumed:
        """See :meth:`pipeline.Pipeline.resume`; what is attached there is loaded there."""
        paths = {
            name: None if path is None else os.fspath(path) for name, path in (("from_", from_), ("external", external))
        }
        return msgspec.convert(await self._ask("resume", step=step, restart=list(restart), **paths), Resumed)

    async def start(self, *, weights_current: bool = False) -> None:
        """See :meth:`pipeline.Pipeline.start`."""
        await self._ask("start", weights_current=weights_current)

    # -- batches -----------------------------------------------------------------------------------------------------

    async def get_batch(self, groups: int) -> Batch:
        """See :meth:`pipeline.Pipeline.get_batch`. With ``part=``, this client's share of it."""
        batch = await self._get_batch(groups, None)
        assert batch is not None
        return batch

    async def _get_batch(self, groups: int, until: int | None) -> Batch | None:
        link = self._opened()
        reply = await self._reply("get_batch", groups=groups, until=until)
        try:
            if reply.value is None:
                return None
            payloads = view(reply.fd(), reply.size, lengths_of(reply.value))
            of = reply.id
            return batch_of(reply.value, payloads, lambda step: link.tell("release", of=of))
        finally:
            reply.close()

    async def batches(self, groups: int, *, until: int | None = None) -> AsyncIterator[Batch]:
        """See :meth:`pipeline.Pipeline.batches`."""
        while True:
            try:
                batch = await self._get_batch(groups, until)
            except EndOfSource:
                if until is None:
                    return
                raise
            if batch is None:
                return
            yield batch
            if not batch.released:
                await self._ask("ack", step=batch.step, if_leased=True)

    async def ack(self, step: int) -> None:
        """See :meth:`pipeline.Pipeline.ack`."""
        await self._ask("ack", step=step)

    def release(self, batch: Batch) -> None:
        """Give a batch back untrained: its groups are buffered again."""
        batch.release()

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def weight_update(self, version: int, running: Running | None = None) -> AsyncIterator[None]:
        """See :meth:`pipeline.Pipeline.weight_update`. If this process ends in the body, that is a failed push."""
        async with self._body("weight_update", version=version, running=running):
            yield

    @asynccontextmanager
    async def checkpoint(self, step: int) -> AsyncIterator[str]:
        """See :meth:`pipeline.Pipeline.checkpoint`: the trainer's own files are committed with the run."""
        async with self._body("checkpoint", step=step) as folder:
            yield folder

    @asynccontextmanager
    async def _body(self, verb: str, **args: Any) -> AsyncIterator[Any]:
        reply = await self._reply(verb, **args)
        try:
            yield reply.value
        except BaseException as error:
            self._opened().tell("leave", body=reply.id, failed=repr(error))
            raise
        await self._ask("leave", body=reply.id, failed=None)

    @property
    def version(self) -> int:
        """Version of the weights that rollouts are made with, as of the last answer."""
        return self._opened().now.version

    async def save(
        self, step: int, *, replay_buffer: bool = True, external: str | os.PathLike[str] | None = None
    ) -> RemoteSaving:
        """See :meth:`pipeline.Pipeline.save`. The trainer's state is in another process than the run's: write it
        first and name it as ``external``, or write it in the body of :meth:`checkpoint`."""
        how = {"replay_buffer": replay_buffer, "external": _absolute(external)}
        reply = await self._reply("save", step=step, **how)
        return RemoteSaving(self, reply.id, *reply.value)

    async def request_save(
        self, reason: str = "request", *, then: Then = "continue", within: float | None = None
    ) -> None:
        """See :meth:`pipeline.Pipeline.request_save`."""
        await self._ask("request_save", reason=reason, then=then, within=within)

    async def save_due(self, step: int) -> bool:
        """See :meth:`pipeline.Pipeline.save_due`."""
        return bool(await self._ask("save_due", step=step))

    # -- not only training -------------------------------------------------------------------------------------------

    async def reward(self, uid: int, value: float, member: int = 0, *, attempt: int | None = None) -> None:
        """See :meth:`pipeline.Pipeline.reward`."""
        await self._ask("reward", uid=uid, value=value, member=member, attempt=attempt)

    async def discard(self, uid: int) -> None:
        """See :meth:`pipeline.Pipeline.discard`."""
        await self._ask("discard", uid=uid)

    async def submit(self, task: Task | str, content: Any) -> int:
        """See :meth:`pipeline.Pipeline.submit`."""
        kept = encode_content(content, f"task {_name(task)!r}, an item by hand")
        return int(await self._ask("submit", task=_name(task), content=kept))

    async def put(self, task: Task | str, rollouts: Rollout | Sequence[Rollout], content: Any = None) -> int:
        """See :meth:`pipeline.Pipeline.put`."""
        several = isinstance(rollouts, (list, tuple))
        notes = [rollout_note(each, _name(task)) for each in (rollouts if several else [rollouts])]
        kept = None if content is None else encode_content(content, f"task {_name(task)!r}, a rollout by hand")
        return int(await self._ask("put", task=_name(task), rollouts=notes, content=kept, several=several))

    async def set_share(self, task: Task | str, share: float) -> None:
        """See :meth:`pipeline.Pipeline.set_share`."""
        await self._ask("set_share", task=_name(task), share=share)

    async def evaluate(
        self,
        task: Task | str,
        version: int | None = None,
        *,
        items: int | Sequence[int] | None = None,
        samples: int = 1,
    ) -> Evaluation:
        """See :meth:`pipeline.Pipeline.evaluate`."""
        chosen = items if items is None or isinstance(items, int) else list(items)
        found = await self._ask("evaluate", task=_name(task), version=version, items=chosen, samples=samples)
        return evaluation_of(found)

    # -- seeing ------------------------------------------------------------------------------------------------------

    async def progress(self) -> Progress:
        """How far the run is: a copy."""
        return msgspec.convert(await self._ask("progress"), Progress)

    async def statistics(self) -> Statistics:
        """See :meth:`pipeline.Pipeline.statistics`."""
        return msgspec.convert(await self._ask("statistics"), Statistics)

    async def metrics(self) -> Mapping[str, float]:
        """See :meth:`pipeline.Pipeline.metrics`."""
        return dict(await self._ask("metrics"))


def _absolute(path: str | os.PathLike[str] | None) -> str | None:
    # The producer may have another working directory.
    return None if path is None else os.path.abspath(path)


def _name(task: Task | str) -> str:
    return task.name if isinstance(task, Task) else task

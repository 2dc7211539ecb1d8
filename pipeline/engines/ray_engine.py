"""Runs runners in Ray actors over a cluster, and keeps them there: an actor or a node that is lost costs its attempts.

The only engine that imports Ray, and only when it is built. What runs in an actor is
:class:`pipeline.engines.worker.relay.Relay`; this side hands calls to it, and takes what it says from the object store.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from pipeline.config import RayOptions
from pipeline.engines.calls import Worker
from pipeline.engines.crew import Crew
from pipeline.engines.local import backend
from pipeline.engines.naming import main_script
from pipeline.engines.remote import RemoteEngine
from pipeline.engines.values import Packer
from pipeline.engines.wire import AnyMessage, Attempt, Frame, Invoke, Load, Ready, Stop, decode
from pipeline.engines.worker.relay import packed
from pipeline.errors import ConfigError, UsageError, WorkerDied

_COPIED_BELOW = 100 << 10  # what is smaller comes with the answer itself, and not through the object store
_MORE_CALLS = 16  # of an actor's methods at once, beside its attempts


class RayEngine(RemoteEngine):
    """Runs runners in actors of a Ray cluster; implements :class:`pipeline.interfaces.Engine`. Needs asyncio.

    ::

        engine = RayEngine(actors=4, per_actor=8, resources={"CPU": 1})
        with Pipeline([Task("sim", source=seeds, run=play)], engine=engine).sync() as pipe:
            ...

    An engine serves one pipeline. Actors import what they run by its name, and ``forebay`` itself: every node has them.
    ``await engine.call(function, ...)`` calls a plain function in an actor.

    Args:
        options: a :class:`~pipeline.config.RayOptions` or a mapping of plain values.
        **more: single options; they win over ``options``.

    Raises:
        ConfigError: an option is unknown or out of range, or Ray is not installed.
    """

    def __init__(self, options: RayOptions | Mapping[str, Any] | None = None, **more: Any) -> None:
        base = options.to_dict() if isinstance(options, RayOptions) else dict(options or {})
        self.options = RayOptions.of({**base, **more})
        self._ray, self._started = _import_ray(), False
        count, grace_s = self.options.actors, self.options.grace_s
        super().__init__(
            Crew(functools.partial(self._start, False), count=count, places=1, grace_s=grace_s),
            Crew(functools.partial(self._start, True), count=count, places=self.options.per_actor, grace_s=grace_s),
            most=self.options.most,
        )

    def _start(self, asynchronous: bool, on_ready: Callable[[], None], on_room: Callable[[], None]) -> RayWorker:
        return RayWorker(self._ray, self._actor_options(), asynchronous, on_ready, on_room)

    def _actor_options(self) -> dict[str, Any]:
        own = dict(self.options.resources)
        found: dict[str, Any] = {"num_cpus": own.pop("CPU", 0), "num_gpus": own.pop("GPU", 0), "resources": own}
        found["max_concurrency"] = self.options.per_actor + _MORE_CALLS
        found["max_restarts"] = found["max_task_retries"] = 0  # who is lost is replaced by the crew
        if self.options.runtime_env and not self._started:
            found["runtime_env"] = dict(self.options.runtime_env)
        return found

    async def __aenter__(self) -> RayEngine:
        if backend() != "asyncio":
            raise UsageError(
                f"RayEngine needs asyncio, and this event loop is {backend()}'s: Ray's answers can be awaited on "
                "asyncio only; use anyio.run(main), or ProcessEngine"
            )
        if not self._entered and not self._ray.is_initialized():
            with anyio.CancelScope(shield=True):  # a thread cannot be cancelled, and what it starts is to be stopped
                # In a thread: it takes seconds, and in the main one it would take SIGTERM over.
                await anyio.to_thread.run_sync(self._init)
        try:
            await self._open()
        except BaseException:
            await self._shut_down()
            raise
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        try:
            return await self._close(*exc)
        finally:
            await self._shut_down()

    def _init(self) -> None:
        address = self.options.address
        if address is None and "RAY_ADDRESS" not in os.environ:
            address = "local"
        given: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        if self.options.runtime_env:
            given["runtime_env"] = dict(self.options.runtime_env)
        self._ray.init(address=address, **given | dict(self.options.init))
        self._started = True

    async def _shut_down(self) -> None:
        if self._started:
            self._started = False
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._ray.shutdown)

    @property
    def actors(self) -> int:
        """How many actors there are now, with those that wait for a node."""
        return sum(crew.running for crew in self._crews)

    async def resize(self, *, actors: int) -> None:
        """Have ``actors`` actors of each kind from now on.

        More are started when there is work for them. If they are fewer, those that are too many end the attempts that
        they have, get no other, and leave; this returns when they have left.

        Raises:
            ConfigError: fewer than 1, or more than ``max_actors``.
        """
        if not isinstance(actors, int) or isinstance(actors, bool) or not 1 <= actors <= self.options.most:
            raise ConfigError(
                f"resize(actors={actors!r}): a number from 1 to max_actors={self.options.most} is needed; "
                "RayEngine(max_actors=) sets the most",
                option="actors",
            )
        async with anyio.create_task_group() as group:
            for crew in self._crews:
                group.start_soon(crew.resize, actors)


class RayWorker(Worker):
    """One actor, seen from the process that started it."""

    def __init__(
        self,
        ray: Any,
        options: Mapping[str, Any],
        asynchronous: bool,
        on_ready: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        super().__init__(on_ready, on_room)
        self._ray = ray
        actor_class = ray.remote(_actor_class())
        self._actor = actor_class.options(**options).remote(_setup(), asynchronous)
        self._life = self._actor.live.remote()
        self._id = self._actor._actor_id.hex()
        self.name, self._pid = f"Ray actor {self._id}", 0
        self._loads: dict[int, Any] = {}
        self._queue: list[Any] = []
        self._sending, self._listening = False, 0
        self._group: anyio.abc.TaskGroup | None = None
        self._why: BaseException | None = None

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def alive(self) -> bool:
        return not self.stopping

    def send(self, message: AnyMessage, packer: Packer | None = None) -> None:
        frame = packed(message, packer)
        if isinstance(message, Load):  # goes with every attempt: an actor's methods may overtake each other
            self._loads[message.task] = frame
            return
        if isinstance(message, Stop) or self._group is None or self.stopping:
            if not isinstance(message, (Attempt, Invoke)):
                self._actor.take.remote(frame)
            return
        if isinstance(message, Attempt):
            self._queue.append(self._loads[message.task])
        self._queue.append(frame)
        self._exchange_soon()

    def _exchange_soon(self) -> None:
        """What is sent in one turn of the loop goes with one call."""
        if not self._sending and self._group is not None:
            self._sending = True
            self._group.start_soon(self._exchange, name=f"forebay calls of {self.name}")

    async def _exchange(self) -> None:
        """Send what is queued, and take what the actor says next, of whatever call."""
        self._sending = False
        frames, self._queue = self._queue, []
        self._listening += 1
        try:
            said = await self._actor.exchange.remote(frames)
        except self._ray.exceptions.RayError as error:
            # The actor is lost, or what it returned is, with its node: in either case it does no more work.
            self._lost(error)
            return
        finally:
            self._listening -= 1
        for head, body in said:
            self._took(Frame(decode(head), _writable(body)))
        await anyio.lowlevel.checkpoint()  # what comes of that goes with the next call
        if self.calls and not self._listening and not self.stopping:
            self._exchange_soon()

    def _lost(self, error: BaseException) -> None:
        if self._why is None:
            self._why = error
        self.stopping = True
        self._end_actor()

    def _end_actor(self) -> None:
        self._ray.kill(self._actor, no_restart=True)

    async def live(self) -> None:
        """Return when the actor has ended and everybody who waits for it has been told."""
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                group.start_soon(self._begin, name="forebay actor's start")
                try:
                    await self._life
                except self._ray.exceptions.RayError as error:
                    self._why = error  # it knows more of it than a single call
                group.cancel_scope.cancel("the actor has ended")
        finally:
            self.stopping = True
            self._end_actor()
            self._lose_calls()

    async def _begin(self) -> None:
        try:
            self._pid, address = await self._actor.ready.remote()
        except self._ray.exceptions.RayError as error:
            self._lost(error)
        else:
            self.name = f"Ray actor {self._id} (process {self.pid} on {address})"
            self._took(Frame(Ready(), None))

    def death(self, when: str) -> WorkerDied:
        why = "" if self._why is None else f": {str(self._why).strip()}"
        planned = self._planned or bool(getattr(self._why, "preempted", False))
        return WorkerDied(f"{self.name} was lost {when}{why}", pid=self.pid, planned=planned)

    def stop(self) -> None:
        self.stopping = True
        self.send(Stop())

    def kill(self) -> None:
        self._planned = self.stopping = True
        self._end_actor()


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ConfigError(f"RayEngine needs Ray: pip install 'forebay[ray]' ({error})", option="engine") from error
    return ray


def _setup() -> dict[str, Any]:
    script = main_script()
    return {
        "path": [os.path.abspath(each) for each in sys.path if isinstance(each, str)],
        "script": None if script is None else {"path": script.path, "package": script.package},
    }


def _writable(body: Any) -> Any:
    """Return bytes that came, to be written to. What lies in the object store is not copied: nobody else has it."""
    if body is None or body.nbytes < _COPIED_BELOW:
        return None if body is None else bytearray(body)
    memory = (ctypes.c_ubyte * body.nbytes).from_address(body.ctypes.data)
    memory.owner = body  # holds the place in the store as long as a view of it is held
    return memory


@functools.cache
def _actor_class() -> type:
    class ForebayActor:
        """Stands in a function, so that Ray sends it as it is: a node imports the library's light part only."""

        def __init__(self, setup: dict[str, Any], asynchronous: bool) -> None:
            import importlib.util
            import os
            import sys

            sys.path += [each for each in setup["path"] if each not in sys.path and os.path.exists(each)]
            found = importlib.util.find_spec("pipeline")
            if found is None or not found.submodule_search_locations:
                raise ImportError("forebay is not installed on this node")
            start = os.path.join(found.submodule_search_locations[0], "engines", "worker", "start.py")
            spec = importlib.util.spec_from_file_location("forebay_worker_start", start)
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            spec.loader.exec_module(module)  # type: ignore[union-attr]
            module.install_light_packages()
            from pipeline.engines.worker import loading
            from pipeline.engines.worker.relay import Relay

            loading.script = setup["script"]
            self._relay = Relay(asynchronous=asynchronous)

        async def live(self) -> None:
            await self._relay.live()

        async def ready(self) -> tuple[int, str]:
            import ray

            here: Any = ray
            pid = await self._relay.ready()
            return pid, here.util.get_node_ip_address()

        async def exchange(self, frames: Any) -> Any:
            return await self._relay.exchange(frames)

        async def take(self, frame: Any) -> None:
            self._relay.take(frame)

    return ForebayActor

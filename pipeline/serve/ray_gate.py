"""Serving over a Ray cluster: an actor beside the process that serves, found by its name, relays for all nodes.

Imports Ray when it is used. What the actor does is :class:`pipeline.serve.relay.Relay`.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread

from pipeline.engines.local import backend
from pipeline.errors import NotServed, PeerLost, ServingError, UsageError
from pipeline.serve.far import Calls, FarWire
from pipeline.serve.relay import Heard
from pipeline.serve.where import FAR, Place

NAMESPACE = "forebay"
_MOST_CALLS = 1000  # of clients, at once
_STARTS_S, _AGAIN_S = 60.0, 0.2


def _ray(verb: str) -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ServingError(f"{verb}: needs Ray: pip install 'forebay[ray]' ({error})") from error
    if not ray.is_initialized():
        raise UsageError(f"{verb}: ray.init(address=...) comes first, or a pipeline with a RayEngine")
    if backend() != "asyncio":
        raise UsageError(f"{verb}: Ray's answers can be awaited on asyncio only, and this event loop is {backend()}'s")
    return ray


class Gate:
    """The actor, as the process that serves has it."""

    def __init__(self, name: str, served: str) -> None:
        """``served``: the address of the socket."""
        self.address = FAR + name
        self._name, self._served = name, served
        self._actor: Any = None

    async def open(self) -> None:
        """Start the actor on this machine.

        Raises:
            ServingError: Ray is not there, or its cluster is on other machines, or the name is taken.
            UsageError: this process is not connected to Ray.
        """
        ray = _ray("serve(via='ray')")
        from ray.util import client
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if client.ray.is_connected():
            raise ServingError(
                "serve(via='ray'): this process is a Ray client, and on no node of the cluster, where the actor would "
                "have to be that reaches it. Run it on a node, with ray.init(address='auto')"
            )
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": self._name, "namespace": NAMESPACE, "num_cpus": 0, "max_concurrency": _MOST_CALLS}
        try:
            made = ray.remote(_gate_class()).options(**options, max_restarts=-1, scheduling_strategy=here)
            self._actor = made.remote(self._served, [each for each in sys.path if isinstance(each, str)], os.getcwd())
        except ValueError as error:
            raise ServingError(
                f"{self.address}: the name is taken, by another run, or by a killed process that Ray has not noticed "
                f"yet: choose another name=, or try again in a moment ({error})"
            ) from None
        try:
            await self._actor.ready.remote()
        except ray.exceptions.RayError as error:
            raise ServingError(f"{self.address}: the actor cannot be started: {error}") from error

    async def hold(self) -> None:
        """Keep the actor until the run ends."""
        try:
            await anyio.sleep_forever()
        finally:
            self.close()

    def close(self) -> None:
        """End the actor."""
        import ray

        here: Any = ray
        with suppress(Exception):  # Ray may have been shut down
            here.kill(self._actor)


async def open_far(place: Place) -> FarWire:
    """Return a client's end of a new connection to a run.

    Raises:
        NotServed: no actor has that name.
        ServingError, UsageError: Ray cannot be used.
    """
    ray = _ray(f"connect({place.address!r})")
    try:
        actor = await anyio.to_thread.run_sync(
            functools.partial(ray.get_actor, place.address.removeprefix(FAR), namespace=NAMESPACE)
        )
    except ValueError:
        raise NotServed(place.absent) from None
    lost, name = ray.exceptions.RayError, secrets.token_hex(16)
    await _ready(ray, actor, place)
    talk = actor.talk.remote(name)

    async def asked(method: Any, *args: Any) -> Any:
        try:
            return await method.remote(name, *args)
        except lost as error:
            raise PeerLost(f"{place.address}: the actor that relays there has ended: {error}") from None

    async def send(bodies: Sequence[bytes]) -> None:
        await asked(actor.send, list(bodies))

    async def listen() -> Heard:
        return Heard(*await asked(actor.listen))

    def leave() -> None:
        nonlocal talk
        talk = None  # held so long, that the call be not forgotten
        with suppress(Exception):  # Ray may have been shut down
            actor.leave.remote(name)

    return FarWire(Calls(send, listen, leave), place.absent, anyio.to_thread.run_sync)


async def _ready(ray: Any, actor: Any, place: Place) -> None:
    """Wait until the actor answers, which may have been started again a moment ago."""
    with anyio.move_on_after(_STARTS_S):
        while True:
            try:
                return await actor.ready.remote()  # type: ignore[no-any-return]
            except ray.exceptions.ActorUnavailableError:
                await anyio.sleep(_AGAIN_S)
            except ray.exceptions.RayError as error:
                raise NotServed(f"{place.absent} ({error})") from None
    raise NotServed(f"{place.absent} (the actor does not answer within {_STARTS_S:g} s)")


@functools.cache
def _gate_class() -> type:
    class ForebayGate:
        """Stands in a function, so that Ray sends it as it is."""

        def __init__(self, served: str, path: list[str], beside: str) -> None:
            import os
            import sys

            path = [os.path.join(beside, each) for each in path]
            sys.path += [each for each in path if each not in sys.path and os.path.exists(each)]
            from pipeline.serve.relay import Relay

            self._relay = Relay(served)

        async def ready(self) -> None:
            pass

        async def talk(self, name: str) -> None:
            await self._relay.talk(name)

        async def send(self, name: str, bodies: Any) -> None:
            await self._relay.send(name, bodies)

        async def listen(self, name: str) -> Any:
            return tuple(await self._relay.listen(name))

        async def leave(self, name: str) -> None:
            await self._relay.leave(name)

    return ForebayGate

"""A trainer that reaches the process that serves through a relay: the same verbs, and what becomes of a silent one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch

from pipeline import ConfigError, NotServed, PeerLost, Pipeline, ServingError, connect
from pipeline.serve import Client, link, relay
from pipeline.serve.far import Calls, FarWire
from pipeline.serve.relay import Heard, Relay
from pipeline.waiting import Signal
from tests.support.runs import ids, task
from tests.support.runs import pipeline as small
from tests.support.serving import large


class Path:
    """Between a client and a relay, as Ray's calls are: each takes a turn of the loop, or is lost."""

    def __init__(self, served: str) -> None:
        self.relay, self.cut = Relay(served), False
        self.listened, self.changed = 0, Signal()
        self._group: Any = None

    @asynccontextmanager
    async def open(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
        """Let :func:`connect` lead here."""
        monkeypatch.setattr(link, "open_far", self._wire)
        async with anyio.create_task_group() as self._group:
            yield
            self._group.cancel_scope.cancel()

    async def _wire(self, place: Any) -> FarWire:
        name = f"client {id(place)}"
        self._group.start_soon(self.relay.talk, name)
        await anyio.lowlevel.checkpoint()

        async def send(bodies: Any) -> None:
            if self.cut:
                await anyio.sleep_forever()
            await self.relay.send(name, bodies)

        async def listen() -> Heard:
            if self.cut:
                await anyio.sleep_forever()
            heard = await self.relay.listen(name)
            self.listened += 1
            self.changed.notify()
            return heard

        def leave() -> None:
            if not self.cut:
                self._group.start_soon(self.relay.leave, name)

        return FarWire(Calls(send, listen, leave), place.absent, anyio.to_thread.run_sync)


@asynccontextmanager
async def reached(
    monkeypatch: pytest.MonkeyPatch, given: Any = None, **options: Any
) -> AsyncIterator[tuple[Pipeline, Path, Any]]:
    async with small(given or task(20), **options) as pipe:
        serving = await pipe.serve()
        path = Path(serving.address)
        await pipe.start()
        async with path.open(monkeypatch):
            yield pipe, path, serving


def far(**more: Any) -> Client:
    return connect("ray://the run", **more)


async def test_the_verbs_are_those_of_a_client_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reached(monkeypatch) as (pipe, _, serving):
        async with far() as held:
            seen = []
            async for batch in held.batches(groups=4):
                seen += ids(batch)
                async with held.weight_update(version=batch.step):
                    assert pipe._run.state.updating
            assert sorted(seen) == list(range(20))
            assert held.version == pipe.version == 5
            with pytest.raises(RuntimeError, match="never handed out"):
                await held.ack(9)
            assert (await held.statistics()).groups.trained == 20
        assert not await serving.ended()


async def test_large_batches_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reached(monkeypatch, task(2, large)) as (_, _, _), far() as held:
        batch = await held.get_batch(2)
        for group in batch:
            (rollout,) = group
            assert rollout["x"].shape == (25 << 18,)
            assert bool((rollout["x"] == float(group.index)).all())
            assert rollout["x"].dtype == torch.float32


async def test_each_of_two_ranks_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reached(monkeypatch) as (pipe, _, _), far(part=(0, 2)) as one, far(part=(1, 2)) as other:
        first, second = await one.get_batch(4), await other.get_batch(4)
        assert len(first) == len(second) == 2
        assert not set(first.uids) & set(second.uids)
        await one.ack(1)
        assert pipe.ledger.step == 0
        await other.ack(1)
        assert pipe.ledger.step == 1


async def test_a_client_that_is_not_heard_from_gives_back_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SILENT_S", 0.05)
    monkeypatch.setattr(relay, "LISTEN_S", 0.05)
    monkeypatch.setattr(link, "_GOODBYE_S", 0.05)
    async with reached(monkeypatch) as (pipe, path, _):
        silent = far()
        await silent.open()
        lost = await silent.get_batch(4)
        path.cut = True
        await pipe._run.state.changed.wait_for(lambda: not pipe.ledger.leases)
        path.cut = False
        async with far() as held:
            again = await held.get_batch(4)
            assert again.uids == lost.uids
            before = path.listened
            await path.changed.wait_for(lambda: path.listened > before + 5)  # longer than a silent one has
            await held.ack(1)
        await silent.aclose()


async def test_a_client_that_leaves_gives_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reached(monkeypatch) as (pipe, path, _):
        async with far() as held:
            lost = await held.get_batch(4)
        await pipe._run.state.changed.wait_for(lambda: not pipe.ledger.leases)
        async with far() as held:
            assert (await held.get_batch(4)).uids == lost.uids
        assert len(path.relay._sessions) <= 2


async def test_nobody_serves_there(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("@forebay-nobody")
    async with path.open(monkeypatch):
        with pytest.raises(NotServed, match=r"ray://the run: no actor of that name"):
            await far().open()


async def test_when_the_process_that_serves_ends_the_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with small(task(20)) as pipe:
        serving = await pipe.serve()
        path = Path(serving.address)
        await pipe.start()
        async with path.open(monkeypatch), far() as held:
            await held.get_batch(4)
            await pipe.aclose()
            with pytest.raises((PeerLost, RuntimeError)):
                await held.get_batch(4)


async def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"via='smoke': 'ray' is allowed"):
        connect("runs/a", via="smoke")  # type: ignore[arg-type]
    async with small(task(4)) as pipe:
        for wrong in ({"via": "smoke"}, {"name": "x"}, {"via": "ray", "name": ""}):
            with pytest.raises(ConfigError, match=r"serve\(via="):
                await pipe.serve(**wrong)  # type: ignore[arg-type]
        with pytest.raises((ServingError, RuntimeError), match=r"(needs Ray|ray.init)"):
            await pipe.serve(via="ray")
        await pipe.serve()  # it is not served yet

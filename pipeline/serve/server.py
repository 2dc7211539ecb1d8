"""The side of the producer: listens, knows who is there, and what is to become of a run whose trainer was killed.

The address is a name in the kernel's abstract namespace, made of the run id and the incarnation: a trainer finds both
in the run's folder, where they stand anyway, and nothing is left of a name when its process ends.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import anyio.abc

from pipeline.buffer import Batch
from pipeline.buffer.batch import Group
from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.errors import ConfigError, EndOfSource, ForebayError, ServingError, Stopped, UsageError
from pipeline.forking import not_for_children
from pipeline.observe import events
from pipeline.serve.connection import Connection
from pipeline.serve.leases import Held, Leases
from pipeline.serve.notes import part_of
from pipeline.store.layout import Layout

if TYPE_CHECKING:
    from pipeline.pipeline import Pipeline

Part: TypeAlias = tuple[Held, Sequence[Group]]
"""What a client gets of a batch, and the batch's lease."""
ADDRESS = "@forebay-"
"""What an address begins with; the ``@`` stands for the zero byte that such names begin with."""


def address_of(run_id: str, incarnation: int) -> str:
    """Return the address at which an incarnation of a run is served."""
    return f"{ADDRESS}{run_id}-{incarnation}"


class _Shared:
    """A batch of which every part is taken by another client."""

    def __init__(self, held: Held, groups: int) -> None:
        self.held, self.asked = held, groups
        self.taken: dict[int, Connection] = {}


class Serving:
    """A pipeline that is served. ``address`` is what ``connect`` takes instead of the run's folder; ``far_address`` is
    it on other machines, where the run is served over Ray."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe, self.run = pipe, pipe._run
        self.run_id = self.run.state.run_id or secrets.token_hex(16)
        self.address = address_of(self.run_id, self.run.state.incarnation)
        self.far_address = ""
        self.leases = Leases(self.run)
        self._clients: set[Connection] = set()
        self._turn = anyio.Lock()
        self._shared: _Shared | None = None
        self.saved_version = self.run.state.version
        """The version of the weights that a trainer has which comes now."""
        self._lost = ""
        self._left = False
        self._stopped: Stopped | None = None

    async def begin(self) -> None:
        """Listen from now on.

        Raises:
            ServingError: the system has no such sockets, or somebody else has the name.
        """
        if not sys.platform.startswith("linux"):
            raise ServingError(
                f"serve() needs memory and sockets without a name, and {sys.platform} has none; use Linux"
            )
        try:
            listener = await anyio.create_unix_listener("\0" + self.address[1:])
        except OSError as error:
            raise ServingError(f"{self.address}: cannot be listened at: {error}. Is serve() called twice?") from None
        not_for_children(listener.extra(anyio.abc.SocketAttribute.raw_socket))
        # Whoever trains is elsewhere, and only it can write what its weights are: no trigger makes a generation alone.
        self.run.saves.own_files = True
        if not self.run._spawn(self._listen, "forebay serving", listener):
            await listener.aclose()
            self.run.require_open()

    async def begin_far(self, name: str | None) -> None:
        """:meth:`begin`, and be reached over Ray as well, under a name.

        Raises:
            ServingError, UsageError: also where Ray cannot be used, or the name is taken.
        """
        from pipeline.serve.ray_gate import Gate

        gate = Gate(name or self.address[1:], self.address)
        await gate.open()
        self.far_address = gate.address
        try:
            await self.begin()
            if not self.run._spawn(gate.hold, "forebay serving over Ray"):
                self.run.require_open()
        except BaseException:
            gate.close()
            raise

    async def _listen(self, listener: Any) -> None:
        async with listener:
            await listener.serve(self._meet)

    async def _meet(self, stream: anyio.abc.UNIXSocketStream) -> None:
        connection = Connection(self, stream)
        self._clients.add(connection)
        try:
            await connection.talk()
        finally:
            self._clients.discard(connection)
            self.run.state.changed.notify()

    async def ended(self) -> bool:
        """Return once there is no trainer any more: False if the last one has left, True if one was killed and its
        weights have gone back, because it had trained steps that no generation holds.

        After True the run is to go back as well: close the pipeline, make it again, and ``resume()``. A trainer that
        was killed with nothing such is waited for, as its batches are.

        Raises:
            ForebayError: the run failed, or was closed.
            Stopped: the run was asked to stop.
        """
        state = self.run.state

        async def wait() -> bool:
            closed = self.run.consumer
            await state.changed.wait_for(
                lambda: self._lost or self._left or self._stopped or closed.closed or state.failure is not None
            )
            if self._stopped is not None:
                raise self._stopped
            self.run.consumer.raise_failure()
            self._left, left = False, self._left
            return not left

        return await self.pipe._unless_asked(wait, stop_only=True)

    def stopped(self, error: Stopped) -> None:
        """A verb of a client's was told that the run is to stop: so is the producer."""
        self._stopped = error
        self.run.state.changed.notify()

    # -- coming and going --------------------------------------------------------------------------------------------

    async def admit(self, client: Connection, step: int | None) -> None:
        """Raise unless a client whose weights are those of ``step`` may come. None: it does not say."""
        # One that was killed before this one came has left before.
        others = self._clients - {client}
        await self.run.state.changed.wait_for(
            lambda: not any(other.leaving() for other in others if other in self._clients)
        )
        now = self.run.state.ledger.step
        if step is not None and step != now:
            raise UsageError(
                f"connect(step={step}): the run has trained step {now}. Load the trainer's state of step {now}, or let "
                f"the producer go back with resume(step={step})"
            )
        if step is None and self._lost:
            raise UsageError(self._lost)
        self._lost = ""
        if not others & self._clients:  # it has the weights that the run has
            self.saved_version = self.run.state.version

    async def newest(self) -> Stored | None:
        """Return the newest generation, once none is being written."""
        saver, directory = self.run._saver, self.run.options.directory
        if saver is None or directory is None:
            return None
        await saver.idle()
        layout = Layout(directory)
        found = await self.run.in_thread(lambda: find_generations(layout, self.run_id))
        return found.complete[-1] if found.complete else None

    async def gone(self, client: Connection) -> None:
        """A client has left, or was killed: what it trained and did not save its weights have forgotten by now."""
        if client.trains and client.content and not any(other.trains for other in self._clients - {client}):
            self._left = True
        lost = False
        if client.acked >= 0 or client.pushed > self.saved_version:
            try:
                stored = await self.newest()
            except ForebayError:  # none that could be resumed, then
                stored = None
            saved = -1 if stored is None else stored.manifest.step
            lost = client.acked > saved or client.pushed > self.saved_version
            if lost:
                self._lost = self._why_lost(client, saved)
        log, lost = self.run.state.log, lost and not client.content
        (log.warning if lost else log.info)(events.TRAINER_LEFT, process=client.process, acked=client.acked, lost=lost)
        self.run.state.changed.notify()

    def _why_lost(self, client: Connection, saved: int) -> str:
        now = self.run.state.ledger.step
        did = f"had trained step {client.acked}" if client.acked > saved else f"had pushed version {client.pushed}"
        held = "no generation holds them" if saved < 0 else f"the newest generation is of step {saved}"
        return (
            f"the trainer that {did} is gone, and its weights with it: {held}. Let the producer resume(); or "
            f"connect(step={now}), if you have the weights of step {now}"
        )

    # -- batches -------------------------------------------------------------------------------------------------------

    async def get_batch(
        self, client: Connection, groups: int, until: int | None
    ) -> tuple[Held, Sequence[Group]] | None:
        """Lease a batch, or the client's part of one, for it. None: the step is past ``until``."""
        if client.part is not None:
            return await self._get_part(client, client.part, groups, until)
        async with self._turn:
            batch = await self._fetch(groups, until)
            if batch is None:
                return None
            held = self.leases.hold(batch)
            held.holders.add(client)
            return held, batch.groups

    async def _fetch(self, groups: int, until: int | None) -> Batch | None:
        if until is not None and self.run.state.ledger.next_step > until:
            return None
        return await self.pipe.get_batch(groups)

    async def _get_part(self, client: Connection, part: tuple[int, int], groups: int, until: int | None) -> Part | None:
        rank, size = part
        if isinstance(groups, int) and groups < size:
            raise ConfigError.of("groups", groups, f"{size} clients share a batch, and each needs at least one group")
        # Who is ahead waits for those who have not taken theirs of the batch that is shared out.
        state = self.run.state
        await state.changed.wait_for(lambda: rank not in self._being_shared() or state.failure is not None)
        async with self._turn:
            self.run.consumer.raise_failure()
            if not self._being_shared():
                batch = await self._fetch(groups, until)
                if batch is None:
                    return None
                if len(batch) < size:
                    batch.release()
                    raise EndOfSource(f"{len(batch)} groups are left at the end, too few for {size} clients")
                self._shared = _Shared(self.leases.hold(batch, size), groups)
            shared = self._shared
            assert shared is not None
            if shared.held.parts != size or shared.asked != groups:
                raise UsageError(
                    f"part={part}, groups={groups}: another client asked for {shared.asked} groups in "
                    f"{shared.held.parts} parts; all must ask for the same"
                )
            shared.taken[rank] = client
            shared.held.holders.add(client)
            self.run.state.changed.notify()
            return shared.held, part_of(shared.held.batch.groups, rank, size)

    def _being_shared(self) -> dict[int, Connection]:
        """Who has taken its part of the batch that is being shared out; nobody if there is none."""
        shared = self._shared
        if shared is None or shared.held.batch.released or len(shared.taken) == shared.held.parts:
            return {}
        return shared.taken

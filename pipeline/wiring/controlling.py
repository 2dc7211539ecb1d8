"""A pipeline that is asked over HTTP: its requests wait with all others, see :mod:`pipeline.wiring.triggering`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
from anyio.from_thread import BlockingPortal

from pipeline.control import ControlServer, Desk
from pipeline.store.service import RunBlocking
from pipeline.wiring.folder import RunFolder
from pipeline.wiring.saving import Saver
from pipeline.wiring.state import RunState
from pipeline.wiring.triggering import Triggers


class Controlling:
    """Listens from the opening of a run to its end; does nothing where the option ``control`` is None."""

    def __init__(self, state: RunState, triggers: Triggers, saver: Saver | None, *, inline: bool) -> None:
        self._state, self._triggers, self._saver = state, triggers, saver
        self.statistics: Callable[[], Any] = dict
        """What the pipeline says of itself; called on the loop."""
        self.server: ControlServer | None = None
        options = state.options.listens
        if options is not None and not inline:
            triggers.desk = Desk()
            self.server = ControlServer(options, triggers.desk, state.log, state.options.rank)

    async def begin(self, folder: RunFolder | None, in_thread: RunBlocking[Any]) -> None:
        """Listen, and say where.

        Raises:
            ServingError: nobody can listen there.
        """
        server = self.server
        if server is not None and folder is not None:
            await in_thread(server.begin)
            await in_thread(partial(server.announce, folder.layout, folder.incarnation))

    @contextlib.asynccontextmanager
    async def hearing(self) -> AsyncIterator[None]:
        """Let requests be heard on this event loop."""
        server = self.server
        if server is None:
            yield
            return
        async with BlockingPortal() as portal:

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # it has ended: the desk is about to be closed
                    portal.start_task_soon(self._triggers.hear)

            server.desk.wake, server.look = wake, partial(portal.call, self._look)
            self._triggers.hear()
            yield

    async def close(self, in_thread: RunBlocking[Any], failure: BaseException | None) -> None:
        """Take no more requests."""
        if self.server is not None:
            why = "the pipeline is closed" if failure is None else f"the run has failed: {failure}"
            await in_thread(partial(self.server.close, why))

    def _look(self) -> dict[str, Any]:
        state, saver, pending = self._state, self._saver, self._triggers.pending
        generation, saved = (None, None) if saver is None or saver.newest is None else saver.newest
        found: dict[str, Any] = {
            "kind": "pipeline",
            "run": state.run_id,
            "incarnation": state.incarnation,
            "step": state.ledger.step,
            "version": state.version,
            "generation": generation,
            "saved_step": saved,
            "saving": saver is not None and saver.busy,
            "asked": None if pending is None else {"reason": pending.reason, "then": pending.then},
            "progress": state.refresh_progress(),
            "statistics": self.statistics(),
        }
        plain: dict[str, Any] = msgspec.to_builtins(found)
        return plain

"""A buffer that is asked over HTTP. ``save_due`` hears of it, and the save that comes answers; see
:mod:`pipeline.replay.due`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.config import Control
from pipeline.control import ControlServer, Desk, Ticket
from pipeline.replay.store import ReplayStore, Saving


class Controlled:
    """Listens from ``resume`` or the first ``save`` on, until ``close``."""

    def __init__(self, options: Control, store: ReplayStore, statistics: Callable[[], Any]) -> None:
        self.desk = Desk()
        self._store, self._statistics = store, statistics
        self._server = ControlServer(options, self.desk, store.log, store.rank)
        self._server.look = self._look
        self._announced = False

    def begin(self) -> None:
        """Listen, if it does not yet.

        Raises:
            ServingError: nobody can listen there.
        """
        if not self._server.listening and not self.desk.closed:
            self._server.begin()

    def announce(self) -> None:
        """Say where, once the folder is this process's."""
        if self._server.listening and self._store.opened and not self._announced:
            self._announced = True
            self._server.announce(self._store.folder.layout, self._store.incarnation)

    def answer(self, ticket: Ticket, saving: Saving, *, stops: bool) -> None:
        """Let who has asked know how a save ends."""

        def ended(error: BaseException | None) -> None:
            if error is not None:
                self.desk.failed(ticket, str(error) or repr(error), stops=stops)
            else:
                self.desk.ended(ticket, saving.generation, saving.step, stops=stops)

        saving.when_ended(ended)

    def linger(self) -> None:
        """Let answers leave before the process does."""
        self._server.linger()

    def close(self) -> None:
        """Take no more requests."""
        self._server.close("the buffer is closed")

    def _look(self) -> dict[str, Any]:
        store = self._store
        found: dict[str, Any] = {
            "kind": store.kind,
            "run": store.folder.run_id,
            "incarnation": store.incarnation,
            "step": store.step,
            "generation": None if store.parent < 0 else store.parent,
            "asked": self.desk.asked,
            "statistics": self._statistics(),
        }
        plain: dict[str, Any] = msgspec.to_builtins(found)
        return plain

"""Requests that came from outside, between the thread that hears them and whoever saves.

A request has a ticket, which says in the end which generation has answered it. There is one ticket at a time that is
neither done nor failed: whoever asks meanwhile gets that one, also while its save is being written. Every save takes
it along, whatever it was that asked for the save.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

Then: TypeAlias = Literal["continue", "stop"]

PENDING, DONE, FAILED = "pending", "done", "failed"
HTTP = "HTTP"
"""The reason of a save that was asked for here."""
_KEPT = 100


class Ticket:
    """A request, and what became of it. Belongs to its desk."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.then: Then = "continue"
        self.state = PENDING
        self.generation: int | None = None
        self.step: int | None = None
        self.reason = ""

    def described(self) -> dict[str, Any]:
        """Return what a client is told."""
        told: dict[str, Any] = {"id": self.id, "state": self.state, "then": self.then}
        if self.state == DONE:
            told |= {"generation": self.generation, "step": self.step}
        if self.state == FAILED:
            told["reason"] = self.reason
        return told


class Desk:
    """Tickets of one run in one process. Methods may be called from any thread, and never block for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}
        self._open: Ticket | None = None
        self._asked: Then | None = None
        self.closed = ""
        """Why no request is taken any more."""
        self.wake: Callable[[], None] = lambda: None
        """Called, by the thread of whoever asks, when there is something to :meth:`take`."""
        self.tell: Callable[[], None] = lambda: None
        """Called, by any thread, when a ticket has ended."""

    # -- who asks ----------------------------------------------------------------------------------------------

    def post(self, then: Then) -> Ticket | None:
        """Ask for a save; None: the run has ended."""
        with self._lock:
            if self.closed:
                return None
            ticket, news = self._open, self._open is None
            if ticket is None:
                ticket = self._open = Ticket()
            if then == "stop" and ticket.then != "stop":
                ticket.then, news = "stop", True
            self._tickets[ticket.id] = ticket
            for old in list(self._tickets)[:-_KEPT]:
                del self._tickets[old]
            if news:
                self._asked = ticket.then
        if news:
            self.wake()
        return ticket

    def find(self, name: str) -> Ticket | None:
        """Return a ticket by its id; the newest hundred are kept."""
        with self._lock:
            return self._tickets.get(name)

    # -- who saves ---------------------------------------------------------------------------------------------

    @property
    def asked(self) -> bool:
        """Whether there is something to :meth:`take`."""
        return self._asked is not None

    def take(self) -> Then | None:
        """Return what was asked for since the last call."""
        with self._lock:
            asked, self._asked = self._asked, None
            return asked

    def begun(self) -> Ticket:
        """A save begins to capture: it answers everything that was asked so far, but for a stop that nobody took."""
        with self._lock:
            if self._open is None:
                self._open = Ticket()
            if self._asked == "continue":
                self._asked = None
            return self._open

    def ended(self, ticket: Ticket | None, generation: int | None, step: int | None, *, stops: bool) -> None:
        """A save is on the disk.

        Args:
            ticket: what :meth:`begun` gave; None: the one that is open, if there is one.
            generation: its number.
            step: the trainer's.
            stops: whether the run stops after it. If not, a ticket that asked for a stop stays open for that.
        """
        with self._lock:
            ticket = ticket or self._open
            if ticket is None or ticket.state != PENDING or (ticket.then == "stop" and not stops):
                return
            ticket.generation, ticket.step = generation, step
            self._end(ticket, DONE)
        self.tell()

    def failed(self, ticket: Ticket | None, reason: str, *, stops: bool) -> None:
        """A save has failed; ``ticket`` and ``stops`` as for :meth:`ended`: the stop has a save of its own."""
        with self._lock:
            ticket = ticket or self._open
            if ticket is None or ticket.state != PENDING or (ticket.then == "stop" and not stops):
                return
            ticket.reason = reason
            self._end(ticket, FAILED)
        self.tell()

    def _end(self, ticket: Ticket, state: str) -> None:
        ticket.state = state
        if ticket is self._open:
            self._open = None

    def close(self, why: str) -> None:
        """Take no more requests; what is open has failed."""
        with self._lock:
            self.closed = self.closed or why
        self.failed(None, why, stops=True)

"""How the last life of a run ended, and what was in flight then: read from the journals that it wrote."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from pipeline.records import Closed, Dropped, Failed, Finished, Inherited, Interrupted, Opened, Parked, Started
from pipeline.store.journal import Logged
from pipeline.store.layout import JournalName

RUNNING, STOPPED, CLOSED, FAILED = "running", "stopped", "closed", "failed"
KILLED, UNCLOSED, UNKNOWN = "killed", "unclosed", "unknown"
_WORST_FIRST = (KILLED, FAILED, STOPPED, CLOSED)


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a run: from the moment its process took the folder to its end."""

    incarnation: int
    ended: str
    """``running``: it has not. ``stopped``: it was asked to, and saved. ``closed``: by itself. ``failed``: by an error.
    ``killed``: nobody closed it. ``unclosed``: the same of a buffer, whose script may have ended without ``close()``.
    ``unknown``: nothing says."""
    reason: str = ""
    """Who asked for the stop, or the error."""
    asked: str = ""
    """Who had asked for a stop, of one that runs, or was killed before it could stop."""
    began: str = ""
    """When, in UTC; empty: not said."""
    over: str = ""
    """When it was closed."""
    in_flight: int | None = None
    """Attempts that had begun and not ended; None: of a buffer, which has none."""


class _Journal:
    """What one journal of the life says."""

    def __init__(self) -> None:
        self.opened: Opened | None = None
        self.closed: Closed | None = None
        self.last_word = False
        self.in_flight: set[tuple[int, int]] = set()

    def take(self, event: object) -> None:
        self.last_word = type(event) is Closed
        if isinstance(event, Started):
            self.in_flight.add((event.uid, event.member))
        elif isinstance(event, (Finished, Parked, Failed, Interrupted)):
            self.in_flight.discard((event.uid, event.member))
        elif isinstance(event, Dropped):
            self.in_flight = {each for each in self.in_flight if each[0] != event.uid}
        elif isinstance(event, Closed):
            self.closed = event
        elif isinstance(event, Opened):
            self.opened = event

    @property
    def ended(self) -> str:
        """One of the words of :attr:`Life.ended`."""
        closed = self.closed
        if closed is None or closed.how == "asked":
            return KILLED
        if closed.how in (STOPPED, CLOSED, FAILED):
            return closed.how
        return CLOSED if self.last_word else KILLED  # of a version that did not say how


class LifeReader:
    """Is told the events of every journal, and says how the last life went."""

    def __init__(self, names: Iterable[JournalName], holder: int) -> None:
        """Args:
        names: of all journals.
        holder: the incarnation that the lock names; it may have written several journals, as each write that fails
            is followed by a new one.
        """
        lives = [name.incarnation for name in names]
        newest = max(lives, default=0)
        first = holder if 0 < holder <= newest else newest
        self._holder = holder
        self._newest: dict[int, int] = {}
        """By rank, the incarnation of the last journal of the life."""
        for name in sorted(names):
            if name.incarnation >= first:
                self._newest[name.rank] = name.incarnation
        self._journals = {(incarnation, rank): _Journal() for rank, incarnation in self._newest.items()}
        self.happened = False
        """Whether the journals hold more than that lives began and ended."""

    def take(self, logged: Logged) -> None:
        """Take in an event."""
        if type(logged.event) not in (Opened, Closed, Inherited):
            self.happened = True
        journal = self._journals.get((logged.incarnation, logged.rank))
        if journal is not None:
            journal.take(logged.event)

    def result(self, *, held: bool, rollouts: bool, written: bool) -> Life | None:
        """Return what is known of the last life; None: there is no trace of any.

        Args:
            held: whether it goes on.
            rollouts: whether the run is one of rollouts.
            written: whether its events were written as they came.
        """
        newest = max(self._newest.values(), default=0)
        if self._holder > newest:  # it has written nothing
            return Life(incarnation=self._holder, ended=RUNNING if held else UNKNOWN)
        if not newest:
            return None
        journals = [self._journals[incarnation, rank] for rank, incarnation in self._newest.items()]
        worst = min(journals, key=lambda each: _WORST_FIRST.index(each.ended))
        closed, opened = worst.closed, worst.opened
        ended = worst.ended
        if ended == KILLED:
            ended = UNKNOWN if not written else KILLED if rollouts else UNCLOSED
        asked = closed is not None and closed.how == "asked"
        return Life(
            incarnation=newest,
            ended=RUNNING if held else ended,
            reason=closed.reason if closed is not None and not asked and not held else "",
            asked=closed.reason if closed is not None and asked else "",
            began=_utc(opened.wall if opened is not None else 0),
            over=_utc(closed.wall if closed is not None and ended in (STOPPED, CLOSED, FAILED) and not held else 0),
            in_flight=sum(len(each.in_flight) for each in journals) if rollouts else None,
        )


def _utc(wall: float) -> str:
    try:
        return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds") if wall > 0 else ""
    except (OverflowError, OSError, ValueError):
        return ""

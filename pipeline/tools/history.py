"""How a run came about: its generations, and the lives that wrote its journals."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import msgspec

from pipeline.checkpoint.generations import Stored
from pipeline.records import Closed, Opened
from pipeline.store.journal import Logged
from pipeline.store.layout import Layout


class GenerationLine(msgspec.Struct, frozen=True, kw_only=True):
    """A generation, in short."""

    generation: int
    step: int
    written: str
    reason: str
    """What made it: a verb, or who asked."""
    incarnation: int
    parent: int
    """-1: none."""
    origin: str = ""
    """Run id and generation that the run was forked from."""
    bytes: int = 0
    """Of its own files, rows aside."""
    without: list[str] = []
    external: str = ""
    """The trainer's own checkpoint that it goes with."""


class LifeLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one life wrote into one journal."""

    incarnation: int
    rank: int
    began: str = ""
    """When, in UTC; empty: the journal does not say, as that of a buffer."""
    host: str = ""
    process: int = 0
    recovered: int = -1
    """The generation that it went on from; -1: none, or not said."""
    origin: str = ""
    ended: str = ""
    """``stopped``, ``closed`` or ``failed``; empty: the journal has no last word."""
    reason: str = ""
    events: int = 0
    bytes: int = 0


def line_of(stored: Stored) -> GenerationLine:
    """Return a generation, in short."""
    manifest = stored.manifest
    return GenerationLine(
        generation=manifest.generation,
        step=manifest.step,
        written=manifest.written,
        reason=manifest.reason,
        incarnation=manifest.incarnation,
        parent=manifest.parent,
        origin=manifest.origin,
        bytes=sum(info.bytes for info in manifest.files),
        without=sorted(manifest.left_out),
        external=manifest.external,
    )


class LivesReader:
    """Is told the events of every journal, and says of each what life it is of."""

    def __init__(self) -> None:
        self._opened: dict[tuple[int, int], Opened] = {}
        self._closed: dict[tuple[int, int], Closed] = {}
        self._events: dict[tuple[int, int], int] = {}

    def take(self, logged: Logged) -> None:
        """Take in an event."""
        key = (logged.incarnation, logged.rank)
        self._events[key] = logged.sequence
        if isinstance(logged.event, Opened):
            self._opened[key] = logged.event
        elif isinstance(logged.event, Closed):
            self._closed[key] = logged.event

    def lines(self, layout: Layout) -> list[LifeLine]:
        """Return what each journal is of, by incarnation and rank."""
        return [
            self._line(name.incarnation, name.rank, _size(name.path), (name.incarnation, name.rank))
            for name in layout.list_journals()
        ]

    def _line(self, incarnation: int, rank: int, size: int, key: tuple[int, int]) -> LifeLine:
        opened, closed = self._opened.get(key), self._closed.get(key)
        ended = "" if closed is None else closed.how or "closed"
        return LifeLine(
            incarnation=incarnation,
            rank=rank,
            began="" if opened is None else utc(opened.wall),
            host="" if opened is None else opened.host,
            process=0 if opened is None else opened.process,
            recovered=-1 if opened is None else opened.generation,
            origin="" if opened is None else opened.origin,
            ended="asked to stop" if ended == "asked" else ended,
            reason="" if closed is None else closed.reason,
            events=self._events.get(key, 0),
            bytes=size,
        )


def utc(wall: float) -> str:
    """Return a time for people; empty if there is none."""
    try:
        return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds") if wall > 0 else ""
    except (OverflowError, OSError, ValueError):
        return ""


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0

"""What a single journal or segment holds, with or without the run that it is of."""

from __future__ import annotations

import os
from collections import Counter

import msgspec

from pipeline.errors import Damaged, ForebayError
from pipeline.records import Closed, Opened
from pipeline.store.files import open_plain
from pipeline.store.frames import EVENTS, HEADER_BYTES, PAYLOAD, SYNCED, Frame, decode_header, scan
from pipeline.store.journal import events_of
from pipeline.store.layout import JournalName
from pipeline.store.segments import find_footer
from pipeline.tools.figures import Figures
from pipeline.tools.history import utc

_MOST_UIDS = 10


class JournalFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal holds."""

    incarnation: int
    rank: int
    bytes: int
    events: int
    by_kind: dict[str, int]
    """Events by their tag, the most frequent first."""
    marks: int
    """Synced marks."""
    synced: int
    """The last event that survives a loss of power; 0: none."""
    began: str = ""
    ended: str = ""
    origin: str = ""
    left: int = 0
    """Bytes at the end that a crash cut off."""
    wrong: str = ""
    """What kept it from being read to its end."""
    offset: int | None = None
    """Where."""


class SegmentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment holds."""

    incarnation: int
    rank: int
    bytes: int
    payloads: int
    lengths: Figures
    """Of payloads, in bytes."""
    first_uids: list[int]
    """Of rollouts; of buffers, the keys of first rows, or numbers of trajectories."""
    uids: int
    """How many different ones there are."""
    again: int
    """Payloads of groups that had been reopened."""
    sealed: bool
    """Whether a footer ends it."""
    left: int = 0
    wrong: str = ""
    offset: int | None = None


class _Scan:
    """The whole frames of a file, and what came after them."""

    def __init__(self, path: str, *, payloads: bool) -> None:
        self.path = path
        with open_plain(path) as file:
            header = decode_header(file.read(HEADER_BYTES), path)
        self.incarnation = 0 if header is None else header.incarnation
        self.rank = 0 if header is None else header.rank
        self.tag = 0 if header is None else header.run_tag
        self.left = 0
        self.wrong = ""
        self.offset: int | None = None
        self._payloads = payloads

    def frames(self) -> list[Frame]:
        """Read all of them; of what is wrong a note is kept."""
        found: list[Frame] = []
        try:
            found.extend(scan(self.path, run_tag=self.tag, ended=self._ended, payloads=self._payloads))
        except (ForebayError, OSError) as error:
            self.fail(error)
        return found

    def fail(self, error: Exception) -> None:
        """Note what is wrong."""
        self.wrong = str(error)
        self.offset = error.offset if isinstance(error, Damaged) else None

    def _ended(self, at: int, left: int) -> None:
        self.left = left


def journal_facts(path: str) -> JournalFacts:
    """Return what a journal holds. Blocks.

    Raises:
        NewerFormat: a newer version wrote it.
        StoreError: it cannot be read at all.
    """
    read = _Scan(path, payloads=True)
    kinds: Counter[str] = Counter()
    marks = synced = 0
    began = ended = origin = ""
    expected = 1
    name = JournalName(read.incarnation, read.rank, path)
    for frame in read.frames():
        if frame.header.kind == SYNCED:
            marks, synced = marks + 1, frame.header.sequence
        if frame.header.kind != EVENTS:
            continue
        try:
            events = events_of(frame, name, expected)
        except ForebayError as error:
            read.fail(error)
            break
        expected += len(events)
        for event in events:
            kinds[str(event.__struct_config__.tag)] += 1
            if isinstance(event, Opened):
                began, origin = utc(event.wall), event.origin
            elif isinstance(event, Closed):
                ended = f"{event.how or 'closed'} {utc(event.wall)} {event.reason}".strip()
    return JournalFacts(
        incarnation=read.incarnation,
        rank=read.rank,
        bytes=os.path.getsize(path),
        events=expected - 1,
        by_kind=dict(kinds.most_common()),
        marks=marks,
        synced=synced,
        began=began,
        ended=ended,
        origin=origin,
        left=read.left,
        wrong=read.wrong,
        offset=read.offset,
    )


def segment_facts(path: str) -> SegmentFacts:
    """Return what a segment holds. Blocks.

    Raises:
        NewerFormat: a newer version wrote it.
        StoreError: it cannot be read at all.
    """
    read = _Scan(path, payloads=False)
    payloads = [frame.header for frame in read.frames() if frame.header.kind == PAYLOAD]
    uids = dict.fromkeys(header.sequence for header in payloads)
    return SegmentFacts(
        incarnation=read.incarnation,
        rank=read.rank,
        bytes=os.path.getsize(path),
        payloads=len(payloads),
        lengths=Figures.of([header.length for header in payloads]),
        first_uids=list(uids)[:_MOST_UIDS],
        uids=len(uids),
        again=sum(header.life > 0 for header in payloads),
        sealed=find_footer(path, read.tag) is not None,
        left=read.left,
        wrong=read.wrong,
        offset=read.offset,
    )

"""What attempts have kept of their work so far: where an interrupted one goes on.

Folded from the events as everything is: what a member kept stays until it finishes, fails, or its group ends or begins
anew. A failure lets it go, since the next attempt may fail in the same way; an interruption does not.
"""

from __future__ import annotations

import msgspec

from pipeline.locations import Location
from pipeline.records import (
    AnyEvent,
    Dropped,
    Failed,
    Finished,
    Inherited,
    Opened,
    Parked,
    PartSaved,
    Reopened,
)


class Part(msgspec.Struct):
    """A member's part: its blob, if it is in memory, where it lies, and the oldest weights that made some of it."""

    oldest: int
    attempt: int
    location: Location | None
    blob: bytes | None = None


class Partials:
    """Parts by uid and member."""

    def __init__(self) -> None:
        self.by_uid: dict[int, dict[int, Part]] = {}
        """To be looked at only: mostly it is empty, and then nothing needs to be done for an event."""

    def __len__(self) -> int:
        return sum(map(len, self.by_uid.values()))

    def get(self, uid: int, member: int) -> Part | None:
        """Return what a member has kept, or None."""
        return self.by_uid.get(uid, {}).get(member)

    def items(self) -> list[tuple[int, int, Part]]:
        """Return uid, member and part of each."""
        return [(uid, member, part) for uid, parts in self.by_uid.items() for member, part in parts.items()]

    def discard(self, uid: int, member: int) -> None:
        """Forget what a member has kept, if it has."""
        parts = self.by_uid.get(uid)
        if parts is not None:
            parts.pop(member, None)
            if not parts:
                del self.by_uid[uid]

    def apply(self, incarnation: int, rank: int, event: AnyEvent, blob: bytes | None = None) -> None:
        """Take in an event of a journal; ``blob`` is the part itself, in life."""
        if isinstance(event, PartSaved):
            at = Location(incarnation, rank, event.segment, event.offset, event.length) if event.segment >= 0 else None
            self.by_uid.setdefault(event.uid, {})[event.member] = Part(event.oldest, event.attempt, at, blob)
        elif not self.by_uid:
            return
        elif isinstance(event, (Finished, Failed, Parked)):
            self.discard(event.uid, event.member)
        elif isinstance(event, (Reopened, Dropped)):
            self.by_uid.pop(event.uid, None)
        elif isinstance(event, Opened):  # old versions are no newer than what was restored
            for _, _, part in self.items():
                part.oldest = min(part.oldest, event.version)
        elif isinstance(event, Inherited):
            for item in event.items:
                self.by_uid.pop(item.uid, None)

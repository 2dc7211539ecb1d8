"""Where payloads of finished members are held."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pipeline.locations import Location
from pipeline.store.layout import SegmentKey


class RolloutStorage:
    """Ragged payloads, one entry for each group, each member's blob as it was packed.

    A blob that lies in a segment may be left there: it is then ``None`` and its location says where. Bytes are counted
    for what is held in memory.
    """

    def __init__(self) -> None:
        # A group is one flat tuple of (member, blob, location) after (member, blob, location): with 100,000 groups,
        # containers in containers would cost more in garbage collection than the rest.
        self._groups: dict[int, tuple[Any, ...]] = {}
        self.memory_bytes = 0
        self.live: dict[SegmentKey, int] = {}
        """Bytes of payloads that are held, by the segment in which they lie. What has none is not there."""

    def put(self, uid: int, member: int, blob: bytes | None, location: Location | None) -> None:
        """Keep a member's payload; one that was there is replaced."""
        group = self._groups.get(uid)
        if group is None:
            self._groups[uid] = (member, blob, location)
        else:
            if member in group[::3]:
                place = group[::3].index(member) * 3
                self._left(group[place + 1], group[place + 2])
                group = group[:place] + group[place + 3 :]
            self._groups[uid] = (*group, member, blob, location)
        if blob is not None:
            self.memory_bytes += len(blob)
        if location is not None:
            key = location.segment_key
            self.live[key] = self.live.get(key, 0) + location.length

    def _left(self, blob: bytes | None, location: Location | None) -> None:
        """Count out a payload that is held no longer."""
        if blob is not None:
            self.memory_bytes -= len(blob)
        if location is not None:
            key = location.segment_key
            left = self.live[key] - location.length
            if left:
                self.live[key] = left
            else:
                del self.live[key]

    def get(self, uid: int) -> Mapping[int, tuple[bytes | None, Location | None]]:
        """Return a group's payloads by member.

        Raises:
            KeyError: nothing is held for ``uid``.
        """
        group = self._groups[uid]
        if len(group) == 3:
            return {group[0]: group[1:]}
        return {member: (blob, where) for member, blob, where in zip(group[::3], group[1::3], group[2::3], strict=True)}

    def blobs(self, uid: int) -> list[bytes] | None:
        """Return a group's payloads, members in order, or None if one of them is not held in memory.

        Raises:
            KeyError: nothing is held for ``uid``.
        """
        group = self._groups[uid]
        if len(group) == 3:
            return None if group[1] is None else [group[1]]
        held = sorted(zip(group[::3], group[1::3], strict=True))  # no member is there twice: blobs are not compared
        return None if any(blob is None for _, blob in held) else [blob for _, blob in held]

    def discard(self, uid: int) -> None:
        """Forget a group's payloads, if there are any."""
        group = self._groups.pop(uid, ())
        if len(group) == 3:
            self._left(group[1], group[2])
        else:
            for blob, location in zip(group[1::3], group[2::3], strict=True):
                self._left(blob, location)

    def discard_members(self, uid: int, members: Collection[int]) -> None:
        """Forget the payloads of some of a group's members; the others stay."""
        kept: tuple[Any, ...] = ()
        for member, (blob, where) in self.get(uid).items():
            if member in members:
                self._left(blob, where)
            else:
                kept += (member, blob, where)
        self._groups[uid] = kept
        if not kept:
            del self._groups[uid]

    def holds(self, uid: int, member: int, location: Location) -> bool:
        """Whether a member's payload is held, and lies there."""
        return uid in self._groups and self.get(uid).get(member, (None, None))[1] == location

    def move(self, uid: int, member: int, before: Location, now: Location) -> bool:
        """Note that a payload lies elsewhere now. Returns whether it was held, and had lain where it is said to."""
        if not self.holds(uid, member, before):
            return False
        self.put(uid, member, self.get(uid)[member][0], now)
        return True

    def locations(self) -> list[tuple[int, int, Location]]:
        """Return (uid, member, location) of every payload that lies in a segment."""
        return [
            (uid, member, location)
            for uid in self._groups
            for member, (_, location) in self.get(uid).items()
            if location is not None
        ]

    def __contains__(self, uid: int) -> bool:
        return uid in self._groups

    def __len__(self) -> int:
        return len(self._groups)

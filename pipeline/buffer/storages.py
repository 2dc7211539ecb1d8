"""Where payloads of finished members are held."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.records import Location


class RolloutStorage:
    """Ragged payloads, one entry for each group, each member's blob as it was packed.

    A blob that lies in a segment may be left there: it is then ``None`` and its location says where. Bytes are counted
    for what is held in memory.
    """

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, tuple[bytes | None, Location | None]]] = {}
        self.memory_bytes = 0

    def put(self, uid: int, member: int, blob: bytes | None, location: Location | None) -> None:
        """Keep a member's payload; one that was there is replaced."""
        group = self._groups.get(uid)
        if group is None:
            group = self._groups[uid] = {}
        before = group.get(member)
        if before is not None and before[0] is not None:
            self.memory_bytes -= len(before[0])
        group[member] = (blob, location)
        if blob is not None:
            self.memory_bytes += len(blob)

    def get(self, uid: int) -> Mapping[int, tuple[bytes | None, Location | None]]:
        """Return a group's payloads by member.

        Raises:
            KeyError: nothing is held for ``uid``.
        """
        return self._groups[uid]

    def discard(self, uid: int) -> None:
        """Forget a group's payloads, if there are any."""
        for blob, _ in self._groups.pop(uid, {}).values():
            if blob is not None:
                self.memory_bytes -= len(blob)

    def locations(self) -> list[tuple[int, int, Location]]:
        """Return (uid, member, location) of every payload that lies in a segment."""
        return [
            (uid, member, location)
            for uid, group in self._groups.items()
            for member, (_, location) in group.items()
            if location is not None
        ]

    def __len__(self) -> int:
        return len(self._groups)

"""Which groups are parked, by the version that their staleness counts from: expiry costs what it finds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.ledger.entry import Entry


class ParkedGroups:
    """An index of uids; the ledger keeps it. A group's version does not change while it is in here."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._by_version: dict[int, set[int]] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Take in a group that has just been parked."""
        self._by_version.setdefault(entry.effective, set()).add(entry.uid)

    def remove(self, entry: Entry) -> None:
        """Forget a group that was added."""
        uids = self._by_version[entry.effective]
        uids.remove(entry.uid)
        if not uids:
            del self._by_version[entry.effective]

    def older_than(self, version: int) -> list[int]:
        """Return the uids of groups whose version lies below ``version``, oldest first."""
        return [uid for each in sorted(self._by_version) if each < version for uid in sorted(self._by_version[each])]

    def __len__(self) -> int:
        return sum(map(len, self._by_version.values()))

    def __bool__(self) -> bool:
        return bool(self._by_version)

    def __iter__(self) -> Iterator[int]:
        for uids in self._by_version.values():
            yield from uids

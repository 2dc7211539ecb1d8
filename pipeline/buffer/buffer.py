"""Finished groups: an index by version, a selector, and a storage.

All of it is synchronous; whoever waits for a batch waits in the pipeline, on a condition. The index holds what may be
selected: a batch that is reserved to be handed out again, or leased, is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from pipeline.buffer.selectors import FifoSelector, FreshestSelector, StalestSelector, StrictSelector
from pipeline.buffer.storages import RolloutStorage
from pipeline.interfaces import Selector

Choice: TypeAlias = Literal["fifo", "stalest", "freshest"]


class GroupBuffer:
    """Holds finished groups until a batch takes them."""

    def __init__(self, *, order: Literal["finished", "strict"], selector: Choice) -> None:
        self.storage = RolloutStorage()
        self._versions = StalestSelector()
        self._strict = StrictSelector() if order == "strict" else None
        self._selector: Selector = self._versions
        if self._strict is not None:
            self._selector = self._strict
        elif selector == "fifo":
            self._selector = FifoSelector()
        elif selector == "freshest":
            self._selector = FreshestSelector()
        self._peak = 0  # as of when groups left last: they leave in batches, and come one by one

    def add(self, uid: int, version: int) -> None:
        """Take in a finished group; ``version`` is the oldest of its weights."""
        self._versions.add(uid, version)
        if self._selector is not self._versions:
            self._selector.add(uid, version)

    def put_back(self, groups: Sequence[tuple[int, int]]) -> None:
        """Take (uid, version) pairs back that were taken, ahead of what came in later."""
        for uid, version in reversed(groups):
            self._versions.add(uid, version, first=True)
            if self._selector is not self._versions:
                self._selector.add(uid, version, first=True)

    @property
    def peak(self) -> int:
        """The most groups that were held at once."""
        return max(self._peak, len(self._versions))

    def remove(self, uid: int) -> None:
        """Take a group out of the selection; its payload stays."""
        self._peak = self.peak
        self._versions.remove(uid)
        if self._selector is not self._versions:
            self._selector.remove(uid)

    def __contains__(self, uid: int) -> bool:
        return uid in self._versions

    def opened(self, uid: int) -> None:
        """Note that ``uid`` is claimed or reopened; strict order waits for it."""
        if self._strict is not None:
            self._strict.opened(uid)

    def closed(self, uid: int) -> None:
        """Note that ``uid`` has finished or been dropped."""
        if self._strict is not None:
            self._strict.closed(uid)

    def ready(self, count: int) -> bool:
        """Whether :meth:`take` would return ``count`` groups now."""
        if len(self._versions) < count:
            return False
        return self._strict is None or self._strict.ready() >= count

    def take(self, count: int) -> list[int]:
        """Take up to ``count`` groups out of the selection, in its order."""
        self._peak = self.peak
        taken = self._selector.take(count)
        if self._selector is not self._versions:
            for uid in taken:
                self._versions.remove(uid)
        return taken

    def older_than(self, version: int) -> list[int]:
        """Return the groups in the selection whose version lies below ``version``, oldest first."""
        oldest = self._versions.oldest()
        return [] if oldest is None or oldest >= version else self._versions.older_than(version)

    def counts(self) -> dict[int, int]:
        """Return how many groups in the selection there are of each version."""
        return self._versions.counts()

    def __len__(self) -> int:
        return len(self._versions)

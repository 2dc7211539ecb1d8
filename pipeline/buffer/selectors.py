"""Which finished groups a batch takes first. Selectors see uids and versions, never data.

Every one costs O(1) to add to and to remove from, and O(log n) or less for each group taken, whatever is held.
The containers are linked maps and heaps of small integers: see ``docs/decisions/0003-index.md``.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque


class FifoSelector:
    """First finished, first taken."""

    def __init__(self) -> None:
        # A plain dict walks over the holes of removed keys at its front; this one is a linked list.
        self._keys: OrderedDict[int, None] = OrderedDict()

    def add(self, uid: int, version: int, *, first: bool = False) -> None:
        self._keys[uid] = None
        if first:
            self._keys.move_to_end(uid, last=False)

    def remove(self, uid: int) -> None:
        del self._keys[uid]

    def take(self, count: int) -> list[int]:
        pop = self._keys.popitem
        return [pop(last=False)[0] for _ in range(min(count, len(self._keys)))]

    def __len__(self) -> int:
        return len(self._keys)


class StalestSelector:
    """Oldest version first, among equals the first finished."""

    def __init__(self) -> None:
        self._buckets: dict[int, OrderedDict[int, None]] = {}
        self._versions: dict[int, int] = {}

    def add(self, uid: int, version: int, *, first: bool = False) -> None:
        self._versions[uid] = version
        bucket = self._buckets.get(version)
        if bucket is None:
            bucket = self._buckets[version] = OrderedDict()
        bucket[uid] = None
        if first:
            bucket.move_to_end(uid, last=False)

    def remove(self, uid: int) -> None:
        version = self._versions.pop(uid)
        bucket = self._buckets[version]
        del bucket[uid]
        if not bucket:
            del self._buckets[version]

    def take(self, count: int) -> list[int]:
        taken: list[int] = []
        for version in self._in_order():
            bucket = self._buckets[version]
            while bucket and len(taken) < count:
                taken.append(bucket.popitem(last=False)[0])
                del self._versions[taken[-1]]
            if bucket:
                break
            del self._buckets[version]
        return taken

    def _in_order(self) -> list[int]:
        return sorted(self._buckets)

    def older_than(self, version: int) -> list[int]:
        """Return the keys with a version below ``version``, oldest first; costs what it returns."""
        return [uid for each in sorted(v for v in self._buckets if v < version) for uid in self._buckets[each]]

    def counts(self) -> dict[int, int]:
        """Return how many keys there are of each version."""
        return {version: len(bucket) for version, bucket in self._buckets.items()}

    def oldest(self) -> int | None:
        """Return the least version held."""
        return min(self._buckets, default=None)

    def __contains__(self, uid: int) -> bool:
        return uid in self._versions

    def __len__(self) -> int:
        return len(self._versions)


class FreshestSelector(StalestSelector):
    """Newest version first, among equals the first finished."""

    def _in_order(self) -> list[int]:
        return sorted(self._buckets, reverse=True)


class StrictSelector:
    """Draw order: the least uid first, and none before every smaller one has finished or been dropped."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._heap: list[int] = []
        self._unblocked: deque[int] = deque()
        self._open_heap: list[int] = []
        self._open: set[int] = set()

    def opened(self, uid: int) -> None:
        """Note that ``uid`` has been claimed, or reopened, and holds the larger ones back."""
        if uid not in self._open:
            self._open.add(uid)
            heapq.heappush(self._open_heap, uid)
            self._put_back(uid)

    def closed(self, uid: int) -> None:
        """Note that ``uid`` has finished or been dropped."""
        self._open.discard(uid)
        if len(self._open_heap) > 2 * len(self._open) + 64:
            self._open_heap = sorted(self._open)

    def add(self, uid: int, version: int, *, first: bool = False) -> None:
        self._keys.add(uid)
        heapq.heappush(self._heap, uid)
        self._put_back(uid)

    def remove(self, uid: int) -> None:
        self._keys.remove(uid)
        for each in self._unblocked:  # `ready` counts them, so none that was removed may stay
            heapq.heappush(self._heap, each)
        self._unblocked.clear()
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = sorted(self._keys)

    def ready(self) -> int:
        """Return how many keys can be taken now."""
        while self._open_heap and self._open_heap[0] not in self._open:
            heapq.heappop(self._open_heap)
        while self._heap and (not self._open_heap or self._heap[0] < self._open_heap[0]):
            uid = heapq.heappop(self._heap)
            if uid in self._keys and (not self._unblocked or self._unblocked[-1] != uid):
                self._unblocked.append(uid)
        return len(self._unblocked)

    def take(self, count: int) -> list[int]:
        self.ready()
        taken: list[int] = []
        while self._unblocked and len(taken) < count:
            uid = self._unblocked.popleft()
            if uid in self._keys:
                self._keys.remove(uid)
                taken.append(uid)
        return taken

    def _put_back(self, uid: int) -> None:
        """A smaller uid has come: what was unblocked behind it is sorted in again."""
        if self._unblocked and uid < self._unblocked[-1]:
            for each in self._unblocked:
                heapq.heappush(self._heap, each)
            self._unblocked.clear()

    def __len__(self) -> int:
        return len(self._keys)

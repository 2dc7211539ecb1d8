"""The rule by which episodes are shared out, and what is done where there is too much for those who share."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapreplace
from typing import Literal, NamedTuple

import numpy as np

from pipeline.checkpoint.listed import PARKED, Ints, Listing
from pipeline.errors import ConfigError

Counted = Literal["steps", "episodes"]


def share_out(steps: Ints, targets: int) -> Ints:
    """Return to which target each of some episodes goes, which are given by their steps, oldest first: to the one with
    the least steps, then the fewest episodes, then the lowest number."""
    if targets == 1:
        return np.zeros(len(steps), np.int64)
    heap = [(0, 0, target) for target in range(targets)]  # in order, so it is a heap
    chosen = []
    for more in steps.tolist():
        load, count, target = heap[0]
        chosen.append(target)
        heapreplace(heap, (load + more, count + 1, target))
    return np.array(chosen, np.int64)


class Room(NamedTuple):
    """How much each target holds, and whether the oldest go where that is not enough."""

    capacity: int
    counted: Counted
    evict: bool

    def taken(self, aged: Listing) -> Ints:
        """[n] What each episode takes of it. What waits takes nothing, as nothing of it is in the buffer; what is
        parked has its place there."""
        each = aged.steps if self.counted == "steps" else np.ones_like(aged.steps)
        return np.where(aged.items & (aged.flags & PARKED == 0), 0, each)

    def check_longest(self, aged: Listing, taken: Ints) -> None:
        """Refuse an episode that no target can hold: to drop all that is older would not be enough.

        Raises:
            ConfigError: there is one.
        """
        if aged.number and taken.max() > self.capacity:
            at = int(taken.argmax())
            raise self.refusal(
                f"episode {aged.uid[at]} of shard {aged.shard[at]} has {taken[at]} steps, more than a target holds, "
                f"and no episode is split. Load with a capacity of at least {taken[at]}"
            )

    def too_many_rows(self, rows: int, targets: int) -> int:
        """Return how many rows have to go, where each goes by itself: these are shared out to the row.

        Raises:
            ConfigError: none may.
        """
        excess = max(0, rows - targets * self.capacity)
        if excess and not self.evict:
            held = f"the shards hold {rows} rows, and {targets} targets hold {targets * self.capacity}"
            raise self.refusal(
                f"{held}: {excess} too many. Load with more room, on more ranks, or with evict_oldest=True"
            )
        return excess

    def refusal(self, text: str) -> ConfigError:
        """Return the error that says why there is no room."""
        return ConfigError(f"capacity={self.capacity}: {text}", option="capacity")

    def pinned(self, aged: Listing, taken: Ints) -> ConfigError:
        """Return the error where all have gone that may go."""
        return self.refusal(
            f"{int(taken[aged.items].sum())} items are parked, which are never evicted, and they are too many. Load "
            "with more room, or on more ranks"
        )


def settled(aged: Listing, room: Room | None, targets: int) -> tuple[Ints, Ints]:
    """Return which of the episodes stay, [n] bool, and the target of each that does, by the rule.

    Those that go are the oldest of all, and with one less of them there would be too much. Where capacity counts steps
    they are the fewest: with an episode less, the loads of the targets, in order of size, are each no larger than
    before, and stay so whatever is added to the least of them.

    Raises:
        ConfigError: there is no room.
    """
    everything = np.ones(aged.number, bool)
    if room is None:
        return everything, share_out(aged.steps, targets)
    taken = room.taken(aged)
    room.check_longest(aged, taken)
    may_go = np.flatnonzero(~aged.items)

    def without(gone: int) -> tuple[Ints, Ints]:
        kept = everything.copy()
        kept[may_go[:gone]] = False
        return kept, share_out(aged.steps[kept], targets)

    def excess(gone: int) -> int:
        kept, ranks = without(gone)
        return int(_sums(ranks, taken[kept], targets).max()) - room.capacity

    over = int(taken.sum()) - targets * room.capacity
    if not room.evict:
        over = over if over > 0 else excess(0)
        if over > 0:
            raise _too_much(room, targets, aged, int(taken.sum()), over)
        return without(0)
    freed = np.concatenate([[0], np.cumsum(taken[may_go])])
    least = min(int(np.searchsorted(freed, over)), len(may_go))
    gone = _first_that_fits(lambda gone: excess(gone) <= 0, least, len(may_go))
    if gone is None:
        raise room.pinned(aged, taken)
    return without(gone)


def _first_that_fits(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """Return a number from ``least`` to ``most`` that fits, where one less does not, unless it is ``least``; None: even
    ``most`` does not. It is looked for in steps that grow, and then by halving."""
    low, high = least - 1, least
    while not fits(high):
        if high == most:
            return None
        low, high = high, min(most, high + 2 * (high - least) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def settled_as_they_were(aged: Listing, room: Room | None, targets: int) -> tuple[Ints, Ints]:
    """As :func:`settled`, where target r takes shard r over. Those that go are the oldest of each shard.

    Raises:
        ConfigError: there is no room.
    """
    kept = np.ones(aged.number, bool)
    if room is None:
        return kept, aged.shard
    taken = room.taken(aged)
    room.check_longest(aged, taken)
    excess = _sums(aged.shard, taken, targets) - room.capacity
    for rank in np.flatnonzero(excess > 0).tolist():
        over = int(excess[rank])
        if not room.evict:
            raise room.refusal(
                f"shard {rank} holds {room.capacity + over} {room.counted}, {over} too many. Load with more room, on "
                "more ranks, with rebalance=True if other ranks have room, or with evict_oldest=True"
            )
        may_go = np.flatnonzero((aged.shard == rank) & ~aged.items)
        freed = np.concatenate([[0], np.cumsum(taken[may_go])])
        if freed[-1] < over:
            raise room.pinned(aged, taken)
        kept[may_go[: int(np.searchsorted(freed, over))]] = False
    return kept, aged.shard[kept]


def _too_much(room: Room, targets: int, aged: Listing, total: int, excess: int) -> ConfigError:
    all_room, what = targets * room.capacity, room.counted
    held = f"the shards hold {total} {what} in {aged.number} episodes, and {targets} targets hold {all_room}"
    if total > all_room:
        wrong = f"{held}: {excess} too many"
    else:
        wrong = f"{held}; but one would get {room.capacity + excess}, {excess} too many, as no episode is split"
    return room.refusal(f"{wrong}. Load with more room, on more ranks, or with evict_oldest=True")


def _sums(ranks: Ints, taken: Ints, targets: int) -> Ints:
    """Return how much each target has."""
    sums = np.zeros(targets, np.int64)
    np.add.at(sums, ranks, taken)
    return sums

"""The consumer half on the disk, read in one way by whoever needs it: what a resume refuses, no tool shows as whole."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pipeline.checkpoint.manifest import CONSUMER_FILE
from pipeline.errors import Damaged
from pipeline.intervals import IntervalSet
from pipeline.ledger import ConsumerHalf
from pipeline.store.files import open_plain


def read_half(folder: str) -> tuple[ConsumerHalf, dict[str, Any]]:
    """Return the consumer half in a generation's folder, and what of it a newer version has added.

    Raises:
        Damaged: it is no consumer half, or contradicts itself.
        OSError: it cannot be read.
    """
    path = os.path.join(folder, CONSUMER_FILE)
    with open_plain(path) as file:
        raw = file.read()
    try:
        half = msgspec.json.decode(raw, type=ConsumerHalf)
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        if any(len(lease.uids) != len(lease.lives) for lease in half.leases):
            raise ValueError("a lease has not as many lives as groups")
        if any(first > last for first, last in half.trained):
            raise ValueError("what is trained begins after its end")
        known = set(ConsumerHalf.__struct_fields__)
        return half, {name: msgspec.json.decode(fields[name]) for name in fields if name not in known}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: the consumer half is damaged ({error})") from None


def half_or_why_not(folder: str) -> tuple[ConsumerHalf, str | None]:
    """Return the consumer half and None; or an empty one, and why it cannot be had."""
    try:
        return read_half(folder)[0], None
    except OSError as error:
        return ConsumerHalf(), str(error)


def joined_halves(halves: Sequence[ConsumerHalf]) -> ConsumerHalf:
    """Return what several ranks say together of what the weights have seen; counts are sums, and leases each rank's."""
    groups: dict[str, tuple[int, int, int]] = {}
    masked: Counter[str] = Counter()
    for half in halves:
        masked.update(half.masked_by_task)
        for task, counts in half.trained_by_task.items():
            before = groups.get(task, (0, 0, 0))
            groups[task] = (before[0] + counts[0], before[1] + counts[1], before[2] + counts[2])
    trained = joined_ranges(half.trained for half in halves)
    return ConsumerHalf(step=halves[0].step, trained=trained, trained_by_task=groups, masked_by_task=dict(masked))


def joined_ranges(ranges: Iterable[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return ranges of uids, first and last of each, as one list."""
    return IntervalSet(each for some in ranges for each in some).ranges()

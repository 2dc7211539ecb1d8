"""What attempts kept, folded from the events."""

from __future__ import annotations

import pytest

from pipeline.buffer.partials import Partials
from pipeline.locations import Location
from pipeline.records import (
    AnyEvent,
    Dropped,
    Failed,
    Finished,
    HeldItem,
    Inherited,
    Interrupted,
    Opened,
    Parked,
    PartSaved,
    Reopened,
    Started,
)

KEPT = PartSaved(1, 0, 2, oldest=7, newest=8, segment=3, offset=64, length=10)
HELD = HeldItem(1, "a", 0, 0, 0, 1, 1, "train", None, b"\0", (0,), (0,))


def after(*events: AnyEvent) -> Partials:
    partials = Partials()
    for event in events:
        partials.apply(4, 0, event)
    return partials


def test_a_part_lies_where_its_event_says() -> None:
    part = after(KEPT).get(1, 0)
    assert part is not None
    assert (part.oldest, part.attempt, part.location, part.blob) == (7, 2, Location(4, 0, 3, 64, 10), None)
    assert after(KEPT).get(1, 1) is None


def test_a_later_one_replaces_it() -> None:
    partials = after(KEPT, PartSaved(1, 0, 3, 5, 9))
    assert [(uid, member, part.oldest, part.location) for uid, member, part in partials.items()] == [(1, 0, 5, None)]


@pytest.mark.parametrize("event", [Started(1), Interrupted(1, 0, 2, "weight update"), Finished(2, 0, 1, 1.0, 0, 0)])
def test_what_does_not_end_it_leaves_it(event: AnyEvent) -> None:
    assert len(after(KEPT, event)) == 1


@pytest.mark.parametrize(
    "event",
    [
        Finished(1, 0, 2, 1.0, 0, 0),
        Parked(1, 0, 2, 0, 0),
        Failed(1, 0, 2, "error", "", False),
        Reopened(1, "expired"),
        Dropped(1, "discarded"),
        Inherited([HELD], {}, {}, {}, {}, []),
    ],
)
def test_what_ends_it_lets_it_go(event: AnyEvent) -> None:
    partials = after(KEPT, event)
    assert (len(partials), partials.by_uid) == (0, {})


def test_another_members_end_leaves_it() -> None:
    assert len(after(KEPT, PartSaved(1, 1, 1, 0, 0), Finished(1, 1, 1, 1.0, 0, 0))) == 1


def test_in_another_life_it_is_no_newer_than_what_was_restored() -> None:
    part = after(KEPT, Opened(5, version=2)).get(1, 0)
    assert part is not None
    assert part.oldest == 2

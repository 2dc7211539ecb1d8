"""What every storage promises: see ``pipeline.interfaces.Storage``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.buffer.storages import RolloutStorage
from pipeline.interfaces import Storage
from pipeline.locations import Location

every = pytest.mark.parametrize("make", [RolloutStorage])
PLACE = Location(1, 0, 1, 64, 3)


@every
def test_payloads_come_back_by_group_and_member(make: Callable[[], Storage]) -> None:
    storage = make()
    storage.put(7, 1, b"one", None)
    storage.put(7, 0, None, PLACE)
    storage.put(8, 0, b"else", PLACE)
    assert dict(storage.get(7)) == {0: (None, PLACE), 1: (b"one", None)}
    assert len(storage) == 2


@every
def test_a_member_that_is_put_again_replaces_the_one_before(make: Callable[[], Storage]) -> None:
    storage = make()
    storage.put(7, 0, b"first", None)
    storage.put(7, 0, b"second", PLACE)
    assert dict(storage.get(7)) == {0: (b"second", PLACE)}


@every
def test_what_is_discarded_is_gone_and_discarding_it_again_is_no_error(make: Callable[[], Storage]) -> None:
    storage = make()
    storage.put(7, 0, b"one", None)
    storage.discard(7)
    storage.discard(7)
    assert len(storage) == 0
    with pytest.raises(KeyError):
        storage.get(7)


@every
def test_single_members_can_be_discarded(make: Callable[[], Storage]) -> None:
    storage = make()
    for member in range(3):
        storage.put(7, member, b"x" * member, PLACE if member else None)
    storage.discard_members(7, [0, 2, 5])
    assert dict(storage.get(7)) == {1: (b"x", PLACE)}
    storage.put(7, 2, b"again", None)
    assert dict(storage.get(7)) == {1: (b"x", PLACE), 2: (b"again", None)}
    storage.discard_members(7, [1, 2])
    assert len(storage) == 0

"""Payloads of finished members: by member, replaced and discarded, with the bytes in memory counted."""

from __future__ import annotations

import random

import pytest

from pipeline.buffer.storages import RolloutStorage
from pipeline.locations import Location


def test_it_holds_what_a_dict_of_dicts_holds() -> None:
    rng = random.Random(5)
    storage = RolloutStorage()
    plain: dict[int, dict[int, tuple[bytes | None, Location | None]]] = {}
    for step in range(2000):
        uid, member = rng.randrange(6), rng.randrange(4)
        if rng.random() < 0.2:
            storage.discard(uid)
            plain.pop(uid, None)
        else:
            blob = None if rng.random() < 0.3 else bytes(rng.randrange(50))
            where = None if blob is not None and rng.random() < 0.5 else Location(1, 0, step, member, 9)
            storage.put(uid, member, blob, where)
            plain.setdefault(uid, {})[member] = (blob, where)
        assert len(storage) == len(plain)
        assert {uid: dict(storage.get(uid)) for uid in plain} == plain
        held = [blob for each in plain.values() for blob, _ in each.values() if blob is not None]
        assert storage.memory_bytes == sum(map(len, held))
        places = {(uid, n, at) for uid, each in plain.items() for n, (_, at) in each.items() if at is not None}
        assert set(storage.locations()) == places
    for uid in range(6):
        storage.discard(uid)
    assert (len(storage), storage.memory_bytes, storage.locations()) == (0, 0, [])


def test_a_group_that_is_not_held_is_a_key_error_and_discarding_it_is_none() -> None:
    storage = RolloutStorage()
    with pytest.raises(KeyError):
        storage.get(3)
    storage.discard(3)

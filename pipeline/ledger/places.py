"""Flat tuples of what members have, changed at one place: nothing in an entry is walked by the garbage collector."""

from __future__ import annotations


def with_at(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    """Return ``values`` with another one at ``place``."""
    changed = list(values)
    changed[place] = value
    return tuple(changed)


def without_members(ages: tuple[int, ...], members: set[int]) -> tuple[int, ...]:
    """Return ``ages`` without what they say of ``members``."""
    return tuple(n for i, n in enumerate(ages) if ages[i - i % 3] not in members) if ages else ()

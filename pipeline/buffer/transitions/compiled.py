"""Loops over a sum tree, compiled by numba, which is the extra ``fast``: imported only where a large tree is built.

They do what :class:`~pipeline.buffer.transitions.sums.SumTree` does with arrays, which calls them, and add in the same
order: the 16 children of a node by halves, eight pairs first. Where a mass falls is found by fours, then within one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numba
import numpy as np

FAN = 16
Array = np.ndarray
Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function, **options: Any) -> Function:
    try:
        made: Any = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # there is no folder in which what was compiled could be kept
        made = numba.njit(nogil=True, **options)(function)
    found: Function = made
    return found


def _of_numbers(function: Function) -> Function:
    """Compile a function of values that are numbers, of whose zeros the sign says nothing: so least and largest are
    found several at a time. Sums keep their order."""
    return _compiled(function, fastmath={"nnan", "nsz"})


def _inlined(function: Function) -> Function:
    """Compile a function as part of those that call it; a call of its own would cost more than what it does."""
    return _compiled(function, inline="always")


@_inlined
def _node(sums: Array, bounds: Array, starts: Array, level: int, node: int) -> None:
    """Compute a node of a level from its children."""
    values = starts[1]
    child = starts[level - 1] + node * FAN
    to = starts[level] + node
    a = sums[child : child + FAN]
    s0, s1, s2, s3 = a[0] + a[8], a[1] + a[9], a[2] + a[10], a[3] + a[11]
    s4, s5, s6, s7 = a[4] + a[12], a[5] + a[13], a[6] + a[14], a[7] + a[15]
    sums[to] = ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))
    low, high = np.inf, 0.0
    if level == 1:
        for at in range(FAN):
            value = sums[child + at]
            high = min(high, -value)
            low = min(low, value if value > 0 else np.inf)
    else:
        for at in range(FAN):
            low, high = min(low, bounds[0, child - values + at]), min(high, bounds[1, child - values + at])
    bounds[0, to - values], bounds[1, to - values] = low, high


@_compiled
def _touch(values: Array, start: int, nodes: Array) -> float:
    """Read from the children of nodes, which lie at ``start``: so they come into the cache at the same time, and not
    one after the other. What this returns has no meaning, but that it must be worked out."""
    touched = 0.0
    for node in nodes:
        begin = start + node * FAN
        touched += values[begin] + values[begin + FAN // 2]
    return touched


@_compiled
def find(sums: Array, starts: Array, masses: Array, places: Array) -> float:
    """Write the places where masses fall into ``places``, which are 0. ``starts``: where each level begins in sums."""
    left, touched = masses.copy(), 0.0
    for level in range(len(starts) - 2, -1, -1):
        start = starts[level]
        if level < 2:
            touched += _touch(sums, start, places)
        for at in range(len(masses)):
            mass, begin = left[at], start + places[at] * FAN
            a = sums[begin : begin + FAN]
            # No branch depends on the values, so that the searches of several masses overlap.
            s0 = (a[0] + a[2]) + (a[1] + a[3])
            s1 = s0 + ((a[4] + a[6]) + (a[5] + a[7]))
            s2 = s1 + ((a[8] + a[10]) + (a[9] + a[11]))
            p0, p1, p2 = np.int64(s0 <= mass), np.int64(s1 <= mass), np.int64(s2 <= mass)
            mass -= s0 * (p0 - p1) + s1 * (p1 - p2) + s2 * p2
            child = 4 * (p0 + p1 + p2)
            s0 = a[child]
            s1 = s0 + a[child + 1]
            s2 = s1 + a[child + 2]
            p0, p1, p2 = np.int64(s0 <= mass), np.int64(s1 <= mass), np.int64(s2 <= mass)
            mass -= s0 * (p0 - p1) + s1 * (p1 - p2) + s2 * p2
            child += p0 + p1 + p2
            while a[child] <= 0:  # rounding left it beyond the sum of those before
                child -= 1
                mass = a[child]
            left[at] = mass
            places[at] = places[at] * FAN + child
    return touched


@_of_numbers
def write(sums: Array, bounds: Array, starts: Array, places: Array, values: Array) -> float:
    """Set values. ``bounds``: those of :class:`~pipeline.buffer.transitions.sums.SumTree`."""
    nodes = places // FAN
    touched = _touch(sums, 0, nodes)
    for at in range(len(places)):
        sums[places[at]] = values[at]
    for level in range(1, len(starts)):
        size = (starts[level] - starts[level - 1]) // FAN
        every = size <= len(nodes)
        for at in range(min(size, len(nodes))):
            node = at if every else nodes[at]  # in a variable of its own: else the loop in `_node` is not vectorized
            _node(sums, bounds, starts, level, node)
        nodes //= FAN
    return touched


@_of_numbers
def fold(sums: Array, bounds: Array, starts: Array, begin: int, end: int) -> None:
    """Compute every node over the places from ``begin`` to ``end``, that one excluded."""
    for level in range(1, len(starts)):
        begin, end = begin // FAN, (end - 1) // FAN + 1
        for node in range(begin, end):
            _node(sums, bounds, starts, level, node)


@cache
def warm() -> None:
    """Compile every loop, or load what was compiled before, by using it."""
    sums, bounds, starts = np.zeros(FAN + 1), np.zeros((2, 1)), np.array([0, FAN])
    write(sums, bounds, starts, np.zeros(1, np.int64), np.ones(1))
    fold(sums, bounds, starts, 0, 1)
    find(sums, starts, np.zeros(1), np.zeros(1, np.int64))

"""Loops over a sum tree, compiled by numba, which is the extra ``fast``: imported only where a large tree is built.

They do what :class:`~pipeline.buffer.transitions.sums.SumTree` does with arrays, which calls them, and add in the same
order: the 16 children of a node by halves, eight pairs first; where a mass falls, from the first child on.
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


def _compiled(function: Function) -> Function:
    try:
        made: Any = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # there is no folder in which what was compiled could be kept
        made = numba.njit(nogil=True)(function)
    found: Function = made
    return found


@_compiled
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
        for at in range(child, child + FAN):
            value = sums[at]
            high = min(high, -value)
            low = min(low, value if value > 0 else np.inf)
    else:
        for at in range(child - values, child - values + FAN):
            low, high = min(low, bounds[0, at]), min(high, bounds[1, at])
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
            children = sums[begin : begin + FAN]
            # No branch depends on the values, so that the searches of several masses overlap.
            total, before, chosen = 0.0, 0.0, 0
            for child in range(FAN):
                total += children[child]
                passed = total <= mass
                chosen += passed
                before = total if passed else before
            if chosen == FAN:  # rounding left it beyond the sum of the node
                mass = np.nextafter(total, 0.0)
                total, before, chosen = children[0], 0.0, 0
                while total <= mass:
                    before, chosen = total, chosen + 1
                    total += children[chosen]
            left[at] = mass - before
            places[at] = places[at] * FAN + chosen
    return touched


@_compiled
def write(sums: Array, bounds: Array, starts: Array, places: Array, values: Array) -> float:
    """Set values. ``bounds``: those of :class:`~pipeline.buffer.transitions.sums.SumTree`."""
    nodes = places // FAN
    touched = _touch(sums, 0, nodes)
    for at in range(len(places)):
        sums[places[at]] = values[at]
    for level in range(1, len(starts)):
        size = (starts[level] - starts[level - 1]) // FAN
        if size <= len(nodes):
            for node in range(size):
                _node(sums, bounds, starts, level, node)
        else:
            for at in range(len(nodes)):
                _node(sums, bounds, starts, level, nodes[at])
        nodes //= FAN
    return touched


@_compiled
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

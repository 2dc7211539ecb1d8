"""Rows for a replay buffer, what it holds, and whether draws are as likely as they should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline import ReplayBuffer
from pipeline.buffer.transitions.priorities import PriorityDrawer


def rows(count: int, first: int = 0, ends: Sequence[int] = ()) -> dict[str, Any]:
    """Columns of rows numbered from ``first``; the episode is truncated at those numbered ``ends``."""
    numbers = np.arange(first, first + count)
    return {"id": numbers, "reward": np.ones(count, np.float32), "truncated": np.isin(numbers, ends)}


def filled(count: int, capacity: int = 10, ends: Sequence[int] = (), **options: Any) -> ReplayBuffer:
    """A buffer with rows 0 to ``count``, of one environment."""
    buffer = ReplayBuffer(capacity, returns="numpy", **options)
    buffer.extend(rows(count, ends=ends))
    return buffer


def prioritized(priorities: Sequence[float] | np.ndarray, capacity: int = 0, **options: Any) -> ReplayBuffer:
    """A buffer that draws by such priorities; alpha is 1 unless it is given."""
    chosen = {"select": "prioritized", "alpha": 1.0, "beta": 1.0} | options
    buffer = filled(len(priorities), capacity or len(priorities), select=chosen)
    buffer.update_priorities(np.arange(len(priorities)), priorities)
    return buffer


def ids(buffer: ReplayBuffer) -> list[int]:
    """The numbers of the rows that are there, oldest first."""
    found: list[int] = buffer.ring.mark("id", buffer.ring.keys()).tolist()
    return found


def probabilities(buffer: ReplayBuffer) -> list[float]:
    """With which probability each row would be drawn, oldest first."""
    mass = buffer._drawer.mass(buffer.ring.keys())
    shares: list[float] = (mass / mass.sum()).tolist()
    return shares


def total(buffer: ReplayBuffer) -> float:
    """The sum of all priorities, to the power of alpha."""
    assert isinstance(buffer._drawer, PriorityDrawer)
    return buffer._drawer.tree.total


def everything(buffer: ReplayBuffer) -> dict[str, Any]:
    """All that a buffer's future depends on, in values that can be compared."""
    ring, storage = buffer.ring, buffer.ring.storage
    lengths = ring.episodes.lengths
    return {
        "counters": (ring.added, ring.size, ring.cuts, ring.stride),
        "episodes": (ring.episodes.state(), ring.episodes.next, lengths.base, lengths._length[: lengths.held].tolist()),
        "schema": storage.schema,
        "rows": storage.records.tobytes(),
        "large": {name: array.tobytes() for name, array in storage.large.items()},
        "drawer": (buffer._drawer.state(), {name: each.tolist() for name, each in buffer._drawer.arrays().items()}),
        "random": buffer._rng.bit_generator.state,
        "limiter": buffer._counts.state(),
        "statistics": buffer.statistics(),
    }


def as_likely(keys: np.ndarray, expected: Sequence[float] | np.ndarray) -> bool:
    """Whether drawn numbers 0, 1, ... are as frequent as probabilities say: a chi-square test at 1 in 10,000."""
    shares = np.asarray(expected, np.float64) / np.sum(expected)
    counts = np.bincount(keys.reshape(-1), minlength=len(shares))
    possible = shares > 0
    if len(counts) != len(shares) or counts[~possible].any():
        return False
    mean = shares[possible] * counts.sum()
    freedom = max(1, int(possible.sum()) - 1)
    statistic = float(((counts[possible] - mean) ** 2 / mean).sum())
    # Wilson and Hilferty 1931: the cube root of chi-square over its freedom is nearly normal; 3.72 is the quantile.
    return bool(statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3)

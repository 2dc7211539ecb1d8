"""What the worker processes of the benchmark run; it imports little, as they do."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pipeline import Context, Item, Rollout


@cache
def made(size: int) -> np.ndarray:
    """So many bytes."""
    return np.arange(size, dtype=np.uint8)


def rollout(item: Item, ctx: Context) -> Rollout:
    """A rollout that costs nothing but its size."""
    return Rollout({"x": made(item.content)} if item.content else {}, reward=1.0)


def nothing(item: Item, ctx: Context) -> Rollout:
    """A rollout of nothing at all."""
    return Rollout(reward=1.0)


def call(size: int) -> Any:
    """The same, for those who know no rollouts."""
    return {"x": made(size)} if size else {}, 1.0

"""What takes so long that a thread had better do it: an event loop may be held for about a millisecond.

These are estimates, made without the buffer's lock. What is no valid argument counts as light: the verb refuses it at
once.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pipeline.replay.buffer import ReplayBuffer

_MOST_BYTES = 1 << 20
_MOST_ROWS = 1 << 13
_LIST_ITEM = 64  # bytes that are copied in the time in which one element of a list is converted
_ENVIRONMENT = 128  # rows that are added in the time in which the rows of one environment are told from others


def heavy_rows(rows: Any, env: Any = 0) -> bool:
    """Whether adding rows, nested as they may be, takes long; ``env``: the environment of each, or of all."""
    if nbytes(rows) > _MOST_BYTES:
        return True
    count = _longest(rows)
    return count > _MOST_ROWS or (np.ndim(env) > 0 and count * _ENVIRONMENT > _MOST_ROWS)


def heavy_extend(buffer: ReplayBuffer, rows: Any, env: Any) -> bool:
    """As :func:`heavy_rows`, of a buffer: where not the oldest rows go, all may be compared with the new ones."""
    return heavy_rows(rows, env) or (buffer.ring.scattered and buffer.ring.size > _MOST_ROWS and _longest(rows) > 1)


def heavy_keys(*arrays: Any) -> bool:
    """Whether these are so many keys, or values of theirs, that it takes long."""
    return any(_length(each) > _MOST_ROWS or nbytes(each) > _MOST_BYTES for each in arrays)


def heavy_sample(buffer: ReplayBuffer, count: Any, more: Mapping[str, Any]) -> bool:
    """Whether a batch takes long to draw, or may, as with functions of the caller's."""
    if any(more.get(option) is not None for option in ("slices", "where", "hindsight")):
        return True
    try:
        rows, steps, frames = (operator.index(each) for each in (count, more.get("n_step", 1), more.get("stack", 1)))
    except TypeError:
        return False
    wide = rows * max(1, frames)
    if wide * buffer.ring.storage.row_bytes > _MOST_BYTES or 2 * wide + rows * max(0, steps) > 2 * _MOST_ROWS:
        return True
    return buffer.drawer.looks_at(rows) > _MOST_ROWS


def nbytes(values: Any) -> int:
    """Return about how many bytes are to be copied of arrays and tensors, nested as they may be; those of another
    device have to be waited for, and count as many."""
    if isinstance(values, Mapping):
        return sum(map(nbytes, values.values()))
    if isinstance(values, tuple):
        return sum(map(nbytes, values[:64])) * len(values) // max(1, len(values[:64]))
    if isinstance(values, list):
        return len(values) * (_LIST_ITEM + nbytes(values[0])) if values else 0
    if not getattr(values, "is_cpu", True):
        return _MOST_BYTES + 1
    size = getattr(values, "nbytes", 0)
    return size if size.__class__ is int else 0


def _length(values: Any) -> int:
    try:
        return len(values)
    except TypeError:
        return 0


def _longest(rows: Any) -> int:
    if isinstance(rows, Mapping):
        return max(map(_longest, rows.values()), default=0)
    return _length(rows)

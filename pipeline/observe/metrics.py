"""Statistics as flat numbers, for TensorBoard, Prometheus, a bar or a log line.

The names below are those that :class:`~pipeline.observe.ProgressBar` looks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

ROLLOUTS_FINISHED: Final = "rollouts/finished"
"""Rollouts finished so far, a counter."""
ROLLOUTS_PER_SECOND: Final = "rollouts/per_second"
"""Their rate; where it is missing, the bar takes it from the counter."""
ROLLOUTS_IN_FLIGHT: Final = "rollouts/in_flight"
"""Attempts running now."""
BUFFER_GROUPS: Final = "buffer/groups"
"""Finished groups that wait for the trainer."""
STALENESS_MEAN: Final = "batch/staleness_mean"
"""Mean staleness of the last batch."""
STALENESS_MAX: Final = "batch/staleness_max"
"""Largest staleness in the last batch."""
REWARD_MEAN: Final = "batch/reward_mean"
"""Mean reward of the last batch."""


def flatten(statistics: Any, prefix: str = "") -> dict[str, float]:
    """Return every number in nested ``msgspec`` structs and mappings, by its slash-separated name.

    Booleans become 0 and 1; arrays and tensors without dimensions count as numbers. What
    is no finite number is left out: a missing value, text, a list, NaN. The parts of a tuple used as a key
    are joined by slashes too. Of two values with one name the later stays.

    >>> flatten({"buffer": {"groups": 3, "full": False}, ("task", "math"): {"produced": 7, "mean": None}})
    {'buffer/groups': 3.0, 'buffer/full': 0.0, 'task/math/produced': 7.0}
    """
    flat: dict[str, float] = {}
    _collect(statistics, prefix, flat)
    return flat


def _collect(value: Any, name: str, flat: dict[str, float]) -> None:
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            _collect(getattr(value, field), f"{name}/{field}" if name else field, flat)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            part = "/".join(map(str, key)) if isinstance(key, tuple) else str(key)
            _collect(inner, f"{name}/{part}" if name else part, flat)
    else:
        number = _number(value)
        if number is not None and name:
            flat[name] = number


def _number(value: Any) -> float | None:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy scalars, 0-d arrays and tensors
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None

"""What environments keep beside their rollouts, as values that can be stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tasks.chat.text import cleaned


def plain(value: Any) -> Any:
    """Return plain values: models of pydantic as dicts, what is of no such kind as its ``repr``, cut to 1,000 letters,
    and a number that is not finite as None."""
    if value is None or isinstance(value, bool | int | bytes):
        return value
    if isinstance(value, str):
        return cleaned(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    dump = getattr(value, "model_dump", None)
    return plain(dump(mode="json", exclude_none=True)) if callable(dump) else repr(value)[:1000]

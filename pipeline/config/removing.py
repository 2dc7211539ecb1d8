"""Which rows leave a full buffer, as options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pipeline.config.base import Options
from pipeline.errors import ConfigError


class Remove(Options, frozen=True):
    """Which row goes first where a new one comes to a full buffer; of equals the oldest.

    But for ``fifo`` the new row is among those that can go: if it is itself the first to go it is not kept, and
    counted. Rows are then no neighbours any more: what is made of rows that follow each other (slices, n-step returns,
    stacked frames, shared next observations, hindsight) needs ``fifo``.

    Attributes:
        by: ``fifo``: the oldest. ``lifo``: the newest, so that once the buffer is full nothing comes in. ``stalest``:
            the one that weights of the lowest version made. ``lowest_priority``: with ``Prioritized`` alone. ``min``
            and ``max``: the one with the least, or the largest, number in a column (``min`` keeps the top ones); what
            is no number goes before all.
        field: the column, with ``min`` and ``max``.
    """

    by: Literal["fifo", "lifo", "stalest", "lowest_priority", "min", "max"] = "fifo"
    field: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._text("field")
        if (self.by in ("min", "max")) != bool(self.field):
            raise ConfigError.of("field", self.field, "the name of a column is needed with by='min' and 'max' alone")


def removal(given: Remove | Mapping[str, Any] | str | None) -> Remove:
    """Return what ``given`` describes: an object, a name such as ``"lifo"``, or a mapping.

    Raises:
        ConfigError: there is none such.
    """
    return Remove.of({"by": given} if isinstance(given, str) else given)

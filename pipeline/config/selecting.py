"""Which rows a buffer samples, as options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from pipeline.config.base import Options
from pipeline.errors import ConfigError


class Anneal(Options, frozen=True, tag="anneal", tag_field="schedule"):
    """A number that goes from ``start`` to ``end`` in a straight line, within ``over`` sampled batches, and stays
    there.

    Its position is part of the buffer's state.
    """

    start: float
    end: float
    over: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("over", 1)

    def at(self, batches: int) -> float:
        """Return the number after so many batches."""
        return self.start + (self.end - self.start) * min(1.0, batches / self.over)


class Uniform(Options, frozen=True, tag="uniform", tag_field="select"):
    """Every row alike, with replacement; of the newest ``window`` rows alone, if that is given."""

    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("window", 1, none_ok=True)


class WithoutReplacement(Options, frozen=True, tag="without_replacement", tag_field="select"):
    """Every row once in each epoch, in an order that a seed and the epoch's number decide.

    An epoch is of the rows that are there when it begins; one that is overwritten meanwhile is left out, and counted.

    Attributes:
        last: what becomes of the rows that are too few for a batch at an epoch's end. ``carry``: the batch is filled
            from the next epoch. ``keep``: it is short. ``drop``: they are left out.
    """

    last: Literal["carry", "keep", "drop"] = "carry"


class Ordered(Options, frozen=True, tag="ordered", tag_field="select"):
    """The first rows of an order, the same again until they go: ``fifo`` the oldest, ``lifo`` the newest, ``stalest``
    and ``freshest`` by the version of the weights that made them, ``min`` and ``max`` by a column of one number.

    Attributes:
        by: the order.
        field: the column, with ``min`` and ``max``.
    """

    by: Literal["fifo", "lifo", "stalest", "freshest", "min", "max"] = "fifo"
    field: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.by in ("min", "max")) != bool(self.field):
            raise ConfigError.of("field", self.field, "the name of a column is needed with by='min' and 'max' alone")


class Prioritized(Options, frozen=True, tag="prioritized", tag_field="select"):
    """Proportional prioritization (Schaul et al. 2016, arXiv:1511.05952): row i with probability
    ``P_i = p_i^alpha / sum_k p_k^alpha``, and the weight ``w_i = (N P_i)^-beta``, divided by the largest one.

    Attributes:
        alpha: how much priorities count; 0: not at all.
        beta: how much the weights make up for it, 0 to 1; or an :class:`Anneal`.
        eps: what is added to each priority that is given. With 0, a row of priority 0 is never drawn.
        weights: the largest weight is that of the ``buffer`` (then a row's weight does not depend on what it is drawn
            with) or of the ``batch``.
        new: the priority of a new row: the largest one that is there (``current_max``; 1 in an empty buffer), the
            largest there ever was, 1 at the least (``all_time_max``), or a number.
    """

    alpha: float = 0.6
    beta: float | Anneal = 0.4
    eps: float = 0.0
    weights: Literal["buffer", "batch"] = "buffer"
    new: Literal["current_max", "all_time_max"] | float = "current_max"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("alpha", "eps"):
            self._in_range(option, getattr(self, option), 0, 1e6)
        ends = (self.beta.start, self.beta.end) if isinstance(self.beta, Anneal) else (self.beta,)
        for beta in ends:
            self._in_range("beta", beta, 0, 1)
        if not isinstance(self.new, str):
            self._in_range("new", self.new, 0, 1e12)

    def _in_range(self, option: str, value: float, least: float, most: float) -> None:
        if not (math.isfinite(value) and least <= value <= most):
            raise ConfigError.of(option, value, f"a number from {least:g} to {most:g} is needed")


Selection: TypeAlias = Uniform | WithoutReplacement | Ordered | Prioritized
_NAMES: dict[str, Selection] = {
    "uniform": Uniform(),
    "without_replacement": WithoutReplacement(),
    "prioritized": Prioritized(),
    **{by: Ordered(by=by) for by in ("fifo", "lifo", "stalest", "freshest")},
}


def selection(given: Selection | Mapping[str, Any] | str) -> Selection:
    """Return the selection that ``given`` describes: an object, a name, or ``{"select": "prioritized", ...}``.

    Raises:
        ConfigError: there is none such.
    """
    if isinstance(given, (Uniform, WithoutReplacement, Ordered, Prioritized)):
        return given
    if isinstance(given, str) and given in _NAMES:
        return _NAMES[given]
    try:
        chosen: Selection = msgspec.convert(given, Selection)
        return chosen
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        allowed = f"one of {', '.join(_NAMES)}, an object such as Prioritized(), or a dict with select: ({error})"
        raise ConfigError.of("select", given, allowed) from None

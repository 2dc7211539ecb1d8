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
    """Every row alike, with replacement.

    Attributes:
        window: of the newest so many rows alone.
        window_trajectories: of the rows of the newest so many episodes alone, by their start, open ones among them.
        uses: how often a row is drawn, at the most; what has been drawn so often is not drawn again. A batch may hold a
            row several times. Of slices, what is drawn is the first row. The counts are part of the buffer's state.
    """

    window: int | None = None
    window_trajectories: int | None = None
    uses: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("window", "window_trajectories"):
            self._at_least(option, 1, none_ok=True)
        _check_uses(self)
        if self.window is not None and self.window_trajectories is not None:
            raise ConfigError.of(
                "window_trajectories", self.window_trajectories, "window= is given as well; choose one"
            )


class WithoutReplacement(Options, frozen=True, tag="without_replacement", tag_field="select"):
    """Every row once in each epoch, in an order that a seed and the epoch's number decide.

    An epoch is of the rows that are there when it begins; one that is overwritten meanwhile is left out, and counted.

    Attributes:
        last: what becomes of the rows that are too few for a batch at an epoch's end. ``carry``: the batch is filled
            from the next epoch. ``keep``: it is short. ``drop``: they are left out.
        uses: in how many batches a row is given out, at the most; then no epoch has it any more.
    """

    last: Literal["carry", "keep", "drop"] = "carry"
    uses: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_uses(self)


class Ordered(Options, frozen=True, tag="ordered", tag_field="select"):
    """The first rows of an order, the same again until they go: ``fifo`` the oldest, ``lifo`` the newest, ``stalest``
    and ``freshest`` by the version of the weights that made them, ``min`` and ``max`` by a column of one number.

    Attributes:
        by: the order.
        field: the column, with ``min`` and ``max``.
        uses: in how many batches a row is given out, at the most: with 1 and ``fifo``, a queue.
    """

    by: Literal["fifo", "lifo", "stalest", "freshest", "min", "max"] = "fifo"
    field: str = ""
    uses: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._text("field")
        _check_uses(self)
        if (self.by in ("min", "max")) != bool(self.field):
            raise ConfigError.of("field", self.field, "the name of a column is needed with by='min' and 'max' alone")


class StalenessWeighted(Options, frozen=True, tag="staleness", tag_field="select"):
    """The staler a row is, the rarer it is drawn, with replacement: row i, which weights of version ``v_i`` made, with
    probability ``P_i = 2^(-s_i / half_life) / sum_k 2^(-s_k / half_life)``, where ``s_i = v - v_i`` is how many
    versions it is behind the newest one ``v`` of the buffer. (``v`` cancels out: which one is the newest decides
    nothing.) Of rows more than 400 half-lives apart the staler ones are drawn alike.

    Attributes:
        half_life: how many versions halve the probability.
    """

    half_life: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-6 <= self.half_life <= 1e12:
            raise ConfigError.of("half_life", self.half_life, "a number of versions from 1e-6 to 1e12 is needed")


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


def _check_uses(options: Uniform | WithoutReplacement | Ordered) -> None:
    uses = options.uses
    if uses is not None and not 1 <= uses < 2**32:
        raise ConfigError.of("uses", uses, f"a number from 1 to {2**32 - 1} is needed, or None: as often as it comes")


Selection: TypeAlias = Uniform | WithoutReplacement | Ordered | Prioritized | StalenessWeighted
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
    if isinstance(given, (Uniform, WithoutReplacement, Ordered, Prioritized, StalenessWeighted)):
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

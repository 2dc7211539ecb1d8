"""How a split is described: which part the units of a run go to."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from pipeline.config.base import Options
from pipeline.errors import ConfigError
from pipeline.replay.where import Where

By = Literal["task", "version"]
_TEST = re.compile(r"\s*([^\s<>=!]+)\s*(==|!=|<=|>=|<|>|not in|in)\s*(.+?)\s*")
_AND = re.compile(r"\s+and\s+|\s*,\s*(?![^\[(]*[\])])")


class SplitBy(Options, frozen=True, kw_only=True):
    """One of them says how a run is split.

    Attributes:
        count: the first part has so many units, the oldest.
        fraction: the first part has that part of the units, the oldest.
        by: there is a part for each task, or each version of weights.
        where: the first part has the units that meet a condition: ``"reward > 0.5 and task == 3"``, or as
            ``ReplayBuffer.sample(where=)`` takes it. Of an episode, one of the rows is to meet it.
    """

    count: int | None = None
    fraction: float | None = None
    by: By | None = None
    where: Any = None

    def __post_init__(self) -> None:
        if self.by not in (None, "task", "version"):
            raise ConfigError.of("by", self.by, "'task', 'version' are allowed")
        super().__post_init__()
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            said = ", ".join(given) or "none"
            raise ConfigError(f"split: one of count, fraction, by and where is needed, not {said}", option="count")
        self._at_least("count", 0, none_ok=True)
        if self.fraction is not None and not (math.isfinite(self.fraction) and 0 <= self.fraction <= 1):
            raise ConfigError.of("fraction", self.fraction, "a number from 0 to 1 is needed")

    def first(self, units: int) -> int:
        """Return how many units the first part has.

        Raises:
            ConfigError: there are fewer.
        """
        if self.fraction is not None:
            return math.floor(self.fraction * units + 1e-9)
        assert self.count is not None
        if self.count > units:
            raise ConfigError.of("count", self.count, f"there are {units}")
        return self.count

    def condition(self) -> Where:
        """Return the condition.

        Raises:
            ConfigError: it is none.
        """
        found = Where.of(parsed(self.where) if isinstance(self.where, str) else self.where)
        if found is None:
            raise ConfigError.of("where", self.where, "at least one comparison is needed")
        return found


def parsed(text: str) -> dict[str, list[Any]]:
    """Return a condition that was written as text: comparisons of columns with numbers, joined by ``and``. Nothing in
    it is evaluated.

    Raises:
        ConfigError: it is none.
    """
    found: dict[str, list[Any]] = {}
    for part in _AND.split(text.strip()):
        match = _TEST.fullmatch(part)
        if match is None:
            raise ConfigError.of("where", part, "COLUMN OP NUMBER is needed, such as reward > 0.5, or task in [1, 2]")
        name, how, value = match.groups()
        many = [_number(each) for each in value.strip("[]()").split(",")] if "in" in how else _number(value)
        found.setdefault(name, []).append((how, many))
    return found


def _number(text: str) -> int | float | bool:
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ConfigError.of("where", text, "a number is needed")

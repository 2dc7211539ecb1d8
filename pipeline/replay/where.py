"""Conditions that drawn rows must meet: ``sample(..., where={"reward": (">", 0.5), "task": 3})``.

A condition is data, or a function of the caller's; nothing is evaluated that came as text.
"""

from __future__ import annotations

import inspect
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, as_array
from pipeline.buffer.transitions.following import Needs
from pipeline.buffer.transitions.layout import EPISODE, PLACE, VERSION, RowLayout
from pipeline.buffer.transitions.ring import Ring
from pipeline.errors import ConfigError

Ints = np.ndarray
Fetch = Callable[[str, Ints], np.ndarray]
MARKS = (VERSION, EPISODE, PLACE)
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_AMONG = ("in", "not in")


class Test(NamedTuple):
    """One comparison of a column with a number, or with several."""

    column: str
    compare: str
    value: Any

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return for each row [n] bool."""
        if self.compare in _AMONG:
            found = np.zeros(len(array), bool)
            for each in self.value:  # one by one: together they might be made floats
                found |= array == each
            return found if self.compare == "in" else ~found
        result: np.ndarray = np.asarray(COMPARE[self.compare](array, self.value), bool)
        return result


class Where(NamedTuple):
    """A condition, checked but for the columns, which only a buffer knows."""

    columns: tuple[str, ...]
    tests: tuple[Test, ...]
    function: Callable[..., Any] | None = None

    @classmethod
    def of(cls, given: Any) -> Where | None:
        """Return the condition that :meth:`~pipeline.ReplayBuffer.sample` describes.

        Raises:
            ConfigError: it is none.
        """
        if given is None or isinstance(given, Where):
            return given
        if isinstance(given, Mapping):
            tests = [test for name, each in given.items() for test in _tests(name, each)]
            return cls(tuple(dict.fromkeys(test.column for test in tests)), tuple(tests)) if tests else None
        if callable(given):
            return cls(_parameters(given), (), given)
        if isinstance(given, tuple) and len(given) == 2 and callable(given[0]) and not isinstance(given[1], str):
            names = tuple(given[1]) if isinstance(given[1], Sequence) else ()
            if names and all(isinstance(name, str) for name in names):
                return cls(names, (), given[0])
        raise ConfigError.of("where", given, f"{_FORMS} is needed")

    def check(self, layout: RowLayout) -> None:
        """Raises:
        ConfigError: a column is not there, or cannot be compared.
        """
        for name in self.columns:
            if name in MARKS:
                continue
            column = layout.column(name)
            if column.torch_only is not None:
                raise ConfigError(f"where: {column}; a dtype that numpy has is needed", option="where")
            if self.function is None and (column.bits.kind == "c" or int(np.prod(column.shape, dtype=np.int64)) != 1):
                raise ConfigError(
                    f"where: {column}; one real number in each row is needed, or a function of the column",
                    option="where",
                )

    def mask(self, arrays: Arrays, count: int) -> Ints:
        """Return for each of ``count`` rows whether it meets the condition: [n] bool.

        Raises:
            ConfigError: the function returned something else.
        """
        if self.function is None:
            met = np.ones(count, bool)
            for test in self.tests:
                met &= test.apply(arrays[test.column].reshape(count))
            return met
        given = [arrays[name].copy() for name in self.columns]  # the caller's, and in one piece
        found, _ = as_array("where", self.function(*given))
        if found.dtype != bool or found.shape != (count,):
            raise ConfigError(
                f"where: the function returned {found.dtype}{list(found.shape)}; [{count}] bool is needed",
                option="where",
            )
        return found


class Matching:
    """Rows that can be drawn and meet a condition. A kind of :class:`~pipeline.buffer.transitions.drawing.Starts`, for
    one draw."""

    def __init__(self, ring: Ring, where: Where, fetch: Fetch, needs: Needs | None) -> None:
        self._ring, self._where, self._fetch, self._needs = ring, where, fetch, needs
        self._all: Ints | None = None

    def mask(self, keys: Ints) -> Ints:
        if self._needs is None:
            return self._met(keys)
        mask = self._needs.mask(keys)
        mask[mask] = self._met(keys[mask])
        return mask

    def all(self) -> Ints:
        if self._all is None:
            keys = self._ring.keys() if self._needs is None else self._needs.all()
            self._all = keys[self._met(keys)]
        return self._all

    def _met(self, keys: Ints) -> Ints:
        if not len(keys):
            return np.zeros(0, bool)
        arrays = {name: self._column(name, keys) for name in self._where.columns}
        return self._where.mask(arrays, len(keys))

    def _column(self, name: str, keys: Ints) -> np.ndarray:
        return self._ring.mark(name, keys) if name in MARKS else self._fetch(name, keys)


_FORMS = (
    'a mapping such as {"reward": (">", 0.5), "task": 3}, a function whose parameters are columns, or a pair of a '
    "function and the names of its columns"
)


def _tests(name: Any, given: Any) -> list[Test]:
    """Return the comparisons of one column: with a number, by (how, number), or by a list of such."""
    if not isinstance(name, str):
        raise ConfigError.of("where", name, "the name of a column is needed")
    two = isinstance(given, (tuple, list)) and len(given) == 2
    pair = two and (isinstance(given, tuple) or isinstance(given[0], str))
    if isinstance(given, list) and not pair:
        return [test for each in given for test in _tests(name, each)]
    compare, value = given if pair else ("==", given)
    if not isinstance(compare, str) or (compare not in COMPARE and compare not in _AMONG):
        raise ConfigError.of("where", compare, f"of {name}: one of {', '.join((*COMPARE, *_AMONG))} is needed")
    if compare in _AMONG:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
            raise ConfigError.of("where", value, f"of {name}: several numbers are needed with {compare!r}")
        return [Test(name, compare, tuple(_number(name, each) for each in value))]
    return [Test(name, compare, _number(name, value))]


def _number(name: str, value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, (bool, numbers.Real)):
        raise ConfigError.of("where", value, f"of {name}: a number is needed")
    return value


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(each.name for each in parameters if each.kind in by_place and each.default is each.empty)
    if not names:
        raise ConfigError.of("where", function, "its parameters do not name columns; give (function, [columns])")
    return names

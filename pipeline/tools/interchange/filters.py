"""Which rows or rollouts are wanted: ``reward>=0.5``, ``#version>3``, ``task==math``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.errors import ConfigError
from pipeline.replay.where import COMPARE
from pipeline.tools.interchange.streams import Record, Records, Rows, Stream, Transitions

_CONDITION = re.compile(r"\s*(?P<name>[#\w.]+)\s*(?P<sign>==|!=|<=|>=|<|>)\s*(?P<value>.+?)\s*")


class Condition(NamedTuple):
    """A field or column, how it is compared, and with what."""

    name: str
    sign: str
    value: Any

    def holds(self, value: Any) -> Any:
        """Whether it holds for a value, or for each of an array."""
        return COMPARE[self.sign](value, self.value)


def condition_of(text: str) -> Condition:
    """Return what a text says.

    Raises:
        ConfigError: it says nothing of the kind.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError.of("where", text, "a name, one of == != < <= > >=, and a value are needed: 'reward>=0.5'")
    try:
        value = msgspec.json.decode(match["value"])
    except msgspec.DecodeError:
        value = match["value"]
    if not isinstance(value, (bool, int, float, str)):
        raise ConfigError.of("where", text, "the value must be a number, true, false, or a text")
    return Condition(match["name"], match["sign"], value)


def filtered(stream: Stream, conditions: Sequence[Condition]) -> Stream:
    """Return those rows or records of a stream that meet all conditions.

    Raises:
        ConfigError: there is no column of one number, or no field, of a name.
    """
    if not conditions:
        return stream
    return _rows(stream, conditions) if isinstance(stream, Transitions) else _records(stream, conditions)


def _rows(stream: Transitions, conditions: Sequence[Condition]) -> Transitions:
    scalars = {column.name for column in stream.schema.columns if not column.shape and column.torch_only is None}
    for each in conditions:
        if each.name not in scalars and each.name not in stream.marks:
            raise ConfigError.of(
                "where", each.name, f"columns of one number are {', '.join(sorted(scalars))}, {', '.join(stream.marks)}"
            )
        if isinstance(each.value, str):
            raise ConfigError.of("where", f"{each.name}{each.sign}{each.value}", "columns are compared with numbers")

    def batches() -> Iterator[Rows]:
        for rows in stream.batches():
            keep = np.ones(len(rows), bool)
            for each in conditions:
                keep &= each.holds(rows.marks[each.name] if each.name in rows.marks else rows.columns[each.name])
            if keep.any():
                yield rows.part(np.flatnonzero(keep))

    about = msgspec.structs.replace(stream.about, contiguous=False, open_episodes=[])
    return stream._replace(about=about, batches=batches, total=None)


def _records(stream: Records, conditions: Sequence[Condition]) -> Records:
    def records() -> Iterator[Record]:
        for record in stream.records():
            if all(_meets(each, record.fields) for each in conditions):
                yield record

    return stream._replace(records=records, total=None)


def _meets(condition: Condition, fields: dict[str, Any]) -> bool:
    value = fields.get(condition.name)
    if not isinstance(value, (bool, int, float, str)):
        named = sorted(name for name, each in fields.items() if isinstance(each, (bool, int, float, str)))
        raise ConfigError.of("where", condition.name, f"fields that can be compared are {', '.join(named)}")
    if isinstance(value, str) != isinstance(condition.value, str):
        raise ConfigError.of("where", condition.name, f"it is {value!r}, and is compared with {condition.value!r}")
    return bool(condition.holds(value))

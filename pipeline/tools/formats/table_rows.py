"""Transitions in tables that something else wrote: columns of numbers, or of lists of them, one row each.

Columns called ``#key``, ``#episode`` and so on are marks, and so is one called ``episode``, ``episode_id`` or
``episode_index``; ``terminated``, ``truncated`` and ``done`` tell where episodes end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column, Schema, as_array, flat
from pipeline.errors import ConfigError, Damaged
from pipeline.tools.interchange.streams import EPISODE, MARK_DTYPES, About, Rows, Transitions

Table = Mapping[str, Any]
_EPISODES = ("episode", "episode_id", "episode_index")


def foreign_rows(
    tables: Callable[[], Iterator[Table]], where: str, *, nbytes: int = 0, about: About | None = None
) -> Transitions:
    """Return the rows of tables, of which each has the same columns [n, ...].

    Args:
        tables: begins to read them.
        where: what they are, for errors.
        nbytes: about how many bytes are read; 0: not known.
        about: what is known of the whole.

    Raises:
        ConfigError: there are none, or they hold what is no number.
    """
    first = next(tables(), None)
    if first is None:
        raise ConfigError(f"{where}: there is no row in it", option="path")
    columns, marks = _split(first, where)
    schema = Schema(tuple(Column(name, dtype, array.shape[1:]) for name, (array, dtype) in sorted(columns.items())))

    def batches() -> Iterator[Rows]:
        for table in tables():
            yield _rows(table, schema, tuple(marks), where)

    return Transitions(schema, tuple(marks), about or About(), batches, nbytes)


def _split(table: Table, where: str) -> tuple[dict[str, tuple[np.ndarray, str]], Arrays]:
    """Return the columns and the marks of a table."""
    columns: dict[str, tuple[np.ndarray, str]] = {}
    marks: Arrays = {}
    try:
        for name, value in flat(_unnested(table)):
            array, dtype = as_array(name, value)
            if array.ndim == 0:
                raise ConfigError(f"column {name}: a single number, where [n, ...] is needed", option=name)
            mark = EPISODE if name in _EPISODES and EPISODE not in table else name
            if mark in MARK_DTYPES:
                marks[mark] = array.astype(MARK_DTYPES[mark]).reshape(len(array))
            elif not name.startswith("#"):
                columns[name] = array, dtype
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{where}: {error}", option="path") from None
    if not columns:
        raise ConfigError(f"{where}: no column with numbers is in it", option="path")
    return columns, marks


def _unnested(table: Table) -> dict[str, Any]:
    """Return a table in which a list of mappings is a mapping of lists."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        nested = isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value)
        found[name] = _unnested({key: [each[key] for each in value] for key in value[0]}) if nested else value
    return found


def _rows(table: Table, schema: Schema, marks: tuple[str, ...], where: str) -> Rows:
    columns, found = _split(table, where)
    if columns.keys() != schema.names or set(found) != set(marks):
        raise Damaged(f"{where}: a part has the columns {sorted(columns)}, and the first {sorted(schema.names)}")
    arrays = {}
    for column in schema.columns:
        array, dtype = columns[column.name]
        whole = column.dtype.startswith("float") and dtype.startswith("int")  # JSON writes 1.0 as 1
        if (dtype != column.dtype and not whole) or array.shape[1:] != column.shape:
            raise Damaged(f"{where}: column {column} is {dtype}{list(array.shape[1:])} further on")
        arrays[column.name] = np.ascontiguousarray(array, column.bits)
    return Rows(arrays, found)

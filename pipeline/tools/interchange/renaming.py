"""Columns under other names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from pipeline.buffer.transitions.columns import Schema
from pipeline.errors import ConfigError
from pipeline.tools.interchange.streams import Rows, Stream, Transitions


def renamed(stream: Stream, names: Mapping[str, str]) -> Stream:
    """Return transitions with columns under other names; ``obs`` stands for ``obs.camera`` as well.

    Raises:
        ConfigError: there is no such column, or the stream has none, or two would have one name.
    """
    if not names:
        return stream
    if not isinstance(stream, Transitions):
        raise ConfigError.of("rename", dict(names), f"columns of transitions are renamed; these are {stream.content}")
    schema = stream.schema
    new = {name: _new(name, names) for name in schema.names}
    for old in names:
        if not any(name == old or name.startswith(f"{old}.") for name in schema.names):
            raise ConfigError.of("rename", old, f"there are the columns {', '.join(sorted(schema.names))}")
    columns = sorted(
        (msgspec.structs.replace(column, name=new[column.name]) for column in schema.columns),
        key=lambda column: column.name,
    )

    def batches() -> Iterator[Rows]:
        for rows in stream.batches():
            yield Rows({new[name]: array for name, array in rows.columns.items()}, rows.marks)

    return stream._replace(schema=Schema(tuple(columns)), batches=batches)


def _new(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name

"""Streams as Arrow tables of some size each, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pipeline.errors import Damaged
from pipeline.tools.formats.arrow_records import (
    Named,
    Row,
    named_of,
    record_schema,
    record_table,
    records_of_rows,
    rows_of_record,
    rows_of_table,
)
from pipeline.tools.formats.arrow_rows import BATCH_BYTES, rows_of, schema_of, table_bytes, table_of
from pipeline.tools.formats.folder import Described, OutFolder, bytes_of_parts
from pipeline.tools.interchange.streams import (
    TRANSITIONS,
    Record,
    Records,
    Rows,
    Stream,
    Transitions,
    rechunked,
)

Tables = Callable[[], Iterator[tuple[Any, str]]]
"""Begins to read tables, each with where it lies."""


class Outgoing:
    """A stream that becomes tables."""

    def __init__(self, pa: Any, stream: Stream, out: OutFolder) -> None:
        self._pa, self._stream, self._out = pa, stream, out
        self._named: list[Named] = []
        self._most = min(BATCH_BYTES, out.part_bytes)
        if isinstance(stream, Transitions):
            self.schema = schema_of(pa, stream)
        else:
            self._named = named_of(stream)
            self.schema = record_schema(pa, stream.content, self._named)
            out.described.details["tensors"] = msgspec.to_builtins(self._named)

    def tables(self) -> Iterator[tuple[Any, int]]:
        """Yield tables, each with how many transitions or records it holds."""
        stream = self._stream
        if isinstance(stream, Transitions):
            for rows in rechunked(stream.batches(), lambda rows: self._most * len(rows) // max(1, table_bytes(rows))):
                yield table_of(self._pa, self.schema, stream, rows), len(rows)
                self._out.progress(rows.nbytes)
            return
        held: list[Row] = []
        size = count = 0
        for record in stream.records():
            held += rows_of_record(record, stream.content)
            size, count = size + record.nbytes, count + 1
            if size >= self._most or len(held) >= 1 << 16:
                yield self._table(held), count
                self._out.progress(size)
                held, size, count = [], 0, 0
        if held:
            yield self._table(held), count
            self._out.progress(size)

    def _table(self, rows: list[Row]) -> Any:
        assert isinstance(self._stream, Records)
        return record_table(self._pa, self.schema, self._stream.content, self._named, rows)


def incoming(pa: Any, described: Described, tables: Tables, where: str) -> Stream:
    """Return the stream that tables of an export hold.

    Raises:
        Damaged: what is said of them cannot be.
    """
    size = bytes_of_parts(described)
    if described.content == TRANSITIONS:

        def batches() -> Iterator[Rows]:
            for table, place in tables():
                if table.num_rows:
                    yield rows_of(pa, table, stream, place)

        stream = Transitions(described.schema, tuple(described.marks), described.about, batches, size, described.count)
        return stream
    content = described.content
    try:
        named = msgspec.convert(described.details["tensors"], list[Named])
    except (msgspec.MsgspecError, LookupError) as error:
        raise Damaged(f"{where}: what is said of its tensors cannot be ({error})") from None

    def rows() -> Iterator[Row]:
        for table, place in tables():
            yield from rows_of_table(pa, table, content, named, place)

    def records() -> Iterator[Record]:
        return records_of_rows(rows(), content, where)

    return Records(content, described.about, records, size, described.count)

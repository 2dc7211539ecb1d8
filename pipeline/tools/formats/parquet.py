"""Parquet, by ``pyarrow`` (extra ``tools``); which columns there are stands in
:mod:`~pipeline.tools.formats.arrow_rows` and :mod:`~pipeline.tools.formats.arrow_records`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from pipeline.errors import Damaged
from pipeline.tools.formats.arrow_rows import BATCH_BYTES, arrow_module, foreign_table
from pipeline.tools.formats.arrow_streams import Outgoing, incoming
from pipeline.tools.formats.extras import needed
from pipeline.tools.formats.folder import OutFolder, checked_parts, is_described, read_described
from pipeline.tools.formats.table_rows import foreign_rows
from pipeline.tools.interchange.streams import About, Stream

NAME = "parquet"
CONTENTS = ("transitions", "rollouts", "trajectories")
_SUFFIX = ".parquet"


def recognises(path: str) -> bool:
    """Whether something else's Parquet lies there."""
    if os.path.isdir(path):
        return any(name.endswith(_SUFFIX) for name in os.listdir(path))
    return path.endswith(_SUFFIX)


def write(stream: Stream, out: OutFolder) -> None:
    """Write a stream.

    Raises:
        ConfigError: ``pyarrow`` is not installed.
    """
    pa, pq = arrow_module(NAME), needed("pyarrow.parquet", NAME, "tools")
    outgoing = Outgoing(pa, stream, out)
    # A dictionary of floats would take two NaNs for one value.
    texts = [field.name for field in outgoing.schema if pa.types.is_string(field.type)]
    path, file, writer, count = "", None, None, 0
    try:
        for table, number in outgoing.tables():
            if writer is None:
                path = out.next_path("parquet")
                file = open(path, "xb")  # noqa: SIM115  it is closed below
                writer = pq.ParquetWriter(file, outgoing.schema, use_dictionary=texts, compression="zstd")
            writer.write_table(table)
            count += number
            assert file is not None
            if file.tell() >= out.part_bytes:
                writer.close()
                file.close()
                out.ended(path, count)
                writer, count = None, 0
        if writer is not None and file is not None:
            writer.close()
            file.close()
            out.ended(path, count)
    finally:
        if file is not None:
            file.close()


def read(path: str) -> Stream:
    """Return the stream in an export, or transitions in anybody's file, or folder of files.

    Raises:
        ConfigError: ``pyarrow`` is not installed.
        Damaged: a file is no such.
    """
    pa, pq = arrow_module(NAME), needed("pyarrow.parquet", NAME, "tools")
    if is_described(path):
        described = read_described(path, NAME)

        def tables() -> Iterator[tuple[Any, str]]:
            for file, _ in checked_parts(path, described):
                yield from tables_of(pa, pq, file)

        return incoming(pa, described, tables, path)
    names = [path]
    if os.path.isdir(path):
        names = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(_SUFFIX)]
    notes: list[str] = []

    def foreign() -> Iterator[dict[str, Any]]:
        for name in names:
            for table, _ in tables_of(pa, pq, name):
                if table.num_rows:
                    yield foreign_table(pa, table, notes)

    return foreign_rows(foreign, path, nbytes=sum(map(os.path.getsize, names)), about=About(notes=notes))


def tables_of(pa: Any, pq: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield what a file holds, a part of a row group at a time, and where each part lies.

    Raises:
        Damaged: it is no Parquet.
    """
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for group in range(file.num_row_groups):
                begun, told = 0, file.metadata.row_group(group)
                most = max(1, min(1 << 14, BATCH_BYTES * told.num_rows // max(1, told.total_byte_size)))
                for batch in file.iter_batches(batch_size=most, row_groups=[group]):
                    yield pa.Table.from_batches([batch]), f"{path}, row group {group}, row {begun}"
                    begun += batch.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:  # of names that are no text, a ValueError
        raise Damaged(f"{path}: cannot be read as Parquet ({error})") from error

"""A folder that ``datasets.load_from_disk`` opens, by ``datasets`` (extra ``tools``); its columns are those of
Parquet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

from pipeline.errors import ConfigError, Damaged
from pipeline.store.blocks import crc32c
from pipeline.tools.formats.arrow_rows import arrow_module, foreign_table
from pipeline.tools.formats.arrow_streams import Outgoing, incoming
from pipeline.tools.formats.extras import needed
from pipeline.tools.formats.folder import OutFolder, checked_parts, is_described, read_described
from pipeline.tools.formats.table_rows import foreign_rows
from pipeline.tools.interchange.streams import About, Stream

NAME = "datasets"
CONTENTS = ("transitions", "rollouts", "trajectories")
_STATE = "state.json"
_INFO = "dataset_info.json"


def recognises(path: str) -> bool:
    """Whether such a folder lies there."""
    return os.path.isfile(os.path.join(path, _STATE)) and os.path.isfile(os.path.join(path, _INFO))


def write(stream: Stream, out: OutFolder) -> None:
    """Write a stream: Arrow files as ``Dataset.save_to_disk`` names them, and the two of JSON beside them. Its own way
    would map all of them into memory.

    Raises:
        ConfigError: ``datasets`` is not installed.
    """
    datasets, pa = needed("datasets", NAME, "tools"), arrow_module(NAME)
    outgoing = Outgoing(pa, stream, out)
    counts = _write_parts(pa, outgoing, out)
    names = [f"data-{number:05d}-of-{len(counts):05d}.arrow" for number in range(len(counts))]
    for number, (name, count) in enumerate(zip(names, counts, strict=True)):
        path = os.path.join(out.directory, name)
        os.rename(_part(out, number), path)
        out.ended(path, count)
    datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(outgoing.schema)).write_to_directory(
        out.directory
    )
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": f"{crc32c(msgspec.json.encode([each.crc32c for each in out.described.files])):016x}",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    with open(os.path.join(out.directory, _STATE), "xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state)))
    for name in (_INFO, _STATE):
        out.ended(os.path.join(out.directory, name), 0)


def _part(out: OutFolder, number: int) -> str:
    return os.path.join(out.directory, f"{number}.arrow")


def _write_parts(pa: Any, outgoing: Outgoing, out: OutFolder) -> list[int]:
    """Write the tables, and return how many transitions or records each file has; there is one at the least."""
    counts: list[int] = []
    file = writer = None
    try:
        for table, number in chain(outgoing.tables(), ((None, 0),)):
            if writer is None and (table is not None or not counts):
                file = pa.OSFile(_part(out, len(counts)), "wb")
                writer = pa.ipc.new_stream(file, outgoing.schema)
                counts.append(0)
            if table is not None and writer is not None:
                writer.write_table(table)
                counts[-1] += number
            if writer is not None and file is not None and (table is None or file.tell() >= out.part_bytes):
                writer.close()
                file.close()
                writer = None
    finally:
        if file is not None:
            file.close()
    return counts


def read(path: str) -> Stream:
    """Return the stream in an export, or transitions in anybody's folder.

    Raises:
        ConfigError: ``datasets`` is not installed, or it is a folder of several splits.
        Damaged: it is no such folder.
    """
    datasets, pa = needed("datasets", NAME, "tools"), arrow_module(NAME)
    if is_described(path):
        described = read_described(path, NAME)

        def tables() -> Iterator[tuple[Any, str]]:
            for file, _ in checked_parts(path, described):
                if file.endswith(".arrow"):
                    yield from _tables(pa, file)

        return incoming(pa, described, tables, path)
    try:
        whole = datasets.load_from_disk(path)
    except Exception as error:
        raise Damaged(f"{path}: datasets cannot load it ({error})") from error
    if not isinstance(whole, datasets.Dataset):
        raise ConfigError(f"{path}: has the splits {', '.join(whole)}; import one of these folders", option="path")
    notes: list[str] = []

    def foreign() -> Iterator[dict[str, Any]]:
        for table in whole.with_format("arrow").iter(batch_size=4096):
            yield foreign_table(pa, table, notes)

    return foreign_rows(foreign, path, nbytes=whole.data.nbytes, about=About(notes=notes))


def _tables(pa: Any, path: str) -> Iterator[tuple[Any, str]]:
    try:
        with pa.OSFile(path, "rb") as file, pa.ipc.open_stream(file) as reader:
            for number, batch in enumerate(reader):
                yield pa.Table.from_batches([batch]), f"{path}, batch {number}"
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"{path}: cannot be read as Arrow ({error})") from error

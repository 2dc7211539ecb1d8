"""Files that ``safetensors`` reads; written and read here without it.

Of transitions a file has the columns and marks [n, ...] under their names. Of rollouts and trajectories it has several
records: ``<number>.<name>`` is a tensor of one of them, and the file's metadata has, under ``records``, a JSON list of
the fields of each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Column
from pipeline.errors import ConfigError, Damaged
from pipeline.store.codec import TensorBytes, item_bytes, tensor_of
from pipeline.store.files import open_plain
from pipeline.tools.formats.folder import OutFolder, bytes_of_parts, checked_parts, is_described, read_described
from pipeline.tools.formats.json_values import plain_from_json, plain_to_json
from pipeline.tools.formats.table_rows import foreign_rows
from pipeline.tools.interchange.columns import (
    column_of_tensor,
    is_stored,
    tensor_of_column,
)
from pipeline.tools.interchange.records import checked_record
from pipeline.tools.interchange.streams import (
    MARK_DTYPES,
    TRANSITIONS,
    Record,
    Records,
    Rows,
    Stream,
    Transitions,
    flat_bytes,
    rechunked,
)

NAME = "safetensors"
CONTENTS = ("transitions", "rollouts", "trajectories")
_FILE_BYTES = 32 << 20  # a file is held whole as it is written
_SLICE = 4 << 20  # bytes of rows that are taken at a time of somebody else's file
_RECORDS = 4096  # in a file: the header stays far below what readers take
_MOST_HEADER = 100 << 20
_RECORDS_KEY = "records"


def recognises(path: str) -> bool:
    """Whether a file of transitions lies there that something else wrote."""
    return path.endswith(".safetensors") and os.path.isfile(path)


def write(stream: Stream, out: OutFolder) -> None:
    """Write a stream."""
    most = min(out.part_bytes, _FILE_BYTES)
    if isinstance(stream, Transitions):
        for rows in rechunked(stream.batches(), lambda rows: max(1, most * len(rows) // max(1, rows.held_bytes))):
            _write_file(out, _named(stream, rows), {}, len(rows))
            out.progress(rows.nbytes)
        return
    held: list[Record] = []
    size = 0
    for record in stream.records():
        held.append(record)
        size += record.nbytes
        out.progress(record.nbytes)
        if size >= most or len(held) >= _RECORDS:
            _write_records(out, held)
            held, size = [], 0
    if held:
        _write_records(out, held)


def _named(stream: Transitions, rows: Rows) -> dict[str, TensorBytes]:
    named = {column.name: tensor_of_column(column, rows.columns[column.name]) for column in stream.schema.columns}
    for name in stream.marks:
        named[name] = tensor_of_column(Column("mark", MARK_DTYPES[name].name), rows.marks[name])
    return named


def _write_records(out: OutFolder, records: list[Record]) -> None:
    named, fields = {}, []
    for number, record in enumerate(records):
        named.update({f"{number}.{name}": tensor for name, tensor in record.tensors.items()})
        fields.append({k: plain_to_json(v) if k == "info" else v for k, v in record.fields.items()})
    metadata = {_RECORDS_KEY: json.dumps(fields, separators=(",", ":"))}
    _write_file(out, named, metadata, len(records))


def _write_file(out: OutFolder, named: dict[str, TensorBytes], metadata: dict[str, str], count: int) -> None:
    # Wide types first: every tensor is then aligned to its own item size without gaps.
    order = sorted(named, key=lambda name: -item_bytes(named[name].dtype))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name in order:
        tensor = named[name]
        end = offset + item_bytes(tensor.dtype) * prod(tensor.shape)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path = out.next_path("safetensors")
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(flat_bytes(named[name]).data)
    out.ended(path, count)


class _File(NamedTuple):
    tensors: dict[str, TensorBytes]
    metadata: dict[str, str]


def read_file(path: str) -> _File:
    """Return all tensors of a file, views of its bytes, and its metadata.

    Raises:
        Damaged: it is no such file.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        raw: np.ndarray = np.memmap(file, np.uint8, "r") if size else np.empty(0, np.uint8)
    try:
        length = int.from_bytes(raw[:8].tobytes(), "little")
        if length > min(_MOST_HEADER, size):
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(raw[8 : 8 + length].tobytes())
        metadata = header.pop("__metadata__", {})
        data = np.asarray(raw[8 + length :])
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            if not is_stored(dtype) or min(shape, default=0) < 0 or not 0 <= begin <= end <= len(data):
                raise ValueError(f"{name!r} is said to be {entry}")
            if item_bytes(dtype) * prod(shape) != end - begin:
                raise ValueError(f"{name!r} is said to be {entry}")
            tensors[name] = TensorBytes(dtype, shape, data[begin:end], item_bytes(dtype))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: no file of safetensors ({error})") from None
    return _File(tensors, metadata)


def read(path: str) -> Stream:
    """Return the stream in an export, or transitions in anybody's file of columns [n, ...].

    Raises:
        Damaged: a file is no such.
    """
    if not is_described(path):
        return foreign_rows(lambda: _foreign(path), path, nbytes=os.path.getsize(path))
    described = read_described(path, NAME)
    size = bytes_of_parts(described)
    if described.content != TRANSITIONS:

        def records() -> Iterator[Record]:
            for file, info in checked_parts(path, described):
                yield from _records(file, described.content, info.count)

        return Records(described.content, described.about, records, size, described.count)

    def batches() -> Iterator[Rows]:
        for file, info in checked_parts(path, described):
            yield _rows(file, stream, info.count)

    stream = Transitions(described.schema, tuple(described.marks), described.about, batches, size, described.count)
    return stream


def _rows(path: str, stream: Transitions, count: int) -> Rows:
    tensors = read_file(path).tensors
    try:
        columns = {each.name: column_of_tensor(each, tensors[each.name], count) for each in stream.schema.columns}
        marks = {
            name: column_of_tensor(Column("mark", MARK_DTYPES[name].name), tensors[name], count)
            for name in stream.marks
        }
    except (ValueError, LookupError) as error:
        raise Damaged(f"{path}: no rows of these columns ({error})") from None
    return Rows(columns, marks)


def _records(path: str, content: str, count: int) -> Iterator[Record]:
    tensors, metadata = read_file(path)
    try:
        fields = json.loads(metadata[_RECORDS_KEY])
        if len(fields) != count:
            raise ValueError(f"{len(fields)} records, where {count} were written")
        named: list[dict[str, TensorBytes]] = [{} for _ in fields]
        for name, tensor in tensors.items():
            place, _, rest = name.partition(".")
            named[int(place)][rest] = tensor
        for each in fields:
            if "info" in each:
                each["info"] = plain_from_json(each["info"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise Damaged(f"{path}: the records do not fit together ({error})") from None
    for number, each in enumerate(fields):
        yield checked_record(Record(each, named[number]), content, f"{path}, record {number}")


def _foreign(path: str) -> Iterator[dict[str, Any]]:
    """Yield some rows at a time of somebody's file."""
    tensors = read_file(path).tensors
    counts = {name: tensor.shape[0] if tensor.shape else -1 for name, tensor in tensors.items()}
    count = next(iter(counts.values()), 0)
    odd = next((name for name, each in counts.items() if each != count or each < 0), None)
    if odd is not None:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise ConfigError(f"{path}: columns [n, ...] of one n are needed, and there are {shapes}", option="path")
    width = sum(tensor.array.nbytes for tensor in tensors.values()) // max(1, count)
    most = max(1, _SLICE // max(1, width))
    for begin in range(0, count, most):
        stop = min(begin + most, count)
        found = {}
        for name, tensor in tensors.items():
            size = tensor.array.nbytes // count
            part = np.array(tensor.array[begin * size : stop * size])
            found[name] = tensor_of(tensor.dtype, (stop - begin, *tensor.shape[1:]), part)
        yield found

"""JSON lines: one transition, rollout or trajectory a line. Needs no package; how values are carried stands in
:mod:`pipeline.tools.formats.json_values`.

A line of a transition has every column by its name and every mark. One of a rollout or a trajectory has its fields, and
``tensors`` by name with dtype and shape.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from pipeline.errors import Damaged
from pipeline.store.files import open_plain
from pipeline.tools.formats.folder import FILE, OutFolder, bytes_of_parts, checked_parts, is_described, read_described
from pipeline.tools.formats.json_values import (
    BASE64,
    plain_from_json,
    plain_to_json,
    rows_from_json,
    rows_to_json,
    tensor_from_json,
    tensor_to_json,
)
from pipeline.tools.formats.table_rows import foreign_rows
from pipeline.tools.interchange.columns import stored_of
from pipeline.tools.interchange.records import checked_record
from pipeline.tools.interchange.streams import (
    MARK_DTYPES,
    ROLLOUTS,
    TRAJECTORIES,
    TRANSITIONS,
    About,
    Record,
    Records,
    Rows,
    Stream,
    Transitions,
)

NAME = "jsonl"
CONTENTS = ("transitions", "rollouts", "trajectories")
_AT_ONCE = 4096  # lines
_LINES = 16 << 20  # bytes of them


def recognises(path: str) -> bool:
    """Whether something else's JSON lines lie there."""
    if os.path.isdir(path):
        return any(name.endswith(".jsonl") for name in os.listdir(path))
    return path.endswith((".jsonl", ".ndjson"))


def write(stream: Stream, out: OutFolder) -> None:
    """Write a stream."""
    lines = _Lines(out)
    try:
        if isinstance(stream, Transitions):
            for rows in stream.batches():
                for begin in range(0, len(rows), _AT_ONCE):
                    part = rows.part(slice(begin, begin + _AT_ONCE))
                    lines.add(_row_lines(stream, part), part.nbytes)
        else:
            for record in stream.records():
                lines.add([_record_line(record)], record.nbytes)
        lines.end(last=True)
    finally:
        lines.close()


class _Lines:
    """Writes lines into files of bounded size."""

    def __init__(self, out: OutFolder) -> None:
        self._out = out
        self._path = ""
        self._file: BinaryIO | None = None
        self._count = self._size = 0

    def add(self, lines: list[bytes], nbytes: int) -> None:
        """Write lines, which hold so many bytes of tensors."""
        for line in lines:
            if self._file is None:
                self._path = self._out.next_path("jsonl")
                self._file = open(self._path, "xb")  # noqa: SIM115  it is closed by end()
            self._file.write(line + b"\n")
            self._count += 1
            self._size += len(line) + 1
            if self._size >= self._out.part_bytes:
                self.end()
        self._out.progress(nbytes)

    def end(self, *, last: bool = False) -> None:
        """End the file that is being written; the next line begins another."""
        if last and self._file is None and not self._out.described.files:
            self._path = self._out.next_path("jsonl")
            self._file = open(self._path, "xb")  # noqa: SIM115  nothing is a file too
        if self._file is not None:
            self._file.close()
            self._file = None
            self._out.ended(self._path, self._count)
            self._count = self._size = 0

    def close(self) -> None:
        """Close the file after a failure."""
        if self._file is not None:
            self._file.close()


def _row_lines(stream: Transitions, rows: Rows) -> list[bytes]:
    names = [*(column.name for column in stream.schema.columns), *stream.marks]
    values = [rows_to_json(stored_of(column.dtype), rows.columns[column.name]) for column in stream.schema.columns]
    values += [rows_to_json(stored_of(MARK_DTYPES[name].name), rows.marks[name]) for name in stream.marks]
    encode = msgspec.json.Encoder().encode
    return [encode(dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)]


def _record_line(record: Record) -> bytes:
    fields = {name: plain_to_json(value) if name == "info" else value for name, value in record.fields.items()}
    tensors = {name: tensor_to_json(tensor) for name, tensor in record.tensors.items()}
    return msgspec.json.encode({**fields, "tensors": tensors})


def read(path: str) -> Stream:
    """Return the stream in an export, or transitions in anybody's file, or folder of files.

    Raises:
        Damaged: a file is no such.
    """
    if not is_described(path):
        return _foreign_stream(path)
    described = read_described(path, NAME)
    size = bytes_of_parts(described)
    if described.content != TRANSITIONS:

        def records() -> Iterator[Record]:
            for file, _ in checked_parts(path, described):
                for number, line in _numbered(file):
                    yield _record(line, described.content, f"{file}, line {number}")

        return Records(described.content, described.about, records, size, described.count)
    schema, marks = described.schema, tuple(described.marks)

    def batches() -> Iterator[Rows]:
        for file, _ in checked_parts(path, described):
            for number, lines in _chunks(file):
                yield _rows(lines, stream, f"{file}, lines {number} to {number + len(lines) - 1}")

    stream = Transitions(schema, marks, described.about, batches, size, described.count)
    return stream


def _rows(lines: list[dict[str, Any]], stream: Transitions, where: str) -> Rows:
    try:
        columns = {
            each.name: rows_from_json(stored_of(each.dtype), each.shape, [line[each.name] for line in lines])
            for each in stream.schema.columns
        }
        marks = {
            name: rows_from_json(stored_of(MARK_DTYPES[name].name), (), [line[name] for line in lines])
            for name in stream.marks
        }
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise Damaged(f"{where}: no rows of these columns ({error})") from None
    for each in stream.schema.columns:
        columns[each.name] = columns[each.name].view(each.bits)
    return Rows(columns, marks)


def _record(line: dict[str, Any], content: str, where: str) -> Record:
    try:
        tensors = {name: tensor_from_json(value) for name, value in line.pop("tensors").items()}
        if "info" in line:
            line["info"] = plain_from_json(line["info"])
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
        raise Damaged(f"{where}: no record ({error})") from None
    return checked_record(Record(line, tensors), content, where)


def _numbered(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of a file, decoded, with their numbers."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with open_plain(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise Damaged(f"{path}, line {number}: no JSON object ({error})") from None


def _chunks(path: str) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield some lines at a time, decoded, with the number of the first."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    held: list[dict[str, Any]] = []
    size, first = 0, 1
    with open_plain(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                held.append(decode(line))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise Damaged(f"{path}, line {number}: no JSON object ({error})") from None
            size += len(line)
            if len(held) >= _AT_ONCE or size >= _LINES:
                yield first, held
                held, size, first = [], 0, number + 1
    if held:
        yield first, held


def _foreign_stream(path: str) -> Stream:
    """Return the rows in somebody's lines; or, if they have ``tensors``, the rollouts or trajectories."""
    names = [path]
    if os.path.isdir(path):
        names = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(".jsonl")]
    size = sum(map(os.path.getsize, names))
    first = next((line for name in names for _, line in _numbered(name)), {})
    if "tensors" not in first:
        return foreign_rows(lambda: _foreign(names), path, nbytes=size)
    content = TRAJECTORIES if "envs" in first else ROLLOUTS

    def records() -> Iterator[Record]:
        for name in names:
            for number, line in _numbered(name):
                yield _record(line, content, f"{name}, line {number}")

    return Records(content, About(), records, size)


def _foreign(names: list[str]) -> Iterator[dict[str, list[Any]]]:
    """Yield what somebody's lines hold, by column."""
    for name in names:
        for number, lines in _chunks(name):
            keys = lines[0].keys()
            odd = next((at for at, line in enumerate(lines) if line.keys() != keys), None)
            if odd is not None:
                raise Damaged(f"{name}, about line {number + odd}: has other columns than the lines before it")
            columns = {key: [line[key] for line in lines] for key in keys}
            _no_bytes(columns, f"{name}, about line {number}")
            yield columns


def _no_bytes(columns: dict[str, list[Any]], where: str) -> None:
    """Refuse lines of an export that are taken by themselves, if nothing in them says what some of it is."""
    names = [key for key, each in columns.items() if any(_is_bytes(value) for value in each)]
    if names:
        raise Damaged(
            f"{where}: {', '.join(map(repr, names))} are bytes there, and their dtypes and shapes stand in the "
            f"{FILE} of the folder that forebay export wrote, which is not there; import that folder"
        )


def _is_bytes(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {BASE64}

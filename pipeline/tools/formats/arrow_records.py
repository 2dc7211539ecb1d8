"""Rollouts and trajectories as Arrow tables, and back.

A rollout has a row for each of its traces, and one with ``trace`` -1 if it has none; a trajectory has one row. Fields
are columns, ``info`` as JSON text. A tensor is a column under its own name (``name#tensor`` where a field is called
so): a list of its numbers, with ``name#shape`` beside it unless all of them have one dimension. Where its dtype differs
from row to row it is binary, with ``name#dtype`` beside it; so is an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import LARGE, Column
from pipeline.errors import Damaged
from pipeline.store.codec import TensorBytes, item_bytes
from pipeline.tools.formats.arrow_rows import carried, held, value_type
from pipeline.tools.formats.json_values import plain_from_json, plain_to_json
from pipeline.tools.interchange.columns import dtype_of_column
from pipeline.tools.interchange.records import checked_record
from pipeline.tools.interchange.streams import ROLLOUTS, Record, Records, flat_bytes

_ROLLOUT = {
    "uid": "int64",
    "member": "int32",
    "trace": "int32",
    "task": "string",
    "agent": "string",
    "policy": "string",
    "status": "string",
    "epoch": "int64",
    "index": "int64",
    "attempt": "int32",
    "reward": "float64",
    "oldest": "int64",
    "newest": "int64",
    "tokens": "int64",
    "info": "string",
}
_TRAJECTORY = {
    "trajectory_id": "int64",
    "steps": "int64",
    "envs": "int64",
    "max_episode_length": "int64",
    "model_weights_id": "string",
}
_ROW_FIELDS = ("trace", "agent", "policy")


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor's column."""

    name: str
    column: str
    dtype: str = ""
    """As safetensors spells it; empty: it differs, and stands in ``<column>#dtype``."""
    shaped: bool = False
    """Whether its shape stands in ``<column>#shape``."""
    binary: bool = False

    @property
    def held(self) -> np.dtype[Any]:
        """The numpy dtype of its bits."""
        return Column("x", dtype_of_column(self.dtype)).bits


class Row(NamedTuple):
    """A row of the table."""

    fields: dict[str, Any]
    tensors: dict[str, TensorBytes]


def fields_of(content: str) -> dict[str, str]:
    """Return the columns of fields, with their Arrow types."""
    return _ROLLOUT if content == ROLLOUTS else _TRAJECTORY


def rows_of_record(record: Record, content: str) -> list[Row]:
    """Return the rows of a record."""
    if content != ROLLOUTS:
        return [Row(record.fields, record.tensors)]
    fields = {**record.fields, "info": msgspec.json.encode(plain_to_json(record.fields["info"])).decode()}
    pairs = list(zip(fields.pop("agents"), fields.pop("policies"), strict=True))
    tensors: list[dict[str, TensorBytes]] = [{} for _ in pairs]
    for name, tensor in record.tensors.items():
        number, _, plain = name.partition(".")
        tensors[int(number)][plain] = tensor
    if not pairs:
        return [Row({**fields, "trace": -1, "agent": "", "policy": ""}, {})]
    return [
        Row({**fields, "trace": number, "agent": agent, "policy": policy}, tensors[number])
        for number, (agent, policy) in enumerate(pairs)
    ]


def named_of(stream: Records) -> list[Named]:
    """Look at all records, and return which columns their tensors need."""
    seen: dict[str, tuple[set[str], set[int], int]] = {}
    for record in stream.records():
        for row in rows_of_record(record, stream.content):
            for name, tensor in row.tensors.items():
                dtypes, dims, most = seen.get(name, (set(), set(), 0))
                seen[name] = (dtypes | {tensor.dtype}, dims | {len(tensor.shape)}, max(most, tensor.array.nbytes))
    fields, found = fields_of(stream.content), []
    for name in sorted(seen):
        dtypes, dims, most = seen[name]
        one = next(iter(dtypes)) if len(dtypes) == 1 else ""
        binary = not one or (one == "U8" and most >= LARGE)
        column = f"{name}#tensor" if name in fields else name
        found.append(Named(name=name, column=column, dtype=one, shaped=dims != {1}, binary=binary))
    return found


def record_schema(pa: Any, content: str, named: Sequence[Named]) -> Any:
    """Return the Arrow schema of rows."""
    fields = [pa.field(name, getattr(pa, kind)(), nullable=False) for name, kind in fields_of(content).items()]
    for each in named:
        kind = pa.binary() if each.binary else pa.list_(value_type(pa, each.dtype))
        fields.append(pa.field(each.column, kind))
        if each.shaped:
            fields.append(pa.field(f"{each.column}#shape", pa.list_(pa.int64())))
        if not each.dtype:
            fields.append(pa.field(f"{each.column}#dtype", pa.string()))
    return pa.schema(fields)


def record_table(pa: Any, schema: Any, content: str, named: Sequence[Named], rows: Sequence[Row]) -> Any:
    """Return rows as a table."""
    arrays = [
        pa.array([row.fields[name] for row in rows], getattr(pa, kind)()) for name, kind in fields_of(content).items()
    ]
    for each in named:
        tensors = [row.tensors.get(each.name) for row in rows]
        if each.binary:
            arrays.append(pa.array([None if it is None else flat_bytes(it).tobytes() for it in tensors], pa.binary()))
        else:
            arrays.append(_lists(pa, each, tensors))
        if each.shaped:
            shapes = [None if it is None else list(it.shape) for it in tensors]
            arrays.append(pa.array(shapes, pa.list_(pa.int64())))
        if not each.dtype:
            arrays.append(pa.array([None if it is None else it.dtype for it in tensors], pa.string()))
    return pa.Table.from_arrays(arrays, schema=schema)


def _lists(pa: Any, named: Named, tensors: Sequence[TensorBytes | None]) -> Any:
    parts = [
        np.empty(0, np.uint8) if it is None else carried(named.dtype, flat_bytes(it).view(named.held)) for it in tensors
    ]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)
    there = [part for part in parts if len(part)]
    kind = value_type(pa, named.dtype)
    values = pa.array(np.concatenate(there)) if there else pa.array([], kind)
    mask = pa.array([it is None for it in tensors])
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=pa.list_(kind), mask=mask)


def rows_of_table(pa: Any, table: Any, content: str, named: Sequence[Named], where: str) -> Iterator[Row]:
    """Yield the rows of a table.

    Raises:
        Damaged: it has other columns, or values that cannot be.
    """
    try:
        fields = {name: table.column(name).to_pylist() for name in fields_of(content)}
        tensors = {each.name: _tensors(table, each) for each in named}
        for at in range(table.num_rows):
            there = {name: found for name, values in tensors.items() if (found := values[at]) is not None}
            yield Row({name: values[at] for name, values in fields.items()}, there)
    except (KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise Damaged(f"{where}: no rows of these columns ({error})") from None


def _tensors(table: Any, named: Named) -> list[TensorBytes | None]:
    array = table.column(named.column).combine_chunks()
    count = len(array)
    shapes = table.column(f"{named.column}#shape").to_pylist() if named.shaped else [None] * count
    dtypes = table.column(f"{named.column}#dtype").to_pylist() if not named.dtype else [named.dtype] * count
    if named.binary:
        values: list[Any] = [None if it is None else np.frombuffer(it, np.uint8) for it in array.to_pylist()]
    else:
        offsets, valid = array.offsets.to_numpy(), array.is_valid().to_numpy(zero_copy_only=False)
        numbers = array.values.to_numpy(zero_copy_only=False)
        values = [
            held(named.dtype, numbers[offsets[at] : offsets[at + 1]], named.held) if valid[at] else None
            for at in range(count)
        ]
    found: list[TensorBytes | None] = []
    for value, shape, dtype in zip(values, shapes, dtypes, strict=True):
        if value is None:
            found.append(None)
            continue
        whole = (len(value),) if shape is None else tuple(shape)
        if prod(whole) * item_bytes(dtype) != value.nbytes:
            raise ValueError(f"{named.name}: {value.nbytes} bytes, where {dtype}{list(whole)} is said to be")
        found.append(TensorBytes(dtype, whole, value, item_bytes(dtype)))
    return found


def records_of_rows(rows: Iterator[Row], content: str, where: str) -> Iterator[Record]:
    """Yield the records that rows are of.

    Raises:
        Damaged: they are of none.
    """
    if content != ROLLOUTS:
        for number, row in enumerate(rows):
            yield checked_record(Record(*row), content, f"{where}, row {number}")
        return
    group: list[Row] = []
    for row in rows:
        if group and row.fields["trace"] <= 0:
            yield _rollout(group, where)
            group = []
        group.append(row)
    if group:
        yield _rollout(group, where)


def _rollout(group: list[Row], where: str) -> Record:
    first = group[0].fields
    traces = [row for row in group if row.fields["trace"] >= 0]
    if [row.fields["trace"] for row in traces] != list(range(len(traces))):
        raise Damaged(f"{where}: the traces of uid {first['uid']}, member {first['member']} do not follow each other")
    fields = {name: value for name, value in first.items() if name not in _ROW_FIELDS}
    try:
        fields["info"] = plain_from_json(msgspec.json.decode(first["info"]))
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise Damaged(f"{where}: the info of uid {first['uid']} cannot be read ({error})") from None
    fields["agents"] = [row.fields["agent"] for row in traces]
    fields["policies"] = [row.fields["policy"] for row in traces]
    tensors = {f"{row.fields['trace']}.{name}": tensor for row in traces for name, tensor in row.tensors.items()}
    return checked_record(Record(fields, tensors), ROLLOUTS, where)

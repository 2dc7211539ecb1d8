"""The small columns of rows as they lie in memory and in blocks: packed bodies, one for each row.

A body is the record of a row without its marks. Rows go to the disk and come back as such runs of bytes: taken apart
column by column, and put together again, each of them costs as much as the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from pipeline.buffer.transitions.columns import Arrays, Column
from pipeline.errors import Damaged
from pipeline.store.codec import dtype_name, item_bytes

BODIES = "#bodies"
"""The name of the tensor that bodies are in a block."""


class RowArrays(dict[str, np.ndarray]):
    """Columns and marks of rows [n, ...] by name, where some columns are views of bodies.

    Whoever exchanges a column for other values need not know: what is no view of the bodies counts by itself.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], bodies: np.ndarray) -> None:
        """Args:
        arrays: the other columns, and marks.
        bodies: [n], with a field for each of their columns.
        """
        super().__init__(arrays)
        self.bodies = bodies
        self._views: Arrays = {name: bodies[name] for name in bodies.dtype.names or ()}
        self.update(self._views)

    def beside(self) -> Arrays:
        """Return what is no view of the bodies."""
        views = self._views
        return {name: array for name, array in self.items() if array is not views.get(name)}

    def rows(self, which: Any) -> RowArrays:
        """Return some of the rows: views by a slice, copies by numbers."""
        plain = self.bodies.view(f"V{self.bodies.dtype.itemsize}")  # with fields, what none fills would be anything
        found = RowArrays({}, plain[which].view(self.bodies.dtype))
        found.update({name: array[which] for name, array in self.beside().items()})
        return found

    def copy(self) -> RowArrays:
        """Return the same arrays, of which others can be exchanged."""
        found = RowArrays({}, self.bodies)
        found.update(self.beside())
        return found


def bodies_as(arrays: Mapping[str, Any], body: np.dtype[Any]) -> np.ndarray | None:
    """Return the bodies of rows [n], without fields, if they lie as these do; None: take the columns."""
    if not isinstance(arrays, RowArrays) or arrays.bodies.dtype != body:
        return None
    return arrays.bodies.view(f"V{arrays.bodies.dtype.itemsize}")


def beside(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns of rows that count beside their bodies."""
    return arrays.beside() if isinstance(arrays, RowArrays) else arrays


def some_rows(arrays: Arrays, which: Any) -> Arrays:
    """Return some rows of columns; bodies stay what they are."""
    if isinstance(arrays, RowArrays):
        return arrays.rows(which)
    return {name: array[which] for name, array in arrays.items()}


def rows_between(arrays: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Return rows that follow each other, of columns or of one value for all rows."""
    return {name: each[begin:end] if isinstance(each, np.ndarray) else each for name, each in arrays.items()}


def changed(arrays: Arrays, others: Arrays) -> Arrays:
    """Return columns, of which ``others`` are exchanged or added; bodies stay what they are."""
    found = arrays.copy()
    found.update(others)
    return found


def joined(
    parts: Sequence[Arrays], order: np.ndarray, together: Callable[[Sequence[np.ndarray]], np.ndarray]
) -> Arrays:
    """Return the rows of several, one after the other, in an order [n]; ``together`` joins those of a column."""
    first = parts[0]
    bodies = [part.bodies for part in parts if isinstance(part, RowArrays)]
    alike = len(bodies) == len(parts) and all(each.dtype == bodies[0].dtype for each in bodies)
    if not alike:
        return {name: together([part[name] for part in parts])[order] for name in first}
    plain = f"V{bodies[0].dtype.itemsize}"
    whole = np.concatenate([each.view(plain) for each in bodies])[order].view(bodies[0].dtype)
    names = set[str]().union(*map(beside, parts))
    found = RowArrays({}, whole)
    found.update({name: together([part[name] for part in parts])[order] for name in names})
    return found


def without(arrays: Arrays, names: Iterable[str]) -> Arrays:
    """Return columns but for some, none of which lies in bodies."""
    gone = frozenset(names)
    if isinstance(arrays, RowArrays):
        found = RowArrays({}, arrays.bodies)
        found.update({name: array for name, array in arrays.beside().items() if name not in gone})
        return found
    return {name: array for name, array in arrays.items() if name not in gone}


class Place(NamedTuple):
    """Where a column lies in each body: ``dtype`` as safetensors spells it, and the byte at which it begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def of(self, bodies: bytes, width: int) -> bytes:
        """Return the column's values of bodies of ``width`` bytes each, one after the other.

        Raises:
            KeyError: there is no such dtype.
            ValueError: it does not lie in a body.
        """
        size = item_bytes(self.dtype) * prod(self.shape)
        if min(self.shape, default=0) < 0 or not 0 <= self.begin <= width - size:
            raise ValueError(f"{self.name!r} is said to lie at bytes {self.begin} to {self.begin + size} of {width}")
        return np.frombuffer(bodies, np.uint8).reshape(-1, width)[:, self.begin : self.begin + size].tobytes()


_places = msgspec.json.Decoder(list[Place]).decode


def places_said(text: str) -> list[Place]:
    """Return what a block says of its bodies.

    Raises:
        ValueError: it cannot be read, or names a column twice.
    """
    try:
        found = _places(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"what the block says of its bodies cannot be read ({error})") from None
    if len({each.name for each in found}) < len(found):
        raise ValueError("what the block says of its bodies names a column twice")
    return found


def described(columns: Mapping[str, tuple[str, tuple[int, ...]]], body: np.dtype[Any]) -> str:
    """Return what a block says of its bodies: name, dtype, shape, and where in each body it begins, of each column.

    Args:
        columns: dtype, as safetensors spells it, and shape by name.
        body: with a field for each of them.
    """
    fields: Any = body.fields
    return msgspec.json.encode([Place(name, *columns[name], fields[name][1]) for name in fields]).decode()


def body_of(said: str, width: int, columns: Sequence[Column], where: str) -> np.dtype[Any]:
    """Return the dtype of the bodies of a block, of ``width`` bytes each, with the columns of these that are in them.

    Args:
        said: what the block's header says of them.
        width, columns: above.
        where: for an error.

    Raises:
        Damaged: they do not fit.
    """
    try:
        return _body_said(said, width, tuple((column, stored_name(column)) for column in columns))
    except ValueError as error:
        raise Damaged(f"{where}: {error}") from None


@lru_cache(maxsize=64)
def _body_said(text: str, width: int, columns: tuple[tuple[Column, str], ...]) -> np.dtype[Any]:
    """Return the dtype of bodies, with a field for each of some columns that are in them.

    Args:
        text: what the block says of them.
        width: bytes of each.
        columns: those that rows have, with their dtypes as safetensors spells them.

    Raises:
        ValueError: it does not fit, or a column is of another dtype or shape.
    """
    known = {column.name: (column, dtype) for column, dtype in columns}
    names, formats, offsets = [], [], []
    if not width:
        raise ValueError("bodies have no bytes there")
    for name, dtype, shape, begin in places_said(text):
        if name not in known:
            continue
        column, expected = known[name]
        if (dtype, shape) != (expected, column.shape):
            raise ValueError(f"{name!r} is {dtype}{list(shape)} there, {expected}{list(column.shape)} was expected")
        if not 0 <= begin <= width - column.nbytes:
            raise ValueError(f"{name!r} is said to begin at byte {begin} of {width}")
        names.append(name)
        formats.append(np.dtype((column.bits, column.shape)))
        offsets.append(begin)
    spec: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": width}
    body: np.dtype[Any] = np.dtype(spec)
    return body


@lru_cache(maxsize=1024)
def stored_name(column: Column) -> str:
    """Return how safetensors spells the dtype in which a column is stored."""
    kind = column.torch_only
    return dtype_name(torch.from_numpy(np.empty(0, column.bits)).dtype if kind is None else kind)

"""The columns of a transition: their names, dtypes and shapes, and the checks that a row must pass.

A row of small columns is one packed record, so that one gather serves all of them; a column of a kilobyte or more (an
image) lies in an array of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from pipeline.config.base import is_text
from pipeline.errors import ConfigError

Rows = Mapping[str, Any]
"""Columns by name; a mapping in it stands for columns named ``outer.inner``."""
Arrays = dict[str, np.ndarray]

LARGE = 1024
"""Bytes from which on a column lies in an array of its own."""
DEEPEST = 64
"""Levels of mappings in a row. What goes deeper would end in a RecursionError somewhere, or, if it holds itself,
nowhere."""

# numpy has no such types: their bits are held as integers of the same size.
_BITS: dict[torch.dtype, np.dtype[Any]] = {torch.bfloat16: np.dtype(np.int16)} | {
    kind: np.dtype(np.uint8)
    for name in ("float8_e4m3fn", "float8_e5m2")
    if (kind := getattr(torch, name, None)) is not None
}
_KINDS = "biufc"


class Number(NamedTuple):
    """What a column that is a single number is given as, in most rows.

    Attributes:
        code: how :mod:`struct` spells it.
        kind: the class of Python's numbers, of which those from ``least`` to ``most`` are taken.
        numpy: numpy's class of its very dtype.
    """

    code: str
    kind: type
    least: float
    most: float
    numpy: type


NUMBERS = {
    "bool": Number("?", bool, 0, 1, np.bool_),
    "float32": Number("f", float, -3e38, 3e38, np.float32),
    "float64": Number("d", float, -3e38, 3e38, np.float64),
} | {
    name: Number(code, int, int(np.iinfo(name).min), int(np.iinfo(name).max), np.dtype(name).type)
    for name, code in zip(
        ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"), "bBhHiIqQ", strict=True
    )
}
"""By dtype."""


class Column(msgspec.Struct, frozen=True, dict=True):
    """One column: what is held for it in each row."""

    name: str
    dtype: str
    """As numpy spells it (``float32``, ``bool``), or ``bfloat16``, ``float8_e4m3fn``, ``float8_e5m2``."""
    shape: tuple[int, ...] = ()

    @cached_property
    def bits(self) -> np.dtype[Any]:
        """The numpy dtype in which it is held."""
        special = getattr(torch, self.dtype, None)
        return _BITS[special] if special in _BITS else np.dtype(self.dtype)

    @cached_property
    def numpy(self) -> np.dtype[Any] | None:
        """The numpy dtype that it is; None if there is none like it."""
        return None if self.torch_only is not None else self.bits

    @cached_property
    def torch_only(self) -> torch.dtype | None:
        """The torch dtype, if numpy has none like it."""
        special = getattr(torch, self.dtype, None)
        return special if special in _BITS else None

    @property
    def nbytes(self) -> int:
        """Bytes in a row."""
        return self.bits.itemsize * prod(self.shape)

    def check(self) -> None:
        """Refuse what could not be held.

        Raises:
            ConfigError: the name is none, or the dtype or the shape.
        """
        if not self.name or self.name.startswith("#"):
            raise ConfigError(f"column {self.name!r}: a name is needed, without # in front", option=self.name)
        if not is_text(self.name):
            raise ConfigError(
                f"column {self.name!r}: half a surrogate pair cannot be written into a file; name it otherwise",
                option=self.name,
            )
        try:
            known = self.bits.kind in _KINDS and self.bits.itemsize <= 8
        except TypeError:
            known = False
        if not known or any(size < 0 for size in self.shape):
            raise ConfigError(f"column {self}: numbers or bools of a fixed shape are needed", option=self.name)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


def check_depth(name: str, depth: int) -> None:
    """Refuse what is nested too deep, and what holds itself.

    Raises:
        ConfigError: ``depth`` is past :data:`DEEPEST`.
    """
    if depth > DEEPEST:
        raise ConfigError(
            f"column {name[:40]}...: nested deeper than {DEEPEST} levels; give its arrays by their names, and leave "
            "the rest out",
            option=name.partition(".")[0],
        )


def flat(rows: Rows, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every column, nested ones as ``outer.inner``.

    Raises:
        ConfigError: the rows are no mapping, or nested too deep, or a name is no text.
    """
    if not isinstance(rows, Mapping):
        raise ConfigError(f"rows: a mapping of columns by name is needed, not {type(rows).__name__}", option="rows")
    for name, value in rows.items():
        if not isinstance(name, str):
            raise ConfigError(f"column {name!r}: a name is needed, not {type(name).__name__}", option="rows")
        if isinstance(value, Mapping):
            check_depth(f"{prefix}{name}", depth + 1)
            yield from flat(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def as_array(name: str, value: Any) -> tuple[np.ndarray, str]:
    """Return a column's values as an array, and the name of its dtype.

    Raises:
        ConfigError: they are no numbers.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.layout != torch.strided:
            raise ConfigError(
                f"column {name}: a dense tensor is needed, not {value.layout}; make it one with to_dense()", option=name
            )
        bits = _BITS.get(value.dtype)
        if bits is not None:
            plain = value.cpu().contiguous().view(torch.int16 if bits.itemsize == 2 else torch.uint8).numpy()
            return plain, str(value.dtype).removeprefix("torch.")
        try:
            value = value.cpu().resolve_conj().resolve_neg().numpy()
        except TypeError as error:  # numpy has no such dtype
            raise ConfigError(f"column {name}: {value.dtype} values cannot be stored ({error})", option=name) from None
    if isinstance(value, np.ma.MaskedArray):
        raise ConfigError(f"column {name}: a masked array; give its data and its mask as two columns", option=name)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ConfigError(f"column {name}: rows of one shape are needed ({error})", option=name) from None
    if array.dtype.kind not in _KINDS or array.dtype.itemsize > 8:
        raise ConfigError(
            f"column {name}: {array.dtype} values cannot be stored; encode them as numbers or bools", option=name
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array, array.dtype.name


class Schema(msgspec.Struct, frozen=True, dict=True):
    """The columns of every row, in the order of their names."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        names: set[str] = set()
        for column in self.columns:
            column.check()
            if column.name in names:
                raise ConfigError(f"column {column.name}: it is there twice", option=column.name)
            names.add(column.name)
        for name in names:
            for at in (at for at, each in enumerate(name) if each == "."):
                if name[:at] in names:
                    raise ConfigError(f"column {name}: {name[:at]} is a column, not a group of them", option=name)

    @classmethod
    def of(cls, rows: Rows, *, leading: bool = True) -> Schema:
        """Return the schema of rows [n, ...], or of one row without its leading axis.

        Raises:
            ConfigError: there is no column, or one has no leading axis or cannot be stored.
        """
        columns = []
        for name, value in sorted(flat(rows), key=itemgetter(0)):
            array, dtype = as_array(name, value)
            if leading and array.ndim == 0:
                raise ConfigError(
                    f"column {name}: a single number, where [n, ...] is needed; `append` takes one row", option=name
                )
            columns.append(Column(name, dtype, array.shape[leading:]))
        if not columns:
            raise ConfigError("rows={}: at least one column is needed", option="rows")
        return cls(tuple(columns))

    @property
    def names(self) -> frozenset[str]:
        """The names of all columns."""
        return frozenset(column.name for column in self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of content in a row."""
        return sum(column.nbytes for column in self.columns)

    def column(self, name: str) -> Column:
        """Return a column by its name.

        Raises:
            ConfigError: there is none; the message lists those that there are.
        """
        for column in self.columns:
            if column.name == name:
                return column
        raise ConfigError(f"column {name!r}: there is none; there are {', '.join(sorted(self.names))}", option=name)

    def fits(self, row: Rows) -> bool:
        """Whether one row has every column in its very dtype and shape, as arrays or numbers: the common case,
        quickly."""
        if row.__class__ is not dict or len(row) != len(self.columns):
            return False
        get = row.get
        for name, dtype, shape, number in self._of_row:
            value: Any = get(name)
            kind = value.__class__
            if kind is np.ndarray:
                if value.dtype is not dtype or value.shape != shape:
                    return False
            elif number is None or not (
                number.least <= value <= number.most if kind is number.kind else kind is number.numpy
            ):
                return False
        return True

    @cached_property
    def _of_row(self) -> list[tuple[str, np.dtype[Any] | None, tuple[int, ...], Number | None]]:
        """Name, dtype and shape of each column, and what a single number is given as."""
        return [
            (each.name, each.numpy, each.shape, None if each.shape else NUMBERS.get(each.dtype))
            for each in self.columns
        ]

    def block(self, rows: dict[str, Any]) -> int:
        """Return how many rows these are, if every column is an array of its very dtype and shape: the common case,
        quickly. -1: look closer."""
        if len(rows) != len(self.columns):
            return -1
        column = self.columns[0]
        first = rows.get(column.name)
        if first.__class__ is not np.ndarray or not first.shape:
            return -1
        count: int = first.shape[0]
        for name, dtype, shape in self._of_count(count):
            value = rows.get(name)
            # A builtin dtype is one object; another that equals it is met by the closer look.
            if value.__class__ is not np.ndarray or value.dtype is not dtype or value.shape != shape:
                return -1
        return count

    def _of_count(self, count: int) -> list[tuple[str, np.dtype[Any] | None, tuple[int, ...]]]:
        """Return name, dtype and shape of each column of so many rows."""
        known = self._known
        if known[0] != count:
            known = (count, [(each.name, each.numpy, (count, *each.shape)) for each in self.columns])
            self.__dict__["_known"] = known  # a cache, written in one step: threads may differ about its newest entry
        return known[1]

    @cached_property
    def _known(self) -> tuple[int, list[tuple[str, np.dtype[Any] | None, tuple[int, ...]]]]:
        return -1, []

    def check(self, rows: Rows, *, leading: bool = True) -> tuple[Arrays, int]:
        """Return the columns of rows [n, ...] (or of one row without that axis) as arrays, and n. Nothing is copied
        that need not be.

        Raises:
            ConfigError: a column is missing or unknown, or has another shape, or values that its dtype cannot hold.
        """
        if leading and isinstance(rows, dict) and (many := self.block(rows)) >= 0:
            return rows, many
        named = list(flat(rows))
        given = dict(named)
        if given.keys() != self.names or len(given) != len(named):
            self._refuse_names(given)
        arrays: Arrays = {}
        count = -1
        for column in self.columns:
            array, dtype = as_array(column.name, given[column.name])
            if leading and array.ndim == 0:
                raise ConfigError(f"column {column.name}: a single number, where [n, ...] is needed", option="rows")
            if array.shape[leading:] != column.shape:
                found = list(array.shape[leading:])
                raise ConfigError(
                    f"column {column.name}: shape {found} in a row, {list(column.shape)} expected", option=column.name
                )
            if leading and count not in (-1, len(array)):
                raise ConfigError(
                    f"column {column.name}: {len(array)} rows, where the columns before it have {count}",
                    option=column.name,
                )
            count = len(array) if leading else 1
            arrays[column.name] = array if dtype == column.dtype else _cast(column, array, dtype)
        return arrays, count

    def _refuse_names(self, given: Mapping[str, Any]) -> None:
        if given.keys() == self.names:
            raise ConfigError("columns: one is there twice, once nested and once by its dotted name", option="rows")
        missing, unknown = sorted(self.names - given.keys()), sorted(given.keys() - self.names)
        said = [f"{', '.join(missing)} missing"] if missing else []
        said += [f"{', '.join(unknown)} unknown"] if unknown else []
        raise ConfigError(f"columns: {'; '.join(said)}; each row has {', '.join(sorted(self.names))}", option="rows")


def _cast(column: Column, array: np.ndarray, dtype: str) -> np.ndarray:
    """Return values in the column's dtype: floats may be rounded to a narrower float, all else must stay what it is."""
    held_as_bits = column.torch_only is not None or dtype != array.dtype.name
    if not held_as_bits and _may_hold(column.bits.kind, array.dtype.kind):
        with np.errstate(all="ignore"):
            cast = array.astype(column.bits)
            back = (cast if array.dtype.kind == "c" or cast.dtype.kind != "c" else cast.real).astype(array.dtype)
        if array.dtype.kind == cast.dtype.kind and cast.dtype.kind in "fc":
            if np.array_equal(np.isfinite(cast), np.isfinite(array)):
                return cast
        elif np.isfinite(array).all() and np.array_equal(back, array) and not _sign_lost(cast, array):
            return cast
    raise ConfigError(
        f"column {column.name}: {dtype} values that {column.dtype} cannot hold; convert them before they are added",
        option=column.name,
    )


def _may_hold(column: str, given: str) -> bool:
    """Whether values of one kind can be those of another: a bool is a number, and a number may be a complex one."""
    return column == given or (column != "b" and given != "c")


def _sign_lost(cast: np.ndarray, array: np.ndarray) -> bool:
    """Whether a wrap-around made the values equal again on the way back: uint64 to int64 and the reverse."""
    if array.dtype.kind == "u" and cast.dtype.kind == "i":
        return bool((cast < 0).any())
    return array.dtype.kind == "i" and cast.dtype.kind == "u" and bool((array < 0).any())

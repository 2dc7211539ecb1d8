"""The verb that changes columns of rows that are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pipeline.buffer.transitions.columns import Arrays, Rows, Schema, flat
from pipeline.buffer.transitions.layout import VERSION
from pipeline.buffer.transitions.ring import Ring
from pipeline.buffer.transitions.sharing import SharedNextObs
from pipeline.buffer.transitions.writing import Written
from pipeline.config import ReplayOptions
from pipeline.errors import ConfigError
from pipeline.replay.arguments import check_known, keys_of
from pipeline.replay.gate import Gate

Ints = np.ndarray


class WrittenBack(NamedTuple):
    """What became of a write-back: of each key exactly one of these holds."""

    applied: np.ndarray
    """[n] bool: the columns were written."""
    stale: np.ndarray
    """[n] bool: the row had gone; nothing was written, also not to the row that has its place."""
    refused: np.ndarray
    """[n] bool: the row is there, but weights of another version made it than was said; it stays as it is."""


class WriteBackVerb:
    """How :class:`~pipeline.ReplayBuffer` changes rows."""

    options: ReplayOptions
    gate: Gate
    ring: Ring
    next_obs: SharedNextObs | None
    _written: Written

    def _usable(self) -> None:
        raise NotImplementedError

    def write_back(self, keys: ArrayLike, columns: Rows, *, versions: ArrayLike | None = None) -> WrittenBack:
        """Set columns of rows that are still there, such as values that were estimated again.

        ::

            batch = buffer.sample(256)
            buffer.write_back(batch.keys, {"value": critic(batch["obs"])}, versions=batch.versions)

        What is bad in the arguments is refused before any row is changed. The changed columns are part of what is saved
        from then on.

        Args:
            keys: [n] of a batch; of one that is named several times the last counts.
            columns: numpy arrays or tensors [n, ...] by column, some of those that rows have; nested ones as
                ``outer.inner`` or in a mapping. They are copied.
            versions: [n] whole numbers, or one for all: a row that weights of another version made is left as it is.

        Raises:
            ConfigError: a column is unknown, or of another shape or dtype, or tells where episodes end, or is shared
                with another row; a key was never that of a row; or the numbers differ. Nothing was changed.
        """
        with self.gate.lock:
            self._usable()
            where = keys_of(keys)
            check_known(where, self.ring.keys_end, -int(self.ring.scattered))
            arrays = self._columns(columns, len(where))
            expected = _versions(versions, len(where))
            there = self.ring.alive(where)
            refused = np.zeros(len(where), bool)
            if expected is not None:
                refused[there] = self.ring.mark(VERSION, where[there]) != expected[there]
            applied = there & ~refused
            self._written.write(where[applied], {name: array[applied] for name, array in arrays.items()})
        return WrittenBack(applied, ~there, refused)

    def _columns(self, given: Rows, count: int) -> Arrays:
        schema = self.ring.storage.schema
        names = [name for name, _ in flat(given)]
        if schema is None or not names:
            raise ConfigError("columns: at least one column of rows that were added is needed", option="columns")
        fields = self.options.fields
        fixed = {fields.terminated, fields.truncated, fields.done}
        paired = () if self.next_obs is None else (fields.obs, fields.next_obs)
        for name in names:
            if name in fixed:
                raise ConfigError(
                    f"column {name}: it tells where episodes end, which is settled when rows are added", option=name
                )
            if any(name == group or name.startswith(f"{group}.") for group in paired):
                raise ConfigError(
                    f"column {name}: with share_next_obs it may be part of two rows, and cannot be changed", option=name
                )
        part = Schema(tuple(schema.column(name) for name in dict.fromkeys(names)))
        arrays, found = part.check(given)
        if found != count:
            raise ConfigError(f"columns: {found} rows, where {count} keys are given", option="columns")
        return arrays


def _versions(versions: ArrayLike | None, count: int) -> Ints | None:
    if versions is None:
        return None
    given = np.asarray(versions)
    if given.dtype.kind not in "iu" or given.shape not in ((), (count,)):
        raise ConfigError.of("versions", versions, f"one whole number, or [{count}] of them, are needed")
    return np.broadcast_to(given, (count,))


def saved(values: Mapping[str, Any], columns: list[str], schema: Schema | None) -> list[tuple[str, Ints, np.ndarray]]:
    """Return what :meth:`Written.load` takes of values by name; see ``values_of`` in :mod:`pipeline.replay.parts`.

    Raises:
        LookupError, ValueError, ConfigError: they do not fit together.
    """
    found = []
    for number, name in enumerate(columns):
        if schema is None:
            raise ValueError(f"column {name} was changed, and there are no columns")
        keys, column = values[f"{number}.keys"], schema.column(name)
        found.append((name, keys, values[f"{number}.values"].view(column.bits).reshape(len(keys), *column.shape)))
    return found

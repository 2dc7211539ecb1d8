"""What a replay buffer hands out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import numpy as np
import torch

from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.buffer.transitions.given import MOST, masses, whole, wholes
from pipeline.buffer.transitions.layout import EPISODE, MARKS, PLACE, VERSION, RowLayout
from pipeline.errors import ConfigError

Kind = Literal["torch", "numpy"]


class TransitionBatch:
    """Rows by column: ``batch["obs"]`` is [n, ...], or [n, window, ...] of slices; all of it is the caller's.

    A group of columns that were given nested comes back as a dict of them. What is not a column:

    Attributes:
        keys: [n] int64 array: what :meth:`~pipeline.replay.ReplayBuffer.update_priorities` takes.
        weights: [n] float32: importance weights; ones where every row is drawn alike.
        mask: [n, window] bool, of slices: whether the row is one of its own; else None.
        discount: [n] float32, with ``gamma``: what the value of ``next_obs`` is multiplied with; else None.
        steps: [n] int64 array, with ``gamma``: how many rewards were summed; else None.
        relabelled: [n] bool array, with ``hindsight``: whether the row has another goal than it had; else None.
        burn_in, bootstrap: of slices: how many rows at the beginning and at the end are not to be learned from.
    """

    def __init__(
        self,
        layout: RowLayout,
        records: np.ndarray,
        arrays: Arrays,
        keys: np.ndarray,
        kind: Kind,
        *,
        weights: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        discount: np.ndarray | None = None,
        steps: np.ndarray | None = None,
        relabelled: np.ndarray | None = None,
        burn_in: int = 0,
        bootstrap: int = 0,
    ) -> None:
        self._layout, self._records, self._arrays = layout, records, arrays
        self.keys, self.kind = keys, kind
        self._weights, self._mask, self._discount = weights, mask, discount
        self.steps: Any = steps
        self.relabelled: Any = relabelled
        self.burn_in, self.bootstrap = burn_in, bootstrap

    def __getitem__(self, name: str) -> Any:
        array = self._arrays.get(name)
        if array is not None:
            if not array.flags.c_contiguous:  # a column of packed records, which `view(-1)` would refuse
                array = self._arrays[name] = array.copy()
            return self._out(array, name)
        inner = {each[len(name) + 1 :]: self[each] for each in self._arrays if each.startswith(f"{name}.")}
        if not inner:
            raise KeyError(f"{name!r}: the batch has {', '.join(sorted(self._arrays))}")
        return _nested(inner)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, each nested group as one."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self._arrays))

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        """How many rows, or slices, were drawn."""
        return len(self.keys)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays or name in self.columns

    def _out(self, array: np.ndarray, name: str = "") -> Any:
        special = self._layout.torch_only.get(name)
        if self.kind == "numpy":
            if special is not None:
                raise ConfigError(f"column {name}: numpy has no such dtype; use batch.torch()", option="returns")
            return array
        tensor = torch.from_numpy(array)
        return tensor if special is None else tensor.view(special)

    def _optional(self, array: np.ndarray | None) -> Any:
        return None if array is None else self._out(array)

    def _mark(self, name: str) -> Any:
        return self._out(np.ascontiguousarray(self._records[name]))

    @property
    def weights(self) -> Any:
        if self._weights is None:
            self._weights = np.ones(len(self.keys), np.float32)
        return self._out(self._weights)

    @property
    def mask(self) -> Any:
        return self._optional(self._mask)

    @property
    def discount(self) -> Any:
        return self._optional(self._discount)

    @property
    def versions(self) -> Any:
        """[n] or [n, window] int32: the version of the weights that made each row."""
        return self._mark(VERSION)

    @property
    def episodes(self) -> Any:
        """[n] or [n, window] int64: the number of each row's episode."""
        return self._mark(EPISODE)

    @property
    def places(self) -> Any:
        """[n] or [n, window] int32: the place of each row in its episode, from 0."""
        return self._mark(PLACE)

    def torch(self) -> Self:
        """Return the same batch, giving out tensors."""
        return self._as("torch")

    def numpy(self) -> Self:
        """Return the same batch, giving out arrays."""
        return self._as("numpy")

    def _as(self, kind: Kind) -> Self:
        batch = object.__new__(type(self))
        vars(batch).update(vars(self))  # what copy.copy does, in a tenth of its time
        batch.kind = kind
        return batch

    def to(self, device: Any, *, non_blocking: bool = False) -> dict[str, Any]:
        """Return the columns, nested as they were given, on a device; with ``weights``, and ``discount`` and ``mask``
        where there are such, unless a column has that name."""
        batch = self.torch()
        found = {name: batch[name] for name in batch.columns}
        extras = {"weights": batch.weights, "discount": batch.discount, "mask": batch.mask}
        found |= {name: each for name, each in extras.items() if each is not None and name not in found}
        return {name: _moved(each, device, non_blocking) for name, each in found.items()}

    def pinned(self) -> Self:
        """Return the same batch in pinned memory, from which a device copies by itself."""
        batch = self._as(self.kind)
        batch._arrays = {name: _pinned(array) for name, array in self._arrays.items()}
        for name in ("_weights", "_mask", "_discount"):
            array = getattr(self, name)
            setattr(batch, name, None if array is None else _pinned(array))
        return batch

    def state(self) -> dict[str, Any]:
        """Return everything as plain values and arrays, for :meth:`restored`."""
        named = {name: getattr(self, name) for name in _PARTS}
        return {
            "columns": [(each.name, each.dtype, list(each.shape)) for each in self._layout.schema.columns],
            "arrays": {name: np.ascontiguousarray(array) for name, array in self._arrays.items()},
            "marks": {name: np.ascontiguousarray(self._records[name]) for name in MARKS.names or ()},
            **{name: part for name, part in named.items() if part is not None},
            "burn_in": self.burn_in,
            "bootstrap": self.bootstrap,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], kind: Kind) -> TransitionBatch:
        """Return the batch whose state this is.

        Raises:
            LookupError, TypeError, ValueError, AttributeError: it is no such state.
        """
        schema = Schema(tuple(Column(name, dtype, tuple(shape)) for name, dtype, shape in state["columns"]))
        marks = state["marks"]
        _check_state(state, schema)
        records = np.empty(marks[EPISODE].shape, MARKS)
        for name in MARKS.names or ():
            records[name] = marks[name]
        parts = {name: state.get(name) for name in _PARTS}
        del parts["keys"]
        options: dict[str, Any] = {name.removeprefix("_"): part for name, part in parts.items()}
        options |= {"burn_in": state["burn_in"], "bootstrap": state["bootstrap"]}
        return cls(RowLayout(schema), records, dict(state["arrays"]), state["keys"], kind, **options)

    def tensordict(self) -> Any:
        """Return a ``TensorDict`` of the columns, as :meth:`to` gives them.

        Raises:
            ImportError: tensordict is not installed.
        """
        from tensordict import TensorDict

        return TensorDict(self.to("cpu"), batch_size=[len(self.keys)])

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}{list(array.shape)}" for name, array in sorted(self._arrays.items()))
        return f"TransitionBatch({columns})"


_PARTS = ("keys", "_weights", "_mask", "_discount", "steps", "relabelled")


def _check_state(state: Mapping[str, Any], schema: Schema) -> None:
    """Refuse a state of which parts do not fit together."""
    count, marks = len(wholes("keys", state["keys"], 0, MOST)), state["marks"]
    shape = marks[EPISODE].shape
    if shape[:1] != (count,) or any(marks[name].shape != shape for name in MARKS.names or ()):
        raise ValueError(f"marks of {list(shape)} rows, where {count} keys are")
    for name, array in state["arrays"].items():
        column = schema.column(name)
        if array.dtype != column.bits or array.shape[:1] != (count,):
            raise ValueError(f"column {column}: {array.dtype}{list(array.shape)}; {count} rows of it are needed")
    if state.get("_weights") is not None:
        masses("weights", state["_weights"], count=count)
    if state.get("steps") is not None:
        wholes("steps", state["steps"], 1, MOST, count=count)
    for name, kind, needed in (("_mask", "b", shape), ("_discount", "f", (count,)), ("relabelled", "b", (count,))):
        part = state.get(name)
        if part is not None and (part.dtype.kind != kind or part.shape != needed):
            raise ValueError(f"{name.strip('_')}: {part.dtype}{list(part.shape)} where {list(needed)} is needed")
    for name in ("burn_in", "bootstrap"):
        whole(name, state[name], 0, MOST)


def _pinned(array: np.ndarray) -> np.ndarray:
    pinned: np.ndarray = torch.from_numpy(np.ascontiguousarray(array)).pin_memory().numpy()
    return pinned


def _nested(columns: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in columns.items():
        outer, dot, inner = name.partition(".")
        if dot:
            found.setdefault(outer, {})[inner] = value
        else:
            found[outer] = value
    return {name: _nested(value) if isinstance(value, dict) else value for name, value in found.items()}


def _moved(value: Any, device: Any, non_blocking: bool) -> Any:
    if isinstance(value, dict):
        return {name: _moved(each, device, non_blocking) for name, each in value.items()}
    return value.to(device, non_blocking=non_blocking)

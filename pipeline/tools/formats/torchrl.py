"""Folders that TorchRL's ``ReplayBuffer.dumps`` wrote, of 0.14 and of versions like it: memory-mapped tensors and JSON,
read with numpy alone. ``prefetch.pkl`` in them is not opened.

A row's observation is called ``obs`` here, and what lies under ``next``: ``next_obs``, ``reward``, ``terminated``,
``truncated`` and ``done``, [n] each and not [n, 1]. What stands beside ``next`` under the names of the last four is of
the state before: ``root.done``. ``collector.traj_ids`` tells episodes. Slots (``index``) do not come along; priorities
do. Rows come oldest first; those of several environments (``ndim=2``) step by step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Column, Schema
from pipeline.errors import ConfigError, Damaged
from pipeline.store.files import open_plain
from pipeline.tools.interchange.columns import is_column_dtype
from pipeline.tools.interchange.streams import EPISODE, PRIORITY, About, Rows, Stream, Transitions

NAME = "torchrl"
_ROWS = 4 << 20  # bytes that are read at a time, about
_SINGLE = "_-single-tensor-_"
_OWN_NAMES = {"observation": "obs", "next.observation": "next_obs"}
_FLAGS = ("reward", "terminated", "truncated", "done")


class _Leaf(NamedTuple):
    path: str
    dtype: str
    shape: tuple[int, ...]


class _Dump(NamedTuple):
    """What a folder says."""

    leaves: dict[str, _Leaf]
    """By their names in TorchRL, with dots."""
    slots: int
    dims: int
    """Dimensions of the storage: slots, and environments."""
    envs: int
    filled: int
    """Slots that hold rows."""
    cursor: int
    notes: list[str]

    @property
    def order(self) -> np.ndarray:
        """The slots that hold rows, oldest first."""
        begin = self.cursor % self.slots if self.filled == self.slots else 0
        order: np.ndarray = (begin + np.arange(self.filled)) % max(1, self.slots)
        return order


def recognises(path: str) -> bool:
    """Whether such a folder lies there."""
    return os.path.isfile(os.path.join(path, "storage", "storage_metadata.json"))


def read(path: str) -> Stream:
    """Return the transitions in a folder.

    Raises:
        ConfigError: it holds what are no rows of numbers.
        Damaged: a file is missing or cut.
    """
    dump = _read_dump(path)
    names = _named(dump)
    columns = [Column(new, leaf.dtype, _shape(new, leaf, dump)) for new, leaf in sorted(names.items())]
    schema = Schema(tuple(columns))
    maps = {name: _map(leaf) for name, leaf in names.items()}
    episodes = dump.leaves.get("collector.traj_ids")
    traj = None if episodes is None else _map(episodes)
    priorities, alpha = _priorities(path, dump)
    marks = tuple(
        name for name, there in ((EPISODE, traj is not None or dump.envs > 1), (PRIORITY, alpha is not None)) if there
    )
    width = schema.nbytes * dump.envs

    def batches() -> Iterator[Rows]:
        most = max(1, _ROWS // max(1, width))
        numbering = _Numbering(dump.envs)
        for begin in range(0, dump.filled, most):
            slots = dump.order[begin : begin + most]
            arrays: Arrays = {
                column.name: np.ascontiguousarray(maps[column.name][slots]).reshape(-1, *column.shape)
                for column in schema.columns
            }
            found: Arrays = {}
            if EPISODE in marks:
                found[EPISODE] = traj[slots].reshape(-1).astype(np.int64) if traj is not None else numbering.of(arrays)
            if priorities is not None:
                found[PRIORITY] = np.array(priorities[slots], np.float64)
            yield Rows(arrays, found)

    count = dump.filled * dump.envs
    about = About(capacity=dump.slots * dump.envs, priority_alpha=alpha, notes=dump.notes)
    return Transitions(schema, marks, about, batches, count * schema.nbytes, count)


class _Numbering:
    """Numbers the episodes of several environments, whose rows come step by step, by where they end."""

    def __init__(self, envs: int) -> None:
        self._envs = envs
        self._next = np.arange(envs, dtype=np.int64)

    def of(self, arrays: Arrays) -> np.ndarray:
        """Return the episode of each row."""
        count = len(next(iter(arrays.values())))
        ended = np.zeros(count, np.int64)
        for name in ("terminated", "truncated", "done"):
            if name in arrays:
                ended |= arrays[name].reshape(count, -1).astype(bool).max(axis=1, initial=False)
        steps = ended.reshape(-1, self._envs)
        before = np.cumsum(steps, axis=0) - steps
        numbers: np.ndarray = (self._next + before * self._envs).reshape(-1)
        self._next = self._next + steps.sum(axis=0) * self._envs
        return numbers


def _read_dump(path: str) -> _Dump:
    storage = os.path.join(path, "storage")
    said = _json(os.path.join(storage, "storage_metadata.json"))
    notes: list[str] = []
    try:
        leaves = (
            {_plain(name): _leaf(storage, name, each) for name, each in said["metadata"].items()}
            if said["is_pytree"]
            else _tensordict(storage, "", notes)
        )
        size = int(said["len"])
        writer = _json(os.path.join(path, "writer", "metadata.json"))
        cursor = int(writer.get("cursor", 0))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{storage}: its JSON is not TorchRL's ({error!r})") from None
    if not leaves:
        raise ConfigError(f"{storage}: no tensor is in it", option="path")
    shape = () if said["is_pytree"] else tuple(_json(os.path.join(storage, "meta.json"))["shape"])
    slots = next(iter(leaves.values())).shape[0] if len(shape) == 0 else shape[0]
    envs = prod(shape[1:])
    odd = next((name for name, leaf in leaves.items() if leaf.shape[:1] != (slots,)), None)
    if odd is not None or size % max(1, envs) or not 0 <= size <= slots * envs or not 0 <= cursor <= slots:
        raise Damaged(
            f"{storage}: {size} rows in slots {list(shape) or slots}, cursor {cursor}, cannot be; or {odd} is odd"
        )
    return _Dump(leaves, slots, max(1, len(shape)), envs, size // max(1, envs), cursor, notes)


def _plain(name: str) -> str:
    return "value" if name == _SINGLE else name.replace("/", ".")


def _tensordict(folder: str, prefix: str, notes: list[str]) -> dict[str, _Leaf]:
    """Return the leaves of a folder of a TensorDict by name; what is no tensor is noted."""
    found: dict[str, _Leaf] = {}
    for name, each in _json(os.path.join(folder, "meta.json")).items():
        if not isinstance(each, dict):
            continue
        if "dtype" in each and not each.get("is_nested"):
            found[prefix + name] = _leaf(folder, name, each)
        elif each.get("type") == "TensorDict":
            found.update(_tensordict(os.path.join(folder, name), f"{prefix}{name}.", notes))
        else:
            notes.append(f"{prefix}{name} is no tensor, and did not come along")
    return found


def _leaf(folder: str, name: str, said: dict[str, Any]) -> _Leaf:
    dtype, shape = str(said["dtype"]).removeprefix("torch."), tuple(int(size) for size in said["shape"])
    if {"", ".", ".."} & set(name.split("/")) or os.path.isabs(name) or "\0" in name:
        raise ValueError(f"the tensor {name!r} is not inside the folder")
    if not shape or min(shape) < 0 or not is_column_dtype(dtype):
        raise ValueError(f"the tensor {name!r} is {dtype}{list(shape)}")
    return _Leaf(os.path.join(folder, f"{name}.memmap"), dtype, shape)


def _map(leaf: _Leaf) -> np.ndarray:
    """Return a tensor, read as it is used."""
    column = Column("x", leaf.dtype)
    size = prod(leaf.shape) * column.bits.itemsize
    try:
        with open_plain(leaf.path) as file:
            there = os.fstat(file.fileno()).st_size
            if there != size:
                raise Damaged(f"{leaf.path}: has {there} bytes, where {list(leaf.shape)} of {leaf.dtype} takes {size}")
            return np.memmap(file, column.bits, "r", shape=leaf.shape) if size else np.empty(leaf.shape, column.bits)
    except FileNotFoundError:
        raise Damaged(f"{leaf.path}: is missing") from None


def _named(dump: _Dump) -> dict[str, _Leaf]:
    """Return the leaves by the names that columns are to have."""
    found: dict[str, _Leaf] = {}
    for name, leaf in dump.leaves.items():
        if name in ("index", "collector.traj_ids"):
            continue
        if name in _FLAGS:
            new = f"root.{name}"
        elif name.removeprefix("next.") in _FLAGS:
            new = name.removeprefix("next.")
        else:
            new = _OWN_NAMES.get(name, name)
        if new in found:
            raise ConfigError(f"{leaf.path}: two tensors would be called {new}", option="path")
        found[new] = leaf
    return found


def _shape(name: str, leaf: _Leaf, dump: _Dump) -> tuple[int, ...]:
    shape = leaf.shape[dump.dims :]
    return () if name in _FLAGS and shape == (1,) else shape


def _priorities(path: str, dump: _Dump) -> tuple[np.ndarray | None, float | None]:
    """Return the priorities of all slots, to the power of the exponent, and that; None where there are none."""
    folder = os.path.join(path, "sampler")
    if not os.path.isfile(os.path.join(folder, "sumtree.memmap")):
        return None, None
    said = _json(os.path.join(folder, "sampler_metadata.json"))
    try:
        alpha, capacity = float(said["_alpha"]), int(said["_max_capacity"])
    except (LookupError, TypeError, ValueError) as error:
        raise Damaged(f"{folder}: its JSON is not TorchRL's ({error!r})") from None
    if capacity != dump.slots or dump.envs > 1:
        dump.notes.append(f"priorities are of {capacity} slots, not of {dump.slots}, and did not come along")
        return None, None
    return _map(_Leaf(os.path.join(folder, "sumtree.memmap"), "float64", (capacity,))), alpha


def _json(path: str) -> dict[str, Any]:
    try:
        with open_plain(path) as file:
            return msgspec.json.decode(file.read(), type=dict[str, Any])
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing, so this is no whole dump of TorchRL") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: no JSON object ({error})") from None

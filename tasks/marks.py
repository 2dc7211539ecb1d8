"""What identifies a source: digests of a few of its items, the same in every process."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from pipeline.records import SourceMark

_MARKED = 2**16  # an endless source is marked by items below this index


def digest(item: Any) -> str:
    """Return 16 hex digits that depend on an item's content alone: blake2b of its canonical MessagePack.

    Dicts count in any order of their keys; lists and tuples are one. Dataclasses and msgspec's structs count by
    their fields, arrays and tensors by dtype, shape and bytes. A value of any other kind (an image, an object)
    counts by the name of its type and its length if it has one, never by ``repr``, which may hold an address:
    two such values may share a digest, but none changes its own between processes.
    """
    try:
        plain = msgspec.msgpack.encode(_canonical(item))
    except Exception:  # nested too deep, or its own methods fail: the item counts by its type alone
        plain = type(item).__qualname__.encode()
    return hashlib.blake2b(plain, digest_size=8).hexdigest()


def _canonical(value: Any) -> Any:
    """Return plain values that stand for ``value``: what is no plain value becomes a dict of one entry."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, (bytes, str)):
        return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else hex(value)
    if isinstance(value, (list, tuple)):
        return [_canonical(part) for part in value]
    if isinstance(value, Mapping):
        pairs = [(msgspec.msgpack.encode(_canonical(key)), _canonical(part)) for key, part in value.items()]
        return {"mapping": sorted(pairs, key=operator.itemgetter(0))}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(msgspec.msgpack.encode(_canonical(part)) for part in value)}
    name = type(value).__qualname__
    if isinstance(value, msgspec.Struct):
        return {name: [_canonical(getattr(value, field)) for field in value.__struct_fields__]}
    if dataclasses.is_dataclass(value):
        return {name: [_canonical(getattr(value, field.name)) for field in dataclasses.fields(value)]}
    return _canonical_array(value) or {name: _length(value)}


def _canonical_array(value: Any) -> Any:
    """Return dtype, shape and bytes of an array or tensor, and None for anything else."""
    torch = sys.modules.get("torch")  # never imported here: a tensor at hand has done so
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return {str(value.dtype): [list(value.shape), flat.view(torch.uint8).numpy().tobytes()]}
    if not isinstance(value, (np.ndarray, np.generic)):
        return None
    plain = np.asarray(value)
    content = _canonical(plain.tolist()) if plain.dtype.hasobject else plain.tobytes()
    return {plain.dtype.str: [list(plain.shape), content]}


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:  # whatever a stranger's __len__ raises, it has no length
        return None


def mark_of(kind: str, length: int | None, item: Callable[[int], Any]) -> SourceMark:
    """Return a mark with the digests of the items 0, 1, 2, 4, 8, 16, ... below ``length``.

    An endless source (``length`` None) is marked by its items below 65,536.
    """
    end, index, digests = _MARKED if length is None else length, 0, {}
    while index < end:
        digests[index] = digest(item(index))
        index = max(1, index * 2)
    return SourceMark(kind=kind, length=-1 if length is None else length, digests=digests)

"""Values in JSON, bit for bit: numbers that a person can read wherever JSON can say them, else base64 of their bytes.

A tensor that is all finite numbers or bools is a number or a (nested) list. One with a NaN, an infinity or a complex or
8-bit float, and one of :data:`LARGE` bytes or more, is ``{"base64": "..."}`` of its little-endian bytes.

Of ``info`` JSON cannot say all either. A float that is not finite is ``{"$float": "7ff8000000000000"}``, its 64 bits;
bytes are ``{"$bytes": base64}``, a tuple ``{"$tuple": [...]}``, a mapping with other keys than texts, or with one that
begins with ``$``, ``{"$map": [[key, value], ...]}``, a whole number of more than 64 bits ``{"$int": "0x..."}``, and
text with half a surrogate pair ``{"$text": {"$bytes": ...}}``.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.buffer.transitions.columns import LARGE
from pipeline.store.codec import TensorBytes, item_bytes
from pipeline.store.plain import MARK

BASE64 = "base64"
_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
_READABLE = frozenset({*_NUMPY, "BF16"})


def rows_to_json(dtype: str, array: np.ndarray) -> list[Any]:
    """Return rows [n, ...] of a dtype as safetensors calls it, one value for each."""
    count = len(array)
    raw = np.ascontiguousarray(array)
    if dtype not in _READABLE or count == 0 or raw.nbytes // count >= LARGE:
        return [_base64(raw[at]) for at in range(count)]
    numbers = _numbers(dtype, raw)
    values: list[Any] = numbers.tolist()
    if numbers.dtype.kind == "f":
        for at in np.flatnonzero(~np.isfinite(numbers).reshape(count, -1).all(axis=1)).tolist():
            values[at] = _base64(raw[at])
    return values


def tensor_to_json(tensor: TensorBytes) -> dict[str, Any]:
    """Return a tensor with its dtype and shape: ``data`` in row-major order, or ``base64``."""
    flat = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)
    value: dict[str, Any] = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    if tensor.dtype in _READABLE and not (tensor.dtype == "U8" and len(flat) >= LARGE):
        numbers = _numbers(tensor.dtype, flat.view(_held(tensor.dtype)))
        if numbers.dtype.kind != "f" or np.isfinite(numbers).all():
            return {**value, "data": numbers.tolist()}
    return {**value, **_base64(flat)}


def rows_from_json(dtype: str, shape: Sequence[int], values: Sequence[Any]) -> np.ndarray:
    """Undo :func:`rows_to_json`; [n, *shape] in the dtype in which bits are held.

    Raises:
        ValueError, TypeError, OverflowError: they are not of this dtype or shape.
    """
    held = _held(dtype)
    coded = [at for at, value in enumerate(values) if type(value) is dict]
    if not coded:
        return _from_numbers(dtype, values, (len(values), *shape))
    found = np.empty((len(values), *shape), held)
    for at in coded:
        found[at] = _bytes_of(values[at], held).reshape(tuple(shape))
    others = [at for at, value in enumerate(values) if type(value) is not dict]
    if others:
        found[others] = _from_numbers(dtype, [values[at] for at in others], (len(others), *shape))
    return found


def tensor_from_json(value: Any) -> TensorBytes:
    """Undo :func:`tensor_to_json`.

    Raises:
        ValueError, TypeError, LookupError, OverflowError: it is none.
    """
    dtype, shape = value["dtype"], tuple(value["shape"])
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"a shape is said to be {list(shape)}")
    if "data" in value:
        array = _from_numbers(dtype, value["data"], (math.prod(shape),))
    else:
        array = _bytes_of(value, _held(dtype))
    if array.size != math.prod(shape):
        raise ValueError(f"{array.size} values are there for the shape {list(shape)}")
    return TensorBytes(dtype, shape, array, item_bytes(dtype))


def _held(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype in which bits of a dtype are held."""
    name = _NUMPY.get(dtype)
    return np.dtype(name if name is not None else {1: "u1", 2: "<i2", 8: "<c8"}[item_bytes(dtype)])


def _numbers(dtype: str, array: np.ndarray) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


def _from_numbers(dtype: str, values: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "BF16":
        bits = np.array(values, np.float32).view(np.uint32)
        if (bits & 0xFFFF).any():
            raise ValueError("a number is no bfloat16")
        return (bits >> 16).astype(np.uint16).view(np.int16).reshape(shape)
    held = _held(dtype)
    if not len(values):
        return np.empty(shape, held)
    given = np.array(values)
    if given.size and given.dtype.kind not in {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[held.kind]:
        # Whole numbers of more than 63 bits beside others look like floats to numpy.
        plain = np.array(values, object).reshape(-1)
        if held.kind not in "iu" or any(type(each) is not int for each in plain):
            raise TypeError(f"{given.dtype} values are there, where {dtype} is needed")
    return np.array(values, held).reshape(shape)


def _base64(array: np.ndarray) -> dict[str, str]:
    return {BASE64: base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()}


def _bytes_of(value: Any, held: np.dtype[Any]) -> np.ndarray:
    raw = base64.b64decode(value[BASE64], validate=True)
    return np.frombuffer(raw, held) if raw else np.empty(0, held)


def plain_to_json(value: Any) -> Any:
    """Return what :func:`pipeline.store.plain.to_plain` gave in terms that JSON keeps."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [plain_to_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if MARK in value:
        kind, content = value[MARK]
        return {f"${kind}": plain_to_json(content)}
    if any(key.startswith("$") for key in value):
        return {"$map": [[key, plain_to_json(each)] for key, each in value.items()]}
    return {key: plain_to_json(each) for key, each in value.items()}


def plain_from_json(value: Any) -> Any:
    """Undo :func:`plain_to_json`.

    Raises:
        ValueError: it has a ``$`` that is none of these.
    """
    if isinstance(value, list):
        return [plain_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: plain_from_json(each) for key, each in value.items()}
    if len(value) != 1:
        raise ValueError(f"{marks[0]!r} stands beside other keys")
    ((mark, content),) = value.items()
    if mark == "$float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if mark == "$bytes":
        return base64.b64decode(content, validate=True)
    if mark in ("$tuple", "$map", "$int", "$text"):
        inner = plain_from_json(content)
        if mark == "$map" and all(type(key) is str and key != MARK for key, _ in inner):
            return dict(inner)
        return {MARK: [mark[1:], inner]}
    raise ValueError(f"{mark!r} is not known")

"""Frames of a LeRobot dataset as Arrow tables: the types that ``datasets`` gives its features."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from pipeline.tools.formats.arrow_rows import value_type
from pipeline.tools.interchange.columns import stored_of


def data_schema(pa: Any, features: dict[str, dict[str, Any]]) -> Any:
    """Return the Arrow schema of frames, with what ``datasets`` wants to know of them."""
    fields: list[Any] = []
    told: dict[str, Any] = {}
    for name, feature in features.items():
        dtype, shape = feature["dtype"], tuple(feature["shape"])
        if dtype == "image":
            kind, told[name] = pa.struct([("bytes", pa.binary()), ("path", pa.string())]), {"_type": "Image"}
        else:
            value = {"dtype": dtype, "_type": "Value"}
            kind = _list_type(pa, value_type(pa, stored_of(dtype)), shape)
            if shape == (1,):
                told[name] = value
            elif len(shape) == 1:
                told[name] = {"feature": value, "length": shape[0], "_type": "Sequence"}
            else:
                told[name] = {"shape": list(shape), "dtype": dtype, "_type": f"Array{len(shape)}D"}
        fields.append(pa.field(name, kind))
    said = msgspec.json.encode({"info": {"features": told}})
    return pa.schema(fields, metadata={"huggingface": said})


def _list_type(pa: Any, value: Any, shape: tuple[int, ...]) -> Any:
    if shape == (1,):
        return value
    if len(shape) == 1:
        return pa.list_(value, shape[0])
    for _ in shape:
        value = pa.list_(value)
    return value


def nested_lists(pa: Any, flat: Any, count: int, shape: tuple[int, ...]) -> Any:
    """Return ``count`` rows of a shape as Arrow has them for LeRobot, of their numbers."""
    if shape == (1,):
        return flat
    if len(shape) == 1:
        return pa.FixedSizeListArray.from_arrays(flat, shape[0])
    return lists(pa, flat, count, shape)


def lists(pa: Any, flat: Any, count: int, shape: tuple[int, ...]) -> Any:
    """Return ``count`` lists of a shape, each as long as it says, of their numbers."""
    sizes = [count, *shape]
    for at in range(len(shape), 0, -1):
        number = int(np.prod(sizes[:at], dtype=np.int64))
        flat = pa.ListArray.from_arrays(pa.array(np.arange(number + 1, dtype=np.int32) * sizes[at]), flat)
    return flat

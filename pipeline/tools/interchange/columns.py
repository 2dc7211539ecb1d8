"""Columns as bytes with a dtype of safetensors, and back."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.buffer.transitions.bodies import stored_name
from pipeline.buffer.transitions.columns import Column
from pipeline.store.codec import TensorBytes, dtype_name

_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
    " complex64"
)
_OF_STORED = {dtype_name(getattr(torch, name)): name for name in _NAMES.split()}


def dtype_of_column(stored: str) -> str:
    """Return what a column calls the dtype that safetensors calls ``stored``."""
    return _OF_STORED[stored]


def stored_of(dtype: str) -> str:
    """Return what safetensors calls the dtype of a column."""
    return stored_name(Column("x", dtype))


def tensor_of_column(column: Column, array: np.ndarray) -> TensorBytes:
    """Return rows [n, ...] of a column as bytes."""
    array = np.ascontiguousarray(array)
    return TensorBytes(stored_name(column), array.shape, array, array.itemsize)


def column_of_tensor(column: Column, tensor: TensorBytes, count: int) -> np.ndarray:
    """Return rows [count, ...] of a column, of their bytes.

    Raises:
        ValueError: they are of another dtype or shape.
    """
    shape = (count, *column.shape)
    if tensor.dtype != stored_name(column) or tuple(tensor.shape) != shape:
        raise ValueError(f"column {column}: {tensor.dtype}{list(tensor.shape)} is there, {list(shape)} was expected")
    flat = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)
    return flat.view(column.bits).reshape(shape)


def is_stored(dtype: str) -> bool:
    """Whether it is a dtype that safetensors knows, and columns do."""
    return dtype in _OF_STORED


def is_column_dtype(dtype: str) -> bool:
    """Whether it is a dtype that columns know."""
    return dtype in _OF_STORED.values()

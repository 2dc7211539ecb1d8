"""Where the bytes of a storage lie."""

from __future__ import annotations

import mmap
import platform
import sys
from math import prod
from typing import Any, Protocol

import numpy as np

from pipeline.errors import ConfigError
from pipeline.store.memory import available_memory

_LINUX = {"x86_64": 0x4000, "aarch64": 0x4000}
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", _LINUX.get(platform.machine(), 0) if sys.platform == "linux" else 0)
"""More addresses than there is memory may be had; Python has the name since 3.13."""


class Memory(Protocol):
    """Gives out arrays whose pages come when they are first written."""

    def check(self, nbytes: int, what: str) -> None:
        """Refuse what cannot fit, before it is tried.

        Raises:
            ConfigError: with the number of bytes.
        """
        ...

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array of zeros: what no column fills up goes to the disk too."""
        ...


class ProcessMemory:
    """Memory of this process. Nothing is taken before it is written: a buffer that is 1% full takes 1%."""

    def check(self, nbytes: int, what: str) -> None:
        free = available_memory()
        if nbytes > free:
            raise ConfigError(
                f"{what}: {nbytes:,} bytes of memory are needed and {free:,} can be had; choose a smaller capacity, or "
                "smaller dtypes",
                option="capacity",
            )

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.zeros(shape, dtype)  # no page is touched for that


class SparseMemory:
    """Memory of this process for a few of many rows, however many these are: nothing is promised beforehand, and what
    is written to takes small pages, where :class:`ProcessMemory` may be given 2 MB for a row."""

    def check(self, nbytes: int, what: str) -> None:
        """Of what is never written nobody need have room."""

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return np.zeros(shape, dtype)
        try:
            mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"capacity={shape[0]}, {name}: addresses for {nbytes:,} bytes cannot be had ({error}); "
                "raise the limit of address space (ulimit -v)",
                option="capacity",
            ) from None
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
        return np.frombuffer(mapped, np.uint8).view(dtype).reshape(shape)

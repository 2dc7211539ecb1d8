"""Where the bytes of a storage lie."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from pipeline.errors import ConfigError
from pipeline.store.memory import available_memory


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

"""Connections to the key-value store of a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_CONNECTS_S = 20.0
"""Seconds after which a store that does not answer has ended."""


class KeyStore(Protocol):
    """What is needed of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> Any: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> Any: ...

    def check(self, keys: list[str], /) -> bool: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...


class Connections:
    """Connections to a store, each used by one thread at a time: while one waits, another may look.

    They are kept, as a new one takes a while: torch asks the name service for the address, which may be slow to answer.
    Where the store has ended, torch tries to reach it for twice the store's own timeout, which is half an hour by
    default: so connections have one of their own.
    """

    def __init__(self, given: KeyStore, timeout_s: float) -> None:
        """Args:
        given: the store; its own timeout stays what it is.
        timeout_s: seconds after which at the latest it is given up to reach it again.
        """
        self._given = given
        self._more: Callable[[], KeyStore] | None = getattr(given, "clone", None)
        self._timeout = timedelta(seconds=max(0.001, min(timeout_s, _CONNECTS_S) / 2))
        self._free: list[KeyStore] = []
        self._lock = threading.Lock()

    def use(self, do: Callable[[KeyStore], T]) -> T:
        """Do something with a connection; after an error it is not used again."""
        if self._more is None:
            return do(self._given)
        with self._lock:
            store = self._free.pop() if self._free else None
        if store is None:
            store = self._new(self._more)
        done = do(store)
        with self._lock:
            self._free.append(store)
        return done

    def _new(self, more: Callable[[], KeyStore]) -> KeyStore:
        store = more()
        # Of a store within one process a clone is the store itself: its timeout is its owner's, and it does not end.
        if _innermost(store) is not _innermost(self._given) and hasattr(store, "set_timeout"):
            store.set_timeout(self._timeout)
            self._more = getattr(store, "clone", more)  # what is cloned of it has its timeout
        return store


def _innermost(store: Any) -> Any:
    """Return the store that one which puts something before each key, or several of such, speaks with."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store

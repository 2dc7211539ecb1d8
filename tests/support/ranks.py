"""Ranks as threads of one process, over torch's store for such."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from functools import partial
from typing import Any, TypeVar

import torch.distributed

from pipeline.distributed import Ranks
from tests.support.gone import GoneStore

T = TypeVar("T")


def ranks_of(size: int, *, timeout_s: float = 60.0, gone: Container[int] = ()) -> list[Ranks]:
    """Return the ranks of a new group; nobody waits for those that are gone."""
    group: Any = torch.distributed
    store: Any = GoneStore(group.HashStore(), lambda _, rank: rank in gone)
    return [Ranks(store, rank, size, timeout_s=timeout_s) for rank in range(size)]


def on_ranks(size: int, do: Callable[[Ranks], T], *, timeout_s: float = 60.0) -> list[T | BaseException]:
    """Call ``do`` on every rank of a new group, at the same time; return by rank what it gave, or raised. One that is
    done with it is gone: the time limit is over at once for who waits for it."""
    gone = set[int]()

    def run(ranks: Ranks) -> T:
        try:
            return do(ranks)
        finally:
            gone.add(ranks.rank)

    return at_once([partial(run, ranks) for ranks in ranks_of(size, timeout_s=timeout_s, gone=gone)])


def at_once(calls: list[Callable[[], T]]) -> list[T | BaseException]:
    """Call all of them at the same time; return what each gave, or raised."""
    found: list[Any] = [None] * len(calls)

    def run(rank: int, call: Callable[[], T]) -> None:
        try:
            found[rank] = call()
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank, call)) for rank, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def fine(found: list[T | BaseException]) -> list[T]:
    """Return what calls gave; raise the first error that one raised."""
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found  # type: ignore[return-value]

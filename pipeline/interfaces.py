"""Every seam of the library on one page.

A part that is to be replaced implements one of these. Selectors, sources and storages have a suite that every
implementation passes, in ``tests/conformance``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from pipeline.records import Item, Rollout, SourceMark

# A rollout function: ``async def solve(item, ctx) -> Rollout``.
Runner: TypeAlias = Callable[[Item, Any], Awaitable[Rollout]]


@runtime_checkable
class Source(Protocol):
    """An addressable sequence of items, finite or endless.

    ::

        class Squares:
            def item(self, index):
                return {"n": index, "answer": index * index}

            def length(self):
                return None  # endless

            def mark(self):
                return SourceMark(kind="squares")
    """

    def item(self, index: int) -> Any:
        """Return the content of item ``index``, the same at each call."""
        ...

    def length(self) -> int | None:
        """Return how many items an epoch has, or None if the source never ends."""
        ...

    def mark(self) -> SourceMark:
        """Return what identifies this source, so that a resumed run notices another one."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """What can be attached: its state goes into every generation.

    ::

        pipe.attach(model=model, optimizer=optimizer)
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return nested dicts, lists and tuples of tensors and plain values."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Take back what :meth:`state_dict` gave."""
        ...


class Engine(Protocol):
    """Where attempts run.

    ::

        async with engine:
            rollout = await engine.run(task, item, ctx)
    """

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *exc: Any) -> bool | None: ...

    def run(self, task: Any, item: Item, ctx: Any) -> Awaitable[Rollout]:
        """Run one attempt and return what the runner returned; its errors pass through."""
        ...


class Selector(Protocol):
    """Chooses among finished groups by key and version; never sees data. Not called concurrently.

    ::

        selector.add(uid=7, version=3)
        first = selector.take(2)  # removed from the selector
    """

    def add(self, uid: int, version: int, *, first: bool = False) -> None:
        """Take in a key, before its equals if ``first``. Costs O(1), whatever is held."""
        ...

    def remove(self, uid: int) -> None:
        """Forget a key that was added."""
        ...

    def take(self, count: int) -> list[int]:
        """Remove and return up to ``count`` keys in this selector's order."""
        ...

    def __len__(self) -> int: ...


class Storage(Protocol):
    """Holds payloads by (uid, member).

    ::

        storage.put(7, 0, blob, None)
        blob, location = storage.get(7)[0]
        storage.discard(7)
    """

    def put(self, uid: int, member: int, blob: bytes | None, location: Any) -> None: ...

    def get(self, uid: int) -> Mapping[int, tuple[bytes | None, Any]]: ...

    def discard(self, uid: int) -> None: ...

    def __contains__(self, uid: int) -> bool: ...

    def __len__(self) -> int: ...

"""Every seam of the library on one page.

A part that is to be replaced implements one of these. Selectors, sources and storages have a suite that every
implementation passes, in ``tests/conformance``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from pipeline.records import TRAIN, Item, Rollout, SourceMark

# A rollout function: ``async def solve(item, ctx) -> Rollout``.
Runner: TypeAlias = Callable[[Item, Any], Awaitable[Rollout]]
# One for an engine that runs it in another process.
PlainRunner: TypeAlias = Callable[[Item, Any], Rollout]


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
class LearningSource(Source, Protocol):
    """A source that is told what its groups came to, such as a pool that prefers what is neither easy nor hopeless.

    ::

        class Pool(SequenceSource):
            def feedback(self, index, reward):
                self.solved[index] = reward

    It is told once for each group that is finished, and of those that a filter then rejects as well, in an order that
    the journal keeps: after a resume it is told all of it again, in that order, before anything is drawn. So its state
    needs no saving, if nothing but ``feedback`` changes it. What ``item`` gives may hang on it: the content of an item
    that was claimed is kept in the journal.
    """

    def feedback(self, index: int, reward: float, /) -> Any:
        """Take in the mean reward of a finished group of item ``index``."""
        ...


@runtime_checkable
class ChoosingSource(LearningSource, Protocol):
    """A source that learns and says itself which item is next, such as ``tasks.prompts.DifficultyPool``."""

    def choose(self, seed: int, epoch: int, position: int, /) -> int:
        """Return the index of the item that is drawn at a position of an epoch.

        It is asked again until the draw is recorded, so it changes nothing: what it returns hangs on these three and on
        what it was told by ``feedback``. The index is kept in the journal.
        """
        ...


@runtime_checkable
class Stream(Protocol):
    """Items without an index: any async iterator, such as an async generator. Its items are kept in the journal.

    ::

        async def questions():
            while (line := await queue.get()) is not None:
                yield {"prompt": line}


        Task("chat", source=questions(), run=solve)

    The next item is asked for when there is room for it and it is this task's turn; until it comes, the other tasks
    are drawn. When the iteration ends, the task ends as with a finite source. After a resume, the iterator that the new
    task brings is asked for what comes next: what was taken before lies in the journal.
    """

    def __aiter__(self) -> AsyncIterator[Any]: ...


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


class AttemptFacts(msgspec.Struct, frozen=True, array_like=True):
    """What an attempt's context says to an engine that runs it in another process."""

    member: int
    attempt: int
    version: int
    key: str
    stream: tuple[int, ...]
    """What seeds ``ctx.rng``."""
    kind: str = TRAIN
    part: bytes | None = None
    """The blob of what an earlier attempt kept."""
    rows: bool = False
    """Whether what it makes are rows of a buffer."""


class Engine(Protocol):
    """Where attempts run.

    ::

        engine.check(task)
        async with engine:
            rollout = await engine.run(task, item, ctx)

    An attempt that is lost with the process that it ran in raises :class:`~pipeline.errors.WorkerDied`: that is no
    failure. What cannot be run at all may be returned as a :class:`~pipeline.errors.RunnerError`: that ends the run.
    """

    def check(self, task: Any) -> None:
        """Raise ConfigError if this engine cannot run ``task``."""
        ...

    def slots(self, tasks: Sequence[Any]) -> int | None:
        """Return how many attempts at ``tasks`` can run at once; None: any number."""
        ...

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

    def discard_members(self, uid: int, members: Collection[int]) -> None: ...

    def __len__(self) -> int: ...

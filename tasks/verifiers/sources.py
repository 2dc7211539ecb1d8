"""What environments play, by index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.errors import SourceError
from pipeline.records import SourceMark
from tasks.marks import digest, mark_of
from tasks.sources import SequenceSource


class Rows(SequenceSource):
    """The rows that an ``Environment`` trains on, in its data set's order."""

    def __init__(self, env: Any) -> None:
        super().__init__(env.get_dataset(), "verifiers")


class TaskItems:
    """The tasks of a taskset of ``verifiers.v1``, each an item; endless where the taskset is.

    Tasks of a finite taskset are loaded once. Of an endless one the newest alone is held: an earlier one is come by
    anew from the beginning, so it has to load the same tasks each time, as every taskset does that can be evaluated
    again.
    """

    def __init__(self, taskset: Any) -> None:
        self._taskset = taskset
        bounded = taskset.bounded if hasattr(taskset, "bounded") else not taskset.INFINITE  # 0.3 has the constant alone
        self._tasks: list[Any] | None = list(taskset) if bounded else None
        self._next: Iterator[Any] = iter(())
        self._at, self._held = -1, None

    def item(self, index: int) -> Any:
        """Return task ``index``, from 0.

        Raises:
            SourceError: there is no such task.
        """
        if self._tasks is not None:
            if not 0 <= index < len(self._tasks):
                raise SourceError(f"{self!r} has {len(self._tasks)} items, from 0; item {index} was asked for")
            return self._tasks[index]
        if index < self._at or self._at < 0:
            self._next, self._at = iter(self._taskset), -1
        while self._at < index:
            try:
                self._held = next(self._next)
            except StopIteration:
                raise SourceError(
                    f"{self!r} says that it is endless, and ended before item {index}; set INFINITE = False"
                ) from None
            self._at += 1
        return self._held

    def length(self) -> int | None:
        """Return how many tasks there are; None: there is no end."""
        return None if self._tasks is None else len(self._tasks)

    def mark(self) -> SourceMark:
        """Return the length, and the digests of a few tasks' contents; of an endless taskset, that of its first."""
        if self._tasks is None:
            return SourceMark("verifiers", -1, {0: digest(self._content(0))})
        return mark_of("verifiers", len(self._tasks), self._content)

    def _content(self, index: int) -> Any:
        return self.item(index).data.model_dump(mode="json", exclude_none=True)

    def __repr__(self) -> str:
        return f"TaskItems({type(self._taskset).__name__})"

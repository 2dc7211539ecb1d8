"""Finished groups of several tasks, of which every batch takes a given number each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pipeline.buffer.buffer import Choice, GroupBuffer
from pipeline.buffer.selectors import FifoSelector, FreshestSelector, StalestSelector, StrictSelector
from pipeline.interfaces import Selector


class MixedBuffer(GroupBuffer):
    """A :class:`GroupBuffer` with a selector for each task, in the order of the tasks in a batch.

    Strict order is kept task by task: a group waits for those of its own task that were drawn before it.
    """

    def __init__(
        self,
        *,
        order: Literal["finished", "strict"],
        selector: Choice,
        task_of: Callable[[int], str],
        places: Callable[[int], Mapping[str, int]],
    ) -> None:
        """Args:
        order, selector: as for :class:`GroupBuffer`.
        task_of: the task of a group that is claimed and has not ended.
        places: how many groups of each task a batch of so many groups takes now.
        """
        super().__init__(order="finished", selector="stalest")
        self._make: Callable[[], Selector] = StrictSelector
        if order != "strict":
            made: dict[Choice, Callable[[], Selector]] = {"stalest": StalestSelector, "freshest": FreshestSelector}
            self._make = made.get(selector, FifoSelector)
        self._task_of, self._places = task_of, places
        self._parts: dict[str, Selector] = {}
        self._task: dict[int, str] = {}  # of what is held, and in strict order of what is waited for

    def add(self, uid: int, version: int) -> None:
        self._versions.add(uid, version)
        self._part(uid).add(uid, version)

    def put_back(self, groups: Sequence[tuple[int, int]]) -> None:
        for uid, version in reversed(groups):
            self._versions.add(uid, version, first=True)
            self._part(uid).add(uid, version, first=True)

    def remove(self, uid: int) -> None:
        self._peak = self.peak
        self._versions.remove(uid)
        self._parts[self._task.pop(uid)].remove(uid)

    def opened(self, uid: int) -> None:
        if self._make is StrictSelector:
            part = self._part(uid)
            assert isinstance(part, StrictSelector)
            part.opened(uid)

    def closed(self, uid: int) -> None:
        task = self._task.get(uid) if self._make is StrictSelector else None
        if task is not None:
            part = self._parts[task]
            assert isinstance(part, StrictSelector)
            part.closed(uid)
            if uid not in self._versions:
                del self._task[uid]

    def ready(self, count: int) -> bool:
        if len(self._versions) < count:
            return False
        places = self._places(count)
        return sum(places.values()) == count and all(self._ready_of(task) >= n for task, n in places.items() if n)

    def take(self, count: int) -> list[int]:
        self._peak = self.peak
        taken: list[int] = []
        for task, places in self._places(count).items():
            part = self._parts.get(task)
            if part is not None:
                taken += part.take(places)
        for uid in taken:
            self._versions.remove(uid)
            del self._task[uid]
        return taken

    def _part(self, uid: int) -> Selector:
        task = self._task[uid] = self._task_of(uid)
        part = self._parts.get(task)
        if part is None:
            part = self._parts[task] = self._make()
        return part

    def _ready_of(self, task: str) -> int:
        part = self._parts.get(task)
        if part is None:
            return 0
        return part.ready() if isinstance(part, StrictSelector) else len(part)

"""Stand-ins: a trainer whose weights remember what they were trained on, and a source of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipeline.buffer import Batch, Group
from pipeline.records import SourceMark

ItemKey = tuple[str, int, int]
"""Task, epoch and index of an item."""


def item_key(group: Group) -> ItemKey:
    """Return what names a group's item in any run of the same tasks."""
    return group.task, group.epoch, group.index


class FakeTrainer:
    """Knows every batch that its weights were trained on, and goes back with the checkpoint.

    ::

        pipe.attach(trainer=trainer)
        async for batch in pipe.batches(groups=4):
            trainer.step(batch)
    """

    def __init__(self, key: Callable[[Group], Any] = item_key) -> None:
        """Args:
        key: what is remembered of a group; plain values that equal those of another run.
        """
        self.batches: list[list[Any]] = []
        self.stalest = 0
        """Staleness of the stalest batch, in this life."""
        self._key = key
        self._weight = torch.zeros(4, dtype=torch.float64)

    def step(self, batch: Batch) -> None:
        """Train on ``batch``.

        Raises:
            AssertionError: it is not the next one for these weights.
        """
        assert batch.step == len(self.batches) + 1, f"step {batch.step} follows step {len(self.batches)}"
        assert float(self._weight[0]) == len(self.batches), "the weights and the record of batches differ"
        self.batches.append([self._key(group) for group in batch])
        self.stalest = max(self.stalest, batch.staleness)
        self._weight += 1

    @property
    def groups(self) -> list[Any]:
        """The key of every group that was trained on."""
        return [key for batch in self.batches for key in batch]

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the record."""
        return {"batches": self.batches, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a record."""
        self.batches = [list(batch) for batch in state["batches"]]
        self._weight.copy_(state["weight"])


class Numbers:
    """A source of ``{"n": index}``; endless without a count."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count

    def item(self, index: int) -> dict[str, int]:
        """Return the item with that index."""
        return {"n": index}

    def length(self) -> int | None:
        """Return how many there are."""
        return self.count

    def mark(self) -> SourceMark:
        """Return what identifies it."""
        return SourceMark("numbers", -1 if self.count is None else self.count)

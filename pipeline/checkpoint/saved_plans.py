"""What a manifest says of a run's tasks, as an order of draws needs to know it; items are nobody's to ask for here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeline.checkpoint.manifest import Manifest
from pipeline.records import SourceMark
from pipeline.sampler import DrawPlan

_SOURCE = re.compile(r"(.*) \((?:endless|(\d+) items), first item's digest .*\)")


def source_as_saved(described: Mapping[str, Any]) -> SourceMark | None:
    """Return the mark of a task's source, without its digests, as a manifest describes the task; None: it does not."""
    found = _SOURCE.fullmatch(str(described.get("source", "")))
    return None if found is None else SourceMark(found[1], -1 if found[2] is None else int(found[2]))


class SavedSource:
    """A source of which no item can be had."""

    def __init__(self, mark: SourceMark) -> None:
        self._mark = mark

    def item(self, index: int) -> Any:
        raise LookupError(index)

    def length(self) -> int | None:
        """How many items it had when the generation was saved."""
        return None if self._mark.length < 0 else self._mark.length

    def mark(self) -> SourceMark:
        """What identified it."""
        return self._mark


def plans_as_saved(manifest: Manifest, marks: Mapping[str, SourceMark]) -> list[DrawPlan]:
    """Return the tasks that a generation was saved with, in their order; ``marks``: of sources, as far as known."""
    plans = []
    for name, task in manifest.tasks.items():
        mark = marks.get(name) or source_as_saved(task) or SourceMark("", 0)
        epochs, share, shuffle = task.get("epochs"), float(task.get("share", 1.0)), bool(task.get("shuffle", False))
        plans.append(DrawPlan(name, SavedSource(mark), share, epochs, shuffle))
    return plans

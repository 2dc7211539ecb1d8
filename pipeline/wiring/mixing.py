"""``mixing="batch"``: every batch is divided among the tasks by their shares.

A fast task must not take the room that a slow one needs, so what may be outstanding is divided as a batch is: as long
as a batch may be begun at all, each task may have as many groups outstanding as that batch takes of it. Hence a batch
that is waited for can always come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError
from pipeline.ledger import LEASED, WAITING, Entry
from pipeline.sampler import Draw
from pipeline.sampler.quotas import divide, due

if TYPE_CHECKING:
    from pipeline.wiring.state import RunState


class Mixing:
    """Divides batches, and what may be outstanding, among the tasks of a run."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._shares = {name: task.share for name, task in state.tasks.items()}
        self._known: tuple[int, dict[str, int]] = (-1, {})
        self._divided: dict[str, int] = {}

    def check(self, groups: int) -> None:
        """Raise if batches of ``groups`` would never hold a group of some task.

        Raises:
            ConfigError: they would not; names the task.
        """
        for name, places in divide(groups, self._shares, {}).items():
            if not places:
                raise ConfigError(
                    f"mixing='batch': a batch of {groups} groups has no place for task {name!r} with its share of "
                    f"{self._shares[name]:g} in {sum(self._shares.values()):g}; ask for more groups, raise its share=, "
                    "or use mixing='long_run'",
                    option="mixing",
                )

    def places(self, groups: int) -> Mapping[str, int]:
        """Return how many groups of each task a batch of ``groups`` takes now, tasks in their order."""
        counts = self._state.ledger.counts
        open_tasks = set(self._state.sampler.open_tasks())
        most = {
            name: sum(counts[name]) - counts[name][LEASED] if name in counts else 0
            for name in self._shares
            if name not in open_tasks
        }
        # It is asked for at every group that finishes, and changes only where sources end.
        if self._known != (groups, most):
            self._known, self._divided = (groups, most), divide(groups, self._shares, most)
        return self._divided

    def draw(self, limit: int) -> Draw | None:
        """Return the next item to claim while ``limit`` groups may be outstanding, or None if none may be."""
        state = self._state
        limits = self._limits(limit)
        tasks = [name for name in self._drawn() if self._outstanding(name) < limits[name]]
        name = due(tasks, limits if not self._size else self.places(self._size), state.sampler.mixture.drawn)
        return None if name is None else state.sampler.draw_of(name)

    def may_claim(self, limit: int) -> bool:
        """Whether :meth:`draw` would return an item."""
        limits = self._limits(limit)
        return any(self._outstanding(name) < limits[name] for name in self._drawn())

    def _drawn(self) -> list[str]:
        """Tasks that may be drawn: a stream that has been asked for an item already is not."""
        sampler = self._state.sampler
        return [name for name in sampler.open_tasks() if name not in sampler.awaited]

    def may_rerun(self, entry: Entry, limit: int) -> bool:
        """Whether a group that waits may start again: what its task has in hand leaves room for it."""
        state, most = self._state, self._limits(limit)[entry.task]
        outstanding = self._outstanding(entry.task)
        if outstanding <= most:
            return True
        if state.in_draw_order:
            entries = state.ledger.entries.values()
            return sum(each.uid < entry.uid and each.task == entry.task for each in entries) < most
        return outstanding - state.ledger.counts[entry.task][WAITING] < most

    @property
    def _size(self) -> int:
        state = self._state
        return state.asked or state.options.batch_groups or state.progress.batch_groups

    def _outstanding(self, task: str) -> int:
        counts = self._state.ledger.counts.get(task)
        return 0 if counts is None else sum(counts)

    def _limits(self, limit: int) -> dict[str, int]:
        """Divide what may be outstanding as a batch is divided."""
        state, size = self._state, self._size
        if not size:  # nobody has asked for a batch yet
            return dict(self.places(limit))
        # What is leased comes on top: a batch is begun when it is waited for, whatever the one before consisted of.
        counts = state.ledger.counts
        new = limit - state.ledger.count(LEASED)
        leased = {name: counts[name][LEASED] if name in counts else 0 for name in self._shares}
        on_top = {name: leased[name] + places * new // size for name, places in self.places(size).items()}
        if state.options.strategy == "synchronous":
            return on_top
        # Once a source has ended, its places are what is left of it without what is leased.
        ended = self._shares.keys() - state.sampler.open_tasks()
        return {
            name: max(places * limit // size, on_top[name] if name in ended else 0)
            for name, places in self.places(size).items()
        }

"""What a new run whose rollouts fill a buffer has beside its rows, where a tool makes it of others: it goes on as one
that has played all of these, and whose draws begin anew."""

from __future__ import annotations

import os
import socket
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.checkpoint.manifest import Manifest
from pipeline.ledger.entry import TaskTotals
from pipeline.records import AnyEvent, Inherited, Opened
from pipeline.sampler import Progress
from pipeline.tools.interchange.rollouts_in import generation_files
from pipeline.tools.played_runs import ITEMS_FILE, TASKS_FILE, UNKNOWN, EveryItem

Ints = np.ndarray


class Playing(NamedTuple):
    """What belongs to the items of one new run.

    Attributes:
        every: all that are read.
        taken: which of these, by rising place.
        uids: what each is called now.
    """

    every: EveryItem
    taken: Ints
    uids: Ints

    @classmethod
    def of(cls, every: EveryItem, episodes: Ints) -> Playing:
        """Return what belongs to the items of some episodes, which are given by their places among all."""
        taken = np.unique(every.of[episodes])
        return cls(every, taken, every.called_now(taken))

    @property
    def renumbered(self) -> int:
        """How many items are called otherwise now."""
        return int((self.uids != self.every.uid[self.taken]).sum())

    def files(self, numbers: Ints, episodes: Ints, step: int) -> dict[str, bytes | memoryview]:
        """Return the files of its generation.

        Args:
            numbers: [n] what its episodes are called.
            episodes: [n] their places among all.
            step: of its weights.
        """
        names = sorted({task for task in self.every.task if task})
        place = {name: at for at, name in enumerate(names)} | {"": UNKNOWN}
        items = self.every.of[episodes]
        own = np.searchsorted(self.taken, items)
        tasks = np.array([place[self.every.task[item]] for item in items.tolist()], np.int64)
        table = np.column_stack([numbers, self.uids[own], self.every.part[items], self.every.uid[items], tasks])
        found: dict[str, bytes | memoryview] = dict(generation_files(Progress(), step))
        found[ITEMS_FILE] = table.astype(np.int64).tobytes()
        found[TASKS_FILE] = msgspec.json.encode(names) + b"\n"
        return found

    def told(self) -> list[list[Any]]:
        """Return what each item is called, its part and uid there, and its task; for people."""
        parts, uids = self.every.part[self.taken].tolist(), self.every.uid[self.taken].tolist()
        tasks = [self.every.task[at] for at in self.taken.tolist()]
        return [list(each) for each in zip(self.uids.tolist(), parts, uids, tasks, strict=True)]

    def events(self, rows: Ints, step: int) -> list[AnyEvent]:
        """Return how its journal begins; ``rows``: by item, how many it has."""
        runs = self.every.runs
        shares = {name: share for run in reversed(runs) for name, share in run.shares.items()}
        totals: dict[str, TaskTotals] = {}
        for at, count in zip(self.taken.tolist(), rows.tolist(), strict=True):
            name = self.every.task[at]
            if name:
                task = totals.setdefault(name, TaskTotals(dropped={}))
                task.claimed, task.retired = task.claimed + 1, task.retired + 1
                task.produced, task.rows = task.produced + 1, task.rows + count
        next_uid = max([int(self.uids.max(initial=-1)) + 1, len(self.uids)])
        drawn = dict.fromkeys(shares, 0)
        opened = Opened(1, 0, -1, step, step, runs[0].seed, socket.gethostname(), os.getpid(), time.time())
        return [opened, Inherited([], {}, shares, drawn, msgspec.to_builtins(totals), [], next_uid)]

    def manifest(self, made: Manifest) -> Manifest:
        """Return the manifest of its generation: ``made``, with what it says of a pipeline."""
        runs = self.every.runs
        tasks = {name: task for run in reversed(runs) for name, task in run.tasks.items()}
        options = {**runs[0].source.stored.manifest.options, "directory": made.options["directory"]}
        return msgspec.structs.replace(made, base=1, options=options, tasks=tasks)

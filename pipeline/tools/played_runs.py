"""Runs whose rollouts fill a buffer of transitions, as merging and splitting read them: the rows as of any buffer, also
those that came after the generation, and of which item each episode is.

An item goes with all of its episodes: there are several where an attempt of it had failed. It has an id: the part that
it belongs to, and the uid that it had there. Of which item an episode is the journals say; of a run that a tool made, a
file beside the rows does, until a process has gone on with it. Where nobody says it, the episode goes by itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.checkpoint.gathering import Gathered
from pipeline.checkpoint.played import Played
from pipeline.checkpoint.survey import fills_buffer, survey
from pipeline.errors import ConfigError, Damaged
from pipeline.store.files import open_plain
from pipeline.tools.found_rows import find_rows
from pipeline.tools.kept_rows import EpisodesThere, RowsOnDisk
from pipeline.tools.later_rows import LaterRows
from pipeline.tools.sources import Source

Ints = np.ndarray
ITEMS_FILE, TASKS_FILE = "origin/items.int64", "origin/tasks.json"
"""By episode: its number, the uid of its item, its part, the uid there, and the place of its task; and the names of
these."""
UNKNOWN = -1
"""In place of a uid, or of a task."""


class ItemsOf(NamedTuple):
    """Of which item the episodes [n] of a run are.

    Attributes:
        uid: what it was called in its part, or -1.
        task: its name; empty: nobody says it.
    """

    uid: Ints
    task: list[str]


class PlayedRun(RowsOnDisk):
    """The rows of such a run, and its items."""

    def __init__(self, source: Source) -> None:
        """Raises:
        Damaged: something is missing or was changed.
        """
        gathered, played, later = _found(source)
        super().__init__(source, source.stored, source.part(), later)
        self._gathered, self._played = gathered, played
        fold = gathered.fold
        self.seed, self.shares = fold.sampler.seed, dict(fold.sampler.mixture.shares)
        self.tasks = source.stored.manifest.tasks
        self.unfinished = len(fold.ledger.entries)

    def items(self, episodes: EpisodesThere) -> ItemsOf:
        """Return of which items some episodes are."""
        found = self._listed_items(episodes.number) if self.made else self._said(episodes.first + self.oldest)
        only = next(iter(self.tasks)) if len(self.tasks) == 1 else ""
        return found._replace(task=[task or only for task in found.task])

    def _said(self, keys: Ints) -> ItemsOf:
        """Return what the journals say of the episodes with some first rows."""
        made = self._played.made
        first, end, uids = (np.array([each[at] for each in made], np.int64) for at in range(3))
        order = np.argsort(first, kind="stable")
        first, end, uids = first[order], end[order], uids[order]
        if not len(first):
            return ItemsOf(np.full(len(keys), UNKNOWN), [""] * len(keys))
        at = np.maximum(np.searchsorted(first, keys, side="right") - 1, 0)
        uid = np.where((first[at] <= keys) & (keys < end[at]), uids[at], UNKNOWN)
        return ItemsOf(uid, [self._played.tasks.get(each, "") for each in uid.tolist()])

    def _listed_items(self, number: Ints) -> ItemsOf:
        """Return what the tool wrote of episodes of some numbers."""
        folder = self.stored.folder
        try:
            with open_plain(os.path.join(folder, ITEMS_FILE)) as file:
                table = np.frombuffer(file.read(), np.int64).reshape(-1, 5)
            with open_plain(os.path.join(folder, TASKS_FILE)) as file:
                names = msgspec.json.decode(file.read(), type=list[str])
        except (ValueError, FileNotFoundError) as error:
            raise Damaged(f"{self.where}: does not say what items its episodes are of ({error})") from None
        table = table[np.argsort(table[:, 0])]
        at = np.minimum(np.searchsorted(table[:, 0], number), max(0, len(table) - 1))
        if len(number) and not (len(table) and np.array_equal(table[at, 0], number)):
            raise Damaged(f"{self.where}: holds rows of episodes of which it is not said what item they are of")
        names.append("")  # nobody knows it
        return ItemsOf(table[at, 3], [names[each] if -1 <= each < len(names) else "" for each in table[at, 4].tolist()])


def _found(source: Source) -> tuple[Gathered, Played, LaterRows]:
    _, candidates, _ = survey(source.layout, rows=True)
    number = source.stored.manifest.generation
    chosen = next(each for each in candidates if each.manifest is not None and each.number == number)
    faults = list(chosen.faults.values())
    if chosen.half is not None and not faults:
        found = find_rows(source.layout, source.tag, source.run_id, chosen, candidates)
        faults = [loss.what for loss in found.gathered.losses]
        if not faults:
            return found.gathered, found.played, found.later.check(source.directory)
    raise Damaged(f"{faults[0] if faults else source.directory}. forebay salvage makes a run of what is whole")


def filling(sources: Sequence[Source]) -> bool:
    """Return whether the rollouts of pipelines fill a buffer.

    Raises:
        ConfigError: those of some do.
    """
    fill = [fills_buffer(each.stored.manifest) for each in sources]
    if any(fill) and not all(fill):
        one, other = sources[fill.index(True)], sources[fill.index(False)]
        raise ConfigError(
            f"{one.directory}: the rollouts of this run fill a buffer of transitions, and those of {other.directory} "
            "are groups: what is merged is of one kind",
            option="runs",
        )
    return all(fill)


class EveryItem(NamedTuple):
    """The items of all episodes that are read, one stream after the other.

    Attributes:
        runs: that have them.
        of: [n] by episode, the place of its item among all, which rise with the oldest episode of each.
        uid, part: by item, its id; a uid of -1: nobody knows it.
        task: by item.
    """

    runs: list[PlayedRun]
    of: Ints
    uid: Ints
    part: Ints
    task: list[str]

    @classmethod
    def read(cls, runs: Sequence[PlayedRun], episodes: Sequence[EpisodesThere]) -> EveryItem:
        """Return the items of some episodes, by run."""
        found = [run.items(each) for run, each in zip(runs, episodes, strict=True)]
        uid = np.concatenate([each.uid for each in found])
        task = [name for each in found for name in each.task]
        part, origin = (np.concatenate([each[at] for each in episodes]) for at in (1, 2))
        alone = np.where(uid < 0, origin, UNKNOWN)  # tells episodes apart of which nobody knows the item
        order = np.lexsort((part, origin))
        _, first, of = np.unique(np.stack([part, uid, alone])[:, order], axis=1, return_index=True, return_inverse=True)
        ages = np.argsort(np.argsort(first))
        places = np.empty(len(order), np.int64)
        places[order] = ages[of.reshape(-1)]
        oldest = order[np.sort(first)]
        return cls(list(runs), places, uid[oldest], part[oldest], [task[at] for at in oldest.tolist()])

    @property
    def left_out(self) -> dict[str, str]:
        """What is not taken over, and why."""
        unfinished = sum(run.unfinished for run in self.runs)
        return {"items": f"{unfinished} that were drawn and have not ended"} if unfinished else {}

    def called_now(self, taken: Ints) -> Ints:
        """Return the uids of some items in a run that has these: those that they had, or, where two had one, new ones
        from 0 on, in the order of their ids; so it does not matter in how many steps they came together."""
        uids: Ints = self.uid[taken]
        known = np.flatnonzero(uids >= 0)
        if len(np.unique(uids[known])) == len(known):
            return uids
        found = np.full(len(uids), UNKNOWN)
        found[known[np.lexsort((self.part[taken][known], uids[known]))]] = np.arange(len(known))
        return found

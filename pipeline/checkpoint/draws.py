"""Which items were drawn where the journal has a hole, so that each of them is trained once.

A task is drawn position by position, so a position below its cursor that no event names was claimed in a hole. It was
trained if the generation knows a trained uid that no event names either; whose uid that is, its payloads say, which
carry task, epoch and index. All others are claimed anew, and run from the start. Where payloads are gone as well, what
may have been trained is given up: nothing is trained twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.saved_plans import source_as_saved
from pipeline.intervals import IntervalSet
from pipeline.ledger import ConsumerHalf
from pipeline.records import EXTERNAL, AnyEvent, Claimed, Dropped, EpochBegan, Inherited, SourceMark
from pipeline.sampler import Sampler
from pipeline.sampler.order import shuffled


class Drawn(NamedTuple):
    """What a payload says of the item that it belongs to."""

    task: str
    epoch: int
    """-1: it was given by hand."""
    item: int
    """Its number in the source."""


class Place(NamedTuple):
    """A draw: the place of an item in its source's order."""

    task: str
    epoch: int
    position: int


class Filled(NamedTuple):
    """What is known of a hole in the end."""

    events: list[AnyEvent]
    """To be folded after those of the journals."""
    again: list[Claimed]
    given_up: list[Claimed]
    """They may have been trained, or cannot be had again."""
    doubtful: bool = False
    """Whether others may have been, of which nothing tells."""


class Draws:
    """What the events say of the items that were drawn."""

    def __init__(self, line: Manifest, seed: int) -> None:
        self.seen = IntervalSet()
        """Uids that an event claims, or that had ended before the line inherited its state."""
        self.line, self._seed = line, seed
        self._by_task: dict[str, IntervalSet] = {}
        self._positions: dict[tuple[str, int], IntervalSet] = {}
        self._lengths: dict[tuple[str, int], int] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._floors: dict[str, tuple[int, int]] = {}
        self._contents: set[str] = set()
        # Whether uids follow the draws, also where the event is lost with which the line inherited its state.
        self._only_draws = not line.reclaimed

    def began(self, event: Claimed, sampler: Sampler) -> EpochBegan | None:
        """Return the event that must have come before a claim, if it was lost."""
        cursor = sampler.cursors.get(event.task)
        if event.kind == EXTERNAL or (cursor is not None and event.epoch <= cursor.epoch):
            return None
        length, mark = self.source(event.task, sampler)
        return EpochBegan(event.task, event.epoch, length, mark)

    def note(self, event: AnyEvent, sampler: Sampler) -> None:
        """Take in an event; call it before the sampler does."""
        if isinstance(event, Claimed):
            self.seen.add(event.uid)
            self._by_task.setdefault(event.task, IntervalSet()).add(event.uid)
            self._sizes[event.task] = (event.size, event.need)
            if event.kind == EXTERNAL:
                self._only_draws = False
                return
            self._positions.setdefault((event.task, event.epoch), IntervalSet()).add(event.position)
            if event.content is not None:
                self._contents.add(event.task)
        elif isinstance(event, EpochBegan):
            self._lengths[event.task, event.epoch] = event.length
        elif isinstance(event, Inherited):
            self._only_draws = False
            if event.next_uid:
                self.seen.add_range(0, event.next_uid - 1)
            self._floors = {task: (cursor[0], cursor[1]) for task, cursor in event.cursors.items()}

    def fill(
        self, sampler: Sampler, half: ConsumerHalf, ended: Mapping[int, str], located: Mapping[int, Drawn], first: int
    ) -> Filled:
        """Return the claims that are missing.

        Args:
            sampler: what was drawn, as far as the events say.
            half: what the weights have seen.
            ended: items without a claim that left, and why.
            located: what payloads say of items without a claim.
            first: a uid from which on none was used.
        """
        uids = self.places_of(located, sampler)
        missing = self._missing(sampler, uids)
        unknown = [uid for uid in self.unseen(half.trained) if uid not in located]
        doubtful: list[Place] = []
        untold = sorted({*unknown, *(uid for uid in ended if uid not in located)})
        if untold:
            told, more, doubtful = self._assign(sampler, half, located, uids, missing, unknown, untold)
            uids |= told
            missing += more
        filled = Filled([], [], [])
        for place in sorted({*uids, *missing}):
            uid = uids.get(place, first)
            claimed, reason = self._claim(uid, place, sampler), ended.get(uid)
            if uid == first:
                first += 1
                lost = place in doubtful or self._is_stream(place.task, sampler)
                (filled.given_up if lost else filled.again).append(claimed)
                reason = "discarded" if lost else None
            filled.events.append(claimed)
            if reason is not None:
                filled.events.append(Dropped(uid, reason))
        for uid, drawn in located.items():
            if drawn.epoch < 0:  # it was given by hand
                filled.events.append(Claimed(uid, drawn.task, -1, -1, -1, *self.size_of(drawn.task), EXTERNAL))
                if uid in ended:
                    filled.events.append(Dropped(uid, ended[uid]))
        return filled

    def further(self, sampler: Sampler, least: Mapping[str, int], more: int, first: int) -> list[Claimed]:
        """Return claims of the next places of each task that there are, which may have been drawn without a trace.

        Args:
            sampler: what was drawn, as far as the events say.
            least: how often at the least each task was drawn; that often is claimed.
            more: how many places of each task are claimed in any case.
            first: a uid from which on none was used.
        """
        found: list[Claimed] = []
        for task, (epoch, position) in (dict.fromkeys(self.line.tasks, (0, 0)) | self._ends(sampler, ())).items():
            base = sampler.cursors[task].base if task in sampler.cursors else 0
            drawn = position + sum(max(0, self._length(task, each, sampler)) for each in range(base, epoch))
            count = max(more, least.get(task, 0) - drawn)
            epochs = self.line.tasks.get(task, {}).get("epochs")
            last = base + epochs if isinstance(epochs, int) else epoch + count + 1  # so many there are to be drawn
            for place in self._beyond(sampler, (), max(0, count)):
                if place.task == task and place.epoch < last:
                    found.append(self._claim(first + len(found), place, sampler))
        return found

    def unseen(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """Return those of some uids that no event claims."""
        return [uid for low, high in ranges for uid in range(low, high + 1) if uid not in self.seen]

    def places_of(self, located: Mapping[int, Drawn], sampler: Sampler) -> dict[Place, int]:
        """Return the places of items, by what their payloads say, and whose uids they are."""
        found: dict[Place, int] = {}
        orders: dict[tuple[str, int], np.ndarray] = {}
        for uid, (task, epoch, index) in located.items():
            length = self._length(task, epoch, sampler)
            position = index
            if self._shuffles(task) and 0 <= index < length:
                if (task, epoch) not in orders:
                    there = np.arange(length, dtype=np.int64)
                    orders[task, epoch] = np.argsort(shuffled(self._seed, epoch, there, length))
                position = int(orders[task, epoch][index])
            place = Place(task, epoch, position)
            if epoch >= 0 and position not in self._positions.get((task, epoch), ()):
                found[place] = uid
        return found

    def _missing(self, sampler: Sampler, uids: Iterable[Place]) -> list[Place]:
        """Return the places below the cursors that nobody claims."""
        taken = set(uids)
        found = []
        for task, (last, position) in self._ends(sampler, taken).items():
            base = sampler.cursors[task].base if task in sampler.cursors else 0
            floor = self._floors.get(task, (base, 0))
            for epoch in range(max(base, floor[0]), last + 1):
                upto = position if epoch == last else self._length(task, epoch, sampler)
                have = self._positions.get((task, epoch), IntervalSet())
                places = (Place(task, epoch, each) for each in range(floor[1] if epoch == floor[0] else 0, upto))
                found += [place for place in places if place.position not in have and place not in taken]
        return found

    def _ends(self, sampler: Sampler, places: Iterable[Place]) -> dict[str, tuple[int, int]]:
        """Return epoch and position up to which each task was drawn, as far as the events and ``places`` say."""
        ends = {task: (each.epoch, each.position) for task, each in sampler.cursors.items() if each.epoch >= 0}
        for task, epoch, position in places:
            ends[task] = max(ends.get(task, (-1, 0)), (epoch, position + 1))
        return ends

    def _beyond(self, sampler: Sampler, places: Iterable[Place], count: int) -> list[Place]:
        """Return the next ``count`` places of every task: so far may have been drawn without a trace."""
        found = []
        tasks = dict.fromkeys(self.line.tasks, (0, 0)) | self._ends(sampler, places)
        for task, (epoch, position) in tasks.items() if count > 0 else ():
            for _ in range(count):
                if 0 <= self._length(task, epoch, sampler) <= position:
                    epoch, position = epoch + 1, 0
                found.append(Place(task, epoch, position))
                position += 1
        return found

    def _assign(
        self,
        sampler: Sampler,
        half: ConsumerHalf,
        located: Mapping[int, Drawn],
        uids: Mapping[Place, int],
        missing: list[Place],
        unknown: list[int],
        untold: list[int],
    ) -> tuple[dict[Place, int], list[Place], list[Place]]:
        """Find the places of uids of which no payload tells.

        Returns:
            The uids of places; places beyond those in ``missing``; and places that may have been trained.
        """
        by_hand = any(drawn.epoch < 0 for drawn in located.values()) or not self._only_draws
        tasks = self._ends(sampler, [*uids, *missing]).keys() | self.line.tasks.keys()
        last = untold[-1] if len(tasks) == 1 and not by_hand else unknown[-1] if unknown else -1
        between = [uid for uid in range(last + 1) if uid not in self.seen and uid not in located]
        more = self._beyond(sampler, [*uids, *missing], len(between) - len(missing))
        places = sorted([*missing, *more])
        if len(tasks) == 1 and not by_hand and between and len(places) >= len(between):
            of = dict(zip(between, places, strict=False))  # one task is drawn in the order of the uids
            return {of[uid]: uid for uid in untold}, more, []
        told: dict[Place, int] = {}
        doubtful: list[Place] = []
        for task in sorted(tasks):
            mine = [place for place in places if place.task == task]
            count = 0 if by_hand else min(len(unknown), len(mine), self._untold(task, half, located))
            # Which of them, nobody knows: all that matters is that none of the places is run again.
            told |= dict(zip(mine, unknown[:count], strict=False))
            doubtful += mine[count:] if count or (by_hand and unknown) else []
            unknown = unknown[count:]
        return told, more, doubtful

    def _untold(self, task: str, half: ConsumerHalf, located: Mapping[int, Drawn]) -> int:
        """Return how many groups of a task were trained of which neither an event nor a payload tells."""
        mine = self._by_task.get(task, IntervalSet())
        trained = IntervalSet(half.trained)
        told = sum(uid in mine for low, high in half.trained for uid in range(low, high + 1))
        told += sum(drawn.task == task and uid in trained for uid, drawn in located.items())
        return max(0, half.trained_by_task.get(task, (0, 0, 0))[0] - told)

    def _claim(self, uid: int, place: Place, sampler: Sampler) -> Claimed:
        length, index = self._length(place.task, place.epoch, sampler), place.position
        if self._shuffles(place.task) and index < length:
            index = int(shuffled(self._seed, place.epoch, np.array([index], np.int64), length)[0])
        return Claimed(uid, *place, index, *self.size_of(place.task))

    def size_of(self, task: str) -> tuple[int, int]:
        """Return the size of a task's groups, and how many must finish for one to count."""
        described = self.line.tasks.get(task, {})
        size = described.get("group_size", 1)
        return self._sizes.get(task, (size, described.get("min_group", size)))

    def _shuffles(self, task: str) -> bool:
        return bool(self.line.tasks.get(task, {}).get("shuffle", False))

    def _is_stream(self, task: str, sampler: Sampler) -> bool:
        length, mark = self.source(task, sampler)
        return length < 0 and (task in self._contents or mark.kind == "stream")

    def _length(self, task: str, epoch: int, sampler: Sampler) -> int:
        known = self._lengths.get((task, epoch))
        return self.source(task, sampler)[0] if known is None else known

    def source(self, task: str, sampler: Sampler) -> tuple[int, SourceMark]:
        """Return how long a task's source is, and its mark: the last that an event says, or what the manifest does."""
        cursor = sampler.cursors.get(task)
        if cursor is not None and cursor.epoch >= 0:
            return cursor.length, cursor.mark
        mark = source_as_saved(self.line.tasks.get(task, {}))
        # Without one there is nothing to be drawn of it, so the next draw begins an epoch.
        return (0, SourceMark()) if mark is None else (mark.length, mark)

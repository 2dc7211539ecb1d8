"""Batches of a run as it trained them, read from its folder: no rollouts, no servers, no pipeline.

A trainer can be run again on exactly what it had, offline: to find out why a loss went wrong, or to try another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import copy
from typing import NamedTuple

from pipeline.buffer import Batch
from pipeline.buffer.staleness import floor
from pipeline.checkpoint.fold import PayloadPlaces
from pipeline.checkpoint.generations import Stored, choose, find_generations, of_kind
from pipeline.checkpoint.lines import find_line
from pipeline.checkpoint.manifest import PIPELINE
from pipeline.errors import Damaged, NotARun
from pipeline.ledger import ConsumerHalf, Entry, Ledger
from pipeline.locations import Location
from pipeline.records import BatchHint, Moved, Opened
from pipeline.store.journal import Logged, read_journals
from pipeline.store.layout import Layout
from pipeline.store.segments import PayloadReader
from pipeline.wiring.consuming import group_of


class _Recorded(NamedTuple):
    """A batch, all but its payloads."""

    step: int
    least: int | None
    """The oldest version of a token that was not masked."""
    groups: list[tuple[Entry, dict[int, Location]]]
    """The items as they were then, and where the payloads lay, by member."""


def recorded_batches(
    directory: str | os.PathLike[str], step: int | None = None, *, skip_missing: bool = False
) -> Iterator[Batch]:
    """Yield the batches that the weights of a generation have seen, in the order of their steps. The run is only read.

    ::

        for batch in recorded_batches("runs/a"):
            loss = train_step(model, batch.padded())

    Payloads of what was trained go with their segments, unless ``archive="all"`` keeps them.

    Args:
        directory: the run's.
        step: that of the generation; left out, the newest.
        skip_missing: leave out the batches of which a payload is gone, instead of raising.

    Raises:
        NotARun: there is no run in ``directory``.
        StoreError: there is no generation of ``step``.
        Damaged: a payload is gone, or damaged; or a journal is.
    """
    layout = Layout(os.fspath(directory))
    run = layout.read_run() if os.path.isdir(layout.directory) else None
    if run is None:
        raise NotARun(f"{layout.directory}: there is no run")
    stored = choose(of_kind(find_generations(layout, run.run_id), PIPELINE, layout.directory), step, layout.directory)
    reader = PayloadReader(layout, run.tag)
    for each in _Line(layout, run.tag, stored).batches():
        try:
            yield _read(reader, each)
        except Damaged as error:
            if not skip_missing:
                raise Damaged(
                    f"step {each.step}: {error} What was trained is let go with its segment, unless archive='all' "
                    "keeps it. skip_missing=True leaves such batches out"
                ) from None


def _read(reader: PayloadReader, recorded: _Recorded) -> Batch:
    blobs = reader.read_many(
        (entry.uid, member, at) for entry, places in recorded.groups for member, at in places.items()
    )
    groups = [
        group_of(recorded.step, entry, [blobs[entry.uid, member] for member in sorted(places)], recorded.least)
        for entry, places in recorded.groups
    ]
    return Batch(recorded.step, groups, release=lambda step: None)


class _Line:
    """Folds the journals, with nothing ever trained, and keeps what each batch was made of when it was handed out."""

    def __init__(self, layout: Layout, run_tag: int, stored: Stored) -> None:
        self._layout, self._tag, self._manifest = layout, run_tag, stored.manifest
        line = find_line(layout, run_tag, stored.manifest, discard=False)
        self._caps = {(incarnation, rank): last for incarnation, rank, last in line.discarded}
        self._unneeded = line.unneeded
        self._ledger, self._places = Ledger(ConsumerHalf()), PayloadPlaces(places={})
        self._moved: dict[Location, Location] = {}
        self._opened: dict[int, Opened] = {}
        self._handed_out: dict[tuple[int, int], _Recorded] = {}  # by incarnation and step: the last word counts
        options = stored.manifest.options
        self._bound = options.get("max_staleness") if options.get("staleness_policy") == "mask" else None

    def batches(self) -> Iterator[_Recorded]:
        """Yield the batches up to the generation's step, from the first that the journals know of."""
        for logged in read_journals(self._layout, run_tag=self._tag, skip=self._unneeded):
            if logged.sequence <= self._caps.get((logged.incarnation, logged.rank), logged.sequence):
                self._apply(logged)
        chosen: dict[int, _Recorded] = {}
        incarnation, last = self._manifest.incarnation, self._manifest.step
        while incarnation in self._opened:  # back along the line: each life from the step that it began at
            opened = self._opened.pop(incarnation)
            for (life, step), each in self._handed_out.items():
                if life == incarnation and opened.step < step <= last:
                    chosen[step] = each
            incarnation, last = opened.parent, opened.step
        for step in sorted(chosen):
            yield chosen[step]._replace(groups=[(entry, self._now(at)) for entry, at in chosen[step].groups])

    def _apply(self, logged: Logged) -> None:
        incarnation, rank, _, event = logged
        if isinstance(event, Opened):
            self._opened[incarnation] = event
        elif isinstance(event, BatchHint):
            self._handed_out[incarnation, event.step] = self._record(event)
        elif isinstance(event, Moved) and event.member in self._places.places.get(event.uid, {}):
            now = Location(incarnation, rank, event.segment, event.offset, event.length)
            self._moved[self._places.places[event.uid][event.member]] = now
        self._ledger.apply(event)
        self._places.apply(incarnation, rank, event)

    def _record(self, hint: BatchHint) -> _Recorded:
        least = None if self._bound is None else floor(hint.step, self._bound)
        groups = []
        for uid in hint.uids:
            entry = self._ledger.entries.get(uid)
            if entry is not None:
                groups.append((copy(entry), dict(self._places.places.get(uid, {}))))
        return _Recorded(hint.step, least, groups)

    def _now(self, places: Mapping[int, Location]) -> dict[int, Location]:
        """Where payloads lie now: a batch may have been handed out before one of them moved."""
        found = dict(places)
        for member, at in places.items():
            while at in self._moved:
                at = self._moved[at]
            found[member] = at
        return found

"""Finished groups of one or more pipelines to one or more new runs: what merging and splitting of them have in common.

A group has an id: the part that it belongs to, and the uid that it had there. It comes as one that was made elsewhere
and put into the run by hand: it is handed out as others are, and what the new run draws of its sources does not hang on
it.
What was not finished is no group yet, and is left out; and so is what was trained, as nothing of it need be there, and
what a resume would set aside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.checkpoint.fold import pending_batches
from pipeline.checkpoint.gathering import Gathered
from pipeline.checkpoint.generations import check_generation
from pipeline.checkpoint.lines import discards
from pipeline.checkpoint.manifest import PIPELINE, MadeOf
from pipeline.checkpoint.rank_gathering import gather_parts
from pipeline.checkpoint.survey import survey
from pipeline.errors import Damaged
from pipeline.ledger import BUFFERED, FINISHED, LEASED, Entry
from pipeline.locations import Location
from pipeline.store.files import open_plain
from pipeline.store.segments import PayloadReader, Place
from pipeline.tools.kept_rows import KEY_FILE, PART_FILE
from pipeline.tools.made import Made
from pipeline.tools.related import Read
from pipeline.tools.sources import Source, left_out_of, named

Ints = np.ndarray
UID_FILE, ORDER_FILE = "origin/uid.int64", "origin/order.int64"
"""By group, by rising uid: its uid; and where it stood in the order in which groups had finished in its part."""


class Groups:
    """The finished groups of one run, of all its ranks if there are several."""

    def __init__(self, source: Source) -> None:
        """Raises:
        Damaged: something is missing or was changed.
        """
        self.source = source
        manifest = source.stored.manifest
        there = {info.path for info in manifest.files}
        check_generation(source.stored)
        gathered = _gathered(source)
        folds = [part.fold for part in gathered]
        entries = sorted((entry for fold in folds for entry in fold.ledger.entries.values()), key=_uid)
        self.entries = [entry for entry in entries if entry.state in (BUFFERED, LEASED)]
        self.unfinished = len(entries) - len(self.entries)
        self.seed = folds[0].sampler.seed
        self.shares = {name: share for fold in folds for name, share in fold.sampler.mixture.shares.items()}
        self.places = {uid: members for fold in folds for uid, members in fold.places.places.items()}
        self.reader = PayloadReader(source.layout, source.tag)
        self.parts = [source.part()]
        self.part: Ints = np.zeros(len(self.entries), np.int64)
        self.number: Ints = np.array([entry.uid for entry in self.entries], np.int64)
        self.order: Ints = np.array(_orders(gathered, self.entries), np.int64)
        if PART_FILE in there and KEY_FILE in there:
            self._made_of(list(manifest.made_of))

    def _made_of(self, parts: list[MadeOf]) -> None:
        """Take in where the groups had been; those that came since have been here alone."""
        known = self._values(UID_FILE)
        at = np.minimum(np.searchsorted(known, self.number), max(0, len(known) - 1))
        if not len(known) or not np.array_equal(known[at], self.number):
            return  # a process has gone on with it
        self.parts = parts
        self.part = self._values(PART_FILE)[at]
        self.order = self._values(ORDER_FILE)[at]
        self.number = self._values(KEY_FILE)[at]

    def _values(self, path: str) -> Ints:
        with open_plain(os.path.join(self.source.stored.folder, path)) as file:
            return np.frombuffer(file.read(), path.rpartition(".")[2]).astype(np.int64)

    def payloads(self, entry: Entry) -> list[Place]:
        """Return where the members of a group lie.

        Raises:
            Damaged: one lies nowhere.
        """
        found = []
        for member, status in enumerate(entry.members):
            if status == FINISHED:
                place: Location | None = self.places.get(entry.uid, {}).get(member)
                if place is None or place.segment < 0:
                    raise Damaged(
                        f"{self.source.directory}: member {member} of group {entry.uid} was never written, as the run "
                        "keeps its rollouts in memory (durability='none')"
                    )
                found.append((entry.uid, member, place))
        return found


def _uid(entry: Entry) -> int:
    return entry.uid


def _orders(gathered: Sequence[Gathered], entries: Sequence[Entry]) -> list[int]:
    """Return where groups stand in the order in which they are handed out. That of several ranks is the one in which a
    resume on one would hand them out: as they were drawn, but first what is to be handed out again."""
    if len(gathered) == 1:
        return [entry.order for entry in entries]
    again = set()
    for part in gathered:
        leases = sorted(part.half.leases, key=lambda lease: lease.step)
        for lease in pending_batches(part.fold.ledger, leases, part.fold.hints, part.half.step):
            again.update(lease.uids)
    stood = sorted(range(len(entries)), key=lambda at: (entries[at].uid not in again, entries[at].uid))
    places = dict(zip(stood, range(1, len(entries) + 1), strict=True))
    return [places[at] for at in range(len(entries))]


def _gathered(source: Source) -> list[Gathered]:
    _, candidates, _ = survey(source.layout)
    number = source.stored.manifest.generation
    chosen = next(each for each in candidates if each.manifest is not None and each.number == number)
    faults = list(chosen.faults.values())
    if chosen.half is not None and not faults:
        discard = discards(source.stored.manifest)
        found = gather_parts(source.layout, source.tag, source.run_id, chosen, candidates, discard=discard).parts
        faults = [loss.what for part in found for loss in part.losses]
        if not faults:
            return found
    raise Damaged(f"{faults[0] if faults else source.directory}. forebay salvage makes a run of what is whole")


class EveryGroup(NamedTuple):
    """All that is read, in its order.

    Attributes:
        runs: they.
        parts: what names groups, in the order in which those of one uid come.
        run, at: [n] which of the runs each group is of, and where it stands there.
        part, uid, order: [n] what names it, and where it stood among the groups of its part.
    """

    runs: list[Groups]
    parts: list[MadeOf]
    run: Ints
    at: Ints
    part: Ints
    uid: Ints
    order: Ints

    @property
    def reads(self) -> list[Read]:
        """What names the groups of each source."""
        return [Read(each.source, each.parts) for each in self.runs]

    def entry(self, place: int) -> tuple[Groups, Entry]:
        """Return a group, and its run."""
        run = self.runs[int(self.run[place])]
        return run, run.entries[int(self.at[place])]

    @property
    def left_out(self) -> dict[str, str]:
        """What is not taken over, and why."""
        notes = left_out_of(run.source for run in self.runs)
        unfinished = sum(run.unfinished for run in self.runs)
        if unfinished:
            notes["items"] = f"{unfinished} that were drawn and have not finished, or wait for a reward"
        return notes


def every_group(sources: Sequence[Source]) -> EveryGroup:
    """Read what there is.

    Raises:
        ConfigError: two runs have a group in common.
        Damaged: something is missing or was changed.
    """
    runs = [Groups(source) for source in sources]
    found = named("group", runs)
    begins = np.cumsum([0, *(len(each.order) for each in runs)])
    order = np.concatenate([each.order for each in runs])[begins[found.run] + found.at]
    return EveryGroup(runs, found.parts, found.run, found.at, found.part, found.number, order)


def told_of(every: EveryGroup, taken: Ints, directory: str) -> Made:
    """Return what a new run would be."""
    places = np.flatnonzero(taken).tolist()
    lengths = [at.length for place in places for _, _, at in _payloads(every, place)]
    uids = uids_of(every, taken)
    return Made(
        directory=directory,
        kind=PIPELINE,
        step=max(run.source.stored.manifest.step for run in every.runs),
        units=len(places),
        rows=len(lengths),
        bytes=sum(lengths),
        renumbered=int((uids != every.uid[taken]).sum()),
        left_out=every.left_out,
        made_of=every.parts,
    )


def _payloads(every: EveryGroup, place: int) -> Iterable[Place]:
    run, entry = every.entry(place)
    return run.payloads(entry)


def uids_of(every: EveryGroup, taken: Ints) -> Ints:
    """Return the uids that groups get: those that they had in their parts, or, where two had one, new ones from 0 on:
    so it does not matter in how many steps they came together."""
    uids = every.uid[taken]
    return uids if len(np.unique(uids)) == len(uids) else np.arange(len(uids))

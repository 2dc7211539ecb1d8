"""What each rank of a pipeline wrote of a generation: its part, as if it were a run of one process."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import msgspec

from pipeline.checkpoint.generations import Stored
from pipeline.checkpoint.lines import Line, line_as_saved
from pipeline.checkpoint.manifest import PIPELINE_RANKS, shard_prefix
from pipeline.errors import ForebayError
from pipeline.records import Inherited
from pipeline.sampler import Sampler, TurnSampler
from pipeline.store.journal import read_journal
from pipeline.store.layout import JournalName, Layout


class PartLayout(Layout):
    """A run's folder as one rank wrote it: its journals alone, and not those of lives that had shared everything out
    anew after a generation which is gone back to."""

    def __init__(self, layout: Layout, rank: int, newest: int, run_tag: int, before: int = sys.maxsize) -> None:
        """Args:
        layout: the folder's.
        rank: whose part it is.
        newest: the incarnation that committed the generation.
        run_tag: the run's tag.
        before: an incarnation from which on, as others say, everything had been shared out anew.
        """
        super().__init__(layout.directory)
        self._rank, self._before = rank, before
        for name in super().list_journals():
            if name.rank == rank and newest < name.incarnation < before and _inherits(name, run_tag):
                self._before = name.incarnation
                break

    def list_journals(self) -> list[JournalName]:
        return [each for each in self._of_rank() if each.incarnation < self._before]

    def abandoned(self) -> list[tuple[int, int, int]]:
        """Return the journals that do not count, as an ``open`` event says it."""
        return [(each.incarnation, each.rank, 0) for each in self._of_rank() if each.incarnation >= self._before]

    def _of_rank(self) -> list[JournalName]:
        return [each for each in super().list_journals() if each.rank == self._rank]


def _inherits(name: JournalName, run_tag: int) -> bool:
    """Whether a life began with what others had."""
    events = read_journal(name, run_tag=run_tag)
    try:
        return any(type(logged.event) is Inherited for logged, _ in zip(events, range(2), strict=False))
    except ForebayError:  # if the journal is needed, the fold will say what is wrong with it
        return False


def shard_of(stored: Stored, rank: int) -> Stored:
    """Return a rank's part of a generation as if it were one, without the trainer's files."""
    prefix, manifest = shard_prefix(rank), stored.manifest
    files = [
        msgspec.structs.replace(info, path=info.path.removeprefix(prefix))
        for info in manifest.files
        if info.path.startswith(prefix)
    ]
    journals = [each for each in manifest.journals if each.rank == rank]
    return Stored(
        os.path.join(stored.folder, prefix), msgspec.structs.replace(manifest, files=files, journals=journals)
    )


class Part(NamedTuple):
    """What one process wrote, or one rank.

    Attributes:
        stored: the generation, or the rank's part of it.
        layout: the folder, with its journals.
        run_tag: of the run.
        rank, size: which of how many; rank -1: one process.
    """

    stored: Stored
    layout: Layout
    run_tag: int
    rank: int = -1
    size: int = 1

    def line(self) -> Line:
        """Return the line that a resume with the options that were saved would find. Blocks."""
        line = line_as_saved(self.layout, self.run_tag, self.stored.manifest)
        if isinstance(self.layout, PartLayout):
            line = line._replace(discarded=[*line.discarded, *self.layout.abandoned()])
        return line

    def sampler(self) -> Sampler:
        """Return what its draws are folded into, where nothing is to be drawn."""
        return Sampler((), 0) if self.rank < 0 else TurnSampler((), 0, self.rank, self.size)

    def wrote(self, incarnation: int, rank: int) -> bool:
        """Whether an event of a journal may be of it."""
        return incarnation >= self.stored.manifest.base and self.rank in (-1, rank)


def parts_of(layout: Layout, run_tag: int, stored: Stored) -> list[Part]:
    """Return the parts of a generation of rollouts. Blocks."""
    manifest = stored.manifest
    if manifest.kind != PIPELINE_RANKS:
        return [Part(stored, layout, run_tag)]
    size = manifest.world_size
    return [
        Part(shard_of(stored, rank), PartLayout(layout, rank, manifest.incarnation, run_tag), run_tag, rank, size)
        for rank in range(size)
    ]

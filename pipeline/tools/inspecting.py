"""What a run, a generation, a shard, a journal or a segment holds, how it came about, and what is wrong with it."""

from __future__ import annotations

import os

import msgspec

from pipeline.checkpoint.generations import Stored, find_generations
from pipeline.checkpoint.manifest import OF_SHARDS, PIPELINE, PIPELINE_RANKS, TRAINER_FOLDER
from pipeline.checkpoint.status import Status, status_of
from pipeline.errors import ForebayError
from pipeline.store.layout import Layout
from pipeline.tools.history import GenerationLine, LifeLine, LivesReader, line_of
from pipeline.tools.how_far import HowFar
from pipeline.tools.one_file import JournalFacts, SegmentFacts, journal_facts, segment_facts
from pipeline.tools.output import Told
from pipeline.tools.rollouts import RolloutReaders, Taker, TaskFacts, read_events
from pipeline.tools.rows import BufferFacts, buffer_facts, bytes_of_rows
from pipeline.tools.target import JOURNAL, RUN, SEGMENT, Target, find_target


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the disk, by what they are."""

    total: int = 0
    journals: int = 0
    segments: int = 0
    generations: int = 0
    """What is hard linked between them counts once."""
    trainer: int = 0
    """Of that, the trainer's files."""


class Inspected(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`inspect` found."""

    path: str
    what: str
    """``run``, ``generation``, ``shard``, ``journal`` or ``segment``."""
    run_id: str
    """Of a file without its run, the part that its records carry."""
    kind: str = ""
    """What wrote it, as in the manifest: ``pipeline``, ``replay``, ``trajectories``, ``replay shards``, ..."""
    generation: GenerationLine | None = None
    """The one that is described: the newest of a run."""
    attached: list[str] = []
    own: list[str] = []
    """What ranks had attached for themselves."""
    world_size: int = 1
    tasks: list[TaskFacts] = []
    buffers: list[BufferFacts] = []
    space: Space | None = None
    generations: list[GenerationLine] = []
    lives: list[LifeLine] = []
    status: Status | None = None
    """Of a run: how it stands, and what is wrong with it as far as sizes, manifests and journals tell."""
    journal: JournalFacts | None = None
    segment: SegmentFacts | None = None
    options: dict[str, object] = {}
    notes: list[str] = []
    """What could not be read."""


def inspect(path: str | os.PathLike[str], *, step: int | None = None, told: Told | None = None) -> Inspected:
    """Return what a path leads to, and what it holds. Blocks, takes no lock, and changes nothing: the run may be in
    use, or a copy that may only be read.

    Args:
        path: a run's folder, a generation's, a shard's, a manifest, a journal or a segment.
        step: of a run, describe the newest generation of this step instead of the newest.
        told: told how many bytes were read of journals and rows, of how many.

    Raises:
        NotARun: it is nothing of a run.
        StoreError: there is no generation of ``step``.
        NewerFormat: a newer version wrote it.
        Damaged: nothing can be said of it.
    """
    target = find_target(path, step=step)
    if target.what == JOURNAL:
        return Inspected(
            path=target.path, what=target.what, run_id=target.run.run_id, journal=journal_facts(target.path)
        )
    if target.what == SEGMENT:
        return Inspected(
            path=target.path, what=target.what, run_id=target.run.run_id, segment=segment_facts(target.path)
        )
    status = status_of(target.path) if target.what == RUN else None
    return _Look(target, status, HowFar(told)).result()


class _Look:
    """One look at a run or a generation."""

    def __init__(self, target: Target, status: Status | None, how_far: HowFar) -> None:
        self.target, self.status, self.how_far = target, status, how_far
        self.notes: list[str] = []

    def result(self) -> Inspected:
        target, stored = self.target, self.target.stored
        layout = target.layout
        self.how_far.expect_files(name.path for name in layout.list_journals())
        if stored is not None:
            self.how_far.expect(sum(bytes_of_rows(stored, rank) for rank in self._ranks(stored)))
        tasks, lives = self._journals()
        found = [] if target.what != RUN else find_generations(layout, target.run.run_id, forgiving=True).complete
        manifest = None if stored is None else stored.manifest
        return Inspected(
            path=target.path,
            what=target.what,
            run_id=target.run.run_id,
            kind="" if manifest is None else manifest.kind,
            generation=None if stored is None else line_of(stored),
            attached=[] if manifest is None else manifest.attached,
            own=[] if manifest is None else sorted({name for shard in manifest.shards for name in shard.own}),
            world_size=1 if manifest is None else manifest.world_size,
            tasks=tasks,
            buffers=[] if stored is None else self._buffers(stored),
            space=space_of(layout) if target.what == RUN else None,
            generations=[line_of(each) for each in found],
            lives=lives if target.what == RUN else [],
            status=self.status,
            options={} if manifest is None else dict(manifest.options),
            notes=self.notes,
        )

    def _journals(self) -> tuple[list[TaskFacts], list[LifeLine]]:
        target, stored = self.target, self.target.stored
        lives = LivesReader()
        takers: list[Taker] = [lives]
        rollouts = None
        if stored is not None and stored.manifest.kind in (PIPELINE, PIPELINE_RANKS):
            rollouts = RolloutReaders(target.layout, target.run.tag, stored)
            takers.append(rollouts)
        self.notes += read_events(target.layout, target.run.tag, *takers, read=self.how_far.file)
        tasks: list[TaskFacts] = []
        if rollouts is not None:
            held = self.status is not None and self.status.hold.held
            tasks = rollouts.result(running=bool(held))
            if rollouts.wrong is not None:
                self.notes.append(rollouts.wrong)
        return tasks, lives.lines(target.layout)

    def _ranks(self, stored: Stored) -> list[int | None]:
        """Return whose buffers are looked at; None: that of a run of one process."""
        if stored.manifest.kind in OF_SHARDS and self.target.rank is None:
            return [each.rank for each in stored.manifest.shards]
        return [self.target.rank]

    def _buffers(self, stored: Stored) -> list[BufferFacts]:
        found: list[BufferFacts] = []
        for rank in self._ranks(stored):  # of several, those come that can be read
            try:
                found += buffer_facts(self.target.layout, stored, rank, self.how_far.more)
            except (ForebayError, OSError) as error:
                self.notes.append(str(error))
        for each in found:
            if each.unread:
                self.notes.append(
                    f"{each.unread} of {each.blocks} blocks of rows could not be read, and are in no figure; verify "
                    "says what is wrong with them"
                )
        return found


def space_of(layout: Layout) -> Space:
    """Return how many bytes a run takes, by what they are."""
    seen: dict[tuple[int, int], tuple[str, int]] = {}
    for folder, _, names in os.walk(layout.directory):
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.lstat(path)
            except OSError:  # gone meanwhile
                continue
            seen[status.st_dev, status.st_ino] = (os.path.relpath(path, layout.directory), status.st_size)

    def summed(prefix: str, part: str = "") -> int:
        return sum(size for path, size in seen.values() if path.startswith(prefix) and part in path)

    return Space(
        total=summed(""),
        journals=summed("journals/"),
        segments=summed("segments/"),
        generations=summed("generations/"),
        trainer=summed("generations/", f"/{TRAINER_FOLDER}/"),
    )

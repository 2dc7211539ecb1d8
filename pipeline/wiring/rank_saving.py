"""Generations where several ranks train together: each writes what its part is, and the first makes them exist.

All ranks begin the n-th save for one step. The first makes the generation's folder aside and writes the trainer's
state; each writes its journal and its segments, and what its part is into a folder of its own in there, and tells the
first; the first writes the manifest, which names all of it, and tells the others. Whoever fails tells that instead, and
then the generation exists for nobody. Which uids any rank has trained goes back to all: one range, where each rank
alone has as many as it had turns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from pipeline.checkpoint.generations import GenerationWriter, Stored, writing_in
from pipeline.checkpoint.manifest import (
    CONSUMER_FILE,
    PIPELINE_RANKS,
    PROGRESS_FILE,
    FileInfo,
    Manifest,
    ShardInfo,
    shard_prefix,
)
from pipeline.distributed import Ranks
from pipeline.errors import RankFailed, UsageError, WriteFailed
from pipeline.intervals import IntervalSet
from pipeline.ledger import BUFFERED, LEASED, ConsumerHalf
from pipeline.sampler import Progress
from pipeline.sampler.progress import encode_progress, joined, restore_in_place
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import SegmentKey
from pipeline.store.segments import SegmentInfo
from pipeline.wiring.saving import OWN_FILES, Capture, Saver, Saving

_FIRST, _OTHERS = ("save begun", "save"), ("save part",)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the first one of its part of a generation."""

    step: int
    attached: list[str]
    external: str
    journals: list[JournalPosition]
    segments: list[SegmentInfo]
    live: list[tuple[SegmentKey, int]]
    opens: tuple[int, int]
    files: list[FileInfo]
    trained: list[tuple[int, int]]
    progress: Progress
    shard: ShardInfo


class RankCapture(Capture):
    """A rank's part of a generation."""

    ranks: Ranks
    number = 0
    """Which save of all ranks it belongs to."""
    told = False
    """Whether the others know how this rank's part of it ended."""
    reports: Sequence[Report] = ()
    """On the first rank: what all told."""
    trained: Sequence[tuple[int, int]] = ()
    """Uids that any rank has trained."""
    progress: Progress
    """Of this rank, as of the capture."""
    of_all: Progress
    """Of all ranks together."""
    groups = 0
    """How many had finished, and were not trained."""

    def write_trainer(self) -> None:
        """Write what reads the trainer's tensors, on the first rank; say that the folder is there. Blocks."""
        if self.ranks.first:
            super().write_trainer()
            self.ranks.tell("save begun", [self.manifest.step, self.manifest.generation], number=self.number)

    def own_folder(self) -> str:
        """Make the folder for files that the ranks write into the generation themselves, or find it. Blocks."""
        if not self.ranks.first:
            self.hear_begun()
        folder = os.path.join(self.writer.folder, OWN_FILES)
        os.makedirs(folder, exist_ok=True)
        return folder

    def hear_begun(self) -> None:
        """Wait until the first rank has made the generation's folder. Blocks."""
        step, generation = self.ranks.hear("save begun", self.number, [0])[0]
        if (step, generation) != (self.manifest.step, self.manifest.generation):
            raise RankFailed(
                f"the save of step {self.manifest.step} on rank {self.ranks.rank} met that of step {step} on rank 0: "
                "all ranks save at the same steps, in the same order. Nothing was saved; see to it that they do"
            )

    def abandon(self) -> None:
        """Remove what was written aside, and tell the others, if they do not know."""
        self.give_up(WriteFailed(f"rank {self.ranks.rank} gave up generation {self.manifest.generation}"))
        super().abandon()

    def give_up(self, error: BaseException) -> None:
        """Tell the others that there will be no such generation. Blocks, but for the store alone."""
        if not self.told:
            self.told = True
            for name in _FIRST if self.ranks.first else _OTHERS:
                self.ranks.tell(name, error=error, number=self.number)


class RankSaver(Saver):
    """Makes the generations of all ranks. Its verbs are called by all of them, in the same order."""

    ranks: Ranks
    whole_only = "ranks save what they hold; save(step) without it, or train in one process"
    saves = 0
    """How many have begun."""
    of_all: Progress
    """The progress of all ranks, brought up to date by a save."""
    _owed = -1  # the number of a save that has begun, until there is a capture which says how it ends

    async def acquire(self) -> None:
        """As :meth:`Saver.acquire`."""
        await self._free.wait_for(lambda: not self.busy)
        self._owed, self.saves = self.saves, self.saves + 1
        await super().acquire()

    def leave(self, error: BaseException) -> None:
        """This rank takes part in no save any more: who has begun the next one is not to wait for it."""
        for name in _FIRST if self.ranks.first else _OTHERS:
            self.ranks.tell(name, error=error, number=self.saves)

    def never_began(self, saves: int, error: BaseException) -> None:
        """What all ranks were about to save came to nothing on this one; ``saves``: :attr:`saves` before it."""
        if self.saves == saves:
            self._owed, self.saves = saves, saves + 1
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        for name in _FIRST if self.ranks.first else _OTHERS:
            self.ranks.tell(name, error=error, number=self._owed)
        self._owed, self.next_generation = -1, self.next_generation + 1

    def release(self) -> None:
        """As :meth:`Saver.release`. A save that came to nothing before anything was captured is given up for all."""
        if self._owed >= 0:
            self._give_up(UsageError(f"a save failed on rank {self.ranks.rank} before it had begun"))
        super().release()

    def _new_capture(self, manifest: Manifest, saving: Saving, sequence: int) -> Capture:
        writer = GenerationWriter(self._layout, self._files, manifest.generation, others=not self.ranks.first)
        manifest = msgspec.structs.replace(manifest, kind=PIPELINE_RANKS, world_size=self.ranks.size)
        capture = RankCapture(writer, saving, manifest, sequence)
        capture.ranks, capture.number = self.ranks, self._owed
        self._owed = -1
        ledger = self._state.ledger
        capture.progress = msgspec.structs.replace(self._state.refresh_progress())
        capture.groups = ledger.count(BUFFERED) + ledger.count(LEASED)
        return capture

    async def finish(self, capture: Capture) -> Stored:
        """As :meth:`Saver.finish`."""
        assert isinstance(capture, RankCapture)
        stored = await super().finish(capture)
        for first, last in capture.trained:
            self._state.ledger.trained.add_range(first, last)
        restore_in_place(self.of_all, capture.of_all)
        return stored

    def _commit(self, capture: Capture, journals: Sequence[JournalPosition], written: Sequence[SegmentInfo]) -> Stored:
        assert isinstance(capture, RankCapture)
        return (self._commit_first if self.ranks.first else self._commit_other)(capture, journals, written)

    def _commit_first(
        self, capture: RankCapture, journals: Sequence[JournalPosition], written: Sequence[SegmentInfo]
    ) -> Stored:
        number, ranks, writer = capture.number, self.ranks, capture.writer
        others = range(1, ranks.size)
        try:
            own = self._own(capture, journals, written)
            told = ranks.hear("save part", number, others)
            ranks.forget("save part", number, others)
            for what in _FIRST:  # who writes its part of a save has heard how the one before ended
                ranks.forget(what, number - 1, [0])
            reports = [own, *(msgspec.convert(each, Report) for each in told)]
            _check(reports)
            progress = joined([each.progress for each in reports])
            with writing_in(writer.folder):
                writer.add(PROGRESS_FILE, encode_progress(progress, self._state.unknown_progress))
            writer.infos += [info for each in reports[1:] for info in each.files]
            stored = self._exist(capture, reports)
        except BaseException as error:
            capture.give_up(error)
            raise
        trained = IntervalSet(each for report in reports for each in report.trained).ranges()
        ranks.tell("save", [stored.manifest.checksum, trained, msgspec.to_builtins(progress)], number=number)
        capture.told, capture.reports, capture.trained, capture.of_all = True, reports, trained, progress
        return stored

    def _exist(self, capture: RankCapture, reports: Sequence[Report]) -> Stored:
        writer = capture.writer
        with writing_in(writer.folder):
            writer.adopt()
        manifest = msgspec.structs.replace(
            capture.manifest,
            shards=[each.shard for each in reports],
            journals=[position for each in reports for position in each.journals],
            segments=_together(reports),
            files=sorted(writer.infos, key=lambda info: info.path),
            reusable=self.retention.reusable(capture.manifest),
        )
        return writer.commit(manifest, keep=self.keep_lock)

    def _commit_other(
        self, capture: RankCapture, journals: Sequence[JournalPosition], written: Sequence[SegmentInfo]
    ) -> Stored:
        number, ranks = capture.number, self.ranks
        try:
            capture.hear_begun()
            report = self._own(capture, journals, written)
        except BaseException as error:
            # One that failed before has removed the folder that this one could not write in.
            cause = ranks.failed_first("save", number) if isinstance(error, WriteFailed) else None
            capture.give_up(error)
            if cause is not None:
                raise cause from error
            raise
        capture.told = True
        ranks.tell("save part", msgspec.to_builtins(report), number=number)
        checksum, trained, progress = ranks.hear("save", number, [0], patience=2)[0]
        capture.trained = [(first, last) for first, last in trained]
        capture.of_all = msgspec.convert(progress, Progress)
        return Stored(capture.writer.final, msgspec.structs.replace(capture.manifest, checksum=checksum))

    def _own(self, capture: RankCapture, journals: Sequence[JournalPosition], written: Sequence[SegmentInfo]) -> Report:
        """Write this rank's part of a generation."""
        writer, state, rank = capture.writer, self._state, self.ranks.rank
        prefix, before = shard_prefix(rank), len(writer.infos)
        with writing_in(writer.folder):
            for path, content in capture.small.items():
                writer.add(prefix + path, content)
            files = writer.infos[before:]
            writer.sync_folders(files)
        half = msgspec.json.decode(capture.small[CONSUMER_FILE], type=ConsumerHalf)
        return Report(
            step=capture.manifest.step,
            attached=list(capture.manifest.attached),
            external=capture.manifest.external,
            journals=list(journals),
            segments=self._listed(capture, written),
            live=list(capture.live.items()),
            opens=(state.incarnation, capture.open_segment),
            files=files,
            trained=half.trained,
            progress=capture.progress,
            shard=ShardInfo(rank=rank, rows=capture.groups, bytes=sum(capture.live.values())),
        )

    def _retire(self, stored: Stored, capture: Capture) -> None:
        """Remove what no generation needs any more; the first rank does that for all."""
        assert isinstance(capture, RankCapture)
        if self.ranks.first:
            live = {key: size for each in capture.reports for key, size in each.live}
            opens = {each.shard.rank: each.opens for each in capture.reports}
            self.retention.committed(stored, live, opens, self.keep_lock)


def _check(reports: Sequence[Report]) -> None:
    for rank, each in enumerate(reports):
        for name in ("step", "attached", "external"):
            own, other = getattr(reports[0], name), getattr(each, name)
            if own != other:
                raise RankFailed(
                    f"save(): {name} is {other!r} on rank {rank}, and {own!r} on rank 0. All ranks save at the same "
                    "step, with the same arguments, and attach the same names. Nothing was saved"
                )


def _together(reports: Sequence[Report]) -> list[SegmentInfo]:
    """Return what all ranks say of segments: something of several may be live in one of before."""
    found: dict[str, SegmentInfo] = {}
    for report in reports:
        for info in report.segments:
            before = found.get(info.name)
            if before is not None:
                both = max(before.bytes, info.bytes), before.live + info.live
                info = msgspec.structs.replace(info, bytes=both[0], live=both[1])
            found[info.name] = info
    return [found[name] for name in sorted(found)]

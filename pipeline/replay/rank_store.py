"""The one folder that the ranks of a run have in common: each writes its own rows, and the first makes generations
exist.

The first rank has the folder's lock. A save goes like this, on all ranks for the same step: each writes its new rows
into segments of its own; the first makes the generation's folder aside, and says so; each writes what it has to say
into a folder of its own in there, and tells the first what that is; the first writes the manifest, which names all of
it, and tells the others. Whoever fails tells that instead, and then the generation does not exist for anybody.

The first rank's process often serves the process group's store: it does not end before the others know how a save has
ended, and waits a moment for them when it is closed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from pipeline.checkpoint.generations import GenerationWriter, Stored, writing_in
from pipeline.checkpoint.manifest import SHARDS, FileInfo, Manifest, ShardInfo, shard_prefix
from pipeline.checkpoint.trainer_state import CapturedState
from pipeline.config import SavingOptions
from pipeline.conversation import Conversation
from pipeline.distributed import Ranks
from pipeline.errors import ClosedError, RankFailed, RankLost, WriteFailed
from pipeline.replay.job import Listing, SaveJob
from pipeline.replay.store import Generation, Part, ReplayStore, Saving
from pipeline.store.files import FilesLike
from pipeline.store.journal import JournalPosition
from pipeline.store.layout import SegmentKey
from pipeline.store.segments import SegmentInfo


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the first one of its part of a generation."""

    step: int
    attached: list[str]
    position: JournalPosition
    segments: list[SegmentInfo]
    incarnation: int
    live: list[tuple[SegmentKey, int]]
    used: list[SegmentKey]
    files: list[FileInfo]
    shard: ShardInfo

    def part(self) -> Part:
        """Return it as the first rank's own."""
        return Part(
            Listing([], b"", dict(self.live), frozenset(self.used)), self.position, self.segments, self.incarnation
        )


class RankStore(ReplayStore):
    """The folder, as one rank has it. Its verbs are called by all ranks, in the same order."""

    def __init__(
        self, options: SavingOptions, ranks: Ranks, files: FilesLike | None = None, kind: str = SHARDS
    ) -> None:
        super().__init__(options, files, kind)
        self.ranks = ranks
        self.rank = ranks.rank
        self.context.update(rank=ranks.rank)
        self.saves = 0
        """How many saves have begun."""
        self.own_files: Mapping[str, bytes] = {}
        """What this rank had attached for itself, by path, for the save that has begun."""
        self.speaking: Conversation | None = None
        """With the other ranks, of the resume that has begun."""
        self._left = False
        self._others: Mapping[int, Part] = {}  # on the first rank: what the others told of the newest generation

    def open(self) -> None:
        """Take the folder's lock on the first rank; find out there what the others need to know.

        Raises:
            NotARun, Locked, StoreError: it cannot be used; on the others RankFailed.
        """
        if not self.opened:
            self.open_together(self.ranks)

    def open_together(self, ranks: Ranks) -> None:
        """As :meth:`open`, by what these ranks tell. Where it was done before, on some of them, it is only said again.

        Raises:
            NotARun, Locked, StoreError: it cannot be used; on the others RankFailed.
        """
        folder = self.folder

        def look() -> list[Any]:
            if not self.opened:
                folder.open()
            return [folder.run_id, folder.incarnation, folder.next_generation]

        run_id, incarnation, number = ranks.of_first("open", look)
        if self.opened:
            return
        if not ranks.first:
            folder.follow(run_id, incarnation, number)
        self.opened = True
        self.incarnation, self._next = incarnation, number
        self.context.update(run=run_id[:8], incarnation=incarnation)

    def close(self) -> None:
        """Give the lock back. Who waits for this rank, in whatever, hears that it does not come; the first rank waits a
        moment for the others."""
        opened = self.opened
        if not self._left:
            self._left = True
            self._leave(self.left_by or ClosedError("the buffer was closed there"))
        try:
            super().close()
        finally:
            if not self.ranks.first:
                with contextlib.suppress(RankLost):
                    self.ranks.tell("closed", number=0)
        if opened and self.ranks.first:
            self.ranks.linger("closed", 0, self._all_others)

    def _leave(self, error: BaseException) -> None:
        if self.ranks.first and not self.opened:
            self.ranks.tell("open", error=error)
        self.failed(self.saves, error)
        self.end_speaking(error)
        Conversation(self.ranks, "resume").tell("resume", error=error)  # the next one: others may have begun it

    def end_speaking(self, error: BaseException) -> None:
        """Tell who still waits for this rank in the resume that has begun that it does not go on with it."""
        if self.speaking is not None:
            self.speaking.tell("resume", error=error)

    @property
    def _all_others(self) -> range:
        return range(1, self.ranks.size)

    def begin(
        self, step: int, states: Sequence[CapturedState], attached: Sequence[str], *, like: Stored | None = None
    ) -> Generation:
        """Begin a generation. The first rank writes the trainer's tensors, or takes its files over.

        Raises:
            WriteFailed: they could not be written; nothing of it stays.
        """
        number, self.saves, guess = self.saves, self.saves + 1, self._next
        if self.ranks.first:
            try:
                generation = super().begin(step, states, attached, like=like)
            except BaseException as error:
                self._next = guess + 1  # as on the others, whatever it failed in
                self.ranks.tell("save begun", error=error, number=number)
                raise
            self.ranks.tell("save begun", [step, generation.saving.generation], number=number)
        else:
            self._next = guess + 1  # what the first rank gives it, if nothing failed
            writer = GenerationWriter(self.folder.layout, self.files, guess, others=True)
            manifest = Manifest(
                kind=self.kind,
                run_id=self.folder.run_id,
                generation=guess,
                parent=self.parent,
                step=step,
                written=datetime.now(UTC).isoformat(timespec="seconds"),
                attached=sorted(attached),
            )
            generation = Generation(writer, manifest, Saving(guess, step))
        generation.number = number
        return generation

    def _commit(self, generation: Generation, job: SaveJob, unknown: dict[str, Any]) -> tuple[Stored, Part]:
        commit = self._commit_first if self.ranks.first else self._commit_other
        return commit(generation, job, unknown)

    def _commit_first(self, generation: Generation, job: SaveJob, unknown: dict[str, Any]) -> tuple[Stored, Part]:
        number = generation.number
        try:
            part, report = self._own(generation, job, unknown)
            told = [report, *self._reports(number)]
            self._check(told)
            generation.manifest = msgspec.structs.replace(
                generation.manifest, world_size=self.ranks.size, shards=[each.shard for each in told]
            )
            others = [each.part() for each in told[1:]]
            generation.writer.infos += [info for each in told[1:] for info in each.files]
            stored = self._exist(generation, [part, *others])
        except BaseException as error:
            self.ranks.tell("save", error=error, number=number)
            raise
        self._others = dict(enumerate(others, 1))
        self.ranks.tell("save", stored.manifest.checksum, number=number)
        return stored, part

    def _reports(self, number: int) -> list[Report]:
        told = self.ranks.hear("save part", number, self._all_others)
        self.ranks.forget("save part", number, self._all_others)
        for what in ("save begun", "save"):  # who writes its part of a save has heard how the one before ended
            self.ranks.forget(what, number - 1, [0])
        return [msgspec.convert(each, Report) for each in told]

    def _commit_other(self, generation: Generation, job: SaveJob, unknown: dict[str, Any]) -> tuple[Stored, Part]:
        number, ranks = generation.number, self.ranks
        try:
            part = self._written(job)
            step, name = ranks.hear("save begun", number, [0])[0]
            if (step, name) != (generation.manifest.step, generation.manifest.generation):
                raise RankFailed(
                    f"save({generation.manifest.step}) on rank {ranks.rank} met save({step}) on rank 0: all ranks save "
                    "at the same steps, in the same order. Nothing was saved; see to it that they do"
                )
            part, report = self._own(generation, job, unknown, part)
        except BaseException as error:
            # One that failed before has removed the folder that this one could not write in.
            cause = ranks.failed_first("save", number) if isinstance(error, WriteFailed) else None
            for name in ("save part", "save heard"):
                ranks.tell(name, error=error, number=number)
            if cause is not None:
                raise cause from error
            raise
        ranks.tell("save part", msgspec.to_builtins(report), number=number)
        try:
            checksum = ranks.hear("save", number, [0], patience=2)[0]
        finally:
            with contextlib.suppress(RankLost):
                ranks.tell("save heard", number=number)
        return Stored(generation.writer.final, msgspec.structs.replace(generation.manifest, checksum=checksum)), part

    def _own(
        self, generation: Generation, job: SaveJob, unknown: dict[str, Any], part: Part | None = None
    ) -> tuple[Part, Report]:
        """Write this rank's part of a generation."""
        part = part or self._written(job)
        prefix, before = shard_prefix(self.rank), len(generation.writer.infos)
        self._add_files(generation.writer, job, part, unknown, prefix)
        with writing_in(generation.writer.folder):
            for path, content in self.own_files.items():
                generation.writer.add(prefix + path, content)
            files = generation.writer.infos[before:]
            generation.writer.sync_folders(files)
        report = Report(
            step=generation.manifest.step,
            attached=list(generation.manifest.attached),
            position=part.position,
            segments=part.segments,
            incarnation=part.incarnation,
            live=list(part.listing.live.items()),
            used=sorted(part.listing.used),
            files=files,
            shard=msgspec.structs.replace(
                self.shard or ShardInfo(rank=self.rank), bytes=sum(part.listing.live.values())
            ),
        )
        return part, report

    def linger(self, generation: Generation) -> None:
        """On the first rank, wait a moment until the others know how a save has ended."""
        if self.ranks.first:
            self.ranks.linger("save heard", generation.number, self._all_others)
            self.ranks.forget("save heard", generation.number, self._all_others)

    def _check(self, told: Sequence[Report]) -> None:
        for rank, each in enumerate(told):
            first = told[0]
            for name, own, other in (
                ("step", first.step, each.step),
                ("attached", first.attached, each.attached),
                ("own", first.shard.own, each.shard.own),
            ):
                if own != other:
                    raise RankFailed(
                        f"save(): {name} is {other!r} on rank {rank}, and {own!r} on rank 0. All ranks save at the "
                        "same step, and attach the same names. Nothing was saved"
                    )

    def failed(self, saves: int, error: BaseException) -> None:
        """Tell the others that a save failed here before it was written; ``saves``: :attr:`saves` before it."""
        if self.saves == saves:
            self.saves, self._next = saves + 1, self._next + 1
        names = ("save begun", "save") if self.ranks.first else ("save part", "save heard")
        for name in names:
            self.ranks.tell(name, error=error, number=saves)

    def _remove_remains(self) -> None:
        """Only the first rank knows that a generation does not exist. What others wrote goes with the next commit."""
        if self.ranks.first:
            super()._remove_remains()

    def _retire(self, stored: Stored, part: Part) -> None:
        if not self.ranks.first:
            return
        parts = {self.rank: part, **self._others}
        needed: dict[SegmentKey, int] = {}
        for each in parts.values():
            needed |= dict.fromkeys(each.listing.used, 0) | each.listing.live
        self._retention.committed(stored, needed, {rank: each.opens for rank, each in parts.items()}, self.folder.keep)

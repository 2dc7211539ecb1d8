"""Salvaging the buffer of several ranks: a new run for as many, each with what is whole of its shard.

Episodes stay with the rank that had them. What is left of one on each side of a gap is an episode of its own, and ends
where it is. Where not the oldest rows go first, each row stays by itself. A rank whose shard cannot be read begins
without rows.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.checkpoint.generations import Stored, check_generation, find_generations
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import OWN_FOLDER, SHARDS, FileInfo, Manifest, ShardInfo
from pipeline.checkpoint.parts import shard_of
from pipeline.errors import ConfigError, Damaged, ForebayError, UsageError, WriteFailed
from pipeline.replay.episode_ids import EpisodeTable
from pipeline.replay.gaps import Gaps, Unfollowed
from pipeline.replay.moving import Gone
from pipeline.replay.resharding import table_of
from pipeline.replay.row_set import RowSet
from pipeline.replay.salvage_choice import (
    Chosen,
    choose_generation,
    payload_loss,
    unfollowed_loss,
)
from pipeline.replay.shards import ShardOnDisk, check_files, read_shard
from pipeline.replay.state import BufferState, read_buffer_state
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout
from pipeline.tools.output import Output, folder_near
from pipeline.tools.reshard_job import Job
from pipeline.tools.resharding import EpisodesJob
from pipeline.tools.resharding_pools import PoolShard, PoolsJob
from pipeline.tools.salvaged_files import Attached
from pipeline.tools.sources import Source

Ints = np.ndarray


class SavedShards(NamedTuple):
    """What is whole of the buffer of several ranks, and what is not.

    Attributes:
        chosen: the generation that it is of.
        origin: run id and generation of that.
        run_id: the new run's; empty after a rehearsal.
        shards: of each rank.
        lost: ranks whose shards cannot be read.
        missing: rows.
        split: episodes that go on as another one after a gap.
        losses: each place that is not whole.
    """

    chosen: Chosen
    origin: str
    run_id: str
    shards: list[ShardInfo]
    lost: list[int]
    missing: int
    split: int
    losses: list[Loss]


class _Kept(Job):
    """The rows of shards of which some are damaged."""

    reason = "salvage"
    partial = True
    chosen: Chosen
    lost: list[int]
    """Ranks whose shards cannot be read."""
    written: list[ShardInfo]

    @property
    def origin(self) -> str:
        """The generation that they are of."""
        manifest = self.source.stored.manifest
        return f"{manifest.run_id}/{manifest.generation}"

    def files(self) -> list[tuple[str, FileInfo]]:
        return Attached(self.chosen).files()

    def manifest(self, shards: list[ShardInfo], directory: str, left_out: dict[str, str]) -> Manifest:
        before, attached = self.source.stored.manifest, Attached(self.chosen)
        own = {each.rank: attached.own(each) for each in before.shards}
        self.written = [msgspec.structs.replace(each, own=own[each.rank]) for each in shards]
        return msgspec.structs.replace(
            super().manifest(self.written, directory, {}),
            origin=self.origin,
            attached=attached.names(),
            left_out=attached.left_out(),
            made_of=[],
        )

    def kept(self, files: FilesLike, folder: str) -> list[int]:
        """Return how many rows of each rank can be read; ``folder`` is for files without a name. Blocks."""
        there = [RowSet(rows) for rows in self.rows]
        aside: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in there]
        for rank, rows in self.handed(files, folder, None):
            aside[rank].append(rows.aside.copy())
            there[rank].add_runs(rows.runs)
        for rank, (each, own) in enumerate(zip(there, aside, strict=True)):
            self.leave_out(rank, each, np.sort(np.concatenate(own)))
        return [len(each) for each in there]

    def leave_out(self, rank: int, there: RowSet, aside: Ints) -> None:
        """Leave out rows of a rank whose next observations are nowhere; ``aside``: those that have them kept aside."""

    def loss(self, gone: Gone) -> Loss:
        """Return what is said of a block that cannot be read."""
        raise NotImplementedError


class _Episodes(_Kept, EpisodesJob):
    """As that, of rows that follow each other in episodes."""

    def leave_out(self, rank: int, there: RowSet, aside: Ints) -> None:
        if self.nexts:
            stretches = there.stretches()
            parts = Gaps.of_stretches(stretches, table_of(self.shards, self.shares, rank).rows)
            found = Unfollowed.within(parts, stretches, aside)
            there.remove(found.rows)
            self.unfollowed += len(found.rows)

    def loss(self, gone: Gone) -> Loss:
        shard, block = self.shards[gone.shard], gone.block
        begin, end = max(block.first, shard.oldest), min(block.first + block.count, shard.state.added)
        said = f"rows {begin} to {end - 1} of rank {shard.rank}"
        return payload_loss(self.source.layout, block, gone.error, said)


class _Pools(_Kept, PoolsJob):
    """As that, of pools."""

    def loss(self, gone: Gone) -> Loss:
        rows = f"{self.lost_in(gone.shard, gone.block)} rows of rank {gone.shard}"
        return payload_loss(self.source.layout, gone.block, gone.error, rows)


def _job(source: Source, chosen: Chosen) -> _Kept:
    """Return what is to be done.

    Raises:
        UsageError: rows cannot be told apart.
        Damaged: no shard that can be read has rows, or they do not fit together.
    """
    parts = [_part(source, info) for info in source.stored.manifest.shards]
    states = {rank: state for part, rank in parts if (state := _state(part, rank)) is not None}
    having = [state for state in states.values() if state.columns is not None]
    pooled = any(state.remove != "fifo" for state in having or states.values())
    shards: dict[int, Any] = {}
    for part, rank in parts:
        with contextlib.suppress(Damaged):
            shards[rank] = _pool(part, rank) if pooled else _shard(part, rank)
    having = [shard.state for shard in shards.values() if shard.state.columns is not None]
    lost = [rank for _, rank in parts if rank not in shards]
    if not having and lost:
        raise Damaged(f"{source.stored.folder}: the shards that can be read have no rows")
    for part, rank in parts:
        if rank not in shards:  # without rows, its buffer takes rows as those of the others do
            state = BufferState(remove=having[0].remove, capacity=having[0].capacity, pool=[0] * len(having[0].pool))
            none = ShardOnDisk(rank, part, state, {}, EpisodeTable.none(), [])
            shards[rank] = PoolShard(part, rank, state, {}, named=True) if pooled else none
    every = [shards[rank] for _, rank in parts]
    job: _Kept = _Pools(source, every, None) if pooled else _Episodes(source, every, len(every))
    job.chosen, job.lost, job.written = chosen, lost, []
    return job


def _part(source: Source, info: ShardInfo) -> tuple[Stored, int]:
    part = shard_of(source.stored, info.rank)
    whole = [each for each in part.manifest.files if not each.path.startswith(OWN_FOLDER + "/")]
    return part._replace(manifest=msgspec.structs.replace(part.manifest, files=whole)), info.rank


def _state(part: Stored, rank: int) -> BufferState | None:
    try:
        check_files(part, rank, part.manifest.files, whole=True)
        return read_buffer_state(part.folder)[0]
    except Damaged:
        return None


def _shard(part: Stored, rank: int) -> ShardOnDisk:
    return read_shard(part, rank, whole=True)


def _pool(part: Stored, rank: int) -> PoolShard:
    check_files(part, rank, part.manifest.files, whole=True)
    try:
        return PoolShard(part, rank, *read_buffer_state(part.folder), named=True)
    except ConfigError as error:
        raise UsageError(f"{error} resume(step=...) goes on from an older generation") from None


def salvage_shards(
    layout: Layout,
    target: str,
    *,
    step: int | None,
    called: str,
    files: FilesLike,
    rehearse: bool,
) -> SavedShards:
    """Write what is whole of the shards of a damaged run into a new one in ``target``, which is absent or empty and
    will be called ``called``. Blocks; the damaged run is only read.

    Raises:
        UsageError: the run is of another kind, or its rows cannot be told apart from what would be lost.
        NotARun, Damaged, StoreError: as :func:`~pipeline.replay.salvage_choice.choose_generation`.
        WriteFailed: it could not be written.
    """
    chosen = choose_generation(layout, SHARDS, step)
    stored = chosen.stored
    source = Source(layout.directory, layout, stored.manifest.run_id, chosen.run_tag, stored)
    run_id, job = "", _job(source, chosen)
    if rehearse:
        kept = job.kept(files, folder_near(target))
        shards = [ShardInfo(rank=rank, rows=count) for rank, count in enumerate(kept)]
    else:
        run_id, shards = _written(job, target, called, files), job.written
    held = sum(each.held for each in stored.manifest.shards)
    losses = [*chosen.losses, *(job.loss(each) for each in job.gone)]
    losses += unfollowed_loss(layout, stored, job.unfollowed)
    return SavedShards(
        chosen=chosen,
        origin=job.origin,
        run_id=run_id,
        shards=shards,
        lost=job.lost,
        missing=held - sum(each.rows for each in shards),
        split=job.split,
        losses=losses,
    )


def _written(job: _Kept, target: str, called: str, files: FilesLike) -> str:
    output = Output(called, "", files)
    output.folder = target
    try:
        run_id = job.write(output, None).run_id
    except ForebayError:
        raise
    except OSError as error:
        raise WriteFailed(f"{target}: could not be written: {error}. Remove it, and try again") from error
    written = find_generations(Layout(target), run_id).complete[-1]
    check_generation(written)  # it was copied from a disk that may have faults
    return run_id

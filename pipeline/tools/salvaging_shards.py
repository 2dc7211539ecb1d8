"""Salvaging the buffer of several ranks: a new run for as many, each with what is whole of its shard.

Episodes stay with the rank that had them. What is left of one on each side of a gap is an episode of its own, and ends
where it is. Where not the oldest rows go first, each row stays by itself. A rank whose shard cannot be read begins
without rows.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.checkpoint.generations import check_generation, find_generations
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import OWN_FOLDER, SHARDS, FileInfo, Manifest, ShardInfo
from pipeline.checkpoint.parts import shard_of
from pipeline.errors import ConfigError, Damaged, ForebayError, UsageError, WriteFailed
from pipeline.replay.episode_ids import EpisodeTable
from pipeline.replay.gaps import Gaps, Unfollowed
from pipeline.replay.moving import Gone
from pipeline.replay.pooling import block_of
from pipeline.replay.resharding import table_of
from pipeline.replay.row_set import RowSet
from pipeline.replay.salvage_choice import (
    Chosen,
    choose_generation,
    payload_loss,
    unfollowed_loss,
)
from pipeline.replay.shards import ShardOnDisk, read_shard
from pipeline.replay.state import BufferState
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout
from pipeline.tools.output import Output
from pipeline.tools.resharding import Job
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


class _Job(Job):
    """The rows of shards of which some are damaged."""

    reason = "salvage"
    partial = True

    def __init__(self, source: Source, chosen: Chosen, origin: str) -> None:
        self._attached, self._origin = Attached(chosen), origin
        self.lost: list[int] = []
        manifest = source.stored.manifest
        shards = [self._shard(source, info) for info in manifest.shards]
        having = [shard.state for shard in shards if shard.state.columns is not None]
        if not having and self.lost:
            raise Damaged(f"{source.stored.folder}: the shards that can be read have no rows")
        shards = [_like(shard, having[0]) if shard.rank in self.lost else shard for shard in shards]
        super().__init__(source, shards, manifest.world_size)
        self.written: list[ShardInfo] = []

    def _shard(self, source: Source, info: ShardInfo) -> ShardOnDisk:
        part = shard_of(source.stored, info.rank)
        whole = [each for each in part.manifest.files if not each.path.startswith(OWN_FOLDER + "/")]
        part = part._replace(manifest=msgspec.structs.replace(part.manifest, files=whole))
        try:
            return read_shard(part, info.rank, whole=True, pools=True)
        except ConfigError as error:
            raise UsageError(f"{error} resume(step=...) goes on from an older generation") from None
        except Damaged:
            self.lost.append(info.rank)
            return ShardOnDisk(info.rank, part, BufferState(), {}, EpisodeTable.none(), [])

    def files(self) -> list[tuple[str, FileInfo]]:
        return self._attached.files()

    def manifest(self, shards: list[ShardInfo], directory: str, left_out: dict[str, str]) -> Manifest:
        before = self.source.stored.manifest
        own = {each.rank: self._attached.own(each) for each in before.shards}
        self.written = [msgspec.structs.replace(each, own=own[each.rank]) for each in shards]
        return msgspec.structs.replace(
            super().manifest(self.written, directory, {}),
            origin=self._origin,
            attached=self._attached.names(),
            left_out=self._attached.left_out(),
            made_of=[],
        )

    def kept(self, files: FilesLike) -> list[int]:
        """Return how many rows of each rank can be read. Blocks."""
        there = [RowSet(rows) for rows in self.shares.rows]
        aside: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in there]
        for rank, rows in self.handed(files, None):
            aside[rank].append(rows.aside.copy())
            there[rank].add_runs(rows.runs)
        if self.nexts:
            for rank, (each, own) in enumerate(zip(there, aside, strict=True)):
                stretches = each.stretches()
                parts = Gaps.of_stretches(stretches, table_of(self.shards, self.shares, rank).rows)
                found = Unfollowed.within(parts, stretches, np.sort(np.concatenate(own)))
                each.remove(found.rows)
                self.unfollowed += len(found.rows)
        return [len(each) for each in there]


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
    run_id, origin = "", f"{stored.manifest.run_id}/{stored.manifest.generation}"
    job = _Job(source, chosen, origin)
    if rehearse:
        shards = [ShardInfo(rank=rank, rows=count) for rank, count in enumerate(job.kept(files))]
    else:
        run_id, shards = _written(job, target, called, files), job.written
    held = sum(each.held for each in stored.manifest.shards)
    losses = [*chosen.losses, *(_loss(layout, job.shards[each.shard], each) for each in job.gone)]
    losses += unfollowed_loss(layout, stored, job.unfollowed)
    return SavedShards(
        chosen=chosen,
        origin=origin,
        run_id=run_id,
        shards=shards,
        lost=job.lost,
        missing=held - sum(each.rows for each in shards),
        split=job.split,
        losses=losses,
    )


def _written(job: _Job, target: str, called: str, files: FilesLike) -> str:
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


def _like(lost: ShardOnDisk, state: BufferState) -> ShardOnDisk:
    """Return a shard without rows, whose buffer takes rows as those of the others do."""
    pool = [0] * len(state.pool)
    return lost._replace(state=BufferState(remove=state.remove, capacity=state.capacity, pool=pool))


def _loss(layout: Layout, shard: ShardOnDisk, gone: Gone) -> Loss:
    if shard.pool:
        rows = int((block_of(shard.pool["at"], [gone.block]) >= 0).sum())
        return payload_loss(layout, gone.block, gone.error, f"{rows} rows of rank {shard.rank}")
    begin, end = max(gone.block.first, shard.oldest), min(gone.block.first + gone.block.count, shard.state.added)
    return payload_loss(layout, gone.block, gone.error, f"rows {begin} to {end - 1} of rank {shard.rank}")

"""Resharding buffers of trajectories. Payloads stay as they lie, in files that the new run has too: what is written is
which of them each rank has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from pipeline.checkpoint.descent import ways_after
from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.manifest import TRAJECTORIES, TRAJECTORY_SHARDS, ShardInfo, shard_prefix
from pipeline.errors import Damaged
from pipeline.replay.shards import Shares, share_out
from pipeline.replay.state import generator_state
from pipeline.replay.trajectory_shards import TrajectoriesOnDisk, listed_for, schema_of
from pipeline.replay.trajectory_state import TrajectoryState
from pipeline.store.held import HeldSegments
from pipeline.store.layout import Layout, SegmentKey, segment_key, segment_name
from pipeline.store.segments import SegmentInfo
from pipeline.tools.linking import life_after, related_run, take_segments
from pipeline.tools.made import Made
from pipeline.tools.output import Output, Outputs, Told
from pipeline.tools.resharded import TOOL, as_it_was, manifest_of, own_left, segments_told
from pipeline.tools.shelf_files import add_shelf
from pipeline.tools.shelved import trajectories_on_disk
from pipeline.tools.sources import Source
from pipeline.tools.writing import SegmentWriter, Wrote, committed


def reshard_trajectories(
    source: Source,
    outputs: Outputs,
    to: int,
    *,
    capacity: int | None,
    rebalance: bool,
    evict: bool,
    dry_run: bool,
    told: Told | None,
) -> Made:
    """Write a buffer of trajectories, of one process or of ranks, anew, for ``to`` ranks.

    Raises:
        ConfigError: there is no room.
        Damaged: something is missing or was changed.
        WriteFailed: the new run could not be written; nothing of it stays.
    """
    shards = trajectories_on_disk(source)
    _check_there(source, shards)
    if source.kind == TRAJECTORY_SHARDS and source.stored.manifest.world_size == to and not rebalance:
        return as_it_was(source, outputs, capacity, dry_run=dry_run, told=told)
    job = _Job(source, shards, to, capacity, rebalance=rebalance, evict=evict)
    if dry_run:
        return job.told(outputs.each[0].directory, linked=job.bytes)
    with outputs:
        made = job.write(outputs.each[0], told)
        outputs.finish()
    return made


def _check_there(source: Source, shards: Sequence[TrajectoriesOnDisk]) -> None:
    """Compare sizes and headers of what is taken over; payloads are not read.

    Raises:
        Damaged: something is not what it should be.
    """
    blocks, listed = [block for shard in shards for block in shard.blocks], source.stored.manifest.segments
    for key in sorted({block.segment_key for block in blocks} - {segment_key(info.name) for info in listed}):
        raise Damaged(
            f"{source.stored.folder}: trajectories lie in {segment_name(key)}, which it does not list. Restore it from "
            "a copy"
        )
    HeldSegments(source.layout, source.tag, blocks, listed).close()


class _Job:
    """Trajectories that come to other ranks."""

    def __init__(
        self,
        source: Source,
        shards: Sequence[TrajectoriesOnDisk],
        to: int,
        capacity: int | None,
        *,
        rebalance: bool,
        evict: bool,
    ) -> None:
        self._source, self._shards = source, shards
        self._schema = schema_of(self._shards)
        of_one, where = source.kind == TRAJECTORIES, source.stored.folder
        self._shares: Shares = share_out(
            self._shards, to, capacity, rebalance=rebalance or of_one, evict=evict, where=where, counted="episodes"
        )
        ranks = [listed_for(rank, self._shards, self._shares) for rank in range(to)]
        self._live: dict[SegmentKey, int] = {}
        for block in [block for _, blocks, _ in ranks for block in blocks]:
            self._live[block.segment_key] = self._live.get(block.segment_key, 0) + block.length
        ages = [each.age for each in source.stored.manifest.shards]
        self._age = self._shards[0].added if of_one else max(ages, default=0)

    @property
    def bytes(self) -> int:
        """Of payloads."""
        return sum(self._live.values())

    def _segments(self) -> list[SegmentInfo]:
        """Return those that something is needed of, as they will be listed."""
        listed = self._source.stored.manifest.segments
        needed = [(info, self._live.get(segment_key(info.name))) for info in listed]
        return [msgspec.structs.replace(info, sealed=True, live=live) for info, live in needed if live is not None]

    def told(self, directory: str, run_id: str = "", linked: int = 0) -> Made:
        """Return what is made."""
        plan, manifest, notes = self._shares.plan, self._source.stored.manifest, own_left(self._source)
        if plan.evicted:
            what = f"no room for the {len(plan.evicted)} oldest, {plan.evicted_steps} transitions"
            notes["trajectories"] = what
        return Made(
            directory=directory,
            kind=TRAJECTORY_SHARDS,
            run_id=run_id,
            step=manifest.step,
            units=sum(len(each.infos) for each in self._shards) - len(plan.evicted),
            rows=sum(self._shares.rows),
            shards=list(self._shares.rows),
            bytes=self.bytes,
            linked=min(linked, self.bytes),
            left_out=notes,
            made_of=[self._source.part()],
        )

    def write(self, output: Output, told: Told | None) -> Made:
        """Write the new run into a place that has begun."""
        source, layout, files = self._source, Layout(output.folder), output.files
        before = source.stored.manifest
        came = ways_after(source.layout, source.run_id, before)
        run = layout.create_folders(files, related_run(source.run_id), came)
        whole = {info.name: info for info in before.segments}
        taken = [msgspec.structs.replace(each, sealed=whole[each.name].sealed) for each in self._segments()]
        linked = take_segments(source, taken, layout, files, taken=segments_told(taken, told))
        # The ranks that go on with it are in the life in which they would have gone on with what it is made of.
        life = life_after(source.layout, before.incarnation)
        generation = GenerationWriter(layout, files, 0)
        wrote: list[Wrote] = []
        with contextlib.ExitStack() as stack:
            stack.callback(generation.abandon)  # does nothing once it was committed
            generation.begin_with((), source.stored.trainer_files())
            shards = [self._rank(rank, generation, life) for rank in range(len(self._shares.rows))]
            for rank in range(len(shards)):
                journal = SegmentWriter(layout, files, run.tag, incarnation=life - 1, rank=rank)
                wrote.append(stack.enter_context(contextlib.closing(journal)).finish(time.time(), TOOL))
            wrote[0] = wrote[0]._replace(segments=self._segments())
            made = self.told(output.directory, run.run_id, linked)
            manifest = manifest_of(source, shards, output.directory, made.left_out)
            committed(generation, wrote, manifest, run, kind=TRAJECTORY_SHARDS)
        layout.write_marker(files, run)
        return made

    def _rank(self, rank: int, generation: GenerationWriter, life: int) -> ShardInfo:
        """Write what a rank has, as it would have it after a resume in a life."""
        infos, blocks, table = listed_for(rank, self._shards, self._shares)
        rows, added = self._shares.rows[rank], self._shares.firsts[rank] + len(infos)
        first, seed = self._shards[0], int(self._source.stored.manifest.options.get("seed", 0))
        state = TrajectoryState(
            columns=None if self._schema is None else list(self._schema.columns),
            trajectory_counter=added,
            sample_window_size=first.state.sample_window_size,
            # The streams of the shards are none of these ranks': each begins one of its own.
            generator=generator_state(np.random.Generator(np.random.PCG64([seed, life, rank]))),
        )
        names = {"uid.int64": table.uid, "age.int64": table.age}
        add_shelf(generation, shard_prefix(rank), state, first.unknown, infos, blocks, names)
        return ShardInfo(
            rank=rank,
            rows=rows,
            saved=rows,
            added=added,
            bytes=sum(block.length for block in blocks),
            episodes=len(infos),
            age=self._age,
        )

"""Resharding: a run for another number of ranks, without any rank; here, a buffer of transitions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.buffer.transitions.columns import Column
from pipeline.buffer.transitions.sharing import twins_of
from pipeline.checkpoint.descent import ways_after
from pipeline.checkpoint.generations import GenerationWriter, check_generation
from pipeline.checkpoint.listed import HEADLESS, OPEN
from pipeline.checkpoint.manifest import (
    PIPELINE,
    PIPELINE_RANKS,
    REPLAY,
    SHARDS,
    FileInfo,
    Manifest,
    ShardInfo,
    shard_prefix,
)
from pipeline.config import Fields
from pipeline.config.replay import MOST_ROWS
from pipeline.errors import ConfigError
from pipeline.replay.episode_ids import EpisodeTable, check_ranks, prefix_of, values_of_rows
from pipeline.replay.handing import SomeRows
from pipeline.replay.moving import Gone, Mover, Wanted, extras_named
from pipeline.replay.pooling import numbers_of, places_of
from pipeline.replay.resharding import Rank, open_in, state_of_rank, table_of
from pipeline.replay.selecting import Selected, extras_of, selection_of
from pipeline.replay.shards import ShardOnDisk, Shares, common_schema, part_of, pool_on_disk, read_shards, share_out
from pipeline.replay.state import BufferState, read_buffer_state
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout, RunFile
from pipeline.tools.kept_rows import RowsOnDisk
from pipeline.tools.linking import life_after
from pipeline.tools.made import Made
from pipeline.tools.output import Output, Outputs, Told
from pipeline.tools.packing import PackedWriter
from pipeline.tools.resharded import TOOL, as_it_was, manifest_of, own_left
from pipeline.tools.resharding_groups import reshard_groups
from pipeline.tools.resharding_trajectories import reshard_trajectories
from pipeline.tools.routing import check_count
from pipeline.tools.scattered import Heap, ScatteredRows
from pipeline.tools.sources import KINDS, Source, open_source
from pipeline.tools.writing import SegmentWriter, Wrote, committed

Ints = np.ndarray


def reshard(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: int,
    *,
    step: int | None = None,
    capacity: int | None = None,
    evict_oldest: bool = False,
    rebalance: bool = False,
    dry_run: bool = False,
    told: Told | None = None,
    files: FilesLike | None = None,
) -> Made:
    """Write a buffer, or a pipeline, anew, for ``to`` ranks: each then takes its own part back, as if they had saved
    it. Blocks; the run is only read.

    ::

        reshard("runs/a", "runs/b", to=16)  # then ReplayBuffer(..., directory="runs/b", ranks=...) on 16 ranks

    The plan is that of ``resume()`` on another number of ranks. As many ranks as before keep what they have. What the
    trainer had attached comes along. Of a pipeline everything does that was claimed and has not ended.

    Args:
        run: the run of a ``ReplayBuffer``, of a ``TrajectoryBuffer`` or of a ``Pipeline``, of ranks or of one process.
        out: where the new run goes; absent or empty.
        to: how many ranks there will be.
        step: take the newest generation of this step.
        capacity: of a buffer: how many rows, or trajectories, a rank has room for; None: for all that come to it.
        evict_oldest: of a buffer: whether the oldest episodes, or trajectories, go if too much is shared out.
        rebalance: whether everything is shared out anew though there are as many ranks as before.
        dry_run, told, files: as :func:`~pipeline.tools.merge` takes them.

    Raises:
        ConfigError: there is no room, or the rows cannot be moved, or ``out`` holds something.
        NotARun, StoreError, Damaged, WriteFailed, Locked: as :func:`~pipeline.tools.merge`.
    """
    check_count("to", to, 1)
    source = open_source(run, step)
    outputs = Outputs([os.fspath(out)], TOOL, files)
    outputs.check([source.directory])
    _check_kind(source, capacity, evict=evict_oldest)
    if source.kind in (PIPELINE, PIPELINE_RANKS):
        return reshard_groups(source, outputs, to, rebalance=rebalance, dry_run=dry_run, told=told)
    check_ranks("to", to)
    check_generation(source.stored)  # what the trainer had attached comes along as it lies there
    how: dict[str, Any] = {"capacity": capacity, "rebalance": rebalance, "evict": evict_oldest}
    of_rows = source.kind in (REPLAY, SHARDS)
    return (_reshard_rows if of_rows else reshard_trajectories)(source, outputs, to, **how, dry_run=dry_run, told=told)


def _reshard_rows(
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
    if source.kind == SHARDS and source.stored.manifest.world_size == to and not rebalance:
        return as_it_was(source, outputs, capacity, dry_run=dry_run, told=told)
    job = Job(source, _shards(source), to, capacity, rebalance=rebalance, evict=evict)
    return job.told(outputs.each[0].directory) if dry_run else job.made(outputs, told)


def _check_kind(source: Source, capacity: int | None, *, evict: bool) -> None:
    kind = KINDS.get(source.kind, source.kind)
    if source.kind in (PIPELINE, PIPELINE_RANKS):
        for option, given in (("capacity", capacity is not None), ("evict_oldest", evict)):
            if given:
                text = f"{source.directory}: the run of {kind}, whose ranks hold all that was drawn; leave it out"
                raise ConfigError(text, option=option)
    elif source.kind not in KINDS:
        text = f"{source.directory}: holds {kind!r}, which this version does not know"
        raise ConfigError(text, option="run")


def _shards(source: Source) -> list[ShardOnDisk]:
    if source.kind == SHARDS:
        return read_shards(source.stored, pools=True)
    state, unknown = read_buffer_state(source.stored.folder)
    if state.remove != "fifo":
        return [pool_on_disk(source.stored, state, unknown)]
    rows = RowsOnDisk(source, source.stored, source.part())
    found = rows.episodes()  # none of those that were dropped
    going = {number for _, _, number, _ in rows.state.open_episodes}
    table = EpisodeTable(
        number=found.number,
        uid=prefix_of(source.stored.manifest.incarnation, 0) | found.number,
        age=np.maximum(rows.oldest + found.first - found.place, 0),
        length=found.place + found.rows,
        rows=found.rows,
        flags=np.where(found.place > 0, HEADLESS, 0) | np.where(np.isin(found.number, list(going)), OPEN, 0),
    )
    return [ShardOnDisk(0, source.stored, rows.state, rows.unknown, table, rows.blocks)]


class Job:
    """Rows that come to ranks, others or the same."""

    reason = TOOL
    partial = False
    """Whether to go on without what is damaged."""

    def __init__(
        self,
        source: Source,
        shards: list[ShardOnDisk],
        to: int,
        capacity: int | None = None,
        *,
        rebalance: bool = False,
        evict: bool = False,
    ) -> None:
        self.source, self.shards, self.capacity = source, shards, capacity
        self.pooled = any(each.state.remove != "fifo" for each in shards)
        """Whether rows lie in any order, and each goes by itself."""
        room, anew = MOST_ROWS if capacity is None else capacity, rebalance or source.kind == REPLAY
        where = source.stored.folder
        self.shares: Shares = share_out(shards, to, room, rebalance=anew, evict=evict, where=where)
        self.gone: list[Gone] = []
        """Blocks that could not be read."""
        self.split = 0
        """Episodes that go on as another one after a gap."""
        self.unfollowed = 0
        """Rows that were left out as their next observations lie in rows that are gone."""

    @property
    def ranks(self) -> int:
        return len(self.shares.rows)

    def selected(self) -> Selected:
        return selection_of([each.state for each in self.shards], [extras_of(each.stored) for each in self.shards])

    def wanted(self) -> Wanted | None:
        """Return what there is of each row; None: there are no rows."""
        schema = common_schema(self.shards)
        return None if schema is None else Wanted(schema, extras_named(self.selected().extras), self.nexts)

    @property
    def nexts(self) -> list[Column]:
        """Columns of next observations, if rows share these."""
        having = [each.state for each in self.shards if each.state.columns is not None]
        return (having[0].next_obs_columns or []) if having else []

    def twins(self) -> dict[str, str]:
        """Return by the column of a next observation that of the observation."""
        return twins_of(self.nexts, Fields.of(self.source.stored.manifest.options.get("fields")))

    def told(self, directory: str, run_id: str = "", written: int | None = None) -> Made:
        """Return what is made."""
        manifest, evicted = self.source.stored.manifest, self.shares.plan.evicted
        blocks = [block for each in self.shards for block in each.needed()]
        notes = self.selected().left_out | own_left(self.source)
        if evicted:
            what = "rows" if self.pooled else "episodes"
            notes[what] = f"no room for the {len(evicted)} oldest, {self.shares.plan.evicted_steps} rows"
        return Made(
            directory=directory,
            kind=SHARDS,
            run_id=run_id,
            step=manifest.step,
            units=sum(len(each.table.uid) for each in self.shards) - len(evicted),
            rows=sum(self.shares.rows),
            shards=list(self.shares.rows),
            capacity=self._room if self.pooled else None,
            bytes=sum(block.length for block in blocks) if written is None else written,
            left_out=notes,
            made_of=[self.source.part()],
        )

    def made(self, outputs: Outputs, told: Told | None) -> Made:
        """Make it."""
        with outputs:
            made = self.write(outputs.each[0], told)
            outputs.finish()
        return made

    def write(self, output: Output, told: Told | None) -> Made:
        """Write the new run into a place that has begun."""
        layout = Layout(output.folder)
        source = self.source
        came = ways_after(source.layout, source.run_id, source.stored.manifest)
        run = layout.create_folders(output.files, made_of=came)
        # Names of episodes are of a life: those that the job itself gives are of none that was, and none that comes.
        life = life_after(self.source.layout, self.source.stored.manifest.incarnation)
        life = life if self.partial else life - 1
        with contextlib.ExitStack() as stack:
            aside = self._scattered(layout, output.files, stack, told)
            generation = GenerationWriter(layout, output.files, 0)
            stack.callback(generation.abandon)  # does nothing once it was committed
            generation.begin_with((), self.files())
            target = _Target(layout, run, output.files, generation, life)
            wrote, shards = [], []
            for rank in range(self.ranks):
                one, info = self._rank(rank, target, aside[rank] if aside else None)
                wrote.append(one)
                shards.append(info)
            made = self.told(output.directory, run.run_id, sum(info.bytes for info in shards))
            manifest = self.manifest(shards, output.directory, made.left_out)
            committed(generation, wrote, manifest, run, kind=SHARDS)
        layout.write_marker(output.files, run)
        return made

    def files(self) -> list[tuple[str, FileInfo]]:
        """Return the files that come along as they are."""
        return self.source.stored.trainer_files()

    def manifest(self, shards: list[ShardInfo], directory: str, left_out: dict[str, str]) -> Manifest:
        """Return what the generation says."""
        return manifest_of(self.source, shards, directory, left_out, self.reason)

    def handed(self, files: FilesLike, told: Told | None) -> Iterator[tuple[int, SomeRows]]:
        """Yield ranks, and the rows of blocks that come to each; afterwards :attr:`gone` says what could not be read.

        Raises:
            Damaged: a block is not whole, where not all may go on.
        """
        source, wanted = self.source, self.wanted()
        if wanted is None:
            return
        mover = Mover(source.layout, source.tag, files, life=0, rank=0, wanted=wanted, partial=self.partial)
        total = sum(block.length for each in self.shards for block in each.needed())
        for shard in [each for each in self.shards if each.needed()]:
            for found in mover.rows(shard, self.shares, shard.needed()):
                yield found
                if told is not None:
                    told(mover.bytes_read, total)
        self.gone = mover.gone

    def _scattered(
        self, layout: Layout, files: FilesLike, stack: contextlib.ExitStack, told: Told | None
    ) -> list[ScatteredRows]:
        wanted = self.wanted()
        if wanted is None:
            return []
        heap = Heap(layout.directory)
        stack.callback(heap.close)
        aside = [ScatteredRows(layout.directory, wanted, rows, heap) for rows in self.shares.rows]
        for each in aside:
            stack.callback(each.close)
        for rank, rows in self.handed(files, told):
            aside[rank].put(rows)
        return aside

    def _rank(self, rank: int, target: _Target, aside: ScatteredRows | None) -> tuple[Wrote, ShardInfo]:
        table, rows = table_of(self.shards, self.shares, rank), self.shares.rows[rank]
        added = self.shares.firsts[rank] + rows
        if aside is not None and self.partial and self.nexts:
            self.unfollowed += aside.leave_out_unfollowed(table, self.twins())
        if aside is not None and aside.missing and self.partial:
            if self.pooled:
                table = aside.leave_out_missing(table)
            else:
                table, named = aside.close_gaps(table, prefix_of(target.life, rank))
                self.split += named
            rows = int(table.rows.sum())
        schema, first = common_schema(self.shards), 0 if self.pooled else added - rows
        part = target.part(rank, self.selected().extras, self.nexts)
        with contextlib.closing(part):
            if aside is not None and schema is not None and rows:
                part.write(schema, first, aside.each(self.source.directory, first))
            state = self._state(Rank(rank, self.ranks, self._seed, target.life + 1), table, added, part.cuts)
            values = table.values()
            if self.pooled:
                values = values_of_rows(table.uid, table.age) | places_of(added, rows)
            pieces = {name: [each] for name, each in values.items()}
            wrote = part.finish(state, self.shards[0].unknown, pieces, TOOL)
        source = self.source
        ages = [each.age for each in source.stored.manifest.shards] if source.kind == SHARDS else []
        return wrote, ShardInfo(
            rank=rank,
            rows=rows,
            saved=rows,
            added=added,
            bytes=part.bytes,
            episodes=0 if self.pooled else len(table.uid),
            age=max(ages or [self.shards[0].state.added]),
        )

    @property
    def _room(self) -> int:
        """What the buffer of each rank is built with, if it is a pool's: one number for all."""
        return self.capacity or max([*self.shares.rows, *(each.state.capacity for each in self.shards)])

    @property
    def _seed(self) -> int:
        return int(self.source.stored.manifest.options.get("seed", 0))

    def _state(self, rank: Rank, table: EpisodeTable, added: int, cuts: list[int]) -> BufferState:
        """Return the state of a rank's buffer, whose rows are those of a table."""
        rows, schema, selected = int(table.rows.sum()), common_schema(self.shards), self.selected()
        selection = selected.selection if rows else self.shards[0].state.selection
        first, states = added - rows, [each.state for each in self.shards]
        state = BufferState(
            columns=None if schema is None else list(schema.columns),
            capacity=self._room,
            added=added,
            size=rows,
            next_episode=len(table.uid),
            open_episodes=[] if self.pooled else open_in(table, first),
            cut_keys=cuts,
            selection=selection,
            selector=selected.state(added) if selection else {},
            next_obs_columns=self.nexts or None,
        )
        if self.pooled:
            gone = part_of(sum(each.pool[2] for each in states), rank.size, rank.rank)
            state.next_episode = sum(each.next_episode for each in states)
            state.remove, state.pool = states[0].remove, numbers_of(rows, gone)
        return state_of_rank(self.shards, rank, state)


class _Target(NamedTuple):
    """The new run."""

    layout: Layout
    run: RunFile
    files: FilesLike
    generation: GenerationWriter
    life: int

    def part(self, rank: int, extras: Sequence[str], nexts: Sequence[Column]) -> PackedWriter:
        """Return what writes a rank's part."""
        segments = SegmentWriter(self.layout, self.files, self.run.tag, incarnation=self.life, rank=rank)
        return PackedWriter(self.files, self.generation, segments, shard_prefix(rank), extras, nexts)

"""Resharding: a run for another number of ranks, without any rank; here, a buffer of transitions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.buffer.transitions.sharing import twins_of
from pipeline.checkpoint.generations import check_generation
from pipeline.checkpoint.listed import HEADLESS, OPEN
from pipeline.checkpoint.manifest import (
    PIPELINE,
    PIPELINE_RANKS,
    REPLAY,
    SHARDS,
)
from pipeline.config import Fields
from pipeline.config.replay import MOST_ROWS
from pipeline.errors import ConfigError
from pipeline.replay.episode_ids import EpisodeTable, check_ranks, prefix_of
from pipeline.replay.handing import SomeRows
from pipeline.replay.moving import Mover
from pipeline.replay.resharding import open_in, table_of
from pipeline.replay.shards import ShardOnDisk, Shares, read_shards, share_out
from pipeline.store.files import FilesLike
from pipeline.tools.kept_rows import RowsOnDisk
from pipeline.tools.made import Made
from pipeline.tools.output import Outputs, Told
from pipeline.tools.pools import are_pools
from pipeline.tools.reshard_job import Job, Settled
from pipeline.tools.resharded import TOOL, as_it_was
from pipeline.tools.resharding_groups import reshard_groups
from pipeline.tools.resharding_pools import PoolsJob, shards_of
from pipeline.tools.resharding_trajectories import reshard_trajectories
from pipeline.tools.routing import check_count
from pipeline.tools.scattered import ScatteredRows
from pipeline.tools.sources import KINDS, Source, open_source

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
    job: Job
    if are_pools([source]):
        job = PoolsJob(source, shards_of(source), to, capacity, evict=evict)
    else:
        job = EpisodesJob(source, _shards(source), to, capacity, rebalance=rebalance, evict=evict)
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
        return read_shards(source.stored)
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


class EpisodesJob(Job):
    """As that, of rows that follow each other in episodes."""

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
        super().__init__(source, shards)
        self.shards, self._capacity = shards, capacity
        room, anew = MOST_ROWS if capacity is None else capacity, rebalance or source.kind == REPLAY
        where = source.stored.folder
        self.shares: Shares = share_out(shards, to, room, rebalance=anew, evict=evict, where=where)

    @property
    def rows(self) -> list[int]:
        return self.shares.rows

    @property
    def firsts(self) -> list[int]:
        return self.shares.firsts

    @property
    def evicted(self) -> tuple[int, int]:
        return len(self.shares.plan.evicted), self.shares.plan.evicted_steps

    @property
    def there(self) -> int:
        return sum(len(each.table.uid) for each in self.shards)

    @property
    def bytes(self) -> int:
        return sum(block.length for each in self.shards for block in each.needed())

    @property
    def capacity(self) -> int | None:
        return None

    @property
    def room(self) -> int:
        return self._capacity or super().room

    def twins(self) -> dict[str, str]:
        """Return by the column of a next observation that of the observation."""
        return twins_of(self.nexts, Fields.of(self.source.stored.manifest.options.get("fields")))

    def handed(self, files: FilesLike, folder: str, told: Told | None) -> Iterator[tuple[int, SomeRows]]:
        source, wanted = self.source, self.wanted()
        if wanted is None:
            return
        mover = Mover(source.layout, source.tag, files, life=0, rank=0, wanted=wanted, partial=self.partial)
        total = self.bytes
        for shard in [each for each in self.shards if each.needed()]:
            for found in mover.rows(shard, self.shares, shard.needed()):
                yield found
                if told is not None:
                    told(mover.bytes_read, total)
        self.gone = mover.gone

    def settled(self, rank: int, life: int, aside: ScatteredRows | None) -> Settled:
        table, rows = table_of(self.shards, self.shares, rank), self.shares.rows[rank]
        added = self.shares.firsts[rank] + rows
        if aside is not None and self.partial and self.nexts:
            self.unfollowed += aside.leave_out_unfollowed(table, self.twins())
        if aside is not None and aside.missing and self.partial:
            table, named = aside.close_gaps(table, prefix_of(life, rank))
            self.split += named
            rows = int(table.rows.sum())
        state = {"next_episode": len(table.uid), "open_episodes": open_in(table, added - rows)}
        return Settled(rows, len(table.uid), state, {name: [each] for name, each in table.values().items()})

"""Merging: several runs of one kind as one new run, which holds all that they held."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.checkpoint.manifest import REPLAY, TRAJECTORIES
from pipeline.errors import ConfigError
from pipeline.store.files import FilesLike
from pipeline.tools import groups, routing_pools
from pipeline.tools.grouping import group
from pipeline.tools.groups import every_group
from pipeline.tools.kept_rows import rows_of
from pipeline.tools.made import Made
from pipeline.tools.output import Outputs, Told
from pipeline.tools.played_runs import PlayedRun, filling
from pipeline.tools.pools import Division, are_pools, every_pool, pools_of
from pipeline.tools.related import Read, check_apart
from pipeline.tools.routing import Aim, Every, dry, every_row, limiter_of, route
from pipeline.tools.routing_pools import aims_of, route_pools
from pipeline.tools.shelves import every_trajectory, shelve, told_of
from pipeline.tools.sources import Paths, Source, each_of, of_one_kind, open_source

TOOL = "merge"
_Check = Callable[[Sequence[Read]], None]


def merge(
    runs: Paths,
    out: str | os.PathLike[str],
    *,
    allow_related: bool = False,
    dry_run: bool = False,
    told: Told | None = None,
    files: FilesLike | None = None,
) -> Made:
    """Write what several runs of one kind hold into a new run. Blocks; the runs are only read.

    ::

        merge(["runs/rank_1", "runs/rank_2", "runs/rank_10"], "runs/all")

    Of each run the newest generation counts. Everything keeps its order by its id: of each id, one run after the other,
    in the order of their names, with the numbers in these as numbers. What was merged, or split off, before comes in
    the order that it had in the runs of which it was made: so it does not matter in how many steps a merge is done, and
    parts that were split are what they had been of. What the trainer had attached is left out. Of buffers from which
    others than the oldest rows go first (``remove=``) each row goes by itself; they are merged with each other alone.

    Args:
        runs: folders of runs, of one process or of ranks: buffers of transitions; or buffers of trajectories; or
            pipelines, of which the finished groups come that were not trained yet; or pipelines whose rollouts fill a
            buffer, of which its rows come.
        out: where the new run goes; absent, or an empty folder. There is nothing before all of it is there.
        allow_related: whether to merge runs though one was made of another one, or both of a third, by a reshard, say:
            what they have in common and has other ids in each is there twice then.
        dry_run: only say what would be written.
        told: told how many bytes are done, and of how many.
        files: the file layer that the new run is written through.

    Raises:
        ConfigError: the runs are not of one kind and one schema, or have something in common, or hold what cannot be
            merged; or ``out`` holds something. Nothing was written.
        NotARun, StoreError: a run cannot be read.
        Damaged: something in one is missing or was changed.
        WriteFailed: the new run could not be written; nothing of it stays.
        Locked: another process is writing the same.
    """
    sources = opened(each_of(runs))
    kind = of_one_kind(sources)
    outputs = Outputs([os.fspath(out)], TOOL, files)
    outputs.check([source.directory for source in sources])
    check = _unchecked if allow_related else check_apart
    how = _merged_trajectories if kind == TRAJECTORIES else _merged_groups
    if kind == REPLAY:
        how = _merged_pools if are_pools(sources) else _merged_rows
    return how(sources, outputs, check, dry_run, told)


def _unchecked(reads: Sequence[Read]) -> None:
    """It may be that they have something in common."""


def opened(runs: Sequence[str]) -> list[Source]:
    """Return the newest generations of runs.

    Raises:
        ConfigError: there is no run, or one is named twice.
    """
    names = [os.path.realpath(run) for run in runs]
    if not names:
        raise ConfigError("runs=[]: at least one is needed", option="runs")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError.of("runs", name, "is named twice")
    return [open_source(run) for run in runs]


def _merged_rows(sources: Sequence[Source], outputs: Outputs, check: _Check, dry_run: bool, told: Told | None) -> Made:
    return _merged(
        every_row(sources, [rows for source in sources for rows in rows_of(source)]), outputs, check, dry_run, told
    )


def _merged(every: Every, outputs: Outputs, check: _Check, dry_run: bool, told: Told | None) -> Made:
    check(every.reads)
    if dry_run:
        return dry(every, _all(every), outputs.each[0].directory)
    return _made(outputs, lambda: route(every, [_all(every)], outputs, TOOL, told))


def _merged_pools(sources: Sequence[Source], outputs: Outputs, check: _Check, dry_run: bool, told: Told | None) -> Made:
    every = every_pool(sources, pools_of(sources), outputs.near)
    check(every.reads)
    division = Division(every, first=every.size)
    aims = aims_of(every, division, [0])
    if dry_run:
        return routing_pools.told_of(every, aims[0], outputs.each[0].directory)
    return _made(outputs, lambda: route_pools(every, division, aims, outputs, TOOL, told))


def _merged_trajectories(
    sources: Sequence[Source], outputs: Outputs, check: _Check, dry_run: bool, told: Told | None
) -> Made:
    every = every_trajectory(sources)
    check(every.reads)
    everything = np.ones(len(every.at), bool)
    if dry_run:
        return told_of(every, everything, outputs.each[0].directory)
    return _made(outputs, lambda: shelve(every, [everything], outputs, TOOL, told))


def _merged_groups(
    sources: Sequence[Source], outputs: Outputs, check: _Check, dry_run: bool, told: Told | None
) -> Made:
    if filling(sources):
        return _merged(every_row(sources, [PlayedRun(source) for source in sources]), outputs, check, dry_run, told)
    every = every_group(sources)
    check(every.reads)
    everything = np.ones(len(every.at), bool)
    if dry_run:
        return groups.told_of(every, everything, outputs.each[0].directory)
    return _made(outputs, lambda: group(every, [everything], outputs, TOOL, told))


def _made(outputs: Outputs, write: Callable[[], list[Made]]) -> Made:
    with outputs:
        (made,) = write()
        outputs.finish()
    return made


def _all(every: Every) -> Aim:
    states = [each.state for each in every.streams]
    return Aim(
        taken=[np.arange(len(each.number)) for each in every.episodes],
        added=sum(state.added for state in states),
        limiter=limiter_of(states),
    )

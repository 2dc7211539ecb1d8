"""Splitting: a run as several new ones, each with a part of what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from pipeline.buffer.transitions.columns import Arrays, Schema
from pipeline.buffer.transitions.layout import VERSION, RowLayout
from pipeline.checkpoint.manifest import REPLAY, TRAJECTORIES
from pipeline.errors import ConfigError
from pipeline.ledger import FINISHED
from pipeline.store.files import FilesLike
from pipeline.tools import groups, routing_pools
from pipeline.tools.choosing import By, SplitBy
from pipeline.tools.grouping import group
from pipeline.tools.groups import EveryGroup, every_group
from pipeline.tools.kept_rows import RowsOnDisk, rows_of, telling
from pipeline.tools.made import Made
from pipeline.tools.output import Outputs, Told
from pipeline.tools.played_runs import PlayedRun, filling
from pipeline.tools.pools import Division, EveryPool, Sorting, are_pools, every_pool, pools_of
from pipeline.tools.routing import Aim, Every, dry, every_row, limiter_of, route, shares_of
from pipeline.tools.routing_pools import aims_of, route_pools
from pipeline.tools.shelves import EveryTrajectory, every_trajectory, shelve, told_of
from pipeline.tools.sources import Paths, Source, each_of, of_one_kind, open_source

Ints = np.ndarray
TOOL = "split"
P = TypeVar("P")


def split(
    run: str | os.PathLike[str],
    out: Paths,
    *,
    count: int | None = None,
    fraction: float | None = None,
    by: By | None = None,
    where: Any = None,
    step: int | None = None,
    dry_run: bool = False,
    told: Told | None = None,
    files: FilesLike | None = None,
) -> list[Made]:
    """Write what a run holds into several new runs. Blocks; the run is only read.

    ::

        split("runs/a", ["runs/old", "runs/new"], count=100)  # the oldest 100 episodes, and the others
        split("runs/a", ["runs/good"], where="reward > 0.5")  # without a second folder the others are left out

    Units are whole: episodes of a buffer of transitions (or rows, if others than the oldest go first: ``remove=``),
    trajectories, finished groups of a pipeline, or its items with their episodes, where rollouts fill a buffer. A part
    keeps their order, and :func:`~pipeline.tools.merge` puts them together again. What was attached is left out.

    Args:
        run: the run's folder.
        out: where the parts go, absent or empty: the first, and the second; with ``by`` one name, which is the folder
            of the parts (``runs/parts/version-3``).
        count, fraction, by, where: see :class:`~pipeline.tools.choosing.SplitBy`; one of them.
        step: take the newest generation of this step.
        dry_run: only say what would be written.
        told: told how many bytes are done, and of how many.
        files: the file layer that the new runs are written through.

    Raises:
        ConfigError, NotARun, StoreError, Damaged, WriteFailed, Locked: as :func:`~pipeline.tools.merge`.
    """
    how = SplitBy(count=count, fraction=fraction, by=by, where=where)
    source = open_source(run, step)
    kind = of_one_kind([source])
    names = each_of(out)
    if not 1 <= len(names) <= (1 if by is not None else 2):
        raise ConfigError.of("out", names, "one folder, or two, are needed; with by= one, in which the parts will lie")
    outputs = Outputs(names, TOOL, files)
    outputs.check([source.directory])
    if kind == REPLAY:
        return _split_rows(source, how, outputs, dry_run, told)
    if kind == TRAJECTORIES:
        return _split_trajectories(source, how, outputs, dry_run, told)
    return _split_groups(source, how, outputs, dry_run, told)


def _split_rows(source: Source, how: SplitBy, outputs: Outputs, dry_run: bool, told: Told | None) -> list[Made]:
    if are_pools([source]):
        return _split_pool(source, how, outputs, dry_run, told)
    every = _read(source, rows_of(source), how)
    return _split_episodes(every, _parts(every, how, source), how, outputs, dry_run, told)


def _split_episodes(
    every: Every, parts: dict[str, list[Ints]], how: SplitBy, outputs: Outputs, dry_run: bool, told: Told | None
) -> list[Made]:
    parts = _chosen(parts, how, outputs)
    aims = dict(zip(parts, _aims(every, parts), strict=True))
    if dry_run:
        return [dry(every, aims[name], place) for name, place in _places(how, aims, outputs)]
    return _made(how, aims, outputs, lambda each, inner: route(every, each, inner, TOOL, told))


def _split_pool(source: Source, how: SplitBy, outputs: Outputs, dry_run: bool, told: Told | None) -> list[Made]:
    every = _read_pool(source, how, outputs.near)
    names, division = _division(every, how)
    parts = _chosen({name: number for number, name in enumerate(names)}, how, outputs)
    aims = dict(zip(parts, aims_of(every, division, list(parts.values())), strict=True))
    if dry_run:
        return [routing_pools.told_of(every, aims[name], place) for name, place in _places(how, aims, outputs)]
    return _made(how, aims, outputs, lambda each, inner: route_pools(every, division, each, inner, TOOL, told))


def _split_trajectories(source: Source, how: SplitBy, outputs: Outputs, dry_run: bool, told: Told | None) -> list[Made]:
    every = every_trajectory([source])
    parts = _chosen(_parts_of_trajectories(every, how, source), how, outputs)
    if dry_run:
        return [told_of(every, parts[name], place) for name, place in _places(how, parts, outputs)]
    return _made(how, parts, outputs, lambda each, inner: shelve(every, each, inner, TOOL, told))


def _split_groups(source: Source, how: SplitBy, outputs: Outputs, dry_run: bool, told: Told | None) -> list[Made]:
    if filling([source]):
        rows = _read(source, [PlayedRun(source)], how)
        return _split_episodes(rows, _parts_of_items(rows, how), how, outputs, dry_run, told)
    every = every_group([source])
    parts = _chosen(_parts_of_groups(every, how), how, outputs)
    if dry_run:
        return [groups.told_of(every, parts[name], place) for name, place in _places(how, parts, outputs)]
    return _made(how, parts, outputs, lambda each, inner: group(every, each, inner, TOOL, told))


def _chosen(parts: dict[str, P], how: SplitBy, outputs: Outputs) -> dict[str, P]:
    """Return the parts that are written: those for which no folder is named are left out."""
    return parts if how.by is not None else dict(list(parts.items())[: len(outputs.each)])


def _places(how: SplitBy, names: Iterable[str], outputs: Outputs) -> Iterator[tuple[str, str]]:
    """Yield the name of each part, and where it goes."""
    for name, output in zip(names, outputs.each, strict=True) if how.by is None else ():
        yield name, output.directory
    for name in names if how.by is not None else ():
        yield name, os.path.join(outputs.each[0].directory, name)


def _made(
    how: SplitBy, parts: dict[str, P], outputs: Outputs, write: Callable[[list[P], Outputs], list[Made]]
) -> list[Made]:
    with outputs:
        made = write(list(parts.values()), outputs if how.by is None else outputs.inside(list(parts)))
        outputs.finish()
    return made


def _parts_of_groups(every: EveryGroup, how: SplitBy) -> dict[str, Ints]:
    """Return by the name of a part which groups it takes: [n] bool."""
    entries = [every.entry(place)[1] for place in range(len(every.at))]
    if how.by is not None:
        return _by_name([entry.task if how.by == "task" else str(entry.oldest) for entry in entries], how.by)
    if how.where is None:
        first = np.zeros(len(entries), bool)
        first[: how.first(len(first))] = True
        return {"first": first, "rest": ~first}
    columns = {
        "reward": [entry.rewards / max(1, entry.members.count(FINISHED)) for entry in entries],
        "tokens": [entry.tokens for entry in entries],
        "oldest": [entry.oldest or 0 for entry in entries],
        "newest": [entry.newest for entry in entries],
        "size": [entry.size for entry in entries],
    }
    condition = how.condition()
    for name in condition.columns:
        if name not in columns:
            raise ConfigError.of("where", name, f"of groups there are {', '.join(columns)}")
    met = condition.mask({name: np.array(columns[name]) for name in condition.columns}, len(entries))
    return {"first": met, "rest": ~met}


def _parts_of_trajectories(every: EveryTrajectory, how: SplitBy, source: Source) -> dict[str, Ints]:
    """Return by the name of a part which trajectories it takes: [n] bool."""
    if how.by == "task":
        raise ConfigError.of("by", "task", f"{source.directory}: trajectories are of no task; split by version")
    if how.where is not None:
        raise ConfigError.of("where", how.where, "of trajectories, count, fraction and by='version' are there")
    if how.by == "version":
        places = zip(every.shelf.tolist(), every.at.tolist(), strict=True)
        return _by_name([every.shelves[shelf].infos[at].model_weights_id for shelf, at in places], how.by)
    first = np.zeros(len(every.at), bool)
    first[: how.first(len(first))] = True
    return {"first": first, "rest": ~first}


def _by_name(names: list[str], by: By) -> dict[str, Ints]:
    """Return which units have each name, by what the folder of these is called: names are data."""
    point = {name: number for number, name in enumerate(dict.fromkeys(names))}
    which = np.array([point[name] for name in names], np.int64)
    found: dict[str, Ints] = {}
    for name, number in point.items():
        plain = f"{by}-" + ("".join(each if each.isalnum() or each in "-_." else "_" for each in name) or "none")
        found[plain if plain not in found else f"{plain}-{len(found)}"] = which == number
    return found


def _read(source: Source, streams: Sequence[RowsOnDisk], how: SplitBy) -> Every:
    if how.where is None:
        return every_row([source], streams)
    condition = how.condition()
    for each in telling(streams):
        condition.check(RowLayout(Schema(tuple(each.columns))))  # next observations that rows share among them

    def met(arrays: Arrays, rows: int) -> Ints:
        return condition.mask(arrays, rows)

    return every_row([source], streams, condition.columns, met)


def _read_pool(source: Source, how: SplitBy, folder: str) -> EveryPool:
    _check_by(how, source)
    pools = pools_of([source])
    if how.by == "version":
        return every_pool([source], pools, folder, Sorting((), lambda arrays, rows: arrays[VERSION]))
    if how.where is None:
        return every_pool([source], pools, folder)
    condition = how.condition()
    for each in pools:
        if each.schema is not None:
            condition.check(RowLayout(each.schema))
    return every_pool([source], pools, folder, Sorting(condition.columns, lambda *of: ~condition.mask(*of)))


def _division(every: EveryPool, how: SplitBy) -> tuple[list[str], Division]:
    """Return the names of the parts, and which rows each takes."""
    if how.by == "version":
        known = sorted({version for pool in every.pools for version in pool.sorts})
        return [f"version-{version}" for version in known], Division(every, sorts=known)
    if how.where is not None:
        return ["first", "rest"], Division(every, sorts=(False, True))
    return ["first", "rest"], Division(every, first=how.first(every.size))


def _check_by(how: SplitBy, source: Source) -> None:
    if how.by == "task":
        raise ConfigError.of("by", "task", f"{source.directory}: transitions are of no task; split by version or where")


def _parts(every: Every, how: SplitBy, source: Source) -> dict[str, list[Ints]]:
    """Return by the name of a part, by stream, which episodes it takes, rising."""
    _check_by(how, source)
    if how.where is not None:
        return _two([each.met for each in every.episodes])
    if how.by == "version":
        known = np.unique(np.concatenate([each.version for each in every.episodes])).tolist()
        parts = [_by_value(each.version, known) for each in every.episodes]
        return {f"version-{version}": [part[at] for part in parts] for at, version in enumerate(known)}
    ages = _ages(every)
    first = how.first(len(ages))
    oldest = np.zeros(len(ages), bool)
    oldest[np.argsort(ages, kind="stable")[:first]] = True
    ends = np.cumsum([len(each.number) for each in every.episodes])[:-1]
    return _two(np.split(oldest, ends))


def _parts_of_items(every: Every, how: SplitBy) -> dict[str, list[Ints]]:
    """Return by the name of a part, by stream, which episodes it takes, rising: all of an item, or none."""
    items = every.items
    assert items is not None
    if how.where is not None:
        met = np.zeros(len(items.uid), bool)
        np.logical_or.at(met, items.of, np.concatenate([each.met for each in every.episodes]))
        parts = {"first": met, "rest": ~met}
    elif how.by == "task":
        parts = _by_name(items.task, how.by)
    elif how.by == "version":
        versions, ages = np.concatenate([each.version for each in every.episodes]), _ages(every)
        first = np.empty(len(items.uid), np.int64)
        first[items.of[np.argsort(-ages)]] = versions[np.argsort(-ages)]  # that of the oldest episode counts
        parts = {f"version-{version}": first == version for version in np.unique(first).tolist()}
    else:
        oldest = np.arange(len(items.uid)) < how.first(len(items.uid))
        parts = {"first": oldest, "rest": ~oldest}
    ends = np.cumsum([len(each.number) for each in every.episodes])[:-1]
    return {name: list(map(np.flatnonzero, np.split(taken[items.of], ends))) for name, taken in parts.items()}


def _two(first: list[Ints]) -> dict[str, list[Ints]]:
    return {"first": list(map(np.flatnonzero, first)), "rest": [np.flatnonzero(~each) for each in first]}


def _by_value(values: Ints, known: Sequence[int]) -> list[Ints]:
    """Return for each of the ``known`` values, which rise, where it stands among ``values``."""
    order = np.argsort(values, kind="stable")
    return np.split(order, np.searchsorted(values[order], known[1:])) if known else []


def _ages(every: Every) -> Ints:
    """Return where each episode stands by age: by its number, and of one number by the part that it is of."""
    part, origin = (np.concatenate([each[at] for each in every.episodes]) for at in (1, 2))
    ages = np.empty(len(part), np.int64)
    ages[np.lexsort((part, origin))] = np.arange(len(part))
    return ages


def _aims(every: Every, parts: dict[str, list[Ints]]) -> list[Aim]:
    """Share out what was counted, so that the sums over all parts stay."""
    states = [each.state for each in every.streams]
    rows = [
        int(sum(each.rows[own].sum() for each, own in zip(every.episodes, taken, strict=True)))
        for taken in parts.values()
    ]
    gone = shares_of(sum(state.added - state.held for state in states), rows)
    whole = limiter_of(states)
    counts = {name: shares_of(value, rows) for name, value in whole.items()}
    return [
        Aim(taken, rows[at] + gone[at], {name: each[at] for name, each in counts.items()})
        for at, taken in enumerate(parts.values())
    ]

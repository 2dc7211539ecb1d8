"""What tools read: one generation of a run. No lock is taken, and nothing is changed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np

from pipeline.buffer.transitions.columns import Column
from pipeline.checkpoint.generations import Stored, choose, find_generations
from pipeline.checkpoint.manifest import (
    OWN_FOLDER,
    PIPELINE,
    PIPELINE_RANKS,
    REPLAY,
    SHARDS,
    TRAINER_FOLDER,
    TRAJECTORIES,
    TRAJECTORY_SHARDS,
    MadeOf,
)
from pipeline.errors import ConfigError, NotARun
from pipeline.store.layout import Layout

Ints = np.ndarray
Path: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = Path | Sequence[Path]
"""One folder, or several."""
KINDS = {
    PIPELINE: "a pipeline",
    PIPELINE_RANKS: "a pipeline of ranks",
    REPLAY: "a replay buffer",
    SHARDS: "a buffer of ranks",
    TRAJECTORIES: "a buffer of trajectories",
    TRAJECTORY_SHARDS: "a buffer of trajectories of ranks",
}


OTHERS = (
    "; or, if the run had gone back to an older generation (resume(step=)) in between, so that these are not the same, "
    "salvage one of them, which gives what is in it ids of its own, and merge that with allow_related=True "
    "(--allow-related)"
)
"""What to do where one id may be of two things: an earlier version did not note that a run had gone back."""
_OF_ONE = {SHARDS: REPLAY, PIPELINE_RANKS: PIPELINE, TRAJECTORY_SHARDS: TRAJECTORIES}


class Source(NamedTuple):
    """A run, and the generation of it that is read."""

    directory: str
    layout: Layout
    run_id: str
    tag: int
    stored: Stored

    @property
    def kind(self) -> str:
        """What wrote it."""
        return self.stored.manifest.kind

    def part(self, shard: int = -1) -> MadeOf:
        """Return what names it, or a shard of it, in what is made of it."""
        manifest = self.stored.manifest
        return MadeOf(
            run_id=self.run_id,
            directory=self.layout.directory,
            generation=manifest.generation,
            step=manifest.step,
            shard=shard,
            kind=manifest.kind,
        )


def open_source(directory: str | os.PathLike[str], step: int | None = None) -> Source:
    """Return the newest generation of a run, or the newest of a step. Blocks.

    Raises:
        NotARun: there is no run.
        StoreError: there is no such generation.
        Damaged: its manifest is.
    """
    path = os.fspath(directory)
    layout = Layout(path)
    run = layout.read_run() if os.path.isdir(path) else None
    if run is None:
        raise NotARun(f"{path}: there is no run of forebay")
    stored = choose(find_generations(layout, run.run_id), step, path)
    return Source(path, layout, run.run_id, run.tag, stored)


def each_of(paths: Paths) -> list[str]:
    """Return the paths of folders."""
    return [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]


def of_one_kind(sources: Sequence[Source]) -> str:
    """Return the kind that all sources have, what is of ranks and what is of one process being one.

    Raises:
        ConfigError: they differ.
    """
    kinds = [_OF_ONE.get(each.kind, each.kind) for each in sources]
    for source, kind in zip(sources, kinds, strict=True):
        if kind not in KINDS:
            raise ConfigError(f"{source.directory}: holds {kind!r}, which this version does not know", option="runs")
        if kind != kinds[0]:
            raise ConfigError(
                f"{source.directory} is the run of {KINDS[kind]}, and {sources[0].directory} that of "
                f"{KINDS[kinds[0]]}: what is merged is of one kind",
                option="runs",
            )
    return kinds[0]


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return what a name sorts by, with the numbers in it as numbers: ``rank_2`` comes before ``rank_10``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def in_order(every: Sequence[Sequence[MadeOf]]) -> tuple[list[MadeOf], list[Ints]]:
    """Return all parts in the order in which those that have one id come, each once; and where those of each of
    ``every`` stand there."""
    known = {identity(part): part for parts in every for part in parts}
    found = sorted(
        known.values(),
        key=lambda part: (natural(part.directory), part.run_id, part.shard, part.generation, part.numbered),
    )
    place = {identity(part): number for number, part in enumerate(found)}
    return found, [np.array([place[identity(part)] for part in parts], np.int64) for parts in every]


def identity(part: MadeOf) -> tuple[str, int]:
    """Return what tells a part from others: ids in it are unique."""
    return part.name, part.shard


def left_out_of(sources: Iterable[Source]) -> dict[str, str]:
    """Return what is not taken over of what the trainer had attached, and why."""
    manifests = [source.stored.manifest for source in sources]
    names = {f"{TRAINER_FOLDER}/{name}.safetensors" for each in manifests for name in each.attached}
    own = {f"{OWN_FOLDER}/{name}.safetensors" for each in manifests for shard in each.shards for name in shard.own}
    why = "state of the trainer, which is neither merged nor split"
    return dict.fromkeys(sorted(names), why) | dict.fromkeys(sorted(own), f"{why}, as a rank had it for itself")


def counted(parts: Sequence[MadeOf], of: Ints) -> list[MadeOf]:
    """Return parts, each with how many units a new run has of it; ``of``: [n] the part of each unit."""
    counts = np.bincount(of, minlength=len(parts)).tolist()
    return [msgspec.structs.replace(part, units=count) for part, count in zip(parts, counts, strict=True)]


class Named(NamedTuple):
    """Units of several runs, in the order of their ids.

    Attributes:
        parts: what names units, in the order in which those of one number come.
        run, at: [n] which of the runs each unit is of, and where it stands there.
        part, number: [n] what names it.
    """

    parts: list[MadeOf]
    run: Ints
    at: Ints
    part: Ints
    number: Ints


class Naming(Protocol):
    """A run whose units are named: by ``part``, one of ``parts`` for each, and ``number``."""

    source: Source
    parts: list[MadeOf]
    part: Ints
    number: Ints


def named(unit: str, runs: Sequence[Naming]) -> Named:
    """Return the units of runs in the order of their ids; ``unit`` is what one is called.

    Raises:
        ConfigError: two runs have one in common.
    """
    parts, places = in_order([each.parts for each in runs])
    run = np.repeat(np.arange(len(runs)), [len(each.number) for each in runs])
    at = np.concatenate([np.arange(len(each.number)) for each in runs])
    part = np.concatenate([place[each.part] for place, each in zip(places, runs, strict=True)])
    number = np.concatenate([each.number for each in runs])
    order = np.lexsort((part, number))
    found = Named(parts, run[order], at[order], part[order], number[order])
    twice = np.flatnonzero((np.diff(found.number) == 0) & (np.diff(found.part) == 0))
    if len(twice):
        first = int(twice[0])
        having = [runs[int(found.run[first + more])].source.directory for more in (0, 1)]
        raise in_both(unit, parts[int(found.part[first])], int(found.number[first]), having)
    return found


def in_both(unit: str, part: MadeOf, number: int, having: Sequence[str]) -> ConfigError:
    """Return the error about a unit, by what it is called, its part and its number there, that runs in several folders
    have in common."""
    where = ", ".join(sorted(set(having)))
    return ConfigError(
        f"runs: {unit} {number} of run {part.run_id} ({part.directory}) is in each of {where}: they are copies or "
        f"parts of one run that have it in common. Leave one of them out{OTHERS}",
        option="runs",
    )


def check_columns(what: str, having: Sequence[tuple[str, Sequence[Column]]]) -> None:
    """Compare the columns of what is put together: of each, where it is and what it has.

    Raises:
        ConfigError: they differ; the message names a column as ``what``.
    """
    for where, columns in having[1:]:
        first, others = having[0]
        one, other = (dict.fromkeys(map(str, each)) for each in (columns, others))
        for name in [*one, *other]:
            if name not in one or name not in other:
                here, there = (where, first) if name in one else (first, where)
                raise ConfigError(
                    f"schema: {what} {name} is in {here}, and not in {there}; what is put together has the same "
                    f"{what}s",
                    option="schema",
                )

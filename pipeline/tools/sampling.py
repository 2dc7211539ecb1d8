"""One batch out of a saved run, to see that it can be had, of what it is made, and how fast.

Nothing is locked, copied or written: of a buffer only the rows that are drawn are read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from pipeline.checkpoint.manifest import OF_SHARDS, PIPELINE, PIPELINE_RANKS, TRAJECTORIES, TRAJECTORY_SHARDS
from pipeline.config import WithoutReplacement
from pipeline.errors import ConfigError, Damaged, Starved
from pipeline.ledger import BUFFERED, FINISHED
from pipeline.replay.looking import bytes_to_look_at, let_go, look_at, look_at_trajectories
from pipeline.replay.state import STATE_FILE
from pipeline.store.codec import unpack
from pipeline.store.segments import PayloadReader, Place
from pipeline.tools.how_far import HowFar
from pipeline.tools.output import Told
from pipeline.tools.rollouts import RolloutReaders, read_events
from pipeline.tools.target import RUN, Target, find_target

_TRIES = 3


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a batch."""

    key: str
    dtype: str
    shape: str
    """Of rows, one of them with the number of rows before it; of rollouts, where they differ, from the least to the
    most."""
    least: float | None = None
    """The least finite number in it."""
    most: float | None = None
    not_finite: int = 0
    bytes: int = 0


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`sample_run` drew."""

    path: str
    kind: str
    """What wrote the run, as in the manifest."""
    generation: int
    step: int
    of: str
    """What was drawn: ``rows``, ``transitions`` or ``groups``."""
    there: int
    """How many there are."""
    asked: int
    drawn: int
    rollouts: int
    """Members of the groups; 0: rows were drawn."""
    rank: int | None
    """Of shards, whose."""
    keys: list[Drawn]
    bytes: int
    load_seconds: float
    """Until it could be drawn from."""
    draw_seconds: float
    per_second: float
    """Of what was drawn."""
    bytes_per_second: float


def sample_run(
    path: str | os.PathLike[str],
    count: int,
    *,
    seed: int | None = None,
    step: int | None = None,
    rank: int = 0,
    told: Told | None = None,
) -> Sampled:
    """Draw once from what a run's newest generation holds. Blocks.

    Args:
        path: a run's folder, a generation's, or a shard's.
        count: rows or transitions of a buffer; finished groups of a run of rollouts, without replacement.
        seed: draw by this; left out, rows as the buffer would have drawn them next, and groups by 0.
        step: of a run, the newest generation of this step.
        rank: of shards, whose.
        told: told how many bytes were read, of about how many.

    Raises:
        NotARun: it is nothing of a run.
        ConfigError: ``count`` or ``rank`` is out of range.
        UsageError: it is the run of a pipeline of several ranks.
        Starved: there is nothing to be drawn.
        Damaged: what is drawn cannot be read.
    """
    if count.__class__ is not int or count < 1:
        raise ConfigError.of("-n", count, "a whole number from 1 on is needed")
    for attempt in range(_TRIES):
        target = find_target(path, step=step)
        try:
            return _sample(target, count, seed, target.rank if target.rank is not None else rank, HowFar(told))
        except Damaged:  # of a run in use, a generation that is older by now may have been removed
            now = find_target(path, step=step)
            if attempt == _TRIES - 1 or now.stored == target.stored:
                raise
    raise AssertionError("the last attempt returns or raises")


def _sample(target: Target, count: int, seed: int | None, rank: int, how_far: HowFar) -> Sampled:
    stored = target.stored
    if stored is None:
        raise Starved(f"{target.path}: nothing was saved yet, so there is nothing to be drawn")
    kind = stored.manifest.kind
    if kind in OF_SHARDS and rank not in [each.rank for each in stored.manifest.shards]:
        raise ConfigError.of("rank", rank, f"{stored.manifest.world_size} ranks wrote it, counted from 0")
    if kind in (TRAJECTORIES, TRAJECTORY_SHARDS):
        return _of_trajectories(target, count, seed, rank if kind == TRAJECTORY_SHARDS else None)
    if kind not in (PIPELINE, PIPELINE_RANKS) or any(info.path == STATE_FILE for info in stored.manifest.files):
        return _of_rows(target, count, seed, rank, how_far)
    return _of_groups(target, count, seed or 0, how_far)


def _of_rows(target: Target, count: int, seed: int | None, rank: int, how_far: HowFar) -> Sampled:
    assert target.stored is not None
    begun = time.perf_counter()
    how_far.expect(bytes_to_look_at(target.stored, rank=rank))
    buffer = look_at(target.layout, target.run.tag, target.stored, rank=rank, seed=seed, told=how_far.more)
    try:
        if not len(buffer):
            raise Starved(f"{target.path}: the buffer is empty in generation {target.stored.manifest.generation}")
        loaded = time.perf_counter()
        most = len(buffer) if isinstance(buffer.options.select, WithoutReplacement) else count
        batch = buffer.sample(min(count, most))
        tensors = dict(_flat({name: batch[name] for name in batch.columns}))
        drawn = time.perf_counter()
    finally:
        let_go(buffer)
    more = {"weights": batch.weights, "keys": batch.keys}
    keys = [_drawn(name, [each]) for name, each in {**tensors, **more}.items()]
    of_shards = target.stored.manifest.kind in OF_SHARDS
    return _told(
        target, "rows", len(buffer), count, len(batch), keys, (begun, loaded, drawn), rank=rank if of_shards else None
    )


def _of_trajectories(target: Target, count: int, seed: int | None, rank: int | None) -> Sampled:
    assert target.stored is not None
    begun = time.perf_counter()
    buffer = look_at_trajectories(target.layout, target.run.tag, target.stored, rank=rank or 0, seed=seed)
    loaded = time.perf_counter()
    batch = dict(_flat(buffer.sample(count)))
    drawn = time.perf_counter()
    length = len(next(iter(batch.values())))
    keys = [_drawn(name, [each]) for name, each in batch.items()]
    times = (begun, loaded, drawn)
    return _told(target, "transitions", buffer.total_samples, count, length, keys, times, rank=rank)


def _flat(batch: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _of_groups(target: Target, count: int, seed: int, how_far: HowFar) -> Sampled:
    stored = target.stored
    assert stored is not None
    begun = time.perf_counter()
    reader = RolloutReaders(target.layout, target.run.tag, stored)
    how_far.expect_files(name.path for name in target.layout.list_journals())
    wrong = read_events(target.layout, target.run.tag, reader, read=how_far.file)
    reader.finish(running=target.what == RUN)
    if reader.wrong is not None or wrong:
        raise Damaged(f"{target.path}: {reader.wrong or wrong[0]}")
    folds = {
        uid: part.fold
        for part in reader.parts
        for uid, entry in part.fold.ledger.entries.items()
        if entry.state == BUFFERED
    }
    waiting = sorted(folds)
    if not waiting:
        raise Starved(f"{target.path}: no finished group waits to be trained")
    chosen = np.random.default_rng(seed).choice(waiting, min(count, len(waiting)), replace=False).tolist()
    places: list[Place] = [
        (uid, member, at)
        for uid in chosen
        for member, at in sorted(folds[uid].places.places.get(uid, {}).items())
        if folds[uid].ledger.entries[uid].members[member] == FINISHED
    ]
    loaded = time.perf_counter()
    tensors: dict[str, list[Any]] = {}
    rewards = []
    for _, blob in PayloadReader(target.layout, target.run.tag).each(places):
        if isinstance(blob, Damaged):
            raise blob
        header, rollout = unpack(blob)
        rewards.append(header.reward)
        for trace in rollout.traces:
            for name, tensor in trace.tensors.items():
                tensors.setdefault(f"{trace.agent}.{name}" if trace.agent else name, []).append(tensor)
    drawn = time.perf_counter()
    keys = [_drawn(name, each) for name, each in tensors.items()]
    keys.append(_drawn("(reward)", [torch.tensor(rewards, dtype=torch.float64)]))
    times = (begun, loaded, drawn)
    return _told(target, "groups", len(waiting), count, len(chosen), keys, times, rollouts=len(places))


def _told(
    target: Target,
    of: str,
    there: int,
    asked: int,
    drawn: int,
    keys: list[Drawn],
    times: tuple[float, float, float],
    *,
    rollouts: int = 0,
    rank: int | None = None,
) -> Sampled:
    assert target.stored is not None
    manifest = target.stored.manifest
    begun, loaded, ended = times
    seconds, size = max(ended - loaded, 1e-9), sum(each.bytes for each in keys)
    return Sampled(
        path=target.path,
        kind=manifest.kind,
        generation=manifest.generation,
        step=manifest.step,
        of=of,
        there=there,
        asked=asked,
        drawn=drawn,
        rollouts=rollouts,
        rank=rank,
        keys=keys,
        bytes=size,
        load_seconds=loaded - begun,
        draw_seconds=seconds,
        per_second=drawn / seconds,
        bytes_per_second=size / seconds,
    )


_NOT_COMPARED = (torch.uint16, torch.uint32, torch.uint64)


def _drawn(key: str, tensors: list[Any]) -> Drawn:
    """Return what the tensors of one key come to."""
    given = [each if isinstance(each, torch.Tensor) else torch.from_numpy(np.asarray(each)) for each in tensors]
    numbers_of = [_wide(each) for each in given] if not given[0].is_complex() else []
    finite = [each[torch.isfinite(each)] for each in numbers_of]
    ends = [end for each in finite if each.numel() for end in (each.min(), each.max())]
    numbers = [float(end) for end in ends]
    return Drawn(
        key=key,
        dtype=", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in given})),
        shape=_shape([tuple(each.shape) for each in given]),
        least=min(numbers, default=None),
        most=max(numbers, default=None),
        not_finite=sum(each.numel() for each in given) - sum(each.numel() for each in finite) if finite else 0,
        bytes=sum(each.numel() * each.element_size() for each in given),
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in a dtype that torch compares: floats of one byte are none, nor are integers without a
    sign that have more."""
    if tensor.is_floating_point():
        return tensor.float() if tensor.element_size() == 1 else tensor
    return tensor.double() if tensor.dtype in _NOT_COMPARED else tensor


def _shape(shapes: list[tuple[int, ...]]) -> str:
    if len({len(shape) for shape in shapes}) > 1:
        return f"{min(map(len, shapes))} to {max(map(len, shapes))} dimensions"
    parts = [(min(sizes), max(sizes)) for sizes in zip(*shapes, strict=True)]
    return f"[{', '.join(str(least) if least == most else f'{least}..{most}' for least, most in parts)}]"

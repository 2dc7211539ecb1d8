"""Writing the run that a salvage makes of a pipeline of several ranks: of each rank segments and a journal, one
generation of all, and the marker last of all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from pipeline.checkpoint.descent import ways_after
from pipeline.checkpoint.gathering import Gathered, progress_of
from pipeline.checkpoint.losses import Loss
from pipeline.checkpoint.manifest import CONSUMER_FILE, PIPELINE_RANKS, PROGRESS_FILE, ShardInfo, shard_prefix
from pipeline.checkpoint.new_run import (
    REASON,
    WrittenPart,
    as_found,
    begin_generation,
    encode_half,
    manifest_of,
    write_part,
)
from pipeline.checkpoint.survey import Candidate
from pipeline.ledger import BUFFERED, LEASED, PARKED
from pipeline.sampler.progress import encode_progress, joined
from pipeline.store.files import FilesLike
from pipeline.store.layout import Layout


class WrittenRanks(NamedTuple):
    """What the new run holds.

    Attributes:
        run_id: its id.
        groups: finished ones of each rank, with every payload.
        members: payloads that came along.
        again: members whose payload is gone.
        losses: payloads that are gone.
    """

    run_id: str
    groups: list[int]
    members: int
    again: int
    losses: list[Loss]


def write_ranks(
    layout: Layout,
    run_tag: int,
    chosen: Candidate,
    gathered: Sequence[Gathered],
    new: Layout,
    files: FilesLike,
    name: str,
    *,
    reason: str = REASON,
    also: Mapping[str, Any] = MappingProxyType({}),
) -> WrittenRanks:
    """Write the new run into ``new``, which is empty; ``name`` is what its folder will be called. Blocks.

    Args:
        layout, run_tag: of the damaged run.
        chosen: its generation.
        gathered: what there is of each rank.
        new, files, name: the new run.
        reason: who does that.
        also: other fields of its manifest.

    Raises:
        Damaged: what was whole when it was looked at is so no more.
        OSError: it cannot be written.
    """
    manifest = gathered[0].manifest
    run = new.create_folders(files, made_of=ways_after(layout, manifest.run_id, manifest))
    parts = [write_part(layout, run_tag, each, new, files, run, reason) for each in gathered]
    groups = _commit(chosen, gathered, parts, new, files, run.run_id, {"reason": reason, **also}, name)
    new.write_marker(files, run)
    files.sync_directory(os.path.dirname(new.directory))
    losses = [loss for part in parts for loss in part.losses]
    return WrittenRanks(run.run_id, groups, sum(each.members for each in parts), sum(p.again for p in parts), losses)


def _commit(
    chosen: Candidate,
    gathered: Sequence[Gathered],
    parts: Sequence[WrittenPart],
    new: Layout,
    files: FilesLike,
    run_id: str,
    also: Mapping[str, Any],
    name: str,
) -> list[int]:
    """Write the one generation. Returns how many groups of each rank are finished and whole."""
    writer = begin_generation(chosen, gathered[0].manifest, new, files)
    shards, progress, groups = [], [], []
    for rank, (each, part) in enumerate(zip(gathered, parts, strict=True)):
        half, ledger = as_found(each, part.inherited)
        told = chosen.ranks[rank]
        progress.append(progress_of(chosen._replace(progress=told.progress), half))
        writer.add(shard_prefix(rank) + CONSUMER_FILE, encode_half(half))
        writer.add(shard_prefix(rank) + PROGRESS_FILE, encode_progress(progress[-1], told.unknown))
        groups.append(ledger.count(BUFFERED) + ledger.count(PARKED))
        shards.append(ShardInfo(rank=rank, rows=ledger.count(BUFFERED) + ledger.count(LEASED), bytes=part.bytes))
    writer.add(PROGRESS_FILE, encode_progress(joined(progress), chosen.unknown))
    manifest = manifest_of(chosen, gathered[0], writer, run_id, {**gathered[0].manifest.options, "directory": name})
    writer.commit(
        msgspec.structs.replace(
            manifest,
            kind=PIPELINE_RANKS,
            world_size=len(parts),
            shards=shards,
            journals=[each.position for each in parts],
            segments=[info for each in parts for info in each.segments],
            **also,
        )
    )
    return groups

"""What reshards of buffers have in common: what their generation says, and that of as many ranks as before."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from pipeline.checkpoint.descent import ways_after
from pipeline.checkpoint.generations import GenerationWriter
from pipeline.checkpoint.manifest import OWN_FOLDER, SHARDS, TRAJECTORY_SHARDS, Manifest, ShardInfo
from pipeline.errors import ConfigError
from pipeline.replay.state import BufferState, read_buffer_state
from pipeline.store.layout import Layout
from pipeline.store.segments import SegmentInfo
from pipeline.tools.kept_rows import stored_parts
from pipeline.tools.linking import life_after, related_run, take_segments
from pipeline.tools.made import Made
from pipeline.tools.output import Outputs, Told
from pipeline.tools.sources import Source
from pipeline.tools.writing import SegmentWriter, committed

TOOL = "reshard"


def manifest_of(
    source: Source, shards: list[ShardInfo], directory: str, left_out: dict[str, str], reason: str = TOOL
) -> Manifest:
    """Return what a generation for other ranks says."""
    before = source.stored.manifest
    return Manifest(
        step=before.step,
        reason=reason,
        world_size=len(shards),
        shards=shards,
        attached=before.attached,
        external=before.external,
        options={**before.options, "directory": directory},
        left_out={**before.left_out, **left_out},
        made_of=[source.part()],
    )


def own_left(source: Source) -> dict[str, str]:
    """Return what ranks had attached for themselves, none of which others can have."""
    why = "what a rank had attached for itself, and the ranks are others"
    own = {name for each in source.stored.manifest.shards for name in each.own}
    return {f"{OWN_FOLDER}/{name}.safetensors": why for name in sorted(own)}


def as_it_was(source: Source, outputs: Outputs, capacity: int | None, *, dry_run: bool, told: Told | None) -> Made:
    """Write a run for as many ranks as it is of: each keeps its shard.

    Raises:
        ConfigError: one of them has no room for that.
    """
    before, pools = source.stored.manifest, [state for state in _states(source) if state.remove != "fifo"]
    if capacity is not None:
        _check_room(source, capacity, pools)
    total = sum(info.live if info.live >= 0 else info.bytes for info in before.segments)

    def made(directory: str, run_id: str = "", linked: int = 0) -> Made:
        return Made(
            directory=directory,
            kind=source.kind,
            run_id=run_id,
            step=before.step,
            units=sum(each.held if pools else each.episodes for each in before.shards),
            rows=sum(each.held for each in before.shards),
            shards=[each.held for each in before.shards],
            capacity=pools[0].capacity if pools else None,
            bytes=total,
            linked=min(linked, total),
            made_of=[source.part()],
        )

    if dry_run:
        return made(outputs.each[0].directory, linked=total)
    with outputs:
        output = outputs.each[0]
        layout = Layout(output.folder)
        came = ways_after(source.layout, source.run_id, before)
        run = layout.create_folders(output.files, related_run(source.run_id), came)
        taken = segments_told(before.segments, told)
        linked = take_segments(source, before.segments, layout, output.files, taken=taken)
        generation = GenerationWriter(layout, output.files, 0)
        files = [(os.path.join(source.stored.folder, info.path), info) for info in before.files]
        generation.begin_with((), files)
        life = life_after(source.layout, before.incarnation)
        with contextlib.closing(SegmentWriter(layout, output.files, run.tag, incarnation=life)) as segments:
            wrote = segments.finish(time.time(), TOOL)
        wrote = wrote._replace(segments=[msgspec.structs.replace(info, sealed=True) for info in before.segments])
        manifest = manifest_of(source, list(before.shards), output.directory, {})
        committed(generation, [wrote], manifest, run, kind=source.kind)
        layout.write_marker(output.files, run)
        outputs.finish()
    return made(output.directory, run.run_id, linked)


def _check_room(source: Source, capacity: int, pools: Sequence[BufferState]) -> None:
    how = (
        "as many ranks as before keep what they have. Leave it out, or share out anew with rebalance=True (--rebalance)"
    )
    for each in pools:
        if each.capacity != capacity:
            raise ConfigError.of(
                "capacity", capacity, f"{source.directory}: was saved with capacity={each.capacity}, and {how}"
            )
    counts = [
        each.episodes if source.kind == TRAJECTORY_SHARDS else each.held for each in source.stored.manifest.shards
    ]
    for shard, count in zip(source.stored.manifest.shards, counts, strict=True):
        if count > capacity:
            what = "trajectories" if source.kind == TRAJECTORY_SHARDS else "rows"
            raise ConfigError.of(
                "capacity",
                capacity,
                f"{source.directory}: rank {shard.rank} has {count} {what}, and {how}; with evict_oldest=True "
                "(--evict-oldest) the oldest go",
            )


def segments_told(infos: Sequence[SegmentInfo], told: Told | None) -> Callable[[int], None]:
    """Return what is told of the bytes of each of some segments that are taken over, and tells ``told``."""
    total, done = sum(info.bytes for info in infos), 0

    def taken(size: int) -> None:
        nonlocal done
        done += size
        if told is not None:
            told(done, total)

    return taken


def _states(source: Source) -> list[BufferState]:
    if source.kind != SHARDS:
        return []
    return [read_buffer_state(stored.folder)[0] for stored, _ in stored_parts(source)]
